"""What gateways share, taken away mid-load: requests go on, none hangs, and what was said is billed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from urllib.parse import quote

import aiohttp
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from gateway import store
from gateway.ledger.spool import Spool
from policies import settings
from tests.builders import PATIENCE_S, an_entry, until, when
from tests.family import answered_by, family, sharing

NUM_CLIENTS = 12
DIVIDING, REFUSING = (
    {"PENSTOCK_POLICIES__DEFAULT": f'{{limits = {{requests_per_minute = 1000000}}, without_redis = "{choice}"}}'}
    for choice in ("divide", "refuse")
)
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}


class Load:
    """Clients that ask again as soon as they are answered."""

    def __init__(self) -> None:
        self.answers: list[int] = []
        """Statuses, in order."""
        self.refusals: list[str] = []
        """Why those who were not answered were not."""

    async def ask(self, session: aiohttp.ClientSession) -> None:
        while True:
            async with session.post("/v1/chat/completions", json=CHAT) as answer:
                body = await answer.json()
                if answer.status != 200:
                    self.refusals.append(body["error"]["message"])
                self.answers.append(answer.status)

    async def more(self, num_answers: int) -> list[int]:
        """The next so many."""
        start = len(self.answers)
        await until(lambda: len(self.answers) >= start + num_answers)
        return self.answers[start:]


@contextlib.asynccontextmanager
async def load(house):
    """While this lasts. Ends when all that was asked is answered; raises what a client met with."""
    running = Load()
    async with house.http() as session, asyncio.TaskGroup() as clients:
        tasks = [clients.create_task(running.ask(session)) for _ in range(NUM_CLIENTS)]
        await running.more(NUM_CLIENTS)
        yield running
        for task in tasks:
            task.cancel()


@pytest.fixture
async def worker(start_scripted_worker):
    return answered_by(await start_scripted_worker("--num-tokens", 4, "--step-s", 0.002))


@pytest.fixture
def impatient(fragile_redis):
    return settings.Redis(url=fragile_redis.url, timeout_ms=2000.0)


@pytest.mark.parametrize("how", ["kill", "stall"])
async def test_without_redis_requests_go_on_within_divided_limits(
    tmp_path, worker, impatient, postgres, fragile_redis, how
):
    environ = {**sharing(impatient, postgres, 3), **worker, **DIVIDING}
    async with family(tmp_path, **environ) as house, load(house) as running:
        assert set(await running.more(50)) == {200}
        getattr(fragile_redis, how)()
        assert set(await running.more(200)) == {200}
        (fragile_redis.start if how == "kill" else fragile_redis.resume)()
        assert set(await running.more(50)) == {200}


@pytest.mark.parametrize("how", ["kill", "stall"])
async def test_without_redis_requests_are_refused_where_the_policy_says_so(
    tmp_path, worker, impatient, postgres, fragile_redis, how
):
    environ = {**sharing(impatient, postgres, 3), **worker, **REFUSING}
    async with family(tmp_path, **environ) as house, load(house) as running:
        assert set(await running.more(50)) == {200}
        getattr(fragile_redis, how)()
        await until(lambda: running.answers[-30:] == [503] * 30)
        (fragile_redis.start if how == "kill" else fragile_redis.resume)()
        await until(lambda: running.answers[-30:] == [200] * 30)


@pytest.mark.parametrize("how", ["kill", "stall"])
async def test_without_the_database_requests_go_on_and_are_billed_once_when_it_is_back(
    tmp_path, worker, redis_settings, fragile_postgres, how
):
    url = f"{fragile_postgres.url}/postgres"
    async with family(tmp_path, **sharing(redis_settings, url, 3), **worker) as house:
        async with load(house) as running:
            getattr(fragile_postgres, how)()
            assert set(await running.more(100)) == {200}, running.refusals
        (fragile_postgres.start if how == "kill" else fragile_postgres.resume)()
        # Clients that were cut off have a row of their own, 499.
        await when(lambda: num_billed(url), lambda num: num >= len(running.answers))
        assert await house.end() == 0
    assert len(running.answers) <= await num_billed(url) <= len(running.answers) + NUM_CLIENTS


async def test_rows_that_come_out_of_the_spool_after_a_start_count_in_the_budget(tmp_path, worker, postgres):
    policy = '{budget = {amount = "100"}, prices = {"*" = {request = "0.0001"}}}'
    environ = {"PENSTOCK_STORE__URL": postgres, "PENSTOCK_POLICIES__DEFAULT": policy, **worker}
    async with family(tmp_path, **environ) as house:
        (tenant,) = (await admin(house, "GET", "tenants"))["data"]
        await house.end()
    now = int(time.time())
    rows = [
        an_entry(
            request_id=f"req_{(1000 * now << 80) + number:032x}",
            tenant_id=tenant["id"],
            created_at=now,
            settled_at=now,
            chain=1,
            position=number,
            cost_micros=100,
        )
        for number in range(1, 4001)
    ]
    spool = Spool(tmp_path / "data" / "spool.db")
    spool.keep(rows)
    spool.close()
    async with family(tmp_path, **environ) as house:
        path = f"tenants/{tenant['id']}/limits"
        await when(lambda: admin(house, "GET", path), lambda limits: limits["budget"]["used_micros"] == 400_000)
        await house.end()


async def num_billed(url: str) -> int:
    """Answers in the ledger."""
    engine = create_async_engine(url)
    async with engine.connect() as connection:
        query = sa.select(sa.func.count()).select_from(store.ledger).where(store.ledger.c.status == 200)
        found: int = (await connection.execute(query)).scalar_one()
    await engine.dispose()
    return found


async def test_what_one_gateway_revokes_is_revoked_at_the_other(tmp_path, worker, redis_settings, postgres):
    async with two_hosts(tmp_path, redis_settings, postgres, worker) as (first, second):
        async with first.http(first.admin_key) as admin, admin.get("/admin/v1/tenants") as answer:
            (tenant,) = (await answer.json())["data"]
        for revoke in (by_the_admin_api, behind_their_backs):
            async with first.http(first.admin_key) as admin:
                body = {"name": "short-lived", "tenant_id": tenant["id"]}
                async with admin.post("/admin/v1/keys", json=body) as answer:
                    assert answer.status == 201, await answer.text()
                    made = await answer.json()
            async with second.http(made["key"]) as session:
                await met(session, 200)
                await revoke(first, postgres, made["key"])
                await met(session, 401)


@contextlib.asynccontextmanager
async def two_hosts(tmp_path, redis_settings, postgres, worker):
    """Each with one gateway; they share Redis, PostgreSQL and the worker."""
    async with hosts(tmp_path, 2, **sharing(redis_settings, postgres, 1), **worker) as (first, second):
        yield first, second


@contextlib.asynccontextmanager
async def hosts(tmp_path, num_hosts, **environ):
    """That are started at the same time, on whatever is there."""
    async with contextlib.AsyncExitStack() as stack:
        places = [tmp_path / f"host-{number}" for number in range(num_hosts)]
        for place in places:
            place.mkdir()
        yield await asyncio.gather(*(stack.enter_async_context(family(place, **environ)) for place in places))


async def met(session: aiohttp.ClientSession, status: int) -> None:
    """Until requests are answered so."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            async with session.get("/v1/models") as answer:
                if answer.status == status:
                    return


async def by_the_admin_api(house, url, key):
    async with house.http(house.admin_key) as admin:
        async with admin.get("/admin/v1/keys?limit=100") as answer:
            (key_id,) = [each["id"] for each in (await answer.json())["data"] if each["last_four"] == key[-4:]]
        async with admin.delete(f"/admin/v1/keys/{key_id}") as answer:
            assert answer.status == 200, await answer.text()


async def behind_their_backs(house, url, key):
    """A change in the database that no gateway has made, and nobody gives notice of."""
    engine = create_async_engine(url)
    async with engine.begin() as connection:
        revision = await store.bump(connection)
        changed = sa.update(store.keys).where(store.keys.c.last_four == key[-4:])
        await connection.execute(changed.values(revoked_at=int(time.time()), revision=revision))
    await engine.dispose()


async def open_at_the_worker(house, num_gateways: int) -> int:
    """Sequences that it has of all gateways together, once it has told that they are so many."""
    async with house.http(house.admin_key) as admin, asyncio.timeout(PATIENCE_S):
        while True:
            async with admin.get("/admin/v1/workers") as answer:
                (worker,) = (await answer.json())["data"]
            if (load := worker["load"]) and load["num_gateways"] == num_gateways:
                return load["num_running"] + load["num_waiting"]


@contextlib.asynccontextmanager
async def streams(house, num_streams: int):
    """So many long answers under way."""
    body = {**CHAT, "max_tokens": 4000, "stream": True}
    async with house.http() as session:
        asking = [asyncio.create_task(session.post("/v1/chat/completions", json=body)) for _ in range(num_streams)]
        yield
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def all_wait_or_run(house, num_requests: int) -> None:
    """Until the queues of all gateways and the worker have so many."""
    async with house.http(house.admin_key) as admin, asyncio.timeout(PATIENCE_S):
        num_found = 0
        while num_found != num_requests:
            async with admin.get("/admin/v1/queues") as answer:
                reports = (await answer.json())["data"]
            num_waiting = sum(queue["num_waiting"] for report in reports for queue in report["queues"])
            num_found = num_waiting + await open_at_the_worker(house, 2)


async def admin(house, method: str, path: str, body: object = None, **headers: str):
    """What the administration answers."""
    call = {"json": body, "headers": headers}
    async with house.http(house.admin_key) as session, session.request(method, f"/admin/v1/{path}", **call) as answer:
        assert answer.status in (200, 201), await answer.text()
        return await answer.json()


async def chatted(house, **others: object):
    """The headers of an answer."""
    async with house.http() as session, session.post("/v1/chat/completions", json={**CHAT, **others}) as answer:
        assert answer.status == 200, await answer.text()
        return answer.headers


async def soon():
    """``async for _ in soon(): if ...: break``, and it has to come to that."""
    began_at = time.monotonic()
    while time.monotonic() - began_at < PATIENCE_S:
        yield
    raise AssertionError("it did not come to that")


async def test_a_worker_that_one_gateway_drains_gets_nothing_from_the_other_until_it_is_resumed(
    tmp_path, worker, redis_settings, postgres
):
    async with two_hosts(tmp_path, redis_settings, postgres, worker) as (first, second):
        (place,) = (await admin(first, "GET", "workers"))["data"]
        path = f"workers/{quote(place['name'], safe='')}"
        await admin(first, "POST", f"{path}/drain")
        async for _ in soon():
            if (await admin(second, "GET", path))["resting"]:
                break
        asked = asyncio.create_task(chatted(second))
        async for _ in soon():
            if await num_waiting_at(second, second) == 1:
                break
        await admin(second, "POST", f"{path}/resume")
        await asked
        async for _ in soon():
            if not (await admin(first, "GET", path))["resting"]:
                break
        await chatted(first)


async def num_waiting_at(house, told_by) -> int:
    """Requests in line at one gateway, as it or another one tells."""
    names = [(await admin(each, "GET", "queues"))["data"][0]["name"] for each in (house, told_by)]
    reports = (await admin(told_by, "GET", "queues"))["data"]
    assert reports[0]["name"] == names[1]
    return sum(queue["num_waiting"] for each in reports if each["name"] == names[0] for queue in each["queues"])


async def test_who_waits_at_one_gateway_is_seen_at_the_other_with_its_next_beat(
    tmp_path, start_scripted_worker, redis_settings, postgres
):
    worker = answered_by(await start_scripted_worker("--max-sequences", 2, "--step-s", 0.5))
    async with two_hosts(tmp_path, redis_settings, postgres, worker) as (first, second), streams(second, 10):
        async for _ in soon():
            if await num_waiting_at(second, second) == await num_waiting_at(second, first) >= 7:
                break


async def test_what_one_gateway_flushes_from_the_cache_the_other_finds_no_longer(
    tmp_path, worker, redis_settings, postgres
):
    async with two_hosts(tmp_path, redis_settings, postgres, worker) as (first, second):
        (tenant,) = (await admin(first, "GET", "tenants"))["data"]
        assert (await chatted(first, temperature=0))["x-penstock-cache"] == "miss"
        async for _ in soon():
            if (await chatted(second, temperature=0))["x-penstock-cache"] == "hit":
                break
        assert (await admin(first, "POST", f"caches/exact/{tenant['id']}/flush"))["num_entries"] == 1
        assert (await chatted(second, temperature=0))["x-penstock-cache"] == "miss"


async def test_a_policy_that_one_gateway_changes_counts_at_the_other(tmp_path, worker, redis_settings, postgres):
    async with two_hosts(tmp_path, redis_settings, postgres, worker) as (first, second):
        assert "x-ratelimit-limit-requests" not in await chatted(second)
        document = {"limits": {"requests_per_minute": 1000}}
        await admin(first, "PUT", "policies/default", {"document": document}, **{"if-match": "*"})
        async for _ in soon():
            if (await chatted(second)).get("x-ratelimit-limit-requests") == "1000":
                break
        await admin(second, "POST", "policies/default/rollback", {"version": 1}, **{"if-match": "*"})
        async for _ in soon():
            if "x-ratelimit-limit-requests" not in await chatted(first):
                break


async def test_whoever_was_told_that_a_change_is_made_meets_it_at_every_gateway(
    tmp_path, worker, redis_settings, postgres
):
    async with hosts(tmp_path, 3, **sharing(redis_settings, postgres, 1), **worker) as (first, *others):
        (tenant,) = (await admin(first, "GET", "tenants"))["data"]
        for ceiling in (1000, 2000, 3000):
            document = {"limits": {"requests_per_minute": ceiling}}
            await admin(first, "PUT", "policies/default", {"document": document}, **{"if-match": "*"})
            for house in others:
                assert (await chatted(house))["x-ratelimit-limit-requests"] == str(ceiling)
            for is_disabled in (True, False):
                path = f"tenants/{tenant['id']}"
                await admin(first, "PATCH", path, {"disabled": is_disabled}, **{"if-match": "*"})
                for house in others:
                    async with house.http() as session, session.get("/v1/models") as answer:
                        assert answer.status == (401 if is_disabled else 200)


async def test_gateways_that_start_together_on_an_empty_database_all_answer(tmp_path, worker, redis_settings, postgres):
    async with hosts(tmp_path, 3, **sharing(redis_settings, postgres, 2), **worker) as started:
        for house in started:
            async with house.http() as session:
                await met(session, 200)
            async with house.http(house.admin_key) as admin, admin.get("/admin/v1/policies") as answer:
                assert [(each["name"], each["version"]) for each in (await answer.json())["data"]] == [("default", 1)]
            assert not [line for line in house.told if "ERROR" in line or "Traceback" in line]


async def test_two_gateways_give_a_worker_no_more_than_it_has_room_for(
    tmp_path, start_scripted_worker, redis_settings, postgres
):
    options = ("--max-sequences", 8, "--step-s", 0.5, "--stats-s", 0.05)
    worker = answered_by(await start_scripted_worker(*options))
    async with two_hosts(tmp_path, redis_settings, postgres, worker) as (first, second):
        assert await open_at_the_worker(first, 2) == await open_at_the_worker(second, 2) == 0
        async with streams(first, 20):
            # The other leaves its part unused.
            async with asyncio.timeout(PATIENCE_S):
                while await open_at_the_worker(first, 2) < 7:
                    pass
            async with streams(second, 20):
                await all_wait_or_run(first, 40)
                # All of the worker to one of them at most, and its own part to the one that came late.
                assert 8 <= await open_at_the_worker(second, 2) <= 8 + 4
