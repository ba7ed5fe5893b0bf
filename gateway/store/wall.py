"""The time of day that all gateways of one store have in common: what one says until when is its own, others believe.

It is PostgreSQL's, asked for now and then and counted on by the machine's monotonic clock. Gateways whose own clocks
differed by more than a lease would take one another's work away. A store that is a file has one machine, and its time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from gateway.background import alongside
from gateway.clock import Clock
from gateway.store import Store

log = logging.getLogger(__name__)

LOOK_S = 60.0
PATIENCE_S = 2.0
"""An answer that takes longer says too little of the time."""
APART_S = 5.0
"""By so much the machine's own time may differ without a word."""
NOW = sa.select(sa.extract("epoch", sa.func.clock_timestamp()))


class Wall:
    """Called, it says Unix seconds."""

    def __init__(self, rooms: Store, clock: Clock) -> None:
        self._rooms = rooms
        self._clock = clock
        self._began_at: float | None = None
        """On this wall, the clock's zero; None: it is the machine's own."""
        self._is_apart = False

    def __call__(self) -> float:
        return time.time() if self._began_at is None else self._began_at + self._clock.now()

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[Wall]:
        """It is right on entering where the database answers, and kept so while this lasts."""
        if self._rooms.database is not None:
            yield self
            return
        await self._try()
        async with alongside(self._watch()):
            yield self

    async def look(self) -> None:
        """Raises what the database raises, and TimeoutError."""
        async with asyncio.timeout(PATIENCE_S), self._rooms.engine.connect() as connection:
            asked_at = self._clock.now()
            there = float((await connection.execute(NOW)).scalar_one())
            heard_at = self._clock.now()
        self._began_at = there - (asked_at + heard_at) / 2
        apart_s = time.time() - self()
        if abs(apart_s) > APART_S and not self._is_apart:
            log.warning("this machine's clock is %+.0f s from the database's, which leases go by", apart_s)
        self._is_apart = abs(apart_s) > APART_S

    async def _watch(self) -> None:
        while True:
            await self._clock.sleep(LOOK_S)
            await self._try()

    async def _try(self) -> None:
        """What is known goes on where nothing is heard."""
        with contextlib.suppress(SQLAlchemyError, OSError):  # TimeoutError is one
            await self.look()
