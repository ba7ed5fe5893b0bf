"""What upstreams say in forms of their own: events in odd clothes, contents in parts."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web

from tests.gateway.conftest import HELLO, OpenFront
from tests.gateway.elsewhere import Elsewhere, Heard, chunk, elsewhere, event, fails, streams

ASKED = {"model": "far", "messages": HELLO}


async def test_events_in_odd_clothes_are_read(open_front: OpenFront):
    async def odd(heard: Heard) -> web.StreamResponse:
        response = await heard.stream()
        text = json.dumps(chunk(content="one ", finish=""))
        await response.write(b"\xef\xbb\xbfdata:" + text[:20].encode())
        await asyncio.sleep(0)
        await response.write(text[20:].encode() + b"\r\n\r\n: a comment\r\n\r\nevent: message\r\nid: 7\r\n")
        await event(response, chunk(content="two", finish="length"))
        return response

    async with elsewhere(odd) as far, open_front(upstreams=(far.upstream(),)) as front:
        said = await front.client.chat.completions.create(**ASKED, stream=True)
        chunks = [each async for each in said]
        assert "".join(each.choices[0].delta.content or "" for each in chunks) == "one two"
        assert chunks[-1].choices[0].finish_reason == "length"
        assert isinstance(far, Elsewhere)


@pytest.mark.parametrize("end", ["\r", "\r\n", "\n"])
@pytest.mark.parametrize("size", [1, 7, 1 << 20])
async def test_ends_of_lines_are_any_of_the_standards_wherever_they_are_cut(open_front: OpenFront, end, size):
    async def odd(heard: Heard) -> web.StreamResponse:
        response = await heard.stream()
        told = [chunk(content="one ", finish=""), chunk(content="two", finish="length")]
        text = "".join(f"event: message{end}data: {json.dumps(each)}{end}{end}" for each in told).encode()
        for start in range(0, len(text), size):
            await response.write(text[start : start + size])
        return response

    async with elsewhere(odd) as far, open_front(upstreams=(far.upstream(),)) as front:
        said = [each async for each in await front.client.chat.completions.create(**ASKED, stream=True)]
        assert "".join(each.choices[0].delta.content or "" for each in said) == "one two"


async def test_content_in_parts_is_read_as_what_was_thought_and_what_is_said(open_front: OpenFront):
    thought = [{"type": "thinking", "thinking": [{"type": "text", "text": text}]} for text in ("hm ", "so ")]
    parts = [*thought, {"type": "reference", "reference_ids": [1]}, {"type": "text", "text": "one "}]

    async def answer(heard: Heard) -> web.StreamResponse:
        if heard.streams:
            told = [chunk(content=[each]) for each in parts]
            return await streams(*told, chunk(content="two", finish="stop"), "[DONE]")(heard)
        message = {"role": "assistant", "content": [*parts, {"type": "text", "text": "two"}]}
        return web.json_response({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    async with elsewhere(answer) as far, open_front(upstreams=(far.upstream(),)) as front:
        whole = (await front.client.chat.completions.create(**ASKED)).choices[0].message
        assert (whole.content, whole.reasoning_content) == ("one two", "hm so ")
        said = await front.client.chat.completions.create(**ASKED, stream=True)
        deltas = [each.choices[0].delta async for each in said]
        assert "".join(each.content or "" for each in deltas) == "one two"
        assert "".join(getattr(each, "reasoning_content", None) or "" for each in deltas) == "hm so "


@pytest.mark.parametrize(
    "words",
    [
        "This model's maximum context length is 8192 tokens. However, your prompt contains 9000 input tokens, which",
        "The decoder prompt (length 9000) is longer than the maximum model length of 8192.",
        "The input (9000 tokens) is longer than the model's context length (8192 tokens).",
        "request (9000 tokens) exceeds the available context size (8192 tokens), try increasing it",
        "prompt is too long: 9000 tokens > 8192 maximum",
    ],
)
async def test_a_prompt_that_is_too_long_has_the_code_for_it_whatever_the_server_calls_it(open_front: OpenFront, words):
    async with elsewhere() as far, open_front(upstreams=(far.upstream(),)) as front:
        body = json.dumps({"error": {"message": words, "type": "BadRequestError", "param": None, "code": 400}})
        far.scripts = [fails(400, body=body.encode())] * 2
        status, refused, _ = await front.post("/v1/chat/completions", ASKED)
        assert (status, refused["error"]["code"]) == (400, "context_length_exceeded")
        assert refused["error"]["message"] == words
        status, refused, _ = await front.post("/v1/messages", {**ASKED, "max_tokens": 5})
        assert (status, refused["error"]["message"]) == (400, f"prompt is too long: {words}")
