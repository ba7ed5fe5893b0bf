"""What rank 0 and another rank say to each other outside of the steps: MessagePack frames on pairs of sockets."""

from __future__ import annotations

import select
import socket
import struct

import msgspec

_LENGTH = struct.Struct("<I")


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages."""


# From rank 0


class Meet(Message, frozen=True):
    """All have their weights: meet the others at the store on this port of the machine; for how many KV blocks is there
    room then?"""

    port: int


class Begin(Message, frozen=True):
    """Have so many blocks, and step as you are told."""

    num_blocks: int
    num_windowed_blocks: int = 0
    """In a pool apart; 0: there is none."""


class Step(Message, frozen=True):
    """One step's plan: ``plan.encoded``."""

    numbers: bytes
    gone: list[int] = []
    """Numbers of adapters that no step has from this one on."""


class Read(Message, frozen=True):
    """Read your part of this adapter (see Runner.load_adapter), and keep it under this number. On the socket for what
    is read beside the steps."""

    number: int
    adapter_id: str
    source: str
    max_bytes: int
    digest: str
    gone: list[int]
    """As for Step, before it is read."""


# To rank 0


class Loaded(Message, frozen=True):
    """The weights are in memory."""


class Room(Message, frozen=True):
    """There is room for so many blocks in one pool, or in two."""

    num_blocks: int
    apart: tuple[int, int]
    """See ``rooms_apart``."""


class Failed(Message, frozen=True):
    """This rank cannot start; why, in one sentence."""

    reason: str


class Unable(Message, frozen=True):
    """This rank could not compute its part of the step that it was told last, and has kept up with the others; why, in
    one sentence."""

    reason: str
    is_out_of_memory: bool


class Parted(Message, frozen=True):
    """This rank ends, for want of another one; what it has seen of that, in one line."""

    reason: str


class Kept(Message, frozen=True):
    """This rank has its part of the adapter that it was told to read."""

    digest: str
    rank: int
    num_bytes: int


class Refused(Message, frozen=True):
    """It has none; why, in one sentence."""

    reason: str


Any = Meet | Begin | Step | Read | Loaded | Room | Failed | Unable | Parted | Kept | Refused

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Any).decode


class Control:
    """One end. Whoever hears waits in the kernel, and so computes nothing."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def tell(self, message: Any) -> None:
        """Raises OSError when the other end is gone."""
        data = _encode(message)
        self.connection.sendall(_LENGTH.pack(len(data)) + data)

    def hear(self) -> Any | None:
        """The next message; None when the other end is gone."""
        head = self._read(_LENGTH.size)
        data = self._read(*_LENGTH.unpack(head)) if head is not None else None
        return None if data is None else _decode(data)

    @property
    def has_heard(self) -> bool:
        """There is a message, or the end, and ``hear`` does not wait."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        self.connection.close()

    def _read(self, num_bytes: int) -> bytes | None:
        parts = []
        while num_bytes:
            try:
                part = self.connection.recv(num_bytes, socket.MSG_WAITALL)
            except ConnectionError:
                return None
            if not part:
                return None
            parts.append(part)
            num_bytes -= len(part)
        return b"".join(parts)
