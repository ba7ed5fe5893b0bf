"""Ports for servers that tests start, also a second time."""

from __future__ import annotations

import contextlib
import random
import socket

BELOW_THE_KERNELS = range(20_000, 32_000)
"""Where the kernel takes none for whoever asks for any: neither for a server nor for a client, who could else come upon
the port of a server that is away, and even be connected with itself."""

_draw = random.SystemRandom()


def free_ports(number: int) -> list[int]:
    """So many that nobody listens on."""
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        while len(found) < number:
            probe = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", _draw.choice(BELOW_THE_KERNELS)))
                found.append(probe.getsockname()[1])
    return found


def free_port() -> int:
    """One that nobody listens on."""
    (port,) = free_ports(1)
    return port
