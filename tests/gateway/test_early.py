"""Streams whose model has to be loaded first: what their clients hear until it is there, or cannot be."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import aiohttp
import msgspec

from policies import settings

LATER = {"later": settings.Model(load_at_start=False)}
HELLO: list[dict[str, str]] = [{"role": "user", "content": "Hello"}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 3},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 3},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 3},
    "/v1/messages": {"messages": HELLO, "max_tokens": 3},
    "/api/chat": {"messages": HELLO, "options": {"num_predict": 3}},
    "/api/generate": {"prompt": "Hello", "options": {"num_predict": 3}},
}
ENDS = {
    "/v1/chat/completions": b"data: [DONE]\n\n",
    "/v1/completions": b"data: [DONE]\n\n",
    "/v1/responses": b"}}\n\n",
    "/v1/messages": b'{"type":"message_stop"}\n\n',
    "/api/chat": b"}\n",
    "/api/generate": b"}\n",
}
LINES = "application/x-ndjson"
SILENT = re.compile(
    rb': keep-alive\n\n|\{[^\n]*"done":false,("message":\{"role":"assistant","content":""\}|"response":"")\}\n'
)


def body_of(path: str, **others: Any) -> dict[str, Any]:
    return {"model": "later", "stream": True, **ASKED[path], **others}


async def test_a_stream_that_waits_for_its_model_is_kept_alive(start_house, tmp_path):
    gate = tmp_path / "gate"
    house = start_house("--waits-for", gate, models=LATER, server=settings.Server(heartbeat_s=0.01))
    once = {"idempotency-key": "once"}
    asked = [(path, {}, headers) for path in ASKED for headers in ({}, once)[: 1 + path.startswith("/v1")]]
    asked += [("/v1/chat/completions", {"store": True}, {}), ("/v1/responses", {"store": False}, {})]

    async def told(session: aiohttp.ClientSession, path: str, fields: dict[str, Any], headers: dict[str, str]) -> bytes:
        async with session.post(path, json=body_of(path, **fields), headers=headers) as answer:
            kind, end = (LINES, b"\n") if path.startswith("/api") else ("text/event-stream", b"\n\n")
            assert (answer.status, answer.content_type) == (200, kind)
            for _ in range(2):
                assert SILENT.fullmatch(await answer.content.readuntil(end))
            waiting.discard((path, *fields, *headers))
            if not waiting:
                gate.touch()
            return SILENT.sub(b"", await answer.read())

    waiting = {(path, *fields, *headers) for path, fields, headers in asked}
    async with house.http() as session:
        answers = await asyncio.gather(*(told(session, *each) for each in asked))
    for (path, *_), said in zip(asked, answers, strict=True):
        assert said.startswith((b"data: {", b"event: ", b"{")), path
        assert said.endswith(ENDS[path]), path
        assert b"error" not in said.replace(b'"error":null', b""), path


async def test_a_model_that_is_not_there_in_time_is_the_end_of_a_stream_that_was_opened(start_house, tmp_path):
    classes = {"standard": msgspec.structs.replace(settings.CLASSES["standard"], max_wait_s=0.2)}
    server = settings.Server(heartbeat_s=0.01)
    house = start_house("--waits-for", tmp_path / "never", models=LATER, classes=classes, server=server)
    async with house.http() as session:
        for path in ASKED:
            async with session.post(path, json=body_of(path)) as answer:
                told = SILENT.sub(b"", await answer.read())
            events = [json.loads(line.removeprefix(b"data: ")) for line in told.splitlines() if line.endswith(b"}")]
            assert (answer.status, "is being loaded" in json.dumps(events[-1])) == (200, True), told
            assert len([each for each in events if "error" in each or each.get("type") == "error"]) == 1, told
            async with session.post(path, json=body_of(path, stream=False)) as answer:
                assert answer.status in (408, 529), "where nothing was sent its status says it"


async def test_a_model_that_is_refused_at_once_is_a_status(start_house):
    house = start_house("--exit-at-start", 2, models=LATER)
    async with house.http() as session:
        for path in ASKED:
            async with session.post(path, json=body_of(path)) as answer:
                assert answer.status >= 500, path
