"""The ledger while its PostgreSQL is killed, stalled, or full of doubt: rows are durable, and there once."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import msgspec
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from gateway import store
from gateway.clock import Clock
from gateway.ledger import Chain, Ledger, WriteError, chains, losses, open_chain, spool, verify, writer_for, writers
from gateway.ledger.follow import Follower
from gateway.ledger.spool import DEFAULTS, Spool, SpooledWriter
from policies import settings
from tests.builders import PATIENCE_S, an_entry, until, when


@contextlib.asynccontextmanager
async def spooled(config, patience_s=0.5):
    """A ledger over a spool over the database."""
    async with store.opened(config) as rooms:
        clock = Clock()
        writer = SpooledWriter(writer_for(rooms), rooms.data_dir / "spool.db", clock, patience_s)
        ledger = Ledger(writer, config, clock, await open_chain(rooms))
        try:
            yield ledger
        finally:
            await ledger.close(5.0)


@pytest.fixture
def config(fragile_postgres, tmp_path):
    return settings.Store(data_dir=str(tmp_path), url=f"{fragile_postgres.url}/postgres", ledger_flush_ms=0.0)


async def settled(ledger, num_rows):
    """The request ids of new rows, once all are durable."""
    entries = [an_entry() for _ in range(num_rows)]
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*map(ledger.settle, entries))
    return {entry.request_id for entry in entries}


async def request_ids(config):
    engine = create_async_engine(store.url_of(config))
    async with engine.connect() as connection:
        found = [row.request_id for row in await connection.execute(sa.select(store.ledger.c.request_id))]
    await engine.dispose()
    assert len(found) == len(set(found))
    return set(found)


async def arrived(config, expected):
    await when(lambda: request_ids(config), lambda found: found == expected)


async def test_rows_of_a_killed_database_come_over_when_it_is_back(config, fragile_postgres):
    async with spooled(config) as ledger:
        expected = await settled(ledger, 5)
        fragile_postgres.kill()
        for _ in range(3):
            expected |= await settled(ledger, 40)
        assert not ledger.num_pending
        fragile_postgres.start()
        await arrived(config, expected)
        expected |= await settled(ledger, 5)
        await arrived(config, expected)


@pytest.mark.parametrize("notices", [True, False])
async def test_rows_that_a_standby_lacks_when_it_takes_over_are_written_again(
    config, fragile_postgres, notices, monkeypatch
):
    async with spooled(config) as ledger:
        expected, lost = await settled(ledger, 5), await settled(ledger, 3)
        await arrived(config, expected | lost)
        engine = create_async_engine(store.url_of(config))
        async with engine.begin() as connection:
            await connection.execute(sa.delete(store.ledger).where(store.ledger.c.request_id.in_(lost)))
            await connection.execute(sa.delete(store.ledger_chains))
        await engine.dispose()  # its connections go with the server
        fragile_postgres.kill()
        monkeypatch.setattr(writers, "RECENT_S", 0.0)  # as long as that it takes in any case
        if notices:  # a row comes meanwhile
            expected |= await settled(ledger, 1)
        fragile_postgres.start()
        expected |= await settled(ledger, 1)
        await arrived(config, expected | lost)
        async with engine.connect() as connection:
            chains = await connection.execute(sa.select(sa.func.count()).select_from(store.ledger_chains))
            assert chains.scalar_one() == 1
            assert not (await connection.execute(sa.select(store.ledger_repeats))).all()
        await engine.dispose()


async def test_a_stalled_database_holds_up_one_commit_and_gets_every_row_once(config, fragile_postgres):
    async with spooled(config) as ledger:
        expected = await settled(ledger, 5)
        fragile_postgres.stall()
        for _ in range(3):
            expected |= await settled(ledger, 20)
        fragile_postgres.resume()
        await arrived(config, expected)


async def test_what_one_gateway_kept_the_next_brings_over(config, fragile_postgres):
    async with spooled(config) as ledger:
        fragile_postgres.kill()
        expected = await settled(ledger, 10)
    fragile_postgres.start()
    async with spooled(config):
        await arrived(config, expected)


async def test_gateways_of_one_directory_share_a_spool(config, fragile_postgres):
    async with spooled(config) as first, spooled(config) as second:
        fragile_postgres.kill()
        kept = await asyncio.gather(settled(first, 50), settled(second, 50))
        fragile_postgres.start()
        await arrived(config, kept[0] | kept[1])


def test_gateways_that_make_their_spool_at_the_same_instant_all_keep_their_rows(tmp_path):
    """A round without their taking turns fails once in five."""
    with ThreadPoolExecutor(3) as gateways:
        for number in range(40):
            path, begin = tmp_path / f"spool-{number}.db", threading.Barrier(3)

            def keep(entry, path=path, begin=begin):
                mine = Spool(path)
                begin.wait()
                mine.keep([entry])
                mine.close()

            entries = [an_entry() for _ in range(3)]
            list(gateways.map(keep, entries))
            assert Spool(path).kept([entry.request_id for entry in entries]) == {each.request_id for each in entries}


def test_a_row_is_kept_once_and_forgotten_when_it_came_over(tmp_path):
    kept = Spool(tmp_path / "spool.db")
    first, second = an_entry(), an_entry(ttft_ms=None)
    kept.keep([first, second])
    kept.keep([first])
    assert kept.oldest(10) == [first, second]
    assert kept.oldest(1) == [first]
    kept.forget([first])
    kept.close()
    assert Spool(tmp_path / "spool.db").oldest(10) == [second]


def test_rows_are_counted_once_whoever_keeps_them_and_brings_them_over(tmp_path):
    mine, other = Spool(tmp_path / "spool.db"), Spool(tmp_path / "spool.db")
    assert mine.oldest(10) == other.oldest(10) == []
    rows = [an_entry() for _ in range(5)]
    mine.keep(rows[:1])
    mine.keep(rows[:1])
    assert mine.num_rows == 1
    other.keep(rows[1:])
    for _ in range(3):
        batch = mine.oldest(2)
        assert other.oldest(2) == batch
        mine.forget(batch)
        other.forget(batch)
        assert min(mine.num_rows, other.num_rows) >= 0
    assert mine.oldest(2) == other.oldest(2) == []
    assert mine.num_rows == other.num_rows == 0


def test_a_row_keeps_its_place_and_both_rows_of_a_request_that_two_settled_are_kept(tmp_path):
    entry = an_entry()
    placed = [Chain(number).extend(entry, 1_795_000_000) for number in (1, 2)]
    kept = Spool(tmp_path / "spool.db")
    kept.keep(placed)
    kept.keep(placed)
    assert kept.oldest(10) == placed
    kept.forget(placed[:1])
    assert kept.oldest(10) == placed[1:]


def test_a_row_of_a_version_that_knew_no_chains_comes_over(tmp_path):
    kept = Spool(tmp_path / "spool.db")
    kept.keep([entry := an_entry()])
    before = {name: value for name, value in msgspec.structs.asdict(entry).items() if name not in DEFAULTS}
    kept._open().execute("UPDATE spool SET entry = ?", [msgspec.json.encode(before)])
    assert kept.oldest(10) == [entry]
    kept.forget([entry])
    assert kept.oldest(10) == []


def test_a_row_that_nobody_understands_is_told_and_holds_up_nothing(tmp_path, caplog):
    kept = Spool(tmp_path / "spool.db")
    kept.keep([an_entry()])
    kept._open().execute("UPDATE spool SET entry = ?", [b'{"of": "another version"}'])
    kept.keep([good := an_entry()])
    assert kept.oldest(10) == [good]
    assert "another version" in caplog.text


@pytest.mark.parametrize("damage", ["cut", "overwritten in the middle", "no database at all"])
def test_of_a_spool_that_is_damaged_the_rest_is_recovered_and_that_is_told(damage, tmp_path, caplog):
    path, entries = tmp_path / "spool.db", [an_entry() for _ in range(200)]
    kept = Spool(path)
    kept.keep(entries)
    kept.close()  # and what was in the log of writes is in the file
    data = bytearray(path.read_bytes())
    match damage:
        case "cut":
            del data[len(data) * 3 // 4 // 4096 * 4096 + 100 :]
        case "overwritten in the middle":
            middle = len(data) // 2 // 4096 * 4096
            data[middle : middle + 4096] = bytes(range(256)) * 16
        case _:
            data[:] = b"nothing that anybody could read" * 100
    path.write_bytes(data)
    again = Spool(path)
    found = again.oldest(1000)
    assert set(found) <= set(entries)
    assert len(found) > (50 if damage == "cut" else 150 if "middle" in damage else -1)
    assert f"was damaged: {len(found)} rows of it are recovered" in caplog.text
    assert path.with_name("spool.db.damaged-1").exists()
    again.keep([late := an_entry()])
    assert again.oldest(1000) == [*found, late]


def test_a_spool_is_bounded_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(spool, "MAX_ROWS", 2)
    kept = Spool(tmp_path / "spool.db")
    kept.keep([an_entry(), an_entry()])
    with pytest.raises(WriteError, match="holds 2 rows already"):
        kept.keep([an_entry()])


async def test_a_disk_that_takes_nothing_makes_rows_wait(config, fragile_postgres, tmp_path, caplog):
    (tmp_path / "spool.db").mkdir()
    async with spooled(config) as ledger:
        fragile_postgres.kill()
        waiting = asyncio.create_task(settled(ledger, 1))
        await until(lambda: "1 rows cannot be written" in caplog.text)
        fragile_postgres.start()
        await arrived(config, await waiting)


async def test_rows_that_waited_while_an_older_backup_was_restored_share_no_place_and_are_followed(
    config, tmp_path, monkeypatch
):
    async with store.opened(config) as rooms:
        with monkeypatch.context() as before:
            before.setattr(chains, "time", SimpleNamespace(time=lambda: 1_700_000_000.0))
            lost = await open_chain(rooms)
        rows = [lost.extend(an_entry(), 1_700_000_000) for _ in range(3)]
        (kept := Spool(tmp_path / "spool.db")).keep(rows[1:])  # the first had been written
        kept.close()
        async with rooms.engine.begin() as connection:  # as it was before that gateway started
            await connection.execute(sa.text("TRUNCATE ledger_chains RESTART IDENTITY"))
    async with spooled(config) as ledger:
        settled_now = await settled(ledger, 4)
        await arrived(config, settled_now | {row.request_id for row in rows[1:]})
    async with store.opened(config) as rooms:
        (missing,) = (await verify.verify(rooms)).findings
        assert (missing.kind, missing.chain, missing.position) == ("missing", lost.number, 1)
        await losses.give_up(rooms, losses.Loss(lost.number, 1, 1, "restored"))
        assert len((await Follower(rooms, "all").next(100)).entries) == 6
