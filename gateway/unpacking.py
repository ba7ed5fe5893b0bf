"""Bodies that come packed (RFC 9110, section 8.4.1), unpacked as they come.

aiohttp would do it by itself, but takes a body for whole whose end is missing, and does not know gzip's older name.
A body is run whole or not at all: what ends before its time, or goes on behind its end, is refused.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import brotli
from aiohttp import StreamReader, hdrs, web
from aiohttp.base_protocol import BaseProtocol

from gateway.errors import InvalidRequest, UnsupportedMediaType

ENCODINGS = frozenset(("identity", "gzip", "x-gzip", "deflate", "br"))
"""That a body may have come in; x-gzip is gzip (RFC 9110, section 8.4.1.3)."""
UNKNOWN_ENCODING = f"Unsupported content encoding: send one of {', '.join(sorted(ENCODINGS))}"
PIECE_BYTES = 64 << 10
"""Read or given out at once."""
MAX_MEMBERS = 10_000
"""Of a gzip body, which may be several, one behind the other: each costs the time of a few kilobytes, however short."""


class Unpacker:
    """One body. ``feed`` and ``finish`` raise InvalidRequest."""

    def __init__(self, encoding: str) -> None:
        """``encoding``: one of ENCODINGS but ``identity``."""
        self._encoding = encoding
        self._unpack: Callable[[bytes], Iterator[bytes]] = self._brotli if encoding == "br" else self._zlib
        self._stream: Any = brotli.Decompressor() if encoding == "br" else None
        self._num_members = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """What more of the body says, in pieces of about PIECE_BYTES."""
        for at in range(0, len(data), PIECE_BYTES):
            try:
                yield from self._unpack(data[at : at + PIECE_BYTES])
            except (zlib.error, brotli.error):
                raise self._broken("it is not packed so, or damaged") from None

    def finish(self) -> None:
        """There is no more of it."""
        if self._stream is None or not self._is_over():
            raise self._broken("it ends before its end")

    def _is_over(self) -> bool:
        return bool(self._stream.is_finished() if self._encoding == "br" else self._stream.eof)

    def _zlib(self, data: bytes) -> Iterator[bytes]:
        while data:
            if self._stream is None or self._stream.eof:
                self._begin(data)
            piece = self._stream.decompress(data, PIECE_BYTES)
            yield piece
            while len(piece) == PIECE_BYTES and not self._stream.eof:  # there may be more of what was read
                piece = self._stream.decompress(self._stream.unconsumed_tail, PIECE_BYTES)
                yield piece
            data = self._stream.unused_data

    def _begin(self, data: bytes) -> None:
        """A first member, or the next one."""
        if self._num_members and (self._encoding == "deflate" or self._num_members == MAX_MEMBERS):
            raise self._broken("there is more behind its end")
        self._num_members += 1
        if self._encoding != "deflate":
            bits = zlib.MAX_WBITS | 16
        else:  # some send it without the head that RFC 1950 has
            bits = zlib.MAX_WBITS if data[0] & 0x0F == 8 else -zlib.MAX_WBITS
        self._stream = zlib.decompressobj(bits)

    def _brotli(self, data: bytes) -> Iterator[bytes]:
        piece = self._stream.process(data, output_buffer_limit=PIECE_BYTES)
        yield piece
        while not self._stream.is_finished() and (piece or not self._stream.can_accept_more_data()):
            piece = self._stream.process(b"", output_buffer_limit=PIECE_BYTES)
            yield piece

    def _broken(self, why: str) -> InvalidRequest:
        return InvalidRequest(f"The body could not be unpacked as {self._encoding}: {why}")


def encoding_of(headers: Mapping[str, str]) -> str | None:
    """In which a body is packed; None: it is not. Raises UnsupportedMediaType."""
    said = headers.get(hdrs.CONTENT_ENCODING)
    if said is None:
        return None
    encoding = said.lower()
    if encoding not in ENCODINGS:
        raise UnsupportedMediaType(UNKNOWN_ENCODING)
    return None if encoding == "identity" else encoding


def unpacked(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """All of a body; none is none, however it is packed. Raises InvalidRequest, and HTTPRequestEntityTooLarge where it
    has more than ``max_bytes`` then."""
    if not body:
        return body
    unpacker, whole = Unpacker(encoding), bytearray()
    for piece in unpacker.feed(body):
        whole += piece
        if len(whole) > max_bytes:
            raise web.HTTPRequestEntityTooLarge(max_bytes)
    unpacker.finish()
    return bytes(whole)


class _Tap(BaseProtocol):
    """What an unpacked stream has for a connection: it says when there is enough for now."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.is_open = asyncio.Event()
        self.is_open.set()

    @property
    def connected(self) -> bool:
        return True

    def pause_reading(self) -> None:
        self._reading_paused = True
        self.is_open.clear()

    def resume_reading(self, resume_parser: bool = True) -> None:
        self._reading_paused = False
        self.is_open.set()


class UnpackedStream:
    """A body that is read as it comes: what ``content`` says stands in ``reader``, which has the failure of one that is
    broken. By ``async with``, whose end nothing is read behind."""

    def __init__(self, content: StreamReader, encoding: str) -> None:
        loop = asyncio.get_running_loop()
        self._tap = _Tap(loop)
        self._content, self._unpacker = content, Unpacker(encoding)
        self.reader = StreamReader(self._tap, PIECE_BYTES, loop=loop)

    async def __aenter__(self) -> UnpackedStream:
        self._pumping = asyncio.create_task(self._pump())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._pumping.cancel()
        await asyncio.wait((self._pumping,))

    async def _pump(self) -> None:
        try:
            while data := await self._content.readany():
                for piece in self._unpacker.feed(data):
                    await self._tap.is_open.wait()
                    if piece:
                        self.reader.feed_data(piece)
            self._unpacker.finish()
        except Exception as error:
            self.reader.set_exception(error)
        else:
            self.reader.feed_eof()
