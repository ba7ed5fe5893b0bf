"""LiteLLM as a client."""

from __future__ import annotations

import json
import os

import litellm

call = {
    "model": "openai/demo",
    "api_base": os.environ["OPENAI_BASE_URL"],
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "num_retries": 0,
}
whole = litellm.completion(**call)
chunks = list(litellm.completion(**call, stream=True))
weather = {
    "name": "get_weather",
    "description": "Get the weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
    },
}
asked = {**call, "tools": [{"type": "function", "function": weather}], "tool_choice": "required"}
pieces = list(litellm.completion(**asked, stream=True))
called = [
    answer.choices[0].message.tool_calls[0].function
    for answer in (litellm.completion(**asked), litellm.stream_chunk_builder(pieces))
]
try:
    litellm.completion(**{**call, "model": "openai/nobody"})
    refused = ""
except litellm.exceptions.APIError as error:
    refused = type(error).__name__
except Exception as error:
    refused = type(error).__name__
print(
    json.dumps(
        {
            "whole": whole.choices[0].message.content,
            "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks),
            "called": [[function.name, *json.loads(function.arguments)] for function in called],
            "usage": whole.usage.total_tokens > 0,
            "refused": [refused],
        }
    )
)
