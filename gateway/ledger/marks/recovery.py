"""Streams that nobody has settled, because their process or their machine is gone: each owes what was delivered.

Their rows say status 500 and finish reason "error", as those of any stream that broke off through our own fault. A
stream whose row is there already, in the store or in the spool, is left alone. Of a stream of which nothing is known to
have been delivered the row is there too, and owes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from gateway import store
from gateway.clock import Clock
from gateway.errors import InternalError
from gateway.ledger import Ledger
from gateway.ledger.entry import Entry
from gateway.ledger.marks.segment import (
    OUTCOME_BITS,
    OUTCOMES,
    SUFFIX,
    Left,
    Word,
    alone_in,
    rates_in,
    read,
    taken_over,
)
from gateway.ledger.spool import SpooledWriter
from gateway.store import Store
from policies import pricing
from policies.terms import Usage

log = logging.getLogger(__name__)

STATUS, FINISH_REASON = InternalError.status, "error"
RETRY_S = 5.0
AT_ONCE = 500
"""Rows that the store is asked for at once."""


class Recovery:
    """Of one directory."""

    def __init__(
        self, directory: Path, rooms: Store, ledger: Ledger, spool: SpooledWriter | None, clock: Clock
    ) -> None:
        self._directory = directory
        self._rooms = rooms
        self._ledger = ledger
        self._spool = spool
        self._clock = clock

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """On entering, what is left is settled. If the store or the disk does not allow it now, it is tried again while
        this lasts, and by the next gateway."""
        trying = None if await self.tried() else asyncio.create_task(self._try_again())
        try:
            yield
        finally:
            if trying is not None:
                trying.cancel()
                await asyncio.wait([trying])

    async def _try_again(self) -> None:
        while True:
            await self._clock.sleep(RETRY_S)
            if await self.tried():
                return

    async def tried(self) -> bool:
        """Whether all that can be settled is."""
        try:
            await self.run()
        except (SQLAlchemyError, OSError) as error:
            log.error("ledger: streams that broke off are not settled yet: %s", store.cause_of(error))
            return False
        except Exception:
            log.exception("ledger: streams that broke off are not settled yet")
            return False
        return True

    async def run(self) -> None:
        """Raises OSError, SQLAlchemyError."""
        if not self._directory.exists():
            return
        with contextlib.ExitStack() as stack:
            files = []
            with alone_in(self._directory):
                for path in sorted(self._directory.glob(f"*{SUFFIX}")):
                    file = stack.enter_context(taken_over(path))
                    if file is not None:
                        files.append((path, file))
            for path, file in files:
                await self._settle(path, file)

    async def _settle(self, path: Path, file: int) -> None:
        left, torn = await asyncio.to_thread(read, file)
        for reason in torn:
            log.critical("ledger: in %s: %s", path, reason)
        entries = await self._unsettled([entry_of(each) for each in left])
        await asyncio.gather(*(self._ledger.settle(entry) for entry in entries))
        if entries:
            self._ledger.came_late.set()
            num_tokens = sum(entry.num_completion_tokens for entry in entries)
            log.warning(
                "ledger: streams that broke off are settled from %s: %d, for %d tokens", path, len(entries), num_tokens
            )
        await asyncio.to_thread(_put_away, path, bool(torn))

    async def _unsettled(self, entries: list[Entry]) -> list[Entry]:
        """Those that have no row. The spool is asked first: a row that leaves it is in the store by then."""
        request_ids = [entry.request_id for entry in entries]
        settled = set() if self._spool is None else await self._spool.kept(request_ids)
        for start in range(0, len(request_ids), AT_ONCE):
            some = store.ledger.c.request_id.in_(request_ids[start : start + AT_ONCE])
            async with self._rooms.engine.connect() as connection:
                settled |= set(await connection.scalars(sa.select(store.ledger.c.request_id).where(some)))
        return [entry for entry in entries if entry.request_id not in settled]


def _put_away(path: Path, is_torn: bool) -> None:
    """What cannot be read stays, for whoever wants to look at it."""
    if is_torn:
        path.rename(path.with_suffix(".torn"))
    else:
        path.unlink(missing_ok=True)


def entry_of(left: Left) -> Entry:
    """The row of a stream that broke off: what was delivered, at the price that it was admitted with."""
    opening, words = left.opening, left.words
    entry, num_tokens = opening.entry, words[Word.TOKENS]
    num_reasoning_tokens, outcome_at = divmod(words[Word.OUTCOME], 1 << OUTCOME_BITS)
    outcome = OUTCOMES[outcome_at]
    usage, cost_micros = Usage(0, 0, 0), 0
    if num_tokens:
        num_reasoning_tokens = min(num_reasoning_tokens, num_tokens)  # some of those may not have been delivered
        usage = Usage(entry.num_prompt_tokens, words[Word.CACHED_TOKENS], num_tokens, num_reasoning_tokens)
        if opening.rates:
            cost_micros = pricing.cost_micros(rates_in(opening.rates), usage, outcome)
    return msgspec.structs.replace(
        entry,
        status=STATUS,
        finish_reason=FINISH_REASON,
        num_prompt_tokens=usage.num_prompt_tokens,
        num_cached_tokens=usage.num_cached_tokens,
        num_completion_tokens=usage.num_completion_tokens,
        num_reasoning_tokens=usage.num_reasoning_tokens,
        cache=outcome,
        queue_ms=words[Word.QUEUE_US] / 1e3,
        ttft_ms=words[Word.TTFT_US] / 1e3 if words[Word.TTFT_US] else None,
        duration_ms=words[Word.DURATION_US] / 1e3,
        cost_micros=cost_micros,
    )
