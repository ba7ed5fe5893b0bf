"""Reading the ledger again, row by row: is each as it was written, is none missing, are the digests those of the rows?

A link that is not over the row and the link before it shows a row that was changed, a place without a row one that is
missing. Both show for closed days by the digest as well, as long as somebody keeps the digest elsewhere: whoever can
write all of the store can also write a ledger that is whole in itself. Rows that nothing closes yet are read to the end
of their chains; a gap there may also be a row that waits in a gateway's spool.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, Literal, NamedTuple

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway import store
from gateway.ledger.chains import GENESIS, content_of_row, link_of
from gateway.ledger.closing import DAY_S, Cut, Day, digest_of, name_of
from gateway.store import Store

MAX_FINDINGS = 1000
"""That are kept; further ones are only counted."""
AT_ONCE = 2000
"""Rows in memory together."""


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something that is not as it was."""

    kind: Literal["changed", "missing", "extra", "digest"]
    what: str
    """A sentence."""
    day: str | None = None
    """Of the closing."""
    chain: int | None = None
    position: int | None = None
    """The first, where there are several."""
    request_id: str | None = None


class Verdict(msgspec.Struct):
    """What was found."""

    num_rows: int = 0
    """That were read."""
    num_chains: int = 0
    num_before_chains: int = 0
    """Rows of versions that knew no chains; of them nothing can be said."""
    days: list[Day] = []
    num_findings: int = 0
    findings: list[Finding] = []

    def find(self, finding: Finding) -> None:
        self.num_findings += 1
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(finding)


class Stretch(NamedTuple):
    """Places of a chain that are read in one go."""

    chain: int
    first: int
    last: int
    link: bytes
    """Before the first."""
    last_link: bytes | None
    """What the closing says; None: no closing covers it."""
    day: int | None


class Place(NamedTuple):
    """What stands at one."""

    position: int
    request_id: str
    content: bytes
    link: bytes | None
    """None of a repeat, whose row stands elsewhere."""


async def verify(
    rooms: Store,
    from_day: int | None = None,
    to_day: int | None = None,
    told: Callable[[int, int], None] = lambda done, total: None,
) -> Verdict:
    """Reads the closed days from one until before another and, unless a closed day follows, what is not closed.
    ``told`` hears how many places of how many are read. Raises what the database raises."""
    verdict = Verdict()
    async with rooms.engine.connect() as connection:
        if rooms.database is None:  # a day may be closed meanwhile; SQLite looks at one state anyway
            await connection.execution_options(isolation_level="REPEATABLE READ")
        stretches = await _closed(connection, from_day, to_day, verdict)
        stretches += await _open(connection, to_day, verdict)
        before = sa.select(sa.func.count()).where(store.ledger.c.chain == 0)
        verdict.num_before_chains = (await connection.execute(before)).scalar_one()
    verdict.num_chains = len({stretch.chain for stretch in stretches})
    done, total = 0, sum(stretch.last - stretch.first + 1 for stretch in stretches)
    for stretch in stretches:
        walk = _Walk(stretch, verdict)
        async for place in _places(rooms, stretch):
            walk.step(place)
            if place.position % AT_ONCE == 0:
                told(done + place.position - stretch.first + 1, total)
        walk.end()
        for repeat in walk.repeats:
            await _check_repeat(rooms, stretch, repeat, verdict)
        done += stretch.last - stretch.first + 1
        told(done, total)
    return verdict


class _Walk:
    """Along the places of a stretch."""

    def __init__(self, stretch: Stretch, verdict: Verdict) -> None:
        self.repeats: list[Place] = []
        self._stretch = stretch
        self._verdict = verdict
        self._position = stretch.first - 1
        self._link: bytes | None = stretch.link
        """None: it stood at a place that is missing, so that the next row cannot be held to it."""

    def step(self, place: Place) -> None:
        if place.position <= self._position:
            return self._find("extra", f"{place.request_id} stands at a place that another row has", place)
        self._miss(place.position)
        expected = None if self._link is None else link_of(self._link, place.content)
        if place.link is None and not place.content:  # nobody knows the row, nor its link
            self._find("missing", f"the row at position {place.position} is missing, and was given up", place)
            expected = None
        elif place.link is None:
            self.repeats.append(place)
        else:
            self._verdict.num_rows += 1
            if expected not in (place.link, None):
                self._find("changed", f"{place.request_id} is not the row that was written, or follows another", place)
        self._link = place.link or expected
        self._position = place.position

    def end(self) -> None:
        stretch = self._stretch
        self._miss(stretch.last + 1)
        if stretch.last_link is not None and self._link not in (stretch.last_link, None):
            self._find("digest", "the closing's link is not the one of its last row", None)

    def _miss(self, position: int) -> None:
        """Whatever should stand before ``position``."""
        first, last = self._position + 1, position - 1
        if last < first:
            return
        which = f"the row at position {first} is" if first == last else f"the rows at positions {first} to {last} are"
        maybe = "missing" if self._stretch.day is not None else "missing, or still in the spool of a gateway"
        self._find("missing", f"{which} {maybe}", None, first)
        self._link = None
        self._position = last

    def _find(
        self, kind: Literal["changed", "missing", "extra", "digest"], what: str, place: Place | None, first: int = 0
    ) -> None:
        day = None if self._stretch.day is None else name_of(self._stretch.day)
        position = place.position if place else first or self._position
        request_id = (place.request_id or None) if place else None
        self._verdict.find(Finding(kind, what, day, self._stretch.chain, position, request_id))


async def _closed(
    connection: AsyncConnection, from_day: int | None, to_day: int | None, verdict: Verdict
) -> list[Stretch]:
    """What the closings of the days cover, in the order of the days, whose digests are held to the closings."""
    days, closings = store.ledger_days.c, store.ledger_closings.c
    first = -1 if from_day is None else from_day
    in_period = days.day >= first if to_day is None else (days.day >= first) & (days.day < to_day)
    ends = await _ends(connection, first)
    before = sa.select(store.ledger_days).where(days.day < first).order_by(days.day.desc()).limit(1)
    previous = (await connection.execute(before)).first()
    stretches: list[Stretch] = []
    for day in (await connection.execute(sa.select(store.ledger_days).where(in_period).order_by(days.day))).all():
        name = name_of(day.day)
        if previous is not None and day.day != previous.day + 1:
            verdict.find(Finding("missing", f"{name} is closed, but not the day before it", name))
        of_day = sa.select(store.ledger_closings).where(closings.day == day.day).order_by(closings.chain)
        cuts = [Cut(*row[1:]) for row in await connection.execute(of_day)]
        if digest_of(GENESIS if previous is None else previous.digest, day.day, cuts) != day.digest:
            verdict.find(Finding("digest", f"the digest of {name} is not the one of its closings", name))
        for cut in cuts:
            end, link = ends.get(cut.chain, (0, GENESIS))
            if cut.first_position != end + 1:
                what = f"the closing begins at position {cut.first_position}, the one before ends at {end}"
                verdict.find(Finding("digest", what, name, cut.chain, end + 1))
            stretches.append(Stretch(cut.chain, end + 1, cut.last_position, link, cut.last_link, day.day))
            ends[cut.chain] = cut.last_position, cut.last_link
        verdict.days.append(Day(name, day.num_rows, day.digest.hex()))
        previous = day
    return stretches


async def _open(connection: AsyncConnection, to_day: int | None, verdict: Verdict) -> list[Stretch]:
    """What no closing covers of each chain, until before a day; nothing when a closed day comes after that."""
    days, rows, places = store.ledger_days.c, store.ledger.c, store.ledger_repeats.c
    last_day = (await connection.execute(sa.select(sa.func.max(days.day)))).scalar_one()
    if to_day is not None and last_day is not None and to_day <= last_day:
        return []
    ends = await _ends(connection, None)
    known = set((await connection.execute(sa.select(store.ledger_chains.c.id))).scalars())
    stretches = []
    async for chain in _chains(connection):
        if chain not in known:
            verdict.find(Finding("extra", f"chain {chain} was never opened, and has rows", chain=chain))
        position, link = ends.get(chain, (0, GENESIS))
        lowest = sa.select(sa.func.min(rows.position)).where(rows.chain == chain)
        if (low := (await connection.execute(lowest)).scalar_one()) is not None and low < 1:
            verdict.find(Finding("extra", f"chain {chain} has a row at position {low}", chain=chain, position=low))
        of_chain = rows.chain == chain
        if to_day is not None:
            of_chain &= rows.settled_at < to_day * DAY_S
        last = (await connection.execute(sa.select(sa.func.max(rows.position)).where(of_chain))).scalar_one() or 0
        if to_day is None:
            of_repeats = sa.select(sa.func.max(places.position)).where(places.chain == chain)
            last = max(last, (await connection.execute(of_repeats)).scalar_one() or 0)
        if last > position:
            stretches.append(Stretch(chain, position + 1, last, link, None, None))
    return stretches


async def _ends(connection: AsyncConnection, before: int | None) -> dict[int, tuple[int, bytes]]:
    """Where the last closing of each chain ends, and its link; of the closings of days ``before`` one, or of all."""
    columns = store.ledger_closings.c
    query = sa.select(columns.chain, columns.last_position, columns.last_link).order_by(columns.day)
    if before is not None:
        query = query.where(columns.day < before)
    return {chain: (position, link) for chain, position, link in await connection.execute(query)}


async def _chains(connection: AsyncConnection) -> AsyncIterator[int]:
    """Those that have rows, one look into the index each."""
    chain = 0
    while True:
        following = sa.select(sa.func.min(store.ledger.c.chain)).where(store.ledger.c.chain > chain)
        if (chain := (await connection.execute(following)).scalar_one()) is None:
            return
        yield chain


async def _places(rooms: Store, stretch: Stretch) -> AsyncIterator[Place]:
    """In order, some at a time; a connection is held for no longer than that takes."""
    rows, repeats = store.ledger.c, store.ledger_repeats.c
    begin = stretch.first
    while begin <= stretch.last:
        end = min(begin + AT_ONCE, stretch.last + 1)

        def between(columns: Any, begin: int = begin, end: int = end) -> sa.ColumnElement[bool]:
            return sa.and_(columns.chain == stretch.chain, columns.position >= begin, columns.position < end)

        async with rooms.engine.connect() as connection:
            query = sa.select(store.ledger).where(between(rows)).order_by(rows.position)
            found = [
                Place(row.position, row.request_id, content_of_row(row), row.link)
                for row in await connection.execute(query)
            ]
            settled_twice = await connection.execute(sa.select(store.ledger_repeats).where(between(repeats)))
            found += [Place(row.position, row.request_id, row.content, None) for row in settled_twice]
        found.sort(key=lambda place: place.position)
        for place in found:
            yield place
        begin = end


async def _check_repeat(rooms: Store, stretch: Stretch, repeat: Place, verdict: Verdict) -> None:
    """The row of its request has to be somewhere."""
    query = sa.select(store.ledger.c.request_id).where(store.ledger.c.request_id == repeat.request_id)
    async with rooms.engine.connect() as connection:
        if (await connection.execute(query)).first() is not None and _names(repeat):
            return
    day = None if stretch.day is None else name_of(stretch.day)
    what = f"{repeat.request_id} was settled twice, and neither row is there"
    verdict.find(Finding("missing", what, day, stretch.chain, repeat.position, repeat.request_id))


def _names(repeat: Place) -> bool:
    """Its bytes are of the request that it names."""
    try:
        named: bool = msgspec.msgpack.decode(repeat.content)[0] == repeat.request_id
    except (msgspec.DecodeError, TypeError, LookupError):
        return False
    return named
