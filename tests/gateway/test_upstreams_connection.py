"""An upstream that goes on with bytes that are no HTTP while nobody reads: the connection is closed by then."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from gateway.upstreams.client import Client
from gateway.upstreams.failures import Trouble
from gateway.upstreams.known import Key, Known
from policies.upstreams.terms import Upstream
from tests.builders import PATIENCE_S

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Broken:
    """Says these events, and what is no chunk once somebody has read them; then it waits to be hung up on."""

    def __init__(self, *events: bytes) -> None:
        self.events = events
        self.read, self.closed = asyncio.Event(), asyncio.Event()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        said = b"".join(b"data: %b\n\n" % event for event in self.events)
        writer.write(HEAD + b"%x\r\n%b\r\n" % (len(said), said))
        await self.read.wait()
        writer.write(b"no chunk\r\n")
        with contextlib.suppress(ConnectionError):
            await reader.read()
        self.closed.set()
        writer.close()

    async def texts(self) -> AsyncIterator[bytes]:
        """What our own client reads of it, with a pause until the connection is closed."""
        async with await asyncio.start_server(self.answer, "127.0.0.1", 0) as server, Client() as client:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            known = Known(Upstream(name="far-1", model="far", url=url), Key(""), "settings")
            async with asyncio.timeout(PATIENCE_S), contextlib.aclosing(client.ask(known, "/", b"{}", True)) as texts:
                async for text in texts:
                    yield text
                    if text == self.events[-1]:
                        self.read.set()
                        await self.closed.wait()


async def test_in_the_middle_it_is_the_upstreams_failure():
    texts = Broken(b"1").texts()
    assert await anext(texts) == b"1"
    with pytest.raises(Trouble):
        await anext(texts)


async def test_behind_the_end_it_is_nobodys_concern():
    assert [text async for text in Broken(b"1", b"[DONE]").texts()] == [b"1", b"[DONE]"]
