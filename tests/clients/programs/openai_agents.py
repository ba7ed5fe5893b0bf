"""OpenAI's Agents SDK, over the Responses API and over chats."""

from __future__ import annotations

import asyncio
import json

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIConversationsSession,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from agents.memory import OpenAIResponsesCompactionSession
from openai import AsyncOpenAI

QUESTION = "What is the capital of France?"
ASKED: list[str] = []


@function_tool
def get_weather(city: str) -> str:
    """Get the weather in a city"""
    ASKED.append(city)
    return json.dumps({"city": city, "weather": "sunny", "temperature": 21})


async def conversed(agent: Agent) -> list[object]:
    """A session that lies at the server."""
    session = OpenAIConversationsSession()
    said: list[object] = [(await Runner.run(agent, QUESTION, session=session)).final_output for _ in range(2)]
    said.append([item["role"] for item in await session.get_items()])
    said.append((await session.pop_item())["content"][0]["text"])
    said.append(len(await session.get_items()))
    await session.clear_session()
    return said


async def made_short(agent: Agent) -> list[str]:
    """A session here, of which the server makes a summary."""
    session = OpenAIResponsesCompactionSession("mine", SQLiteSession("mine"))
    session.model = "demo"  # it begins with no names but OpenAI's
    await Runner.run(agent, QUESTION, session=session)
    await session.run_compaction({"force": True})
    await Runner.run(agent, QUESTION, session=session)
    return [item.get("type", "message") for item in await session.get_items()]


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
                "conversed": await conversed(responses),
                "short": await made_short(responses),
            }
        )
    )


asyncio.run(main())
