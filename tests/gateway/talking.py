"""A WebSocket of /v1/responses as a test talks over it, with the worker's part played beside."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import msgspec
from openai.types.responses import ResponsesServerEvent
from pydantic import TypeAdapter

from tests.builders import PATIENCE_S
from tests.gateway.conftest import Front
from tests.gateway.responding import END

_official: TypeAdapter[Any] = TypeAdapter(ResponsesServerEvent)
LAST = ("response.completed", "response.incomplete", "response.failed", "error")


class Socket:
    """One connection."""

    def __init__(self, front: Front, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.front = front
        self.socket = socket

    async def ask(self, what: object = "Hello", **others: object) -> None:
        """``what``: the input."""
        event = {"type": "response.create", "model": "demo", "input": what, **others}
        await self.socket.send_str(msgspec.json.encode(event).decode())

    async def next(self) -> Any:
        """One event, which the official client would know."""
        message = await self.socket.receive(PATIENCE_S)
        assert message.type is aiohttp.WSMsgType.TEXT, message
        _official.validate_json(message.data)
        return msgspec.json.decode(message.data)

    async def events(self) -> list[Any]:
        """Up to the end of a response, or a refusal."""
        told = [await self.next()]
        while told[-1]["type"] not in LAST:
            told.append(await self.next())
        return told

    async def kinds(self, num: int) -> list[str]:
        return [(await self.next())["type"] for _ in range(num)]

    async def refusal(self) -> tuple[int, str | None, str | None]:
        """The next event, which is one: status, code and param."""
        event = await self.next()
        assert event["type"] == "error", event
        assert set(event["error"]) - {"headers"} == {"type", "code", "message", "param"}
        return event["status"], event["error"]["code"], event["error"]["param"]

    async def answered(self, what: object = "Hello", text: str = "Hi there.", **others: object) -> Any:
        """The response, which says this."""
        await self.ask(what, **others)
        await self.say(text)
        return (await self.events())[-1]["response"]

    async def say(self, text: str = "Hi there.") -> str:
        """As the worker, to the next that it is sent, whose prompt is returned."""
        front = self.front
        submit = await front.peer.submitted()
        front.peer.say(submit, [*front.ids(text), END], "stop")
        return self.read(submit.prompt_token_ids)

    def read(self, token_ids: Sequence[int]) -> str:
        return self.front.text._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    async def closed(self) -> int | None:
        """The code that the server closes it with."""
        message = await self.socket.receive(PATIENCE_S)
        assert message.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED), message
        return self.socket.close_code


@contextlib.asynccontextmanager
async def talking(front: Front, **headers: str) -> AsyncIterator[Socket]:
    async with front.http.ws_connect(f"{front.url}/v1/responses", headers=headers) as socket:
        async with asyncio.timeout(PATIENCE_S):
            yield Socket(front, socket)
