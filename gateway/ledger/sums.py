"""Sums over the ledger, by minute, hour and day: each row is added once, soon after it was settled.

What is asked about usage and costs is answered from these sums and the few rows that are not in them yet. A row belongs
to the time at which it was settled, so what a month says changes no more once all its rows have come.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from operator import attrgetter
from typing import Any, Protocol, get_args

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway import store
from gateway.background import alongside
from gateway.clock import Clock
from gateway.ledger.entry import Entry
from gateway.ledger.follow import Batch, Follower, Move
from gateway.store import Edition, Store
from gateway.store.upserts import insert_for
from gateway.telemetry import about
from policies import pricing
from policies.pricing import FROM_CACHE, Kind, Rates
from policies.terms import Usage

log = logging.getLogger(__name__)

FOLLOWER = "usage"
LOOK_S = 5.0
"""Between two looks for new rows."""
GAP_S = 60
"""So long after a row was settled, rows that should stand before it are waited for beside those behind."""
MAX_ROWS = 250
"""Added in one transaction; so few that whoever settles meanwhile waits some milliseconds for it at most."""
MAX_STRETCH = 25_000
"""Added up by the database in one statement, which takes far less of the gateway than the rows one by one."""
MAX_AT_ONCE = 50
"""Added up before the loop is given to others."""
WIDTHS = (60, 3600, 86400)
"""Of the spans, in seconds, each a multiple of the first; they begin at multiples of it."""
_KEYS = tuple(str(column.name) for column in store.usage.primary_key.columns)  # SQLAlchemy's names are no plain str
WORDS = tuple(name for name in _KEYS if name not in ("width_s", "starts_at"))
"""What rows have in common that are in one sum."""
NUMBERS = tuple(str(column.name) for column in store.usage.c if not column.primary_key)
"""What is added up."""

ADDED = NUMBERS[1:8]
"""Those of NUMBERS that are columns of the ledger."""
KINDS: tuple[Kind, ...] = get_args(Kind)
"""In the order of those of NUMBERS that are behind them; the last two are what is owed."""

words_of = attrgetter(*WORDS)
"""Of a row of the ledger."""


Sums = dict[tuple[Any, ...], list[int]]
"""By width, beginning and WORDS."""


class RatesOf(Protocol):
    """What was charged under a price version for a model. Raises LookupError when that cannot be known any more."""

    async def __call__(self, price_version: str, model: str) -> Rates: ...


def numbers_of(entry: Entry, rates: Rates | None) -> tuple[int, ...]:
    """What a row adds to each of NUMBERS. Without rates nobody can tell what its cost was for."""
    num_requests = 0 if entry.corrects is not None else 1
    parts: dict[Kind, int] = {}
    if rates is not None:
        usage = Usage(
            entry.num_prompt_tokens, entry.num_cached_tokens, entry.num_completion_tokens, entry.num_reasoning_tokens
        )
        parts = pricing.parts(rates, usage, entry.cache, entry.engine_us, num_requests, entry.cost_micros)
    return (
        num_requests,
        entry.num_prompt_tokens,
        entry.num_cached_tokens,
        entry.num_completion_tokens,
        entry.num_reasoning_tokens,
        entry.engine_us,
        entry.kv_block_ms,
        entry.cost_micros,
        *(parts.get(kind, 0) for kind in KINDS),
        num_requests if entry.is_owed else 0,
        entry.engine_us if entry.is_owed and entry.cache not in FROM_CACHE else 0,
    )


async def priced(entries: Iterable[Entry], rates_of: RatesOf) -> AsyncIterator[tuple[Entry, tuple[int, ...]]]:
    """Each with its ``numbers_of``, letting the loop go on meanwhile."""
    known: dict[tuple[str, str], Rates | None] = {}
    for number, entry in enumerate(entries):
        if number % MAX_AT_ONCE == 0:
            await asyncio.sleep(0)
        rates = None
        if entry.cost_micros:
            version = (price_version_of(entry), entry.model)
            if version not in known:
                try:
                    known[version] = await rates_of(*version)
                except LookupError as error:
                    extra = about(entry.request_id, entry.trace_id)
                    log.error("what the cost of this request was for is not known: %s", error, extra=extra)
                    known[version] = None
            rates = known[version]
        yield entry, numbers_of(entry, rates)


def price_version_of(entry: Entry) -> str:
    """A row from before there were price lists was charged by its policy."""
    return entry.price_version or f"policy:{entry.policy_name}@{entry.policy_version}"


def add(sums: list[int], numbers: Iterable[int]) -> None:
    for index, number in enumerate(numbers):
        sums[index] += number


class Rollup:
    """Adds new rows to the sums. Of the gateways that share a store, one at a time does."""

    def __init__(self, rooms: Store, rates_of: RatesOf, clock: Clock, wall: Callable[[], float] = time.time) -> None:
        """``wall``: Unix seconds."""
        self._rooms = rooms
        self._rates_of = rates_of
        self._wall = wall
        self._follower = Follower(rooms, FOLLOWER)
        self._clock = clock
        self._failure: str | None = None
        self._rolled: Edition | None = None
        """The store as it was before all of it was added up that can be."""

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """While this lasts, the sums keep up with the ledger."""
        async with alongside(self._watch()):
            yield

    async def roll(self) -> int:
        """Adds all rows that were there when it began and can be followed, and may add some that came since; how many
        they were: 0 when another gateway is at it. Raises what the database raises, and Overtaken."""
        async with self._follower.alone() as is_alone:
            if not is_alone:
                return 0
            edition = await self._rooms.edition()
            num_rows = await self._roll(self._follower)
            gaps, has_more = await self._follower.step_over(int(self._wall()) - GAP_S)
            for gap in gaps:
                log.error(
                    "ledger: chain %d lacks rows %d to %d; they count when they come", gap.chain, gap.from_ + 1, gap.to
                )
                num_rows += await self._roll(self._follower)
            for waiting in await self._follower.waiting():
                num_rows += await self._roll(waiting)
        self._rolled = None if has_more else edition
        return num_rows

    async def _roll(self, follower: Follower) -> int:
        num_rows = 0
        # Read to their ends. What comes behind waits for the next look: a busy gateway settles some rows meanwhile each
        # time, so there would be no end to ever smaller steps.
        done: set[int] = set()
        while True:
            # What is whole the database adds up by itself; rows around a gap are read one by one.
            if (move := await follower.stretch(MAX_STRETCH, done)) is not None:
                batch, sums, is_end = Batch((), [move]), await self._summed(move), move.to - move.from_ < MAX_STRETCH
                num_rows += move.to - move.from_
            elif batch := await follower.next(MAX_ROWS, but=done):
                sums, is_end = await self._added_up(batch.entries), len(batch.entries) < MAX_ROWS
                num_rows += len(batch.entries)
            else:
                return num_rows
            if is_end:
                done.update(move.chain for move in batch.moves)
            async with follower.past(batch) as connection:
                if sums:
                    await _write(connection, sums)

    async def _summed(self, move: Move) -> Sums:
        sums: Sums = {}
        async with self._rooms.engine.connect() as connection:
            place = {"chain": move.chain, "first": move.from_, "last": move.to}
            groups = (await connection.execute(_GROUPS, place)).all()
        for group in groups:
            rates = None
            if group.cost_micros:
                rates = await self._known_rates(group)
            _add_to(sums, (WIDTHS[0], group.minute, *words_of(group)), _numbers_of_group(group, rates))
        return _with_wider(sums)

    async def _known_rates(self, group: Any) -> Rates | None:
        try:
            return await self._rates_of(price_version_of(group), group.model)
        except LookupError as error:
            log.error("what some costs of %s were for is not known: %s", group.model, error)
            return None

    async def _added_up(self, entries: Iterable[Entry]) -> Sums:
        narrowest = WIDTHS[0]
        sums: Sums = {}
        async for entry, numbers in priced(entries, self._rates_of):
            at = entry.settled_at
            _add_to(sums, (narrowest, at - at % narrowest, *words_of(entry)), numbers)
        return _with_wider(sums)

    async def _watch(self) -> None:
        while True:
            try:
                if await self._rooms.edition() != self._rolled:
                    await self.roll()
            except (SQLAlchemyError, OSError) as error:
                self._say(store.cause_of(error))
            except Exception:
                log.exception("the ledger cannot be added up")
            else:
                self._say(None)
            await self._clock.sleep(LOOK_S)

    def _say(self, failure: str | None) -> None:
        """Once when it begins."""
        if failure is not None and self._failure is None:
            log.error("the ledger cannot be added up: %s", failure)
        self._failure = failure


def _add_to(sums: Sums, key: tuple[Any, ...], numbers: Iterable[int]) -> None:
    known = sums.get(key)
    if known is None:
        sums[key] = [*numbers]
    else:
        add(known, numbers)


def _with_wider(sums: Sums) -> Sums:
    """And the same for the wider spans, of what there is for the narrowest."""
    for (_, starts_at, *words), numbers in list(sums.items()):
        for width_s in WIDTHS[1:]:
            _add_to(sums, (width_s, starts_at - starts_at % width_s, *words), numbers)
    return sums


def _groups() -> sa.Select[Any]:
    """A line for each minute and WORDS of the rows of ``:chain`` behind ``:first`` up to ``:last``, those that cost
    nothing apart from the others, whose cost is for nothing that they took; and for each correction, which may be of
    anything."""
    columns = store.ledger.c
    minute = (columns.settled_at - columns.settled_at % WIDTHS[0]).label("minute")
    correction = sa.case((columns.corrects.is_not(None), columns.request_id), else_="").label("correction")
    is_paid = (columns.cost_micros != 0).label("is_paid")
    # The policy is what a row from before there were price lists was charged by.
    words = [*(columns[name] for name in WORDS), columns.policy_name, columns.policy_version]
    sums = [sa.func.sum(columns[name]).label(name) for name in ADDED]
    has_tokens = (columns.num_prompt_tokens != 0) | (columns.num_completion_tokens != 0)
    is_owed = has_tokens | (columns.cost_micros != 0) | columns.corrects.is_not(None)  # as Entry.is_owed
    num_owed = sa.func.sum(sa.case((is_owed, 1), else_=0)).label("num_owed")
    is_computed = columns.cache.not_in(FROM_CACHE)
    engine_us = sa.func.sum(sa.case((is_owed & is_computed, columns.engine_us), else_=0)).label("owed_engine_us")
    return (
        sa.select(minute, correction, is_paid, *words, sa.func.count().label("num_rows"), *sums, num_owed, engine_us)
        .where(
            columns.chain == sa.bindparam("chain"),
            columns.position > sa.bindparam("first"),
            columns.position <= sa.bindparam("last"),
        )
        .group_by(minute, correction, is_paid, *words)
    )


_GROUPS = _groups()
"""Made once: to put it together takes longer than to run it."""


def _numbers_of_group(group: Any, rates: Rates | None) -> tuple[int, ...]:
    """As ``numbers_of``, of rows that were added up; what their cost was for is divided as a whole."""
    added = [int(getattr(group, name)) for name in ADDED]  # PostgreSQL's sums are decimals
    num_prompt, num_cached, num_completion, num_reasoning, engine_us, _, cost_micros = added
    num_requests, num_owed = (0, 0) if group.correction else (group.num_rows, int(group.num_owed))
    parts: dict[Kind, int] = {}
    if rates is not None:
        usage = Usage(num_prompt, num_cached, num_completion, num_reasoning)
        parts = pricing.parts(rates, usage, group.cache, engine_us, num_requests, cost_micros)
    return (num_requests, *added, *(parts.get(kind, 0) for kind in KINDS), num_owed, int(group.owed_engine_us))


async def _write(connection: AsyncConnection, sums: Sums) -> None:
    """Adds to what is there. In the order of the keys, so that those who write at once wait for each other rather than
    in a circle."""
    names = ("width_s", "starts_at", *WORDS, *NUMBERS)
    rows = [dict(zip(names, (*key, *numbers), strict=True)) for key, numbers in sorted(sums.items())]
    await connection.execute(_upsert(connection.dialect.name), rows)


@functools.cache
def _upsert(dialect: str) -> Any:
    """A row of sums, added to what there is."""
    statement = insert_for(dialect)(store.usage)
    grown = {name: store.usage.c[name] + statement.excluded[name] for name in NUMBERS}
    return statement.on_conflict_do_update(index_elements=store.usage.primary_key.columns, set_=grown)
