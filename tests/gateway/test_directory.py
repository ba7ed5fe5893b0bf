"""The directory: it knows what the store says, finds what has changed, and outlasts a database that is away."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from gateway import keys, store
from gateway.auth import Auth, Caller
from gateway.bootstrap import bootstrap
from gateway.directory import CHUNK, POLL_S, SEEK_S, Directory
from gateway.store import Store
from policies import settings
from policies.policy import Limits, Narrowing, Policy, narrowed
from tests.builders import until
from tests.residents import add_key, add_tenant, add_version, change


@pytest.fixture
async def rooms(store_settings: settings.Store) -> AsyncIterator[Store]:
    async with store.opened(store_settings) as rooms:
        await bootstrap(rooms, {})
        yield rooms


@pytest.fixture
async def directory(rooms, clock) -> Directory:
    return await Directory.load(rooms, clock)


def caller(directory: Directory, key: str) -> Caller | None:
    return Auth(directory).caller(key)


async def test_a_caller_has_the_policy_that_counts_narrowed_by_the_key(rooms, directory):
    await add_version(rooms, "gold", Policy(models=("a", "b"), key_limits=Limits(requests_per_minute=10)))
    tenant = await add_tenant(rooms, "north", "gold")
    narrowing = Narrowing(models=("b", "c"), limits=Limits(requests_per_minute=5))
    wide, narrow = await add_key(rooms, tenant), await add_key(rooms, tenant, narrowing=narrowing)
    await directory.refresh()
    gold = caller(directory, wide).policy
    assert (gold.models, gold.key_limits.requests_per_minute) == (("a", "b"), 10)
    found = caller(directory, narrow)
    assert (found.tenant_id, found.tenant_name, found.policy_name, found.policy_version) == (tenant, "north", "gold", 1)
    assert found.policy == narrowed(gold, narrowing)
    assert caller(directory, narrow).policy is found.policy  # made once

    await add_version(rooms, "gold", Policy(models=("c",)), version=2)
    await directory.refresh()
    assert caller(directory, wide).policy.models == ("c",)
    assert caller(directory, narrow).policy.models == ("c",)
    assert caller(directory, narrow).policy_version == 2
    assert found.policy.models == ("b",)  # who came before keeps the version that admitted it


async def test_a_refresh_reads_only_what_is_new(rooms, directory):
    tenant = await add_tenant(rooms, "north")
    kept = await add_key(rooms, tenant)
    await directory.refresh()
    async with rooms.engine.begin() as connection:  # a change that claims to be none
        await connection.execute(sa.update(store.keys).values(revoked_at=1))
    new = await add_key(rooms, tenant)
    await directory.refresh()
    assert caller(directory, kept) is not None
    assert caller(directory, new) is not None


async def test_what_is_revoked_disabled_or_moved_counts_after_a_refresh(rooms, directory):
    tenant = await add_tenant(rooms, "north")
    key = await add_key(rooms, tenant)
    await directory.refresh()
    id = caller(directory, key).key_id
    for table, row, column in ((store.keys, id, "revoked_at"), (store.tenants, tenant, "disabled_at")):
        await change(rooms, table, row, **{column: 1})
        await directory.refresh()
        assert caller(directory, key) is None
        await change(rooms, table, row, **{column: None})
        await directory.refresh()
        assert caller(directory, key) is not None
    await add_version(rooms, "silver", Policy())
    await change(rooms, store.tenants, tenant, policy="silver", name="south")
    await directory.refresh()
    assert (caller(directory, key).policy_name, caller(directory, key).tenant_name) == ("silver", "south")


async def test_a_long_walk_of_changes_leaves_what_a_fresh_load_finds(rooms, directory, clock):
    """Whatever order changes come in, and however many of them a refresh has to catch up with."""
    seed = 20_261_121
    chance = random.Random(seed)
    tenants = [await add_tenant(rooms, f"t{number}") for number in range(3)]
    known = {await add_key(rooms, chance.choice(tenants)) for _ in range(5)}
    await directory.refresh()
    ids = {key: caller(directory, key).key_id for key in known}
    versions = {"default": 1}
    for step in range(120):
        match chance.randrange(6):
            case 0:
                await add_key(rooms, chance.choice(tenants), narrowing=Narrowing(models=(f"m{step}",)))
            case 1:
                await change(rooms, store.keys, ids[chance.choice(sorted(ids))], revoked_at=chance.choice([None, 1]))
            case 2:
                await change(rooms, store.tenants, chance.choice(tenants), disabled_at=chance.choice([None, 1]))
            case 3:
                name = chance.choice(["default", f"p{step}"])
                versions[name] = versions.get(name, 0) + 1
                await add_version(rooms, name, Policy(weight=chance.randint(1, 9)), versions[name])
            case 4:
                await change(rooms, store.tenants, chance.choice(tenants), policy=chance.choice(sorted(versions)))
            case 5:
                await directory.refresh()
                fresh = await Directory.load(rooms, clock)
                assert directory.revision == fresh.revision, f"seed {seed}, step {step}"
                assert known_to(directory) == known_to(fresh), f"seed {seed}, step {step}"


def known_to(directory: Directory) -> object:
    return (directory._keys, directory._tenants, directory._policies)


async def test_more_keys_than_are_read_at_once_are_all_known(rooms, directory):
    tenant = await add_tenant(rooms, "north")
    count = 2 * CHUNK + 1
    async with rooms.changing() as (connection, revision):
        secret = directory.secret
        rows = [
            {
                "id": f"key_{number}",
                "tenant_id": tenant,
                "kind": "api",
                "name": "many",
                "hash": keys.hash_of(secret, f"sk-{number}"),
                "prefix": "",
                "last_four": "",
                "created_at": 1,
                "version": 1,
                "revision": revision,
            }
            for number in range(count)
        ]
        await connection.execute(sa.insert(store.keys), rows)
    await directory.refresh()
    assert all(caller(directory, f"sk-{number}").key_id == f"key_{number}" for number in range(count))


async def test_a_change_is_found_within_the_half_second_and_at_once_when_it_is_noticed(rooms, directory, clock):
    key = await add_key(rooms, await add_tenant(rooms, "north"))
    async with directory.watched():
        await until(clock.waits)
        assert caller(directory, key) is None
        assert POLL_S <= 0.5
        clock.advance(POLL_S)
        await until(lambda: caller(directory, key))
        await change(rooms, store.keys, caller(directory, key).key_id, revoked_at=1)
        await until(clock.waits)
        directory.notice()
        await until(lambda: caller(directory, key) is None)
    assert clock.waits() == []


async def test_whoever_brings_unknown_keys_has_the_database_asked_ten_times_a_second_at_most(rooms, directory, clock):
    tenant = await add_tenant(rooms, "north")
    async with directory.watched():
        await until(clock.waits)
        first = await add_key(rooms, tenant)
        await directory.seek()
        assert caller(directory, first) is not None
        await until(clock.waits)
        second = await add_key(rooms, tenant)
        seeking = [asyncio.create_task(directory.seek()) for _ in range(100)]
        await until(lambda: len(clock.waits()) > 1)
        assert clock.waits() == [SEEK_S, POLL_S]
        clock.advance(SEEK_S)
        await asyncio.gather(*seeking)
        assert caller(directory, second) is not None
    assert SEEK_S >= 0.1


async def test_while_the_database_is_away_everything_stays_and_then_it_catches_up(postgres, tmp_path, clock, caplog):
    caplog.set_level(logging.INFO)
    config = settings.Store(data_dir=str(tmp_path), url=postgres)
    async with store.opened(config) as rooms, away(postgres) as gone:
        await bootstrap(rooms, {})
        directory = await Directory.load(rooms, clock)
        tenant = await add_tenant(rooms, "north")
        first = await add_key(rooms, tenant)
        await directory.refresh()
        second = await add_key(rooms, tenant)
        async with directory.watched():
            await until(clock.waits)
            await gone(True)
            for _ in range(3):
                clock.advance(POLL_S)
                await until(clock.waits)
            assert caller(directory, first) is not None
            assert caller(directory, second) is None
            assert caplog.text.count("the store cannot be read") == 1
            await gone(False)
            clock.advance(POLL_S)
            await until(lambda: caller(directory, second))
            await until(clock.waits)
    assert caplog.text.count("the store can be read again") == 1
    assert "Traceback" not in caplog.text


@contextlib.asynccontextmanager
async def away(url: str) -> AsyncIterator[object]:
    """``await gone(True)``: the database takes nobody in and has put out who was there."""
    server, _, name = url.rpartition("/")
    engine = create_async_engine(f"{server}/postgres", isolation_level="AUTOCOMMIT")

    async def gone(is_gone: bool) -> None:
        async with engine.connect() as connection:
            await connection.execute(sa.text(f"ALTER DATABASE {name} ALLOW_CONNECTIONS {not is_gone}"))
            if is_gone:
                put_out = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name"
                await connection.execute(sa.text(put_out), {"name": name})

    try:
        yield gone
    finally:
        await engine.dispose()


async def test_words_of_a_newer_version_stop_nothing_else(rooms, directory, caplog):
    await add_version(rooms, "gold", Policy(weight=2))
    tenant, other = await add_tenant(rooms, "north", "gold"), await add_tenant(rooms, "south")
    key, revoked = await add_key(rooms, tenant), await add_key(rooms, other)
    await directory.refresh()
    await add_version(rooms, "gold", {"of_the_future": 1}, version=2)
    await add_version(rooms, "new", {"of_the_future": 1})
    unreadable = [
        await add_key(rooms, other, narrowing={"of_the_future": 1}),
        await add_key(rooms, other, networks=["nowhere"]),
        await add_key(rooms, other, scopes="no JSON"),
        await add_key(rooms, await add_tenant(rooms, "west", "new")),
    ]
    await change(rooms, store.keys, caller(directory, revoked).key_id, revoked_at=1)
    await directory.refresh()
    assert caller(directory, revoked) is None
    assert (caller(directory, key).policy_version, caller(directory, key).policy.weight) == (1, 2)
    assert [caller(directory, key) for key in unreadable] == [None] * 4
    assert "version 2 of policy gold cannot be read" in caplog.text
    assert caplog.text.count("opens nothing") == 3


async def test_refreshes_at_the_same_time_agree(rooms, directory):
    key = await add_key(rooms, await add_tenant(rooms, "north"))
    await asyncio.gather(*(directory.refresh() for _ in range(5)))
    assert caller(directory, key) is not None


async def test_a_change_that_fails_has_changed_nothing(rooms, directory):
    before = directory.revision

    async def fail() -> None:
        async with rooms.changing() as (connection, _):
            await connection.execute(sa.update(store.tenants).values(name="other"))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await fail()
    await directory.refresh()
    assert directory.revision == before
    assert {tenant.name for tenant in directory.tenants()} == {"default"}


async def test_changes_at_the_same_time_take_turns(rooms, directory):
    """Each has a revision of its own, and a refresh never sees the second without the first."""

    async def rename(number: int) -> int:
        async with rooms.changing() as (connection, revision):
            await connection.execute(sa.update(store.tenants).values(name=f"name {number}", revision=revision))
            return revision

    revisions = await asyncio.gather(*(rename(number) for number in range(8)))
    assert sorted(revisions) == list(range(directory.revision + 1, directory.revision + 9))


async def test_what_a_standby_lacks_when_it_takes_over_counts_no_more(fragile_postgres, tmp_path, clock):
    """A key that no list shows could be revoked by nobody, and a change that has the number of a lost one be missed."""
    config = settings.Store(data_dir=str(tmp_path), url=f"{fragile_postgres.url}/postgres")
    async with store.opened(config) as rooms:
        await bootstrap(rooms, {})
        await add_version(rooms, "gold", Policy())
        tenant = await add_tenant(rooms, "north", "gold")
        kept = await add_key(rooms, tenant, narrowing=Narrowing(models=("a", "b")))
        engine = create_async_engine(store.url_of(config))
        async with engine.connect() as connection:
            before = (await connection.execute(sa.select(store.changes.c.revision))).scalar_one()
        lost = await add_key(rooms, tenant)
        await add_version(rooms, "gold", Policy(models=("a",)), version=2)
        directory = await Directory.load(rooms, clock)
        assert caller(directory, lost) is not None
        assert caller(directory, kept).policy.models == ("a",)
        fragile_postgres.kill()
        fragile_postgres.start()
        await engine.dispose()
        heads = store.policy_heads.c
        async with engine.begin() as connection:
            await connection.execute(sa.delete(store.keys).where(store.keys.c.revision > before))
            await connection.execute(sa.delete(store.policies).where(store.policies.c.version == 2))
            back = sa.update(store.policy_heads).where(heads.revision > before)
            await connection.execute(back.values(current_version=1, revision=before))
            await connection.execute(sa.update(store.changes).values(revision=before))
        await engine.dispose()
        made = await add_key(rooms, tenant)
        await add_version(rooms, "gold", Policy(models=("b",)), version=2)
        adapter = {"name": "accent", "model": "demo", "adapter_id": "adp_1", "source": "", "digest": "", "rank": 0}
        adapter |= {"num_bytes": 0, "loaded_at": 0, "loaded_by": "", "version": 1}
        async with rooms.changing() as (connection, revision):
            await connection.execute(sa.insert(store.adapters), adapter | {"revision": revision})
        await directory.refresh()
        assert [caller(directory, key) is None for key in (kept, made, lost)] == [False, False, True]
        assert caller(directory, kept).policy.models == ("b",)
        assert directory.bases == {"accent": "demo"}
