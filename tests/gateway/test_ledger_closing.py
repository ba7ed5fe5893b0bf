"""Closing days on both databases: what belongs to one, in what order, once, and when."""

from __future__ import annotations

import asyncio
import random
import time

import pytest
import sqlalchemy as sa

from gateway import store
from gateway.ledger import Chain, Entry, closing, open_chain, writer_for
from gateway.ledger.chains import GENESIS
from gateway.ledger.closing import DAY_S, Closing, Cut, close_next, digest_of
from gateway.store import Store
from tests.builders import an_entry, until

FIRST = 20_000
"""2024-10-04."""


async def begun(rooms: Store, opened_at: int = FIRST * DAY_S) -> Chain:
    """A chain, as if its gateway had started then."""
    chain = await open_chain(rooms)
    async with rooms.engine.begin() as connection:
        await connection.execute(sa.update(store.ledger_chains).values(opened_at=opened_at))
    return chain


async def write(rooms: Store, *entries: Entry) -> None:
    writer = writer_for(rooms)
    await writer.write(entries)
    await writer.close()


async def close_until(rooms: Store, before: int) -> list[closing.Day]:
    closed = []
    while (day := await close_next(rooms, before, 0)) is not None:
        closed.append(day)
    return closed


async def cuts(rooms: Store) -> list[tuple[int, int, int, int]]:
    """(day, chain, first position, last position)."""
    async with rooms.engine.connect() as connection:
        query = sa.select(store.ledger_closings).order_by("day", "chain")
        return [tuple(row)[:4] for row in await connection.execute(query)]


async def test_a_day_has_the_rows_that_were_settled_in_it(rooms):
    chain = await begun(rooms)
    rows = [chain.extend(an_entry(), FIRST * DAY_S + seconds) for seconds in (0, 5, DAY_S - 1, DAY_S, DAY_S + 7)]
    await write(rooms, *rows)
    days = await close_until(rooms, FIRST + 2)
    assert [(day.day, day.num_rows) for day in days] == [("2024-10-04", 3), ("2024-10-05", 2)]
    assert await cuts(rooms) == [(FIRST, chain.number, 1, 3), (FIRST + 1, chain.number, 4, 5)]
    first = digest_of(GENESIS, FIRST, [Cut(chain.number, 1, 3, rows[2].link)])
    assert [day.digest for day in days] == [
        first.hex(),
        digest_of(first, FIRST + 1, [Cut(chain.number, 4, 5, rows[4].link)]).hex(),
    ]


async def test_days_without_rows_are_closed_too_and_a_closed_day_stays_as_it_is(rooms):
    chain = await begun(rooms)
    await write(rooms, chain.extend(an_entry(), (FIRST + 2) * DAY_S))
    assert [day.num_rows for day in await close_until(rooms, FIRST + 4)] == [0, 0, 1, 0]
    assert await close_until(rooms, FIRST + 4) == []
    await write(rooms, chain.extend(an_entry(), (FIRST + 2) * DAY_S))
    assert [day.num_rows for day in await close_until(rooms, FIRST + 5)] == [1]


async def test_a_ledger_without_chains_has_nothing_to_close(rooms):
    assert await close_until(rooms, FIRST) == []


async def test_rows_behind_a_gap_fall_to_the_day_that_is_closed_when_it_is_filled(rooms):
    chain = await begun(rooms)
    rows = [chain.extend(an_entry(), FIRST * DAY_S + number) for number in range(6)]
    await write(rooms, *rows[:2], *rows[4:])
    assert [day.num_rows for day in await close_until(rooms, FIRST + 1)] == [2]
    await write(rooms, rows[2])
    assert [day.num_rows for day in await close_until(rooms, FIRST + 2)] == [1]
    await write(rooms, rows[3])
    assert [day.num_rows for day in await close_until(rooms, FIRST + 3)] == [3]
    assert [(day, first, last) for day, _, first, last in await cuts(rooms)] == [
        (FIRST, 1, 2),
        (FIRST + 1, 3, 3),
        (FIRST + 2, 4, 6),
    ]


async def test_a_request_that_two_have_settled_is_one_row_and_no_gap(rooms):
    first, second = await begun(rooms), await begun(rooms)
    twice = [an_entry(), an_entry()]
    at = FIRST * DAY_S
    await write(rooms, *(first.extend(entry, at) for entry in twice))
    await write(rooms, *(second.extend(entry, at) for entry in (twice[0], an_entry(), twice[1], an_entry())))
    assert [day.num_rows for day in await close_until(rooms, FIRST + 1)] == [4]
    assert await cuts(rooms) == [(FIRST, first.number, 1, 2), (FIRST, second.number, 1, 4)]


@pytest.mark.parametrize("seed", range(3))
async def test_each_row_belongs_to_one_day_however_late_it_comes(rooms, seed, monkeypatch):
    monkeypatch.setattr(closing, "AT_ONCE", 3)
    chance = random.Random(seed)
    chains = [await begun(rooms) for _ in range(3)]
    rows = [
        chance.choice(chains).extend(an_entry(), FIRST * DAY_S + int(number * 5 * DAY_S / 120)) for number in range(120)
    ]
    late = sorted(rows, key=lambda row: row.settled_at + chance.choice([0, 0, 0, 0, 2 * DAY_S]))
    num_rows = 0
    for day in range(FIRST, FIRST + 8):
        end = (day + 1) * DAY_S
        while late and (late[0].settled_at < end or day > FIRST + 5):
            await write(rooms, late.pop(0))
        num_rows += sum(closed.num_rows for closed in await close_until(rooms, day + 1))
    found = await cuts(rooms)
    for chain in chains:
        places = [cut[2:] for cut in found if cut[1] == chain.number]
        assert [first for first, _ in places] == [1, *(last + 1 for _, last in places[:-1])], f"seed {seed}"
        assert places[-1][1] == sum(row.chain == chain.number for row in rows), f"seed {seed}"
    assert num_rows == 120


async def test_who_closes_the_same_day_at_the_same_time_closes_it_once(rooms):
    chain = await begun(rooms)
    await write(rooms, *(chain.extend(an_entry(), FIRST * DAY_S) for _ in range(3)))
    closed = await asyncio.gather(*(close_until(rooms, FIRST + 3) for _ in range(4)))
    assert sorted(day.day for days in closed for day in days) == ["2024-10-04", "2024-10-05", "2024-10-06"]


async def test_a_day_is_closed_some_time_after_its_end(rooms, clock):
    await begun(rooms)
    now = [(FIRST + 1) * DAY_S + 3599.0]
    async with Closing(rooms, clock, 3600.0, lambda: now[0]).watched():
        await until(clock.waits)
        assert await days(rooms) == []
        now[0] += 1
        clock.advance(closing.LOOK_S)
        await until(clock.waits)
        assert await days(rooms) == [FIRST]


@pytest.mark.parametrize("store_settings", ["postgres"], indirect=True)
async def test_a_clock_that_is_days_ahead_of_the_databases_closes_none_early(rooms, clock, caplog):
    today = closing.day_of(time.time())
    await begun(rooms, (today - 3) * DAY_S)
    async with Closing(rooms, clock, 3600.0, lambda: time.time() + 5 * DAY_S).watched():
        await until(clock.waits)
        clock.advance(closing.LOOK_S)
        await until(clock.waits)
    closed = await days(rooms)
    assert closed[:2] == [today - 3, today - 2]
    assert not [day for day in closed if day >= closing.day_of(time.time())]
    assert caplog.text.count("ahead of the database's") == 1


async def days(rooms: Store) -> list[int]:
    async with rooms.engine.connect() as connection:
        return list((await connection.execute(sa.select(store.ledger_days.c.day))).scalars())
