"""The far side of the gateway, light enough to share a core with the load: a worker that answers at once, and an
upstream for the bare proxy.

The worker speaks the real wire. A whole answer is one frame as soon as the request is there. Streams wait until all of
a run are there, then go step by step, a frame each with one token for every sequence, in one of two ways:

- flood: as fast as the socket takes them, so a gateway that cannot keep up merges tokens into fewer chunks;
- in step: a group's next step leaves when its last one has reached every client, so each token is a chunk of its own.
  Two groups take turns, so that neither core waits for the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from policies import framing, wire
from policies.wire import Delta, Finish, Ready, Stats, StepOutput, Submit

_FINISH = Finish("length", 0, 0, 0.0, 0.0, 0.0)


class Worker(asyncio.Protocol):
    """One connection of a gateway, and the streams it submitted."""

    def __init__(self, ready: Ready, token_ids: Sequence[int], on_connected: Callable[[Worker], None]) -> None:
        self._ready = ready
        self._token_ids = list(token_ids)
        self._on_connected = on_connected
        self._frames = framing.frames_to_worker()
        self._writable = asyncio.Event()
        self._writable.set()
        self._streams: list[Submit] = []
        self._num_expected = 0
        self._all_here: asyncio.Future[list[Submit]]
        self.num_answered = 0
        """Whole answers so far."""

    def expect_streams(self, num_streams: int) -> asyncio.Future[list[Submit]]:
        """The next so many requests are the streams of one run and wait for it to begin; done with the last of them."""
        self._streams, self._num_expected = [], num_streams
        self._all_here = asyncio.get_running_loop().create_future()
        return self._all_here

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._send(wire.Hello(wire.VERSION, "scripted"))
        self._send(self._ready)
        self._alive()
        self._on_connected(self)

    def connection_lost(self, _: Exception | None) -> None:
        self._heartbeat.cancel()
        self._writable.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        whole: list[Delta] = []
        for message in self._frames.feed(data):
            if isinstance(message, Submit):
                if self._num_expected:
                    self._streams.append(message)
                    if len(self._streams) == self._num_expected:
                        self._num_expected = 0
                        self._all_here.set_result(self._streams)
                else:
                    token_ids = [self._token(i) for i in range(message.sampling.max_tokens)]
                    whole.append(Delta(message.request_id, 0, token_ids, None, _FINISH))
        if whole:
            self.num_answered += len(whole)
            self._send(StepOutput(whole))

    async def flood(self, group: Sequence[Submit], num_tokens: int) -> None:
        """Every stream's tokens, as fast as the gateway reads."""
        frames = [
            framing.encode(StepOutput([Delta(submit.request_id, 0, [token_id]) for submit in group]))
            for token_id in self._token_ids
        ]
        for i in range(num_tokens - 1):
            await self._writable.wait()
            self._transport.write(frames[i % len(frames)])
            if i % 16 == 15:
                # The readers share this loop.
                await asyncio.sleep(0)
        self._last(group, num_tokens)

    def step(self, group: Sequence[Submit], number: int, num_tokens: int) -> None:
        """Token ``number`` of each stream of the group."""
        if number == num_tokens - 1:
            self._last(group, num_tokens)
        else:
            token_ids = [self._token(number)]
            self._send(StepOutput([Delta(submit.request_id, 0, token_ids) for submit in group]))

    def _last(self, group: Sequence[Submit], num_tokens: int) -> None:
        token_ids = [self._token(num_tokens - 1)]
        self._send(StepOutput([Delta(submit.request_id, 0, token_ids, None, _FINISH) for submit in group]))

    def _token(self, number: int) -> int:
        return self._token_ids[number % len(self._token_ids)]

    def _send(self, message: wire.Message) -> None:
        self._transport.write(framing.encode(message))

    def _alive(self) -> None:
        blocks = self._ready.num_blocks
        self._send(Stats(0, 0, blocks, 0, 0, blocks, 0, 0, 0, 0, 0, 0.0))
        self._heartbeat = asyncio.get_running_loop().call_later(1.0, self._alive)


class Upstream(asyncio.Protocol):
    """The smallest HTTP server that the bare proxy can forward to: one fixed answer for each request with a body."""

    def __init__(self, answer: bytes) -> None:
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(answer)}\r\n\r\n"
        self._response = head.encode() + answer
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while True:
            head, found, rest = self._buffer.partition(b"\r\n\r\n")
            if not found:
                return
            length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
            if len(rest) < length:
                return
            self._buffer = rest[length:]
            self._transport.write(self._response)


async def listen_as_worker(
    path: Path, ready: Ready, token_ids: Sequence[int]
) -> tuple[asyncio.Server, asyncio.Future[Worker]]:
    """A worker on a Unix socket, and its first connection when there is one."""
    loop = asyncio.get_running_loop()
    connected: asyncio.Future[Worker] = loop.create_future()

    def on_connected(worker: Worker) -> None:
        if not connected.done():
            connected.set_result(worker)

    def make() -> Any:
        return Worker(ready, token_ids, on_connected)

    return await loop.create_unix_server(make, str(path)), connected
