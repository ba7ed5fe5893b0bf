"""A connection to PostgreSQL that is given up where the server says nothing any more.

Whoever is cancelled returns its connection to the pool first, and is held up until that has rolled back, or has closed
it. A server that is stalled, or gone without a word, answers neither, and nothing else bounds that wait.

Statements may take as long as they need. But a machine that has gone answers none of them: the system asks whether it
is still there, as libpq has it do, so that whoever waits is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import asyncpg

PATIENCE_S = 2.0
"""How long the server may take for that."""
SILENCE_S = 30
"""A machine that has acknowledged nothing for so long is gone; it is asked from half of it on."""


class Connection(asyncpg.Connection):  # type: ignore[misc]
    def __init__(self, protocol: Any, transport: asyncio.Transport, *given: Any, **named: Any) -> None:
        super().__init__(protocol, transport, *given, **named)
        ours: socket.socket = transport.get_extra_info("socket")
        if ours.family != socket.AF_UNIX:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in (
                ("TCP_KEEPIDLE", SILENCE_S // 2),
                ("TCP_KEEPINTVL", SILENCE_S // 6),
                ("TCP_KEEPCNT", 3),
                ("TCP_USER_TIMEOUT", SILENCE_S * 1000),
            ):
                if (option := getattr(socket, name, None)) is not None:  # not every system has all of them
                    ours.setsockopt(socket.IPPROTO_TCP, option, value)

    async def execute(self, query: str, *given: Any, **named: Any) -> Any:
        if not query.startswith("ROLLBACK"):
            return await super().execute(query, *given, **named)
        giving_up = asyncio.get_running_loop().call_later(PATIENCE_S, self.terminate)
        try:
            return await super().execute(query, *given, **named)
        finally:
            giving_up.cancel()

    async def close(self, **named: Any) -> None:
        with contextlib.suppress(TimeoutError):  # it is closed all the same
            async with asyncio.timeout(PATIENCE_S):  # older drivers leave what was cancelled out of their own
                await super().close(**named)
