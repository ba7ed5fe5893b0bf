"""A small server of OpenAI's API with scripted answers, on a real port: what our own clients are tried against."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


class CompatibleServer:
    """Answers every prompt with ``words``; what clients asked is kept in ``requests``."""

    def __init__(self, words: tuple[str, ...] = ("one ", "two ", "three")) -> None:
        self.words = words
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.url = ""
        self.with_usage = True
        self.fail_with: int | None = None
        """HTTP status of every answer from now on."""
        self.num_whole_streams: int | None = None
        """When set: streams after so many requests break off before their last chunk."""
        self.hold: asyncio.Event | None = None
        """When set: answers stop after their first word until the event."""
        self.cancelled = asyncio.Event()
        """A client hung up on an answer that was held."""
        self.held = asyncio.Event()
        self.asked = asyncio.Event()
        """Set at each request; whoever waits for the next one clears it."""

    def usage(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = body.get("prompt") or " ".join(message["content"] for message in body["messages"])
        # Two tokens a word and five of template: what a fit has to find out.
        num_prompt, num_completion = 5 + 2 * len(prompt.split()), len(self.words)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
            "prompt_tokens_details": {"cached_tokens": 3},
        }

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "tiny", "object": "model"}]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.keys.append(request.headers.get("Authorization"))
        self.asked.set()
        if self.fail_with:
            error = {"message": "no room left", "type": "server_error", "param": None, "code": None}
            return web.json_response({"error": error}, status=self.fail_with)
        chat = request.path.endswith("/chat/completions")
        if not body.get("stream"):
            text = "".join(self.words)
            choice = {"index": 0, "finish_reason": "stop"} | (
                {"message": {"content": text}} if chat else {"text": text}
            )
            return web.json_response({"choices": [choice], "usage": self.usage(body) if self.with_usage else None})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            await self._stream(response, body, chat)
        except (asyncio.CancelledError, ConnectionError):
            self.cancelled.set()
            raise
        return response

    async def _stream(self, response: web.StreamResponse, body: dict[str, Any], chat: bool) -> None:
        async def send(choices: list[dict[str, Any]], **more: Any) -> None:
            await response.write(f"data: {json.dumps({'choices': choices} | more)}\n\n".encode())

        if chat:
            await send([{"index": 0, "delta": {"role": "assistant", "content": ""}}])
        await response.write(b": a comment\n\n")
        for number, word in enumerate(self.words):
            await send([{"index": 0} | ({"delta": {"content": word}} if chat else {"text": word})])
            if number == 0 and self.hold:
                self.held.set()
                await self.hold.wait()
        if self.num_whole_streams is not None and len(self.requests) > self.num_whole_streams:
            return
        await send([{"index": 0, "finish_reason": "stop"} | ({"delta": {}} if chat else {"text": ""})])
        if self.with_usage:
            await send([], usage=self.usage(body))
        await response.write(b"data: [DONE]\n\n")


@asynccontextmanager
async def compatible_server(**options: Any) -> AsyncIterator[CompatibleServer]:
    """The server on a free port of the loopback."""
    server = CompatibleServer(**options)
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/v1/chat/completions", server.complete)
    app.router.add_post("/v1/completions", server.complete)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    server.url = f"http://{host}:{port}"
    try:
        yield server
    finally:
        await runner.cleanup()
