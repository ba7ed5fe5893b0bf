"""The official client: what it decodes, whole and streamed."""

from __future__ import annotations

import asyncio
import hashlib
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


def in_parts() -> list[str]:
    """A file, as its own loop sends it, and a batch of it."""
    client = openai.OpenAI(max_retries=0)
    asked = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 5}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": asked}
    data = json.dumps(line).encode()
    upload = client.uploads.upload_file_chunked(
        **{"file": data, "filename": "a.jsonl", "bytes": len(data), "part_size": 50},
        **{"mime_type": "application/jsonl", "purpose": "batch", "md5": hashlib.md5(data).hexdigest()},
    )
    batch = client.batches.create(input_file_id=upload.file.id, endpoint="/v1/completions", completion_window="24h")
    return [upload.status, batch.status]


def conversed() -> dict[str, object]:
    """A conversation that is kept, and one that is made short."""
    client = openai.OpenAI(max_retries=0)
    mine = client.conversations.create(items=[{"role": "system", "content": "Be brief."}], metadata={"a": "b"})
    call = {"model": "demo", "input": "What is the capital of France?", "temperature": 0, "conversation": mine.id}
    whole = client.responses.create(**call)
    with client.responses.stream(**call) as stream:
        streamed = stream.until_done().get_final_response()
    items = list(client.conversations.items.list(mine.id, order="asc", limit=2))
    popped = client.conversations.items.delete(items[-1].id, conversation_id=mine.id)
    short = client.responses.compact(model="demo", input=[item.model_dump(exclude_unset=True) for item in items])
    summary = short.output[-1].model_dump(exclude_unset=True)
    behind = client.responses.create(model="demo", input=[summary, {"role": "user", "content": "Hello"}])
    return {
        "conversed": [whole.output_text, streamed.output_text, items[-1].content[0].text],
        "kinds": [(item.type, item.role) for item in items],
        "short": [item.type for item in short.output],
        "behind": behind.status,
        "deleted": [popped.metadata, client.conversations.delete(mine.id).deleted],
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


async def asynchronous() -> dict[str, object]:
    async with openai.AsyncOpenAI(max_retries=0) as client:
        about = {"filename": "a", "mime_type": "text/plain", "purpose": "user_data"}
        upload = await client.uploads.create(bytes=6, **about)
        pieces = (client.uploads.parts.create(upload.id, data=piece) for piece in (b"abc", b"def"))
        first, second = await asyncio.gather(*pieces)
        done = await client.uploads.complete(upload.id, part_ids=[second.id, first.id])
        given_up = await client.uploads.cancel((await client.uploads.create(bytes=6, **about)).id)
        stream = await client.responses.create(
            model="demo", input="What is the capital of France?", temperature=0, stream=True
        )
        return {
            "asynchronous": "".join([each.delta async for each in stream if each.type == "response.output_text.delta"]),
            "uploaded": (await client.files.content(done.file.id)).text,
            "given up": given_up.status,
        }


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


print(
    json.dumps(
        {
            **sync(),
            "in parts": in_parts(),
            **helped(),
            **conversed(),
            **asyncio.run(asynchronous()),
            "refused": refused(),
        }
    )
)
