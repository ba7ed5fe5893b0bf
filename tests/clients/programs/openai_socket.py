"""The official client over a WebSocket: turns that are not stored, lanes side by side, a tool, and what is refused."""

from __future__ import annotations

import asyncio
import json

import openai

ASKED = "What is the capital of France?"
CALL = {"model": "demo", "store": False, "temperature": 0}
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]},
}


def turns() -> dict[str, object]:
    with openai.OpenAI().responses.connect() as connection:

        def answered(**asked):
            connection.send({"type": "response.create", **CALL, **asked})
            text = ""
            for event in connection:
                if event.type == "response.output_text.delta":
                    text += event.delta
                elif event.type in ("response.completed", "response.incomplete"):
                    return event.response, text
                elif event.type in ("response.failed", "error"):
                    raise RuntimeError(event.to_json())
            raise RuntimeError("closed")

        warm, nothing = answered(input="You are helpful.", generate=False)
        first, text = answered(input=ASKED)
        second, again = answered(input=ASKED, previous_response_id=first.id)
        called, _ = answered(input="What is the weather in Paris?", tools=[WEATHER], tool_choice="required")
        output = {"type": "function_call_output", "call_id": called.output[0].call_id, "output": "sunny"}
        told, _ = answered(input=[output], previous_response_id=called.id, tools=[WEATHER], tool_choice="none")
        connection.response.create(**CALL, input="x", previous_response_id=warm.id)
        error = next(iter(connection))
    return {
        "texts": [nothing, text, again],
        "behind": second.previous_response_id == first.id,
        "called": [called.output[0].name, told.status],
        "refused": [error.type, error.error.code, error.error.param],
    }


async def lanes() -> dict[str, object]:
    async with openai.AsyncOpenAI() as client, client.responses.connect() as connection:
        texts = {"a": "", "b": ""}
        for lane in texts:
            await connection.send({"type": "response.create", "stream_id": lane, "input": ASKED, **CALL})
        num_ended = 0
        async for event in connection:
            if event.type == "response.output_text.delta":
                texts[event.stream_id] += event.delta
            elif event.type == "response.completed":
                num_ended += 1
                if num_ended == len(texts):
                    break
    return {"lanes": texts}


async def no_key() -> int:
    try:
        async with openai.AsyncOpenAI(api_key="sk-wrong").responses.connect():
            return 0
    except Exception as error:
        return error.response.status_code


print(json.dumps({**turns(), **asyncio.run(lanes()), "no key": asyncio.run(no_key())}))
