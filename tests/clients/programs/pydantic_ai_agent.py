"""Pydantic AI: an agent with a tool, and an answer of a type."""

from __future__ import annotations

import asyncio
import json

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel


class Capital(BaseModel):
    city: str
    country: str


async def main() -> None:
    plain = Agent(OpenAIChatModel("demo"), model_settings={"temperature": 0})
    whole = await plain.run("What is the capital of France?")
    async with plain.run_stream("What is the capital of France?") as stream:
        streamed = "".join([text async for text in stream.stream_text(delta=True)])
    told: list[str] = []
    calling = Agent(OpenAIChatModel("demo"), model_settings={"temperature": 0})

    @calling.tool_plain
    def get_weather(city: str) -> str:
        """Get the weather in a city"""
        told.append(city)
        return json.dumps({"city": city, "weather": "sunny", "temperature": 21})

    await calling.run("What is the weather in Paris?")
    typed = Agent(
        OpenAIChatModel("demo"), output_type=Capital, model_settings={"temperature": 0, "max_tokens": 200}, retries=0
    )
    found = (await typed.run("What is the capital of France?")).output
    print(
        json.dumps(
            {"whole": whole.output, "streamed": streamed, "typed": isinstance(found, Capital), "called": bool(told)}
        )
    )


asyncio.run(main())
