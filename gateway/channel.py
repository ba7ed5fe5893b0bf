"""One socket to one worker: frames out, messages in, and a named reason when it ends.

It knows the wire and nothing of requests. What it reads goes to its ``Reader`` in the same turn of the loop, without a
queue or a task between. What is sent in one turn leaves together, as a system call costs more than a frame.
"""

from __future__ import annotations

import asyncio
from typing import Protocol, cast

from policies import framing, wire

MAX_UNSENT_BYTES = 64 << 10
"""Past it frames leave at once, and what the worker does not take counts."""


class Reader(Protocol):
    """Who hears of a channel."""

    def heard(self, message: wire.ToGateway) -> None:
        """A message arrived, ``Hello`` excepted. Raises WireError when it makes no sense: the channel then closes."""

    def hung_up(self, reason: str, by_worker: bool) -> None:
        """The channel is closed, by the worker or by us, for a reason that reads after the worker's name.

        Called once at most, and not after ``close``.
        """


class Channel(asyncio.Protocol):
    """Open from ``connection_made`` until ``hung_up`` or ``close``."""

    def __init__(self, reader: Reader, max_send_buffer_bytes: int, asks: bool = True) -> None:
        """``asks``: requests will be sent."""
        self._reader: Reader | None = reader
        self._frames = framing.frames_to_gateway()
        self._max_send_buffer_bytes = max_send_buffer_bytes
        self._asks = asks
        self._transport: asyncio.Transport | None = None
        self._greeted = False
        self._unsent: list[bytes] = []
        self._num_unsent_bytes = 0
        self.num_received_bytes = 0

    async def connect(self, address: str) -> None:
        """To "unix:/path" or "tcp:host:port". Raises OSError when nobody listens there.

        The reader may hear the first messages before this returns.
        """
        loop = asyncio.get_running_loop()
        kind, _, where = address.partition(":")
        if kind == "unix":
            await loop.create_unix_connection(lambda: self, where)
        else:
            host, _, port = where.rpartition(":")
            await loop.create_connection(lambda: self, host.strip("[]"), int(port))

    def send(self, message: wire.ToWorker) -> None:
        """Passes the message on, or gives the worker up when it has let too much wait. On a closed channel: nothing.

        Raises WireError when the message is longer than a frame may be; nothing was sent then.
        """
        if self._transport is None:
            return
        frame = framing.encode(message)
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(frame)
        self._num_unsent_bytes += len(frame)
        if self._num_unsent_bytes >= MAX_UNSENT_BYTES:
            self._flush()

    def close(self) -> None:
        """Ends the connection at once; the reader hears nothing more."""
        self._reader = None
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._reader is None:
            self.close()
        else:
            self._transport.write(framing.encode(wire.Hello(wire.VERSION, "gateway", self._asks)))

    def data_received(self, data: bytes) -> None:
        self.num_received_bytes += len(data)
        try:
            for message in self._frames.feed(data):
                if self._reader is None:  # an earlier message of the same bytes ended it
                    return
                if not self._greeted:
                    self._greet(message)
                elif isinstance(message, wire.Hello):
                    raise wire.WireError("a second Hello")
                else:
                    self._reader.heard(message)
        except wire.WireError as error:
            self._hang_up(f"broke the protocol: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self._hang_up(f"closed the connection{f' ({error})' if error else ''}", by_worker=True)

    def _flush(self) -> None:
        frames, self._unsent, self._num_unsent_bytes = self._unsent, [], 0
        if self._transport is None or not frames:
            return
        self._transport.write(b"".join(frames))
        waiting_bytes = self._transport.get_write_buffer_size()
        if waiting_bytes > self._max_send_buffer_bytes:
            self._hang_up(f"does not read: {waiting_bytes} bytes wait for it")

    def _greet(self, message: wire.ToGateway) -> None:
        if not isinstance(message, wire.Hello):
            raise wire.WireError(f"{type(message).__name__} before Hello")
        if message.version != wire.VERSION:
            raise wire.WireError(f"it speaks version {message.version}, this gateway speaks {wire.VERSION}")
        self._greeted = True

    def _hang_up(self, reason: str, by_worker: bool = False) -> None:
        reader = self._reader
        self.close()
        if reader is not None:
            reader.hung_up(reason, by_worker)
