"""OpenAI's Agents SDK, over the Responses API and over chats."""

from __future__ import annotations

import asyncio
import json

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

QUESTION = "What is the capital of France?"
ASKED: list[str] = []


@function_tool
def get_weather(city: str) -> str:
    """Get the weather in a city"""
    ASKED.append(city)
    return json.dumps({"city": city, "weather": "sunny", "temperature": 21})


async def main() -> None:
    set_tracing_disabled(True)
    settings = ModelSettings(temperature=0)
    responses = Agent(name="asker", model="demo", model_settings=settings)
    chats = Agent(
        name="asker", model=OpenAIChatCompletionsModel("demo", AsyncOpenAI(max_retries=0)), model_settings=settings
    )
    streamed = Runner.run_streamed(responses, QUESTION)
    text = ""
    async for event in streamed.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            text += event.data.delta
    caller = ModelSettings(temperature=0, max_tokens=100, tool_choice="required", parallel_tool_calls=False)
    called = []
    for model in ("demo", chats.model):
        ASKED.clear()
        agent = Agent(name="caller", model=model, model_settings=caller, tools=[get_weather])
        await Runner.run(agent, "What is the weather in Paris?", max_turns=5)
        called.append(bool(ASKED))
    print(
        json.dumps(
            {
                "whole": (await Runner.run(responses, QUESTION)).final_output,
                "streamed": text,
                "called": called,
                "chat": (await Runner.run(chats, QUESTION)).final_output,
            }
        )
    )


asyncio.run(main())
