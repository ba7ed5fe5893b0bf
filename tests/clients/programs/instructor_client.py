"""Instructor: an answer of a type, by a tool and by a schema."""

from __future__ import annotations

import json

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field


class Capital(BaseModel):
    """The demo model has learned no JSON, so it is told where to stop."""

    city: str = Field(max_length=12)
    country: str = Field(max_length=12)


asked = {
    "model": "demo",
    "response_model": Capital,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 200,
    "max_retries": 0,
}
found = []
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(OpenAI(max_retries=0), mode=mode)
    whole = client.chat.completions.create(**asked)
    *_, last = client.chat.completions.create_partial(**asked)
    found.append(isinstance(whole, Capital) and all(last.model_dump().values()))
print(json.dumps({"typed": found}))
