"""Following the ledger on both databases: each row once, in order, up to the first gap, by one at a time."""

from __future__ import annotations

import asyncio
import contextlib
import random

import msgspec
import pytest
import sqlalchemy as sa

from gateway import store
from gateway.ledger import Chain, writer_for
from gateway.ledger.follow import NO_CHAIN, Follower, Overtaken, number_strays
from policies import settings
from tests.builders import PATIENCE_S, an_entry, write_chain


async def taken(follower: Follower, max_rows: int = 100, before: int | None = None) -> list[str]:
    """What comes next, and the cursors are past it."""
    batch = await follower.next(max_rows, before)
    async with follower.past(batch):
        return [entry.request_id for entry in batch.entries]


async def test_rows_come_once_in_the_order_of_their_chain(rooms):
    first = await write_chain(rooms, *(an_entry() for _ in range(5)), chain=1)
    second = await write_chain(rooms, *(an_entry() for _ in range(3)), chain=2)
    follower = Follower(rooms, "usage")
    batch = await follower.next(100)
    assert batch.entries == [*first, *second]
    assert batch.moves == [(1, 0, 5), (2, 0, 3)]
    async with follower.past(batch) as connection:
        assert await follower.positions(connection) == {1: 5, 2: 3}
    assert not await follower.next(100)
    assert (await Follower(rooms, "sink:webhook").next(100)).entries == batch.entries


async def test_a_batch_has_no_more_rows_than_asked_for(rooms):
    rows = [*await write_chain(rooms, *(an_entry() for _ in range(5)), chain=1)]
    rows += await write_chain(rooms, *(an_entry() for _ in range(5)), chain=2)
    follower = Follower(rooms, "usage")
    sizes, ids = [], []
    while found := await taken(follower, max_rows=4):
        sizes.append(len(found))
        ids += found
    assert sizes == [4, 4, 2]
    assert ids == [row.request_id for row in rows]


async def test_nothing_behind_a_gap_is_read_until_the_row_has_come(rooms):
    rows = [an_entry() for _ in range(4)]
    ids = [row.request_id for row in rows]
    await write_chain(rooms, *rows[:2])
    await write_chain(rooms, rows[3], first_position=4)
    follower = Follower(rooms, "usage")
    assert await taken(follower) == ids[:2]
    assert await taken(follower) == []
    await write_chain(rooms, rows[2], first_position=3)
    assert await taken(follower) == ids[2:]


@pytest.mark.parametrize("max_rows", [1, 2, 100])
async def test_a_place_whose_row_stands_elsewhere_is_passed(rooms, max_rows):
    """A request that two settled has its row in one chain and a repeat in the other."""
    twice = [an_entry() for _ in range(3)]
    first, second = Chain(1), Chain(2)
    rows = [first.extend(entry, 1_795_000_000) for entry in twice]
    later = [second.extend(entry, 1_795_000_000) for entry in (twice[0], an_entry(), twice[1], twice[2], an_entry())]
    writer = writer_for(rooms)
    async with rooms.engine.begin() as connection:
        for chain in (1, 2):
            row = {"id": chain, "opened_at": 1, "gateway": "a gateway"}
            await connection.execute(sa.insert(store.ledger_chains), row)
    await writer.write(rows)
    await writer.write(later)
    await writer.close()
    follower = Follower(rooms, "usage")
    ids = []
    while batch := await follower.next(max_rows):
        async with follower.past(batch) as connection:
            ids += [entry.request_id for entry in batch.entries]
            positions = await follower.positions(connection)
    assert ids == [entry.request_id for entry in (*rows, later[1], later[4])]
    assert positions == {1: 3, 2: 5}


async def test_rows_that_were_settled_later_wait(rooms):
    rows = [an_entry(settled_at=at) for at in (100, 100, 200, 300)]
    await write_chain(rooms, *rows)
    follower = Follower(rooms, "closing")
    assert await taken(follower, before=200) == [row.request_id for row in rows[:2]]
    assert await taken(follower, before=200) == []
    assert await taken(follower, before=301) == [row.request_id for row in rows[2:]]


async def test_an_effect_that_fails_leaves_the_cursor_where_it_was(rooms):
    await write_chain(rooms, an_entry())
    follower = Follower(rooms, "usage")
    batch = await follower.next(10)
    with pytest.raises(ZeroDivisionError):
        async with follower.past(batch):
            raise ZeroDivisionError
    assert await follower.next(10) == batch


async def test_who_comes_second_with_the_same_rows_does_nothing(rooms):
    await write_chain(rooms, *(an_entry() for _ in range(3)))
    follower = Follower(rooms, "usage")
    for max_rows in (2, 1):  # a cursor that is new, and one that moves
        first, second = await follower.next(max_rows), await Follower(rooms, "usage").next(max_rows)
        async with follower.past(first):
            pass
        with pytest.raises(Overtaken):
            async with follower.past(second):
                pytest.fail("was let in")


async def test_one_at_a_time_is_alone_with_a_name(rooms, store_settings, tmp_path):
    follower = Follower(rooms, "sink:webhook")
    async with contextlib.AsyncExitStack() as stack:
        other = follower
        if rooms.database is None:  # another gateway
            settings = msgspec.structs.replace(store_settings, data_dir=str(tmp_path / "other"))
            other = Follower(await stack.enter_async_context(store.opened(settings)), "sink:webhook")
        async with follower.alone() as first, other.alone() as second, Follower(rooms, "usage").alone() as third:
            assert (first, second, third) == (True, False, True)
        async with other.alone() as is_alone:
            assert is_alone


async def test_who_is_cancelled_is_alone_no_more_though_the_server_says_nothing(fragile_postgres, tmp_path):
    async def follow() -> None:
        async with Follower(rooms, "usage").alone() as is_alone:
            assert is_alone
            fragile_postgres.stall()
            is_stalled.set()
            await asyncio.Event().wait()

    is_stalled = asyncio.Event()
    config = settings.Store(data_dir=str(tmp_path), url=f"{fragile_postgres.url}/postgres")
    async with store.opened(config) as rooms:
        following = asyncio.create_task(follow())
        await is_stalled.wait()
        following.cancel()
        over, _ = await asyncio.wait([following], timeout=PATIENCE_S)
        fragile_postgres.resume()
        await asyncio.wait([following])
        assert over
        async with asyncio.timeout(PATIENCE_S):
            while True:  # the server hears of it in its own time
                async with Follower(rooms, "usage").alone() as is_alone:
                    if is_alone:
                        break


async def test_rows_that_belong_to_no_chain_are_given_a_place_and_followed(rooms):
    rows = [an_entry(settled_at=settled_at) for settled_at in (0, 17, 0)]
    async with rooms.engine.begin() as connection:
        await connection.execute(sa.insert(store.ledger), [msgspec.structs.asdict(row) for row in rows])
    follower = Follower(rooms, "usage")
    batch = await follower.next(100)
    assert {entry.request_id for entry in batch.entries} == {row.request_id for row in rows}
    assert batch.moves == [(NO_CHAIN, 0, 3)]
    assert sorted(entry.settled_at for entry in batch.entries) == [17, rows[0].created_at, rows[0].created_at]
    async with follower.past(batch):
        pass
    late = an_entry()  # a spool of before brings it
    async with rooms.engine.begin() as connection:
        await connection.execute(sa.insert(store.ledger), msgspec.structs.asdict(late))
    assert await taken(follower) == [late.request_id]
    await number_strays(rooms)
    assert await taken(follower) == []


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_arrives_late_or_fails_each_row_counts_once(rooms, seed):
    chance = random.Random(seed)
    waiting = {chain: [an_entry() for _ in range(60)] for chain in (1, 2, 3)}
    expected = {entry.request_id for entries in waiting.values() for entry in entries}
    unwritten = [(chain, position) for chain, entries in waiting.items() for position in range(1, len(entries) + 1)]
    unwritten.sort(key=lambda place: place[1] + chance.uniform(0, 20))  # some are late
    follower = Follower(rooms, "usage")
    seen: list[str] = []
    last = dict.fromkeys(waiting, 0)
    while len(seen) < len(expected):
        for chain, position in [unwritten.pop(0) for _ in range(min(len(unwritten), chance.randrange(12)))]:
            await write_chain(rooms, waiting[chain][position - 1], chain=chain, first_position=position)
        batch = await follower.next(chance.randrange(1, 40))
        with contextlib.suppress(ZeroDivisionError):
            async with follower.past(batch):
                if chance.random() < 0.3:
                    raise ZeroDivisionError
            seen += [entry.request_id for entry in batch.entries]
            for entry in batch.entries:
                assert entry.position == last[entry.chain] + 1, f"seed {seed}"
                last[entry.chain] = entry.position
    assert sorted(seen) == sorted(expected), f"seed {seed}"
