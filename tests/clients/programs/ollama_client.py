"""Ollama's own client."""

from __future__ import annotations

import json
import os

import ollama
from pydantic import BaseModel, Field


class City(BaseModel):
    city: str = Field(max_length=12)


def get_weather(city: str) -> str:
    """Get the weather in a city

    Args:
        city: The city
    """
    return f"It is sunny in {city}."


client = ollama.Client(headers={"Authorization": f"Bearer {os.environ['OLLAMA_API_KEY']}"})
call = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "options": {"temperature": 0},
}
asked = {**call, "messages": [{"role": "user", "content": "What is the weather in Paris?"}], "tools": [get_weather]}
calls = [*(client.chat(**asked).message.tool_calls or ())]
for part in client.chat(**asked, stream=True):
    calls += part.message.tool_calls or ()
typed = client.chat(**call, format=City.model_json_schema()).message.content
written = client.generate("demo", "Tell me a story.", options={"num_predict": 5}, logprobs=True, top_logprobs=2)
try:
    client.chat(**{**call, "model": "nobody"})
    refused = 0
except ollama.ResponseError as error:
    refused = error.status_code
print(
    json.dumps(
        {
            "whole": client.chat(**call).message.content,
            "streamed": "".join(part.message.content or "" for part in client.chat(**call, stream=True)),
            "called": [[each.function.name, *each.function.arguments] for each in calls],
            "typed": bool(City.model_validate_json(typed)),
            "written": [written.done_reason, written.eval_count],
            "scored": [len(entry.top_logprobs or ()) for entry in written.logprobs or ()],
            "vectors": [len(vector) for vector in client.embed("demo", ["The fox", "The hen"]).embeddings],
            "models": [model.model for model in client.list().models],
            "capabilities": client.show("demo").capabilities,
            "refused": refused,
        }
    )
)
