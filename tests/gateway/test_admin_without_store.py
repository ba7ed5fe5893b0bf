"""The administration while its database is away: what cannot be done says so, what is in memory goes on."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from gateway import store
from policies import settings
from tests.builders import PATIENCE_S, when
from tests.gateway.conftest import KEY
from tests.gateway.desk import Desk, Reply


@pytest.fixture
async def desk(open_front, fragile_postgres, tmp_path):
    url = f"{fragile_postgres.url}/postgres"
    async with open_front(store=settings.Store(data_dir=str(tmp_path / "data"), url=url)) as front:
        yield Desk(front)


def says_what_to_do(reply: Reply) -> bool:
    return (
        (reply.status, reply.body["type"]) == (503, "urn:penstock:problem:store_unavailable")
        and "PostgreSQL" in reply.body["detail"]
        and reply.headers["retry-after"] == "1"
    )


async def test_what_needs_the_database_is_refused_and_the_rest_goes_on(desk, fragile_postgres):
    fragile_postgres.kill()
    for method, path, body in (
        ("GET", "tenants", None),
        ("GET", "audit_log", None),
        ("POST", "tenants", {"name": "blue"}),
        ("POST", "keys", {"tenant_id": "ten_1", "name": "a key"}),
        ("POST", "policies/default/rollback", {"version": 1}),
    ):
        reply = await desk(method, path, body, if_match="*")
        assert says_what_to_do(reply), (path, reply)
    openais = await desk("GET", "/v1/organization/projects")
    assert (openais.status, openais.body["error"]["code"]) == (503, "store_unavailable")
    # Whose clients can do nothing about it hear that they may try again, and nothing of how it is made.
    for method, path in (("GET", "files"), ("GET", "batches"), ("POST", "batches/batch_1/cancel")):
        reply = await desk(method, f"/v1/{path}", key=KEY)
        error = reply.body["error"]
        assert (reply.status, error["code"], reply.headers["retry-after"]) == (503, "store_unavailable", "1")
        assert error["message"] == "Files and batches cannot be reached at the moment. Please try again."

    assert (await desk("GET", "queues")).status == 200
    assert (await desk("GET", "workers")).status == 200
    asked = desk.front.chat()
    desk.front.peer.say(await desk.front.peer.submitted(), [5, 6, 3], "stop")
    assert (await asked).usage.completion_tokens == 3

    fragile_postgres.start()
    assert (await desk.made("tenants", {"name": "blue"}))["name"] == "blue"


async def test_a_change_that_is_cut_off_is_repeated_under_its_idempotency_key(desk, fragile_postgres):
    engine = create_async_engine(f"{fragile_postgres.url}/postgres")
    call = {"body": {"name": "blue"}, "idempotency_key": "one"}
    async with contextlib.AsyncExitStack() as stack:
        other = await stack.enter_async_context(engine.connect())
        await other.execute(sa.update(store.changes).values(revision=store.changes.c.revision))
        changing = asyncio.create_task(desk("POST", "tenants", **call))
        await until_somebody_waits_for(other)
        fragile_postgres.kill()
        assert says_what_to_do(await changing)
        with contextlib.suppress(sa.exc.DBAPIError):
            await stack.aclose()
    await engine.dispose()
    fragile_postgres.start()
    made = await desk.made("tenants", **call)
    assert await desk.made("tenants", **call) == made
    assert sorted(tenant["name"] for tenant in (await desk.got("tenants"))["data"]) == ["blue", "default"]


async def test_whoever_has_sqlite_is_told_of_its_file_and_not_of_postgresql(open_front, data_dir, monkeypatch):
    monkeypatch.setattr(store, "PRAGMAS", (*store.PRAGMAS, "busy_timeout = 100"))
    async with open_front(store=settings.Store(data_dir=str(data_dir))) as front:
        desk = Desk(front)
        other = sqlite3.connect(data_dir / "penstock.db", timeout=PATIENCE_S, check_same_thread=False)
        with contextlib.closing(other):
            await asyncio.to_thread(other.execute, "BEGIN IMMEDIATE")
            refused = await desk("POST", "tenants", {"name": "blue"})
            assert (refused.status, refused.body["type"]) == (503, "urn:penstock:problem:store_unavailable")
            assert "keeps penstock.db locked" in refused.body["detail"]
            assert "PostgreSQL" not in refused.body["detail"]
        assert (await desk.made("tenants", {"name": "blue"}))["name"] == "blue"


async def until_somebody_waits_for(connection):
    """For what this connection has locked."""
    waiting = sa.text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
    await when(lambda: connection.scalar(waiting))


async def test_what_is_wrong_with_a_statement_is_no_absence(postgres):
    engine = create_async_engine(postgres)
    async with engine.connect() as connection:
        for text in ("SELECT 1 / 0", "SELECT * FROM nowhere", "INSERT INTO nowhere VALUES (1)", "SELECT 'a'::int"):
            with pytest.raises(sa.exc.DBAPIError) as failed:
                await connection.execute(sa.text(text))
            await connection.rollback()
            assert not store.is_away(failed.value), text
    await engine.dispose()
    engine = create_async_engine(f"{postgres}_that_is_none")
    with pytest.raises(sa.exc.DBAPIError) as failed:
        async with engine.connect():
            pass
    assert store.is_away(failed.value)
