"""Messages as bytes, and back: a 4-byte big-endian length, and so many bytes of MessagePack, a tagged array."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

from policies.wire import Message, ToGateway, ToWorker, WireError

MAX_FRAME_BYTES = 32 << 20
"""A prompt of a million token ids fits five times over."""

M = TypeVar("M")

_LENGTH = struct.Struct(">I")
_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """One frame, length included. Raises WireError where it is longer than MAX_FRAME_BYTES."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"frame of {len(body)} bytes exceeds {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


class Frames(Generic[M]):
    """Bytes as they arrive, messages as they complete. Holds at most one unfinished frame."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[M]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[M]:
        """The messages that ``data`` completes, in order; consume them all before feeding more.

        Raises WireError on the first bad frame; the channel is then useless.
        """
        buffer = self._buffer
        buffer += data
        start, end = 0, len(buffer)
        try:
            while end - start >= _LENGTH.size:
                (num_bytes,) = _LENGTH.unpack_from(buffer, start)
                if num_bytes > MAX_FRAME_BYTES:
                    raise WireError(f"frame of {num_bytes} bytes exceeds {MAX_FRAME_BYTES}")
                stop = start + _LENGTH.size + num_bytes
                if stop > end:
                    break
                try:
                    with memoryview(buffer) as view, view[start + _LENGTH.size : stop] as body:
                        message = self._decoder.decode(body)
                except msgspec.DecodeError as error:  # ValidationError is one
                    raise WireError(f"bad frame of {num_bytes} bytes: {error}") from error
                start = stop
                yield message
        finally:
            del buffer[:start]


def frames_to_worker() -> Frames[ToWorker]:
    """What a worker reads from one gateway."""
    return Frames(msgspec.msgpack.Decoder(ToWorker))


def frames_to_gateway() -> Frames[ToGateway]:
    """What a gateway reads from one worker."""
    return Frames(msgspec.msgpack.Decoder(ToGateway))
