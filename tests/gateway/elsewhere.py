"""An upstream that does as a test says: answers as OpenAI would, or in every way in which a server can go wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from policies.upstreams.terms import Upstream

Behaviour = Callable[["Heard"], Awaitable[web.StreamResponse]]
USAGE = {
    "prompt_tokens": 21,
    "completion_tokens": 3,
    "total_tokens": 24,
    "prompt_tokens_details": {"cached_tokens": 5},
}


@dataclass
class Heard:
    """One request that has come."""

    request: web.Request
    body: dict[str, Any]
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Whoever had asked hung up."""

    @property
    def is_chat(self) -> bool:
        return self.request.path.endswith("/chat/completions")

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))

    async def stream(self) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(self.request)
        return response


async def event(response: web.StreamResponse, value: Any) -> None:
    text = value if isinstance(value, str) else json.dumps(value)
    await response.write(f"data: {text}\n\n".encode())


def chunk(index: int = 0, finish: str | None = None, **delta: Any) -> dict[str, Any]:
    """Of a chat."""
    return {"object": "chat.completion.chunk", "choices": [{"index": index, "delta": delta, "finish_reason": finish}]}


def says(
    *words: str, usage: dict[str, Any] | None = USAGE, finish: str = "stop", gap: asyncio.Event | None = None
) -> Behaviour:
    """Answers so; after the first word it waits for ``gap``."""

    async def answer(heard: Heard) -> web.StreamResponse:
        num = heard.body.get("n") or 1
        if not heard.streams:
            choices = [
                {"index": index, "finish_reason": finish}
                | ({"message": {"role": "assistant", "content": "".join(words)}} if heard.is_chat else {})
                | ({} if heard.is_chat else {"text": "".join(words)})
                for index in range(num)
            ]
            return web.json_response({"choices": choices, "usage": usage})
        response = await heard.stream()
        for place, word in enumerate(words):
            for index in range(num):
                text = {"delta": {"content": word}} if heard.is_chat else {"text": word}
                await event(response, {"choices": [{"index": index, "finish_reason": None, **text}]})
            if gap is not None and not place:
                await gap.wait()
        for index in range(num):
            end = {"delta": {}} if heard.is_chat else {"text": ""}
            await event(response, {"choices": [{"index": index, "finish_reason": finish, **end}]})
        if usage is not None and (heard.body.get("stream_options") or {}).get("include_usage"):
            await event(response, {"choices": [], "usage": usage})
        await event(response, "[DONE]")
        return response

    return answer


def streams(*events: Any) -> Behaviour:
    """Just these, and the end of the connection's answer."""

    async def answer(heard: Heard) -> web.StreamResponse:
        response = await heard.stream()
        for each in events:
            await event(response, each)
        return response

    return answer


def fails(status: int, message: str = "no", body: bytes | None = None, **headers: str) -> Behaviour:
    async def answer(heard: Heard) -> web.StreamResponse:
        text = json.dumps({"error": {"message": message, "type": "x", "param": None, "code": None}}).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(status=status, body=text if body is None else body, headers=named)

    return answer


async def hangs(heard: Heard) -> web.StreamResponse:
    """Says nothing until it is hung up on."""
    try:
        await asyncio.Event().wait()
    finally:
        heard.gone.set()
    raise AssertionError


def stalls(*words: str) -> Behaviour:
    """Begins and says no more."""

    async def answer(heard: Heard) -> web.StreamResponse:
        response = await heard.stream()
        for word in words:
            await event(response, chunk(content=word))
        return await hangs(heard)

    return answer


def breaks(*words: str) -> Behaviour:
    """Begins and cuts the connection."""

    async def answer(heard: Heard) -> web.StreamResponse:
        response = await heard.stream()
        for word in words:
            await event(response, chunk(content=word))
        assert heard.request.transport is not None
        heard.request.transport.abort()
        return response

    return answer


class Elsewhere:
    """The server. What comes is answered by the next of ``scripts``, and then by ``always``."""

    def __init__(self, always: Behaviour) -> None:
        self.always = always
        self.scripts: list[Behaviour] = []
        self.heard: list[Heard] = []
        self.came = asyncio.Event()
        """Set at each request; whoever waits for the next one clears it."""
        self.is_there = True
        """As it says when it is probed."""
        self.num_connections = 0
        self.url = ""
        self._peers: set[Any] = set()

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [heard.body for heard in self.heard]

    def upstream(self, name: str = "far-1", model: str = "far", **terms: Any) -> Upstream:
        defaults: dict[str, Any] = {"probe_s": 0.0, "max_retries": 0}
        return Upstream(name=name, model=model, url=f"{self.url}/v1", **{**defaults, **terms})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self._note(request)
        heard = Heard(request, await request.json())
        self.heard.append(heard)
        self.came.set()
        behaviour = self.scripts.pop(0) if self.scripts else self.always
        try:
            return await behaviour(heard)
        except (asyncio.CancelledError, ConnectionError):
            heard.gone.set()
            raise

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": []}, status=200 if self.is_there else 503)

    def _note(self, request: web.Request) -> None:
        assert request.transport is not None
        peer = request.transport.get_extra_info("peername")
        self.num_connections += peer not in self._peers
        self._peers.add(peer)


@asynccontextmanager
async def elsewhere(always: Behaviour | None = None) -> AsyncIterator[Elsewhere]:
    """One on a free port of the loopback."""
    server = Elsewhere(always or says("one ", "two ", "three"))
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/v1/{rest:.*}", server.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    server.url = f"http://{host}:{port}"
    try:
        yield server
    finally:
        await runner.cleanup()


@asynccontextmanager
async def several(num: int) -> AsyncIterator[Sequence[Elsewhere]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(elsewhere()) for _ in range(num)]
