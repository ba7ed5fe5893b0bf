"""Reads many streams at once and does next to nothing with them: counts pieces of text, notices the end."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, cast
from urllib.parse import urlsplit

from benchmarks.gateway.peer import Worker
from policies.wire import Submit

_DONE = b"data: [DONE]"
MAX_STREAMS = 512
_EMPTY, _PIECE = b'"content":""', b'"content":"'


class StreamError(Exception):
    """A stream was not what it should be; the message shows it."""


@dataclass(frozen=True, slots=True)
class Streamed:
    """Figures of one run over all streams."""

    num_tokens: int
    duration_s: float
    """First request sent to last stream ended."""
    tokens_per_s: float
    num_chunks: int

    @property
    def tokens_per_chunk(self) -> float:
        return self.num_tokens / max(1, self.num_chunks)


class Reader(asyncio.Protocol):
    """One stream."""

    def __init__(self, request: bytes, on_pieces: Callable[[int], None] | None = None) -> None:
        self._request = request
        self._on_pieces = on_pieces
        self._tail = b""
        self.start = b""
        """The first bytes, to be shown when something is wrong."""
        self.num_pieces = 0
        self.num_tokens: int | None = None
        """As the usage at the end says."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if len(self.start) < 2000:
            self.start += data
        num = data.count(_PIECE) - data.count(_EMPTY)
        if num:
            self.num_pieces += num
            if self._on_pieces:
                self._on_pieces(num)
        # The end may lie across two reads. A piece of text may too, though hardly ever: tokens are counted by usage.
        self._tail = self._tail[-300:] + data if len(data) < 300 else data[-600:]
        if _DONE in self._tail and not self.ended.done():
            usage = re.search(rb'"completion_tokens": ?(\d+)', self._tail)
            self.num_tokens = int(usage[1]) if usage else None
            self.ended.set_result(None)
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(StreamError(f"a stream ended early, after {self.start[:500]!r}"))


def http_request(url: str, key: str, body: bytes) -> bytes:
    address = urlsplit(url)
    path = f"{address.path}?{address.query}" if address.query else address.path
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        "Cache-Control: no-store\r\n\r\n"  # the seeds are the same in every round
    )
    return head.encode() + body


async def read_bare(url: str, num_streams: int, num_tokens: int, body: bytes) -> Streamed:
    """A bare server's streams of ``num_tokens`` chunks each."""
    request = http_request(f"{url}?n={num_tokens}", "none", body)
    began_at = perf_counter()
    readers = [await _open(url, Reader(request)) for _ in range(num_streams)]
    await asyncio.gather(*(reader.ended for reader in readers))
    return _streamed(readers, num_tokens, perf_counter() - began_at)


_runs = itertools.count()


async def read_gateway(
    url: str, key: str, fields: dict[str, object], worker: Worker, num_streams: int, num_tokens: int, in_step: bool
) -> Streamed:
    """The gateway's streams of ``num_tokens`` tokens each, all checked by their usage. Raises StreamError."""
    all_here = worker.expect_streams(num_streams)
    first_seed = MAX_STREAMS * next(_runs)
    groups = [_Group(worker, num_tokens), _Group(worker, num_tokens)]
    began_at = perf_counter()
    readers = []
    for number in range(num_streams):
        # The seed travels to the worker and tells it which stream is which; one that came before would be answered
        # from the cache.
        seed = first_seed + number
        body = json.dumps({**fields, "stream": True, "max_tokens": num_tokens, "seed": seed}).encode()
        on_pieces = groups[number % 2].on_pieces if in_step else None
        readers.append(await _open(url, Reader(http_request(url, key, body), on_pieces)))
    ended = asyncio.ensure_future(asyncio.gather(*(reader.ended for reader in readers)))
    waiting: list[asyncio.Future[Any]] = [ended, all_here]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    if not all_here.done():
        worker.expect_streams(0)
        await ended
        raise StreamError("all streams ended before all of them had reached the worker")
    submits = all_here.result()
    if in_step:
        for half, group in enumerate(groups):
            group.begin([submit for submit in submits if submit.sampling.seed % 2 == half])
    else:
        await worker.flood(submits, num_tokens)
    await ended
    duration_s = perf_counter() - began_at
    for reader in readers:
        if reader.num_tokens != num_tokens:
            raise StreamError(
                f"a stream counts {reader.num_tokens} tokens for {num_tokens} sent: {reader.start[:900]!r}"
            )
    return _streamed(readers, num_tokens, duration_s)


async def _open(url: str, reader: Reader) -> Reader:
    address = urlsplit(url)
    assert address.hostname
    assert address.port
    await asyncio.get_running_loop().create_connection(lambda: reader, address.hostname, address.port)
    return reader


def _streamed(readers: list[Reader], num_tokens: int, duration_s: float) -> Streamed:
    total = len(readers) * num_tokens
    return Streamed(total, duration_s, total / duration_s, sum(reader.num_pieces for reader in readers))


class _Group:
    """Streams that get their next token when all of them have shown the last one."""

    def __init__(self, worker: Worker, num_tokens: int) -> None:
        self._worker = worker
        self._num_tokens = num_tokens
        self._num_steps = 0
        self._num_missing = 0

    def begin(self, streams: list[Submit]) -> None:
        self._streams = streams
        self._step()

    def on_pieces(self, num: int) -> None:
        self._num_missing -= num
        if not self._num_missing and self._num_steps < self._num_tokens:
            self._step()

    def _step(self) -> None:
        self._num_missing = len(self._streams)
        self._worker.step(self._streams, self._num_steps, self._num_tokens)
        self._num_steps += 1
