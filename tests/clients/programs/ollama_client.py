"""Ollama's own client."""

from __future__ import annotations

import json
import os

import ollama

client = ollama.Client(headers={"Authorization": f"Bearer {os.environ['OLLAMA_API_KEY']}"})
call = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "options": {"temperature": 0},
}
print(
    json.dumps(
        {
            "whole": client.chat(**call).message.content,
            "streamed": "".join(part.message.content or "" for part in client.chat(**call, stream=True)),
            "models": [model.model for model in client.list().models],
        }
    )
)
