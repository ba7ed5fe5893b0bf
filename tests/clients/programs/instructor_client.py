"""Instructor: an answer of a type, by a tool and by a schema."""

from __future__ import annotations

import json

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Capital(BaseModel):
    city: str
    country: str


found = {}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(OpenAI(max_retries=0), mode=mode)
    answer = client.chat.completions.create(
        model="demo",
        response_model=Capital,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=200,
        max_retries=0,
    )
    found[mode.name] = isinstance(answer, Capital)
print(json.dumps({"typed": all(found.values())}))
