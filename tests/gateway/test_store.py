"""The store on both databases: a schema from nothing, a second start that changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import sqlite3
import threading

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.exc import SQLAlchemyError

import migrations
from gateway import keys, store
from gateway.auth import Auth
from gateway.bootstrap import ADMIN_KEY, API_KEY, bootstrap
from gateway.clock import Clock
from gateway.directory import Directory
from gateway.ledger.spool import Spool
from policies import settings
from policies.policy import Limits, Policy
from tests.builders import PATIENCE_S, an_entry
from tests.residents import visiting

REVISIONS = sorted(path.name[:4] for path in migrations.DIRECTORY.glob("0*.py"))


async def test_an_empty_database_is_brought_up_to_date_and_a_second_start_changes_nothing(new_store):
    async with store.opened(new_store) as rooms:
        assert rooms.applied == REVISIONS
    async with store.opened(new_store) as rooms:
        assert rooms.applied == []


async def test_a_step_is_in_a_file_of_its_revisions_name(new_store):
    """By which a start finds that there is nothing to do, without Alembic."""

    def steps(connection: sa.Connection) -> list[str]:
        scripts = ScriptDirectory.from_config(migrations.config_of(connection))
        return [script.revision for script in scripts.walk_revisions()][::-1]

    async with store.opened(new_store) as rooms, rooms.engine.connect() as connection:
        assert await connection.run_sync(steps) == REVISIONS


async def test_the_migrated_schema_is_the_one_that_the_code_knows(new_store):
    def differences(connection: sa.Connection) -> list[object]:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        return compare_metadata(context, store.metadata)

    async with store.opened(new_store) as rooms, rooms.engine.connect() as connection:
        assert await connection.run_sync(differences) == []
        assert await connection.run_sync(checks) == {
            "install": {"install_is_one_row"},
            "changes": {"changes_is_one_row"},
            "organizations": set(),
            "policies": set(),
            "sessions": set(),
            "policy_heads": set(),
            "service_accounts": {"service_accounts_have_a_role"},
            "audit_log": set(),
            "idempotency": set(),
            "keys": {"keys_have_their_kind"},
            "tenants": set(),
            "ledger": set(),
            "ledger_chains": set(),
            "ledger_closings": set(),
            "ledger_days": set(),
            "ledger_repeats": set(),
            "ledger_cursors": set(),
            "prices": set(),
            "adapters": set(),
            "conversations": set(),
            "conversation_items": set(),
            "files": set(),
            "uploads": set(),
            "upload_parts": set(),
            "batches": set(),
            "responses": set(),
            "response_events": set(),
            "chats": set(),
            "chat_labels": set(),
            "posted_events": set(),
            "sink_states": set(),
            "sink_failures": set(),
            "sink_skips": set(),
            "upstreams": set(),
            "usage": set(),
            "alembic_version": set(),
        }


async def test_tenants_and_keys_of_an_older_store_come_along(new_store):
    """They are in an organization then, and have the policy that the settings call "default"."""
    secret = b"s" * 32
    os.makedirs(new_store.data_dir)

    def fill(connection: sa.Connection) -> None:
        command.upgrade(migrations.config_of(connection), "0002")
        connection.execute(sa.text("INSERT INTO install VALUES (1, :secret, 5)"), {"secret": secret})
        connection.execute(sa.text("INSERT INTO tenants VALUES ('ten_1', 'one', 5, NULL), ('ten_2', 'two', 5, 6)"))
        for id, tenant, kind, revoked_at in (
            ("key_1", "ten_1", "api", None),
            ("key_2", "ten_1", "api", 7),
            ("key_3", "ten_2", "api", None),
            ("key_4", None, "admin", None),
        ):
            row = {"id": id, "tenant": tenant, "kind": kind, "hash": keys.hash_of(secret, id), "revoked": revoked_at}
            text = "INSERT INTO keys VALUES (:id, :tenant, :kind, 'a name', :hash, '', '', 5, :revoked)"
            connection.execute(sa.text(text), row)

    async with visiting(new_store) as old, old.engine.begin() as connection:
        await connection.run_sync(fill)
    limits = Limits(requests_per_minute=7)
    async with store.opened(new_store) as rooms:
        assert rooms.applied[0] == "0003"
        assert await bootstrap(rooms, {}, {"default": Policy(limits=limits), "gold": Policy()}) is None
        directory = await Directory.load(rooms, Clock())
    auth = Auth(directory)
    caller = auth.caller("key_1")
    assert (caller.tenant_name, caller.policy_name, caller.policy.limits) == ("one", "default", limits)
    assert caller.organization_id.startswith("org_")
    assert [auth.caller(f"key_{number}") for number in (2, 3, 4)] == [None] * 3
    assert directory.key(keys.hash_of(secret, "key_4")).role == "owner"


async def test_policies_of_the_settings_are_made_once_and_then_left_alone(store_settings):
    async with store.opened(store_settings) as rooms:
        await bootstrap(rooms, {}, {"gold": Policy(weight=2)})
        await bootstrap(rooms, {}, {"gold": Policy(weight=3), "silver": Policy(weight=4)})
        directory = await Directory.load(rooms, Clock())
    found = {name: directory.policy(name) for name in ("default", "gold", "silver")}
    assert {name: (version.version, version.policy.weight) for name, version in found.items()} == {
        "default": (1, 1),
        "gold": (1, 2),
        "silver": (1, 4),
    }


def checks(connection: sa.Connection) -> dict[str, set[str | None]]:
    inspector = sa.inspect(connection)
    return {
        table: {check["name"] for check in inspector.get_check_constraints(table)}
        for table in inspector.get_table_names()
    }


async def test_a_step_that_fails_leaves_nothing_behind(store_settings):
    async with store.opened(store_settings) as rooms, rooms.engine.connect() as connection:
        async with connection.begin():
            await connection.execute(sa.text("CREATE TABLE half (id INTEGER)"))
            with pytest.raises(sa.exc.DBAPIError):
                await connection.execute(sa.text("CREATE TABLE half (id INTEGER)"))
            await connection.rollback()
        assert "half" not in await connection.run_sync(lambda sync: sa.inspect(sync).get_table_names())


async def test_nobody_else_reads_the_files_of_a_store_in_a_directory_that_is_open_to_all(tmp_path):
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(os.umask, os.umask(0o022))
        rooms = await stack.enter_async_context(store.opened(settings.Store(data_dir=str(tmp_path))))
        await bootstrap(rooms, {})
        kept = Spool(tmp_path / "spool.db")
        kept.keep([an_entry()])
        modes = {path.name: path.stat().st_mode & 0o077 for path in tmp_path.iterdir() if path.is_file()}
        kept.close()
    assert {"penstock.db", "penstock.db-wal", "spool.db", "spool.db-wal"} <= modes.keys()
    assert set(modes.values()) == {0}, modes


async def test_a_store_of_a_newer_version_is_refused(store_settings):
    async with store.opened(store_settings) as rooms, rooms.engine.begin() as connection:
        await connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(store.StoreError, match=r"newer Penstock \(revision 9999\)"):
        async with store.opened(store_settings):
            pass


async def test_the_first_start_makes_keys_that_open_the_door_and_the_second_makes_none(store_settings):
    async with store.opened(store_settings) as rooms:
        born = await bootstrap(rooms, {})
        assert born is not None
        assert await bootstrap(rooms, {}) is None
        auth = Auth(await Directory.load(rooms, Clock()))
    assert born.path.stat().st_mode & 0o777 == 0o600
    assert born.path.read_text() == "".join(f"{name}={key}\n" for name, key in born.made.items())
    assert auth.caller(born.made[API_KEY]) is not None
    assert auth.caller(born.made[ADMIN_KEY]) is None  # it opens the administration alone
    assert auth.caller(born.made[API_KEY][:-1]) is None


@pytest.mark.parametrize("name", [API_KEY, ADMIN_KEY])
@pytest.mark.parametrize("key", ["sk-of-my-own\r", "sk of my own", "sk-\u20ac", "sk-of\nmy-own"])
async def test_a_key_that_no_client_can_send_is_refused_before_it_is_kept(store_settings, name, key):
    async with store.opened(store_settings) as rooms:
        with pytest.raises(store.StoreError, match=f"{name} has characters that no client can send"):
            await bootstrap(rooms, {name: key})
        assert await bootstrap(rooms, {}) is not None


async def test_keys_of_the_environment_are_used_as_they_are(store_settings):
    environ = {API_KEY: "sk-of-my-own", ADMIN_KEY: "sk-another"}
    async with store.opened(store_settings) as rooms:
        born = await bootstrap(rooms, environ)
        auth = Auth(await Directory.load(rooms, Clock()))
    assert born.made == {}
    assert auth.caller("sk-of-my-own") is not None
    assert born.path.read_text() == "PENSTOCK_API_KEY=sk-of-my-own\nPENSTOCK_ADMIN_KEY=sk-another\n"


async def test_a_key_of_the_environment_that_a_later_start_does_not_know_is_mentioned(store_settings, caplog):
    async with store.opened(store_settings) as rooms:
        born = await bootstrap(rooms, {API_KEY: "sk-of-my-own"})
        await bootstrap(rooms, {API_KEY: "sk-of-my-own", ADMIN_KEY: born.made[ADMIN_KEY]})
        assert caplog.text == ""
        await bootstrap(rooms, {API_KEY: "sk-mistyped"})
    assert "PENSTOCK_API_KEY is set but is no key of this store" in caplog.text
    assert "sk-mistyped" not in caplog.text


async def test_a_key_is_nowhere_in_the_store(store_settings):
    async with store.opened(store_settings) as rooms:
        born = await bootstrap(rooms, {ADMIN_KEY: "short"})
        async with rooms.engine.connect() as connection:
            rows = (await connection.execute(sa.select(store.keys))).all()
    (key,) = born.made.values()
    assert {(row.kind, row.prefix, row.last_four) for row in rows} == {
        ("api", "sk-penstock-", key[-4:]),
        ("admin", "", ""),
    }
    for row in rows:
        assert len(row.hash) == 32
        assert key not in repr(row)
        assert "short" not in repr(row)


async def test_what_fails_does_not_tell_what_was_to_be_stored(store_settings):
    async with store.opened(store_settings) as rooms, rooms.engine.connect() as connection:
        with pytest.raises(sa.exc.SQLAlchemyError) as failure:
            await connection.execute(sa.text("INSERT INTO nowhere VALUES (:said)"), {"said": "SECRET"})
    assert "nowhere" in str(failure.value)
    assert "SECRET" not in str(failure.value)


async def test_a_revoked_key_and_a_disabled_tenant_open_nothing(store_settings):
    async with store.opened(store_settings) as rooms:
        born = await bootstrap(rooms, {})
        for table, column in ((store.keys, "revoked_at"), (store.tenants, "disabled_at")):
            async with rooms.engine.begin() as connection:
                await connection.execute(sa.update(table).values({column: 1}))
            assert Auth(await Directory.load(rooms, Clock())).caller(born.made[API_KEY]) is None
            async with rooms.engine.begin() as connection:
                await connection.execute(sa.update(table).values({column: None}))
            assert Auth(await Directory.load(rooms, Clock())).caller(born.made[API_KEY]) is not None


def test_ids_are_in_the_order_of_making():
    ids = [store.new_id("key") for _ in range(10_000)]
    assert ids == sorted(ids)
    assert len(set(ids)) == len(ids)
    assert {len(id) for id in ids} == {len("key_") + 24}


async def test_one_data_directory_is_one_gateways(tmp_path):
    config = settings.Store(data_dir=str(tmp_path))
    async with store.opened(config):
        with pytest.raises(store.StoreError, match="in use by another Penstock"):
            async with store.opened(config):
                pass
    async with store.opened(config):
        pass


async def test_a_change_that_is_broken_off_within_a_statement_keeps_nobody_from_writing(tmp_path):
    """As when a client hangs up; and while nobody has collected what is left of it."""
    asked = asyncio.Event()
    async with store.opened(settings.Store(data_dir=str(tmp_path))) as rooms:
        sa.event.listen(rooms.engine.sync_engine, "before_cursor_execute", lambda *_: asked.set())
        with contextlib.closing(sqlite3.connect(tmp_path / "penstock.db", isolation_level=None)) as other:
            async with rooms.engine.connect() as connection:
                await connection.begin()
                asked.clear()
                other.execute("BEGIN IMMEDIATE")
                change = asyncio.create_task(store.bump(connection))
                await asked.wait()
                gc.disable()
                try:
                    change.cancel()
                    other.execute("ROLLBACK")
                    await asyncio.wait([change])
                    other.execute("BEGIN IMMEDIATE")
                finally:
                    gc.enable()
        assert change.cancelled()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the thread, told too late
def test_a_statement_that_is_given_up_twice_lets_the_event_loop_end(tmp_path):
    """A gateway that stops while SQLite is slow."""
    config, given_up = settings.Store(data_dir=str(tmp_path)), threading.Event()
    other = sqlite3.connect(tmp_path / "penstock.db", isolation_level=None, check_same_thread=False)

    async def main() -> None:
        async with store.opened(config) as rooms:

            async def write() -> None:
                async with rooms.changing():
                    pass

            other.execute("BEGIN IMMEDIATE")
            writing = asyncio.create_task(write())
            while not writing.done():
                await asyncio.sleep(0.05)
                writing.cancel()
            given_up.set()

    gateway = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    gateway.start()
    assert given_up.wait(PATIENCE_S)
    gateway.join(PATIENCE_S)
    other.close()
    assert not gateway.is_alive()


async def test_a_server_that_says_nothing_any_more_keeps_nobody_for_ever(fragile_postgres, tmp_path):
    """Neither whoever is through with reading, nor whoever closes the store."""
    config = settings.Store(data_dir=str(tmp_path), url=f"{fragile_postgres.url}/postgres")

    async def read(rooms: store.Store) -> None:
        async with rooms.engine.connect() as left_in_the_pool, rooms.engine.connect() as reading:
            await left_in_the_pool.execute(sa.select(1))
            await left_in_the_pool.rollback()
            await reading.execute(sa.select(1))
            fragile_postgres.stall()

    async def visit() -> None:
        async with store.opened(config) as rooms:
            with pytest.raises((SQLAlchemyError, OSError)):
                await read(rooms)

    visit_under_way = asyncio.create_task(visit())
    over, _ = await asyncio.wait([visit_under_way], timeout=PATIENCE_S)
    fragile_postgres.resume()
    await visit_under_way
    assert over


async def test_a_postgresql_whose_machine_has_gone_is_noticed_by_whoever_waits_for_it(postgres, tmp_path):
    async with (
        store.opened(settings.Store(data_dir=str(tmp_path), url=postgres)) as rooms,
        rooms.engine.connect() as connection,
    ):
        driver = (await connection.get_raw_connection()).driver_connection
        ours = driver._transport.get_extra_info("socket")
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < 60
        assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) < 60_000


async def test_gateways_may_share_a_postgresql(postgres, tmp_path):
    config = settings.Store(data_dir=str(tmp_path), url=postgres)
    async with store.opened(config) as first, store.opened(config) as second:
        assert (len(first.applied), len(second.applied)) == (len(REVISIONS), 0)


async def test_gateways_that_start_together_on_an_empty_database_make_one_store(postgres, tmp_path):
    async def start(name: str):
        async with store.opened(settings.Store(data_dir=str(tmp_path / name), url=postgres)) as rooms:
            born = await bootstrap(rooms, {}, {"gold": Policy(weight=2)})
            return rooms.applied, born, await Directory.load(rooms, Clock())

    started = await asyncio.gather(*(start(f"host-{number}") for number in range(6)))
    assert sorted(len(applied) for applied, _, _ in started) == [0, 0, 0, 0, 0, len(REVISIONS)]
    (born,) = [born for _, born, _ in started if born is not None]
    for _, _, directory in started:
        assert Auth(directory).caller(born.made[API_KEY]) is not None
        assert directory.policy("gold").version == directory.policy("default").version == 1
