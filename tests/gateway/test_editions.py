"""Where nothing was written and no time is over, nobody looks through the store; and whatever is there to be done is
done as soon as ever."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from gateway import store
from gateway.batches.book import Book
from gateway.bootstrap import bootstrap
from gateway.clock import Clock
from gateway.directory import Directory
from gateway.files import Files
from gateway.ledger.follow import Follower
from gateway.ledger.sums import FOLLOWER, GAP_S, Rollup
from gateway.ledger.sums import LOOK_S as ROLLUP_LOOK_S
from gateway.responses.shelf import Shelf
from gateway.sinks.delivery import LOOK_S as SINK_LOOK_S
from gateway.store import Edition, Store
from policies import settings
from policies.pricing import Rates
from tests.batches import a_batch
from tests.builders import PATIENCE_S, an_entry, until, write_chain
from tests.gateway import sink_bench
from tests.gateway.test_responses_shelf import Wall, a_response, there
from tests.residents import add_key, add_tenant, visiting

NUM_TRIES = 5
"""PostgreSQL writes something of its own now and then."""


@pytest.fixture
async def rooms(store_settings: settings.Store) -> AsyncIterator[Store]:
    async with store.opened(store_settings) as rooms:
        await bootstrap(rooms, {})
        yield rooms


@contextlib.contextmanager
def asked(rooms: Store) -> Any:
    """What is asked of the database meanwhile, but for its edition."""
    statements: list[str] = []

    def note(*told: Any) -> None:
        if "pg_current_snapshot" not in told[2]:
            statements.append(told[2])

    sa.event.listen(rooms.engine.sync_engine, "before_cursor_execute", note)
    yield statements
    sa.event.remove(rooms.engine.sync_engine, "before_cursor_execute", note)


async def is_quiet(rooms: Store, look: Callable[[], Awaitable[object]]) -> bool:
    """It asks nothing, at last."""
    for _ in range(NUM_TRIES):
        with asked(rooms) as statements:
            await look()
        if not statements:
            return True
    return False


async def seen(rooms: Store, work: Callable[[], Awaitable[object]]) -> tuple[Edition, Edition]:
    before = await rooms.edition()
    await work()
    return before, await rooms.edition()


async def test_an_edition_is_another_one_after_each_commit_and_after_nothing_else(rooms, store_settings):
    async with visiting(store_settings) as others:

        async def read() -> None:
            async with rooms.engine.connect() as connection:
                await connection.execute(sa.select(store.keys))

        async def change_nothing() -> None:
            async with others.engine.begin() as connection:
                await connection.execute(sa.update(store.keys).where(sa.false()).values(name="x"))

        for work in (read, change_nothing):
            editions = [await seen(rooms, work) for _ in range(NUM_TRIES)]
            assert any(before == after for before, after in editions)
        for number, by in enumerate((others, rooms), 1):
            before, after = await seen(rooms, partial(write_chain, by, an_entry(), chain=number))
            assert before != after
            assert before.revision == after.revision
            before, after = await seen(rooms, partial(add_tenant, by, f"tenant {number}"))
            assert after.revision == before.revision + 1


@pytest.mark.parametrize("store_settings", ["postgres"], indirect=True)  # SQLite's writers come one after the other
async def test_one_under_way_is_in_no_edition_before_it_is_committed(rooms, store_settings):
    """However many begin and end meanwhile."""
    async with visiting(store_settings) as others, others.engine.connect() as connection:
        await connection.execute(sa.update(store.install).values(created_at=7))
        await write_chain(rooms, an_entry())
        before, after = await seen(rooms, connection.commit)
        assert before != after


async def test_a_database_that_breaks_off_is_asked_again_and_one_that_says_nothing_is_away(fragile_postgres, tmp_path):
    config = settings.Store(data_dir=str(tmp_path), url=f"{fragile_postgres.url}/postgres")
    async with store.opened(config) as rooms:
        first = await rooms.edition()
        fragile_postgres.kill()
        with pytest.raises((SQLAlchemyError, OSError)):
            await rooms.edition()
        fragile_postgres.start()
        second = await rooms.edition()
        assert second.revision == first.revision
        assert second != first
        fragile_postgres.kill()
        fragile_postgres.start()
        assert (await rooms.edition()).revision == first.revision  # nobody has noticed that it was away
        fragile_postgres.stall()
        asking = [asyncio.create_task(rooms.edition()) for _ in range(2)]
        answered, _ = await asyncio.wait(asking, timeout=0.1)
        assert not answered
        asking[0].cancel()
        fragile_postgres.resume()
        assert (await asking[1]).revision == first.revision


async def test_keys_are_not_read_again_before_one_has_changed(rooms):
    directory = await Directory.load(rooms, Clock())
    await write_chain(rooms, an_entry())
    assert await is_quiet(rooms, directory.refresh)
    num_keys = len([*directory.every_key()])
    await add_key(rooms, await add_tenant(rooms, "north"))
    await directory.refresh()
    assert len([*directory.every_key()]) == num_keys + 1


async def test_what_is_kept_is_looked_through_when_it_has_changed_or_a_time_is_over(rooms):
    wall = Wall()
    shelf = Shelf(rooms, settings.Responses(retention_s=100), Clock(), wall)
    await shelf.put(a_response(1))
    await shelf.sweep()
    assert await is_quiet(rooms, shelf.sweep)
    wall.now += 60
    await shelf.put(a_response(2))
    with asked(rooms) as statements:
        await shelf.sweep()
    assert statements
    assert await is_quiet(rooms, shelf.sweep)
    for left in ([2], []):
        wall.now += 60
        await shelf.sweep()
        async with rooms.engine.connect() as connection:
            assert len((await connection.execute(sa.select(store.responses.c.id))).all()) == len(left)
        assert await there(shelf, 1, 2) == left


async def test_a_batch_is_looked_for_when_something_has_changed_or_a_lease_is_over(rooms):
    wall = Wall()
    files = Files(rooms, settings.Files(), Clock())
    ours, others = (Book(rooms, settings.Batches(), files, name, wall=wall) for name in ("ours", "another's"))
    assert await ours.claim([], 4, 2) == []
    assert await is_quiet(rooms, lambda: ours.claim([], 4, 2))
    batch = a_batch(1, await add_tenant(rooms, "one"))
    async with rooms.engine.begin() as connection:
        await connection.execute(sa.insert(store.batches), msgspec.structs.asdict(batch))
    (taken,) = await others.claim([], 4, 2)
    assert await is_quiet(rooms, lambda: others.claim([taken], 4, 2))
    (again,) = await others.claim([], 4, 2)  # it could not go on
    assert again.id == taken.id
    if rooms.database is None:
        assert await ours.claim([], 4, 2) == []
        assert await is_quiet(rooms, lambda: ours.claim([], 4, 2))
        wall.now += settings.Batches().lease_s + 1
    assert [batch.owner for batch in await ours.claim([], 4, 2)] == ["ours"]


async def test_the_ledger_is_added_up_when_it_has_grown_or_a_gap_has_waited_long_enough(rooms, clock):
    wall = Wall()
    rollup = Rollup(rooms, no_rates, clock, wall)

    async def positions() -> dict[int, int]:
        async with rooms.engine.connect() as connection:
            return await Follower(rooms, FOLLOWER).positions(connection)

    async def look() -> None:
        await until(clock.waits)
        clock.advance(ROLLUP_LOOK_S)
        await until(clock.waits)

    async with rollup.watched():
        await write_chain(rooms, an_entry(settled_at=int(wall.now)))
        await look()
        assert await positions() == {1: 1}
        await look()
        assert await is_quiet(rooms, look)
        await write_chain(rooms, an_entry(settled_at=int(wall.now)), first_position=3)
        await look()
        assert await positions() == {1: 1}
        wall.now += GAP_S + 1
        await look()
        assert await positions() == {1: 3}


async def no_rates(price_version: str, model: str) -> Rates:
    raise LookupError


async def test_a_sink_looks_when_the_ledger_has_grown_or_it_is_time_for_another_try(store_settings, clock):
    async with sink_bench.opened(store_settings) as rooms, sink_bench.benches(rooms) as open_bench:
        bench = await open_bench("webhook")
        bench.delivery._clock = clock
        watching = asyncio.create_task(bench.delivery.watch())

        async def look() -> None:
            await until(clock.waits)
            clock.advance(SINK_LOOK_S)
            async with asyncio.timeout(PATIENCE_S):
                await until(clock.waits)

        await look()
        assert await is_quiet(rooms, look)
        bench.receiver.script = [503]
        rows = await bench.write(*sink_bench.some_entries(2))
        await look()
        assert not bench.receiver.counted
        bench.wall.at += 1.0
        await look()
        assert bench.values() == bench.expected(*rows)
        watching.cancel()
        await asyncio.wait([watching])
