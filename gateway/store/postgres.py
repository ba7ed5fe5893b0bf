"""A connection to PostgreSQL that is given up where the server says nothing any more.

Whoever is cancelled returns its connection to the pool first, and is held up until that has rolled back, or has closed
it. A server that is stalled, or gone without a word, answers neither, and nothing else bounds that wait.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import asyncpg

PATIENCE_S = 2.0
"""How long the server may take for that."""


class Connection(asyncpg.Connection):  # type: ignore[misc]
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
