"""The worker's end of a socket: bytes to messages, messages to bytes, never waiting for the other side.

What a message means is the loop's business. A channel that cannot go on raises ``ChannelClosed`` with the reason.
"""

from __future__ import annotations

import socket
import stat
from collections import deque
from contextlib import suppress
from pathlib import Path

from policies import framing, wire

MAX_OUTGOING_BYTES = 64 << 20
"""What may wait for a gateway that does not read; with more it is cut off."""
RECEIVE_BYTES = 1 << 20
BACKLOG = 64


class ChannelClosed(Exception):
    """The other side left, or does what the protocol does not allow; the message says which."""


class Channel:
    """One connected gateway; ``connection`` is switched to non-blocking."""

    def __init__(self, connection: socket.socket, number: int, now: float) -> None:
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.number = number
        """For logs."""
        self.connected_at = now
        self.greeted = False
        """Its Hello has come."""
        self.asks = False
        """It said that it will send requests."""
        self.knows_blocks = False
        """It was told of all blocks that are kept; from then on, of those that come and go."""
        self.request_ids: set[str] = set()
        """Its requests that have not ended."""
        self._connection = connection
        self._frames = framing.frames_to_worker()
        self._outgoing: deque[memoryview] = deque()
        self._num_outgoing_bytes = 0

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def num_outgoing_bytes(self) -> int:
        """Bytes that wait until the gateway reads."""
        return self._num_outgoing_bytes

    def receive(self) -> list[wire.ToWorker]:
        """The messages that what has arrived completes; the first of all must be Hello, and it is not among them.

        Raises ChannelClosed.
        """
        try:
            data = self._connection.recv(RECEIVE_BYTES)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError as error:
            raise ChannelClosed(f"lost: {error.strerror or error}") from None
        if not data:
            raise ChannelClosed("the gateway has left")
        messages: list[wire.ToWorker] = []
        try:
            for message in self._frames.feed(data):
                if isinstance(message, wire.Hello):
                    self._greet(message)
                elif not self.greeted:
                    raise wire.WireError(f"{type(message).__name__} before Hello")
                else:
                    messages.append(message)
        except wire.WireError as error:
            raise ChannelClosed(f"broke the protocol: {error}") from None
        return messages

    def _greet(self, hello: wire.Hello) -> None:
        if self.greeted:
            raise wire.WireError("a second Hello")
        if hello.version != wire.VERSION:
            raise wire.WireError(f"it speaks version {hello.version}, this worker speaks {wire.VERSION}")
        self.greeted, self.asks = True, hello.asks

    def send(self, message: wire.Message) -> None:
        """Sends what the socket takes and keeps the rest. Raises ChannelClosed."""
        try:
            frame = framing.encode(message)
        except wire.WireError as error:
            raise ChannelClosed(f"cannot be told: {error}") from None
        self._outgoing.append(memoryview(frame))
        self._num_outgoing_bytes += len(frame)
        if len(self._outgoing) == 1:
            self.flush()
        if self._num_outgoing_bytes > MAX_OUTGOING_BYTES:
            raise ChannelClosed(f"does not read: {self._num_outgoing_bytes} bytes wait for it")

    def flush(self) -> None:
        """Sends what the socket takes now. Raises ChannelClosed."""
        outgoing = self._outgoing
        try:
            while outgoing:
                num_sent = self._connection.send(outgoing[0])
                self._num_outgoing_bytes -= num_sent
                if num_sent < len(outgoing[0]):
                    outgoing[0] = outgoing[0][num_sent:]
                    return
                outgoing.popleft()
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            raise ChannelClosed(f"lost: {error.strerror or error}") from None

    def close(self) -> None:
        """At once; what waits to be sent is dropped."""
        self._outgoing.clear()
        self._num_outgoing_bytes = 0
        self._connection.close()


def listen(address: str) -> socket.socket:
    """A listening socket at "unix:/path" (only for this user; a leftover file is replaced) or "tcp:host:port".

    Raises OSError, or ValueError for an address of another form.
    """
    kind, _, where = address.partition(":")
    if kind == "unix" and where:
        path = Path(where)
        with suppress(FileNotFoundError):
            if stat.S_ISSOCK(path.stat().st_mode):
                path.unlink()
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(where)
            path.chmod(0o600)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
    else:
        host, _, port = where.rpartition(":")
        if kind != "tcp" or not host or not port.isdecimal() or int(port) > 65535:
            raise ValueError('an address is "unix:/path" or "tcp:host:port"')
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host.strip("[]"), int(port)), family=family, backlog=BACKLOG)
    listener.setblocking(False)
    return listener
