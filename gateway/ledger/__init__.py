"""What was delivered, written down: a row for each finished request, durable before its answer ends.

Commits are shared. A row that comes while nothing is being written and nobody else could join it is written at once;
the others wait until all requests that are open have come, or for ``store.ledger_flush_ms`` at most. Rows that a failed
commit leaves behind are tried again; a row is inserted once however often it is written. How rows get into a database
is ``writers``, where they wait while it is away is ``spool``, and what makes a change of them show is ``chains``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence

import msgspec
from sqlalchemy.exc import SQLAlchemyError

from gateway.background import within
from gateway.clock import Clock, Timer
from gateway.errors import LedgerBehind
from gateway.ledger.chains import Chain, open_chain
from gateway.ledger.entry import Entry, WriteError, Writer
from gateway.ledger.marks import Mark, Marks
from gateway.ledger.recent import Recent
from gateway.ledger.tally import Tally
from gateway.ledger.writers import writer_for
from gateway.telemetry import Times, about
from policies import settings

__all__ = ["Chain", "Entry", "Ledger", "WriteError", "Writer", "open_chain", "writer_for"]

log = logging.getLogger(__name__)

MAX_BATCH = 1000
"""Rows of one commit."""
FIRST_RETRY_S, LAST_RETRY_S = 0.1, 5.0
CLOSING_S = 3.0
"""How long it may take to let go of the database."""
ADDED_BOUNDS_MS = (0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 25.0, 50.0, 100.0, 250.0, 1000.0, 5000.0)


class Ledger:
    """The only writer of what a tenant owes."""

    def __init__(
        self,
        writer: Writer,
        config: settings.Store,
        clock: Clock,
        chain: Chain,
        num_open: Callable[[], int] = lambda: 1,
        marks: Marks | None = None,
        tally: Tally | None = None,
        recent: Recent | None = None,
        another: Callable[[], Coroutine[None, None, Chain]] | None = None,
    ) -> None:
        """``chain``: nobody else's. ``num_open``: requests that have not been answered; as many rows may still
        come. ``another``: opens another chain, where the system's time was set back. Raises what the database
        raises."""
        self.marks = marks
        self._writer = writer
        self._chain = chain
        self._flush_s = 1e-3 * config.ledger_flush_ms
        self._max_backlog = config.max_ledger_backlog
        self._clock = clock
        self._num_open = num_open
        self.added = Times(ADDED_BOUNDS_MS)
        """How long answers waited for their rows."""
        self.tally = tally or Tally({})
        """Has them counted when they are durable."""
        self.recent = recent or Recent(0)
        self.came_late = asyncio.Event()
        """Rows have come long after what was spent was counted, or of requests that nobody has counted."""
        self._pending: list[tuple[Entry, asyncio.Future[None], float]] = []
        self._timer: Timer | None = None
        self._writing: asyncio.Task[None] | None = None
        self._another = another
        self._opening: asyncio.Task[None] | None = None
        self._is_failing = False
        """The last try to write failed."""

    def settle(self, entry: Entry, mark: Mark | None = None) -> asyncio.Future[None]:
        """Done when the row is durable. It will be, also when the caller is cancelled meanwhile; that ends the stream's
        mark."""
        durable = self.put(entry, mark)
        return durable if mark is None else asyncio.shield(durable)  # the mark stays until the row is written

    def put(self, entry: Entry, mark: Mark | None = None) -> asyncio.Future[None]:
        """As ``settle``, for whoever need not wait."""
        durable: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending.append((entry, durable, self._clock.now()))
        if mark is not None:
            durable.add_done_callback(mark.end)
        if self._writing is None:
            if len(self._pending) >= self._num_worth_a_commit():
                self._flush()
            elif self._timer is None:
                self._timer = self._clock.call_later(self._flush_s, self._flush)
        return durable

    def check_room(self) -> None:
        """Raises LedgerBehind when nothing can be written at the moment, or so much waits for it that nothing more
        should be delivered."""
        if self.marks is not None:
            self.marks.check_room()
        if self._is_failing or len(self._pending) >= self._max_backlog:
            raise LedgerBehind(
                "This server cannot write its ledger at the moment. Please try again.", retry_after_s=1.0
            )

    @property
    def has_room(self) -> bool:
        """``check_room`` raises nothing."""
        try:
            self.check_room()
        except LedgerBehind:
            return False
        return True

    @property
    def is_failing(self) -> bool:
        """The last try to write failed, and it is tried again."""
        return self._is_failing

    @property
    def num_pending(self) -> int:
        """Rows that are not durable yet."""
        return len(self._pending)

    async def close(self, patience_s: float) -> None:
        """Writes what is pending, then lets go of the database. Rows that cannot be written in time go to the log."""
        try:
            async with asyncio.timeout(patience_s):
                while self._writing is not None or self._pending:
                    self._flush()
                    assert self._writing is not None
                    await asyncio.shield(self._writing)
        except TimeoutError:
            assert self._writing is not None
            self._writing.cancel()
            await asyncio.wait([self._writing])
            for entry, _, _ in self._pending:
                row = msgspec.json.encode(msgspec.structs.asdict(entry)).decode()
                log.critical("ledger: not written: %s", row, extra=about(entry.request_id, entry.trace_id))
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
        await within(CLOSING_S, self._writer.close(), "the ledger")

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._writing is None and self._pending:
            self._writing = asyncio.create_task(self._write_all())

    async def _write_all(self) -> None:
        """One commit, and the next ones as long as enough rows wait for them."""
        try:
            while self._pending:
                began_at = self._clock.now()
                batch = self._pending[:MAX_BATCH]
                now = int(time.time())
                if self._chain.is_ahead(now) and self._another is not None and self._opening is None:
                    self._opening = asyncio.create_task(self._begin(self._another))
                await self._write([self._chain.extend(entry, now) for entry, _, _ in batch])
                del self._pending[: len(batch)]
                written_at = self._clock.now()
                for _, durable, put_at in batch:
                    self.added.add(1e3 * (written_at - put_at))
                    if not durable.done():  # its waiter may have been cancelled
                        durable.set_result(None)
                self.tally.add([entry for entry, _, _ in batch])
                waited_s = written_at - began_at  # about as long as those that came meanwhile
                if len(self._pending) < self._num_worth_a_commit() and waited_s < self._flush_s:
                    break
        finally:
            self._writing = None
            if self._pending:
                self._timer = self._clock.call_later(self._flush_s, self._flush)

    async def _begin(self, another: Callable[[], Coroutine[None, None, Chain]]) -> None:
        """Another chain, of the time that it is now; until it is there rows go into the old one."""
        try:
            self._chain = await another()
            log.warning("ledger: the system's time was set back; rows of the time before it are dated later than these")
        except (SQLAlchemyError, OSError):
            pass  # it is tried again with the next rows
        finally:
            self._opening = None

    def _num_worth_a_commit(self) -> int:
        return min(self._num_open(), MAX_BATCH) if self._flush_s else 1

    async def _write(self, entries: Sequence[Entry]) -> None:
        """Until it is done: what was delivered must be written down."""
        retry_s = FIRST_RETRY_S
        while True:
            try:
                await self._writer.write(entries)
                self._is_failing = False
                return
            except WriteError as error:
                self._is_failing = True
                log.error("ledger: %d rows cannot be written (%s); next try in %.3g s", len(entries), error, retry_s)
            await self._clock.sleep(retry_s)
            retry_s = min(2 * retry_s, LAST_RETRY_S)
