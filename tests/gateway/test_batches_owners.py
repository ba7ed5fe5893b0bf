"""Which gateway works on a batch, and that one does, whatever has become of another or of the database."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from gateway import store
from policies import settings
from tests import builders
from tests import house as houses
from tests.batches import CHAT, as_file, begun, lines, over, when
from tests.builders import scripted, until

SLOW = scripted("--tokens-per-step", 1, "--step-s", 0.02)
FEW = settings.Batches(max_in_flight=2)


@contextlib.contextmanager
def gateway(directory: Path, database: str, batches: settings.Batches = FEW) -> Iterator[houses.House]:
    """One of those that share the database."""
    kept_in = settings.Store(data_dir=str(directory), url=database)
    with houses.running(directory, SLOW, store=kept_in, batches=batches) as house:
        yield house


@contextlib.asynccontextmanager
async def connected(database: str | sa.URL) -> AsyncIterator[AsyncConnection]:
    engine = create_async_engine(database, isolation_level="AUTOCOMMIT")
    async with engine.connect() as connection:
        yield connection
    await engine.dispose()


async def owners(database: str) -> list[str | None]:
    async with connected(database) as connection:
        return list((await connection.execute(sa.select(store.batches.c.owner))).scalars())


async def test_a_batch_is_nobodys_once_its_gateway_has_stopped(tmp_path, migrated_postgres):
    with gateway(tmp_path / "data", migrated_postgres) as house:
        async with house.client() as client:
            batch = await begun(client, lines(500))
            await when(client, batch, lambda batch: batch.request_counts.completed)
        assert await owners(migrated_postgres) != [None]
    assert await owners(migrated_postgres) == [None]


async def test_a_batch_that_one_gateway_cannot_read_is_another_ones(tmp_path, migrated_postgres, caplog):
    """Its disk is not there, as others' is."""
    with gateway(tmp_path / "one", migrated_postgres) as house:
        async with house.client() as client:
            batch = await begun(client, lines(300))
            await when(client, batch, lambda batch: batch.request_counts.completed)
    with gateway(tmp_path / "other", migrated_postgres):
        await until(lambda: f"{batch.id}: cannot go on now" in caplog.text)
        with gateway(tmp_path / "one", migrated_postgres) as house:
            async with house.client() as client:
                batch = await over(client, batch)
    assert (batch.status, batch.request_counts.completed) == ("completed", 300)


BREAKS = (
    "CREATE SEQUENCE tries",
    "CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS "
    "$$ BEGIN PERFORM nextval('tries'); RAISE EXCEPTION 'the disk' USING ERRCODE = 'io_error'; END $$",
    "CREATE TRIGGER broken BEFORE UPDATE ON batches FOR EACH ROW EXECUTE FUNCTION fail()",
)
IS_WHOLE = ("DROP TRIGGER broken ON batches", "DROP FUNCTION fail", "DROP SEQUENCE tries")


@contextlib.asynccontextmanager
async def broken(database: str) -> AsyncIterator[None]:
    """It takes no changes of batches, and has been asked for some when this is left."""
    async with connected(database) as connection:
        for statement in BREAKS:
            await connection.execute(sa.text(statement))
        yield
        await builders.when(lambda: connection.scalar(sa.text("SELECT is_called FROM tries")))
        for statement in IS_WHOLE:
            await connection.execute(sa.text(statement))


async def test_a_failure_of_the_database_that_nobody_has_foreseen_ends_no_batch(tmp_path, migrated_postgres):
    """Neither one that nobody has begun, nor one that is under way, which can still be cancelled."""
    with gateway(tmp_path / "data", migrated_postgres) as house:
        async with house.client() as client:
            async with broken(migrated_postgres):
                batch = await begun(client, lines(1000))
            await when(client, batch, lambda batch: batch.request_counts.completed)
            async with broken(migrated_postgres):
                pass
            await client.batches.cancel(batch.id)
            batch = await over(client, batch)
    assert batch.status == "cancelled"


async def test_a_batch_stays_its_gateways_for_as_long_as_its_results_are_written(start_house, monkeypatch):
    """Which for a large one is longer than a lease."""
    is_writing, may_end, sync = threading.Event(), threading.Event(), os.fsync

    def slowly(number: int) -> None:
        is_writing.set()
        may_end.wait()
        sync(number)

    house = start_house("--tokens-per-step", 4, batches=settings.Batches(lease_s=1))
    leased = sa.select(store.batches.c.leased_until)
    async with house.client() as client, connected(store.url_of(house.config.store)) as connection:
        file = await client.files.create(file=("in.jsonl", as_file(lines(3))), purpose="batch")
        monkeypatch.setattr(os, "fsync", slowly)
        try:
            batch = await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
            await until(is_writing.is_set)
            first = await connection.scalar(leased)
            await builders.when(lambda: connection.scalar(leased), lambda leased_until: leased_until > first + 1)
        finally:
            may_end.set()
        batch = await over(client, batch)
    assert (batch.status, batch.request_counts.completed) == ("completed", 3)
