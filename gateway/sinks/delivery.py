"""One sink: the ledger's rows in order, each event at least once, however often the receiver, the store or a gateway
fails.

What was taken is forgotten until the cursor has moved past its row, so events may come again, with the ids that they
had. One that the receiver refuses for good is kept aside, to be looked at and tried again (``Book``); while the
receiver takes nothing, the sink waits longer and longer, or as long as it was asked to.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime

from sqlalchemy.exc import SQLAlchemyError

from gateway.clock import Clock
from gateway.ledger.entry import Entry
from gateway.ledger.follow import Batch, Follower, Move, Overtaken
from gateway.sinks.book import MAX_FAILURES, Book, Skips
from gateway.sinks.events import Event, events_of
from gateway.sinks.sending import MAX_RETRY_AFTER_S, Done, Sender, Trouble
from gateway.store import Edition, Store, cause_of
from policies.sinks import Sink

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between two looks for new rows."""
MAX_ROWS = 100
"""Read, sent and passed at once; after a crash the receiver may get so many a second time."""
FIRST_DELAY_S, MAX_DELAY_S, GROWTH = 1.0, 300.0, 2.0
"""Between tries."""
MAX_WAIT_S = max(MAX_DELAY_S, MAX_RETRY_AFTER_S)
MAX_NAMED = 10_000
"""Tenants whose rows are passed over that the log has named."""


def follower_of(name: str) -> str:
    return f"sink:{name}"


class Delivery:
    """Sends one sink's events. Of the gateways that share a store, one at a time does."""

    def __init__(
        self,
        name: str,
        sink: Sink,
        sender: Sender,
        rooms: Store,
        clock: Clock,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """``wall``: Unix seconds."""
        self.name = name
        self.num_taken = self.num_refused = 0
        """Events that this gateway has brought, for good."""
        self.is_waiting = False
        """The receiver takes nothing, or has refused so much that no more is sent."""
        self._sink = sink
        self._sender = sender
        self._clock = clock
        self._wall = wall
        self._rooms = rooms
        self._book = Book(rooms, name, sink)
        self._follower = Follower(rooms, follower_of(name))
        since = sink.since
        self._since = 0 if since is None else int(datetime(since.year, since.month, since.day, tzinfo=UTC).timestamp())
        self._named: set[str] = set()
        self._delivered: Edition | None = None
        """The store as it was before all was sent."""
        self._failure: str | None = None

    async def deliver(self) -> None:
        """Sends all that is there, unless another gateway is at it or it is too early for another try. Raises what the
        database raises, and Overtaken."""
        async with self._follower.alone() as is_alone:
            if not is_alone:
                return
            edition = await self._rooms.edition()
            state = await self._book.state()
            now = self._wall()
            # A clock that was set back must not make it wait for ever.
            if now < state.retry_at <= now + MAX_WAIT_S:
                self.is_waiting = True
                return
            num_failures = state.num_failures
            try:
                while num_failures < MAX_FAILURES and (batch := await self._follower.next(MAX_ROWS)):
                    num_failures += await self._pass(batch)
                await self._send_again()  # last: one that makes trouble whenever it comes must not hold up the others
            except Trouble as trouble:
                num_tries = (await self._book.state()).num_tries + 1  # from 1 again, had it taken anything
                delay_s = max(backoff_s(num_tries), trouble.retry_after_s)
                if str(trouble) != state.last_error or num_tries == 1:
                    log.warning("sink %s: %s; tried again in %g s", self.name, trouble, delay_s)
                now = self._wall()
                await self._book.note(str(trouble), num_tries, now + delay_s, now)
                self.is_waiting = True
                return
            self.is_waiting = num_failures >= MAX_FAILURES
            if self.is_waiting:
                self._say(f"{MAX_FAILURES} events were refused; until some are taken or discarded no more are sent")
            else:
                self._say(None)
            self._delivered = edition

    async def watch(self) -> None:
        """For ever."""
        while True:
            try:
                if await self._rooms.edition() != self._delivered:
                    await self.deliver()
            except Overtaken as error:
                log.info("sink %s: %s", self.name, error)
            except (SQLAlchemyError, OSError) as error:
                self._say(cause_of(error))
            except Exception:
                log.exception("sink %s cannot go on", self.name)
            await self._clock.sleep(LOOK_S)

    async def _pass(self, batch: Batch) -> int:
        """Sends what the rows have to say, and moves past those that are done with; how many events were refused.
        Raises Trouble when there are others."""
        entries = batch.entries
        customers = await self._book.customers({entry.tenant_id for entry in entries})
        events: dict[str, list[Event]] = {}
        skipped: dict[str, Skips] = {}
        for entry in entries:
            if entry.settled_at >= self._since and entry.tenant_id in customers:
                events[entry.request_id] = events_of(entry, customers[entry.tenant_id], self._sink)
        done: Done = {}
        trouble: Trouble | None = None
        try:
            await self._sender.send([event for row in events.values() for event in row], done)
        except Trouble as found:
            trouble = found
        num_rows = _num_done(entries, events, done)
        passed = [event for entry in entries[:num_rows] for event in events.get(entry.request_id, ())]
        for entry in entries[:num_rows]:
            if entry.settled_at >= self._since and entry.tenant_id not in customers:
                _count(skipped, entry)
        refused = [(event, why) for event in passed if (why := done[event.id]) is not None]
        if num_rows or trouble is None:
            async with self._follower.past(_beginning(batch, num_rows)) as connection:
                await self._book.add(
                    connection,
                    num_rows=num_rows,
                    num_events=len(passed) - len(refused),
                    refused=refused,
                    skipped=skipped,
                    now=self._wall(),
                )
            self.num_taken += len(passed) - len(refused)
            self.num_refused += len(refused)
            self._name_skipped(skipped)
            self._name_refused(refused)
        if trouble is not None:
            raise trouble
        return len(refused)

    async def _send_again(self) -> None:
        """What was refused, and somebody asked for: as the ledger and the settings have it now. Raises Trouble."""
        while due := await self._book.due(MAX_ROWS):
            entries = await self._book.entries({failure.request_id for failure in due})
            customers = await self._book.customers({entry.tenant_id for entry in entries.values()})
            done: Done = {}
            events = []
            for failure in due:
                if (entry := entries.get(failure.request_id)) is None:
                    done[failure.event_id] = "its row is not in the ledger"
                elif (customer := customers.get(entry.tenant_id)) is None:
                    done[failure.event_id] = f"its tenant has no {self._sink.customer}"
                else:
                    found = [event for event in events_of(entry, customer, self._sink) if event.id == failure.event_id]
                    events += found
                    if not found:
                        done[failure.event_id] = "the settings send nothing of it any more"
            trouble: Trouble | None = None
            try:
                await self._sender.send(events, done)
            except Trouble as error:
                trouble = error
            # Not where this is cancelled: a server that is stalled would not answer, and nobody cancels twice.
            await self._book.tried(done, self._wall())
            self.num_taken += sum(why is None for why in done.values())
            if trouble is not None:
                raise trouble

    def _name_skipped(self, skipped: Iterable[str]) -> None:
        for tenant_id in skipped:
            if tenant_id not in self._named and len(self._named) < MAX_NAMED:
                self._named.add(tenant_id)
                log.warning(
                    "sink %s: rows of tenant %s are passed over, since it has no %s",
                    self.name,
                    tenant_id,
                    self._sink.customer,
                )

    def _name_refused(self, refused: Sequence[tuple[Event, str]]) -> None:
        if refused:
            event, why = refused[0]
            others = f", and {len(refused) - 1} others" if len(refused) > 1 else ""
            log.error("sink %s: event %s was refused%s: %s", self.name, event.id, others, why)

    def _say(self, failure: str | None) -> None:
        """Once when it begins."""
        if failure is not None and failure != self._failure:
            log.error("sink %s: %s", self.name, failure)
        self._failure = failure


def backoff_s(num_tries: int) -> float:
    """Seconds before the next try after so many failures in a row, >= 1."""
    return float(min(MAX_DELAY_S, FIRST_DELAY_S * GROWTH ** min(num_tries - 1, 30)))


def _num_done(entries: Sequence[Entry], events: dict[str, list[Event]], done: Done) -> int:
    """Rows at the beginning of which nothing is left to be sent."""
    for number, entry in enumerate(entries):
        if any(event.id not in done for event in events.get(entry.request_id, ())):
            return number
    return len(entries)


def _beginning(batch: Batch, num_rows: int) -> Batch:
    """The batch as far as its first rows, of which some are left."""
    if num_rows == len(batch.entries):
        return batch
    last = {entry.chain: entry.position for entry in batch.entries[:num_rows]}
    stopped_in = batch.entries[num_rows].chain
    moves = []
    for move in batch.moves:
        if move.chain == stopped_in:
            if move.chain in last:
                moves.append(Move(move.chain, move.from_, last[move.chain]))
            break
        moves.append(move)
    return Batch(batch.entries[:num_rows], moves)


def _count(skipped: dict[str, Skips], entry: Entry) -> None:
    seen = skipped.setdefault(entry.tenant_id, Skips(0, entry.settled_at, entry.settled_at))
    seen.num_rows += 1
    seen.last_at = max(seen.last_at, entry.settled_at)
