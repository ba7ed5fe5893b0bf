"""Anthropic's official client."""

from __future__ import annotations

import json

import anthropic

client = anthropic.Anthropic(max_retries=0)
call = {
    "model": "demo",
    "max_tokens": 40,
    "extra_body": {"temperature": 0},
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
}
whole = client.messages.create(**call)
with client.messages.stream(**call) as stream:
    streamed = "".join(stream.text_stream)
    final = stream.get_final_message()
weather = {
    "name": "get_weather",
    "description": "Get the weather in a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
    },
}
asked = {**call, "tools": [weather], "messages": [{"role": "user", "content": "What is the weather in Paris?"}]}
has_to = {"type": "any", "disable_parallel_tool_use": True}
with client.messages.stream(**asked, tool_choice=has_to) as stream:
    kinds = {event.type for event in stream}
    called = stream.get_final_message()
(use,) = called.content
found = json.dumps({"city": "Paris", "weather": "sunny", "temperature": 21})
result = {"type": "tool_result", "tool_use_id": use.id, "content": found}
turns = [{"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
told = client.messages.create(**{**asked, "messages": [*asked["messages"], *turns]})
counted = client.messages.count_tokens(model="demo", messages=call["messages"])
try:
    anthropic.Anthropic(api_key="sk-wrong", max_retries=0).messages.create(**call)
    refused = ""
except anthropic.APIStatusError as error:
    refused = type(error).__name__
print(
    json.dumps(
        {
            "whole": whole.content[0].text,
            "streamed": streamed,
            "called": [called.stop_reason, use.name, *use.input],
            "pieces": "input_json" in kinds,
            "told": told.content[0].text,
            "usage": final.usage.output_tokens == whole.usage.output_tokens,
            "counted": counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens,
            "refused": [refused],
            "models": [model.id for model in client.models.list(limit=1)],
        }
    )
)
