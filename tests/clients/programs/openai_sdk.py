"""The official client: what it decodes, whole and streamed."""

from __future__ import annotations

import asyncio
import json

import openai
from pydantic import BaseModel, Field

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def sync() -> dict[str, object]:
    client = openai.OpenAI(max_retries=0)
    call = {"model": "demo", "messages": QUESTION, "temperature": 0}
    whole = client.chat.completions.create(**call)
    with client.chat.completions.create(**call, stream=True, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)
    completion = client.completions.create(model="demo", prompt="Once upon a time", max_tokens=5, temperature=0)
    response = client.responses.create(model="demo", input="What is the capital of France?", temperature=0)
    again = client.responses.retrieve(response.id)
    vector = client.embeddings.create(model="demo", input="The fox").data[0].embedding
    return {
        "whole": whole.choices[0].message.content,
        "streamed": "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices),
        "usage": whole.usage.total_tokens == chunks[-1].usage.total_tokens,
        "completion": bool(completion.choices[0].text),
        "response": response.output_text,
        "kept": again.output_text,
        "vector": len(vector),
        "models": [model.id for model in client.models.list()],
    }


class Weather(BaseModel):
    """Get the weather in a city."""

    city: str = Field(max_length=12)


def helped() -> dict[str, object]:
    """By what it has to read types, and to put the pieces of a stream together."""
    client = openai.OpenAI(max_retries=0)
    asked, weather = "What is the weather in Paris?", openai.pydantic_function_tool(Weather)
    chat = {"model": "demo", "messages": [{"role": "user", "content": asked}], "temperature": 0}
    response = {"model": "demo", "input": asked, "temperature": 0}
    calls = {"tool_choice": "required", "parallel_tool_calls": False}
    with client.chat.completions.stream(**chat, **calls, tools=[weather]) as stream:
        kinds = {event.type for event in stream}
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    with client.responses.stream(**response, **calls, tools=[{"type": "function", **weather["function"]}]) as stream:
        (item,) = stream.get_final_response().output
    typed = (
        client.chat.completions.parse(**chat, response_format=Weather).choices[0].message.parsed,
        client.responses.parse(**response, text_format=Weather).output_parsed,
        call.function.parsed_arguments,
        Weather.model_validate_json(item.arguments),
    )
    return {
        "typed": [isinstance(each, Weather) for each in typed],
        "called": [call.function.name, item.name],
        "pieces": "tool_calls.function.arguments.delta" in kinds,
    }


async def asynchronous() -> str:
    async with openai.AsyncOpenAI(max_retries=0) as client:
        stream = await client.responses.create(
            model="demo", input="What is the capital of France?", temperature=0, stream=True
        )
        return "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])


def refused() -> list[str]:
    client = openai.OpenAI(max_retries=0)
    found = []
    for call in (
        lambda: openai.OpenAI(api_key="sk-wrong", max_retries=0).models.list(),
        lambda: client.chat.completions.create(model="nobody", messages=QUESTION),
        lambda: client.chat.completions.create(model="demo", messages=QUESTION, temperature=9),
        lambda: client.responses.retrieve("resp_none"),
    ):
        try:
            call()
        except openai.APIStatusError as error:
            found.append(type(error).__name__)
    return found


print(json.dumps({**sync(), **helped(), "asynchronous": asyncio.run(asynchronous()), "refused": refused()}))
