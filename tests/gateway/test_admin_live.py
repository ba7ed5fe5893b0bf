"""What the administration sees and does of the running house: workers, queues, caches, and trials of a policy."""

from __future__ import annotations

import asyncio
from urllib.parse import quote

import pytest
import sqlalchemy as sa

from gateway import trials
from policies import settings, wire
from tests.builders import until, when
from tests.conftest import PATIENT_MS
from tests.gateway.desk import Desk

LIMITED = {"limits": {"requests_per_minute": 5}}
NO_STEPS = "from gateway import trials; trials.simulation.MAX_STEPS = 0; trials.main()"


@pytest.fixture
def desk(front) -> Desk:
    return Desk(front)


async def answered(desk: Desk, temperature: float = 0, **others: object) -> None:
    """A request, computed and settled."""
    task = desk.front.chat(temperature=temperature, **others)
    submit = await desk.front.peer.submitted()
    desk.front.peer.say(submit, [5, 6, 3], "stop")
    await task


async def test_a_worker_that_is_drained_gets_nothing_until_it_is_resumed(desk):
    (worker,) = (await desk.got("workers"))["data"]
    assert (worker["model"], worker["state"], worker["resting"]) == ("demo", "ready", False)
    assert worker["facts"]["num_blocks"] == 64
    path = f"workers/{quote(worker['name'], safe='')}"
    assert await desk.got(path) == worker

    assert (await desk.made(f"{path}/drain", None))["resting"] is True
    assert (await desk.got(path))["resting"] is True
    task = desk.front.chat()
    await until(lambda: desk.front.gw.dispatch.num_waiting() == 1)
    (queue,) = [
        queue
        for gateway in (await desk.got("queues?model=demo&sla_class=standard"))["data"]
        for queue in gateway["queues"]
    ]
    assert (queue["sla_class"], queue["num_waiting"], queue["num_tenants"]) == ("standard", 1, 1)
    assert desk.front.peer.is_quiet()

    assert (await desk.made(f"{path}/resume", None))["resting"] is False
    submit = await desk.front.peer.submitted()
    desk.front.peer.say(submit, [5, 3], "stop")
    await task
    log = (await desk.got("audit_log?object_kind=worker"))["data"]
    assert [(entry["action"], entry["after"]["resting"]) for entry in log] == [
        ("worker.drained", True),
        ("worker.resumed", False),
    ]
    assert (await desk("POST", "workers/nobody/drain")).status == 404


async def test_the_queues_of_all_classes_are_seen(desk):
    (gateway,) = (await desk.got("queues"))["data"]
    assert {queue["sla_class"] for queue in gateway["queues"]} == {"interactive", "standard", "batch"}
    assert (await desk("GET", "queues?class=batch")).fields() == ["class"]
    ((gateway),) = (await desk.got("queues?model=other"))["data"]
    assert gateway["queues"] == []


async def test_what_is_kept_for_a_tenant_is_counted_and_forgotten(desk):
    ((tenant),) = (await desk.got("tenants"))["data"]
    other = await desk.made("tenants", {"name": "blue"})
    await answered(desk)
    kept = await desk.got(f"caches/exact/{tenant['id']}")
    assert kept["num_entries"] == 1
    assert kept["num_bytes"] > 0
    assert (await desk.got("caches/exact"))["num_entries"] == 1
    assert (await desk.got(f"caches/exact/{other['id']}"))["num_entries"] == 0

    assert (await desk.made(f"caches/exact/{other['id']}/flush", None))["num_entries"] == 0
    await desk.front.chat(temperature=0)  # from the cache: the worker is not asked
    flushed = await desk.made(f"caches/exact/{tenant['id']}/flush", None)
    assert flushed == {"tenant_id": tenant["id"], "sharing_group": "", "num_entries": 1}
    await answered(desk)
    assert (await desk("POST", "caches/exact/ten_none/flush")).status == 404


async def test_what_was_done_is_in_the_audit_log_though_whoever_asked_hangs_up(open_front, migrated_postgres, data_dir):
    async with open_front(store=settings.Store(data_dir=str(data_dir), url=migrated_postgres)) as front:
        desk = Desk(front)
        ((tenant),) = (await desk.got("tenants"))["data"]
        await answered(desk)
        async with front.gw.store.engine.begin() as connection:
            await connection.execute(sa.text("LOCK TABLE audit_log IN EXCLUSIVE MODE"))
            asked = asyncio.create_task(desk("POST", f"caches/exact/{tenant['id']}/flush"))
            await when(front.gw.cache.held_in_all, lambda held: not held.num_entries)
            asked.cancel()
            await asyncio.wait([asked])
            await desk.got("models")  # the gateway has heard of it by now
        await desk.made("tenants", {"name": "blue"})  # whose turn comes after it
        log = (await desk.got("audit_log"))["data"]
        assert [entry["action"] for entry in log] == ["cache.flushed", "tenant.created"]


async def test_the_limits_of_a_tenant_and_of_a_key_are_seen_as_they_stand(desk):
    document = {
        "limits": {"requests_per_minute": 10, "tokens_per_day": 1000, "concurrent_requests": 4},
        "key_limits": {"requests_per_minute": 5},
        "model_limits": {"*": {"tokens_per_minute": 500}},
        "budget": {"amount": "0.001", "period": "day"},
        "prices": {"*": {"prompt": "1", "completion": "1"}},
    }
    assert (await desk("PUT", "policies/default", {"document": document}, if_match="*")).status == 200
    (tenant,), (key,) = (await desk.got("tenants"))["data"], (await desk.got("keys"))["data"]
    path = f"tenants/{tenant['id']}/limits"
    fresh = await desk.got(path)
    assert [(one["scope"], one["model"], one["limit"], one["remaining"]) for one in fresh["ceilings"]] == [
        ("tenant", None, "requests_per_minute", 10),
        ("tenant", None, "tokens_per_day", 1000),
        ("tenant", None, "concurrent_requests", 4),
        ("model", "demo", "tokens_per_minute", 500),
    ]
    assert (fresh["policy"], fresh["policy_version"], fresh["budget"]["remaining_micros"]) == ("default", 2, 1000)

    await answered(desk, max_tokens=10)
    (row,) = await desk.front.settled(1)
    num_tokens = row["num_prompt_tokens"] + row["num_completion_tokens"]
    task = desk.front.chat(max_tokens=10)
    submit = await desk.front.peer.submitted()
    held = len(submit.prompt_token_ids) + 10
    seen = await desk.got(path)
    used = {(one["scope"], one["limit"]): (one["used"], one["remaining"]) for one in seen["ceilings"]}
    assert used == {
        ("tenant", "requests_per_minute"): (2, 8),
        ("tenant", "tokens_per_day"): (num_tokens + held, 1000 - num_tokens - held),
        ("tenant", "concurrent_requests"): (1, 3),
        ("model", "tokens_per_minute"): (num_tokens + held, 500 - num_tokens - held),
    }
    resets = {one["limit"]: one["reset_ms"] for one in seen["ceilings"]}
    assert 0 < resets["requests_per_minute"] <= 61_000
    assert resets["concurrent_requests"] is None
    budget = seen["budget"]
    assert 0 < budget["reset_ms"] <= 86_400_000
    assert budget | {"reset_ms": 0} == {
        "period": "day",
        "hard": True,
        "currency": "USD",
        "amount_micros": 1000,
        "used_micros": num_tokens + held,
        "remaining_micros": 1000 - num_tokens - held,
        "reset_ms": 0,
    }
    mine = await desk.got(f"keys/{key['id']}/limits?model=demo")
    (own,) = [one for one in mine["ceilings"] if one["scope"] == "key"]
    assert (own["limit"], own["used"], own["remaining"], mine["key_id"]) == ("requests_per_minute", 2, 3, key["id"])
    assert len(mine["ceilings"]) == 5
    desk.front.peer.say(submit, [5, 3], "stop")
    await task


async def test_the_limits_of_nobody_are_not_there_and_those_of_a_narrowed_key_are_its_own(desk):
    (tenant,) = (await desk.got("tenants"))["data"]
    narrowing = {"limits": {"requests_per_minute": 2}}
    key = await desk.made("keys", {"tenant_id": tenant["id"], "name": "narrow", "narrowing": narrowing})
    (own,) = (await desk.got(f"keys/{key['id']}/limits"))["ceilings"]
    assert (own["scope"], own["limit"], own["ceiling"], own["used"]) == ("key", "requests_per_minute", 2, 0)
    limits = await desk.got(f"tenants/{tenant['id']}/limits")
    assert (limits["ceilings"], limits["budget"]) == ([], None)
    for path in ("tenants/ten_none/limits", "keys/key_none/limits", "tenants/%20/limits"):
        assert (await desk("GET", path)).status == 404
    assert (await desk("GET", f"tenants/{tenant['id']}/limits?models=demo")).fields() == ["models"]
    reader = await desk.made("admin_keys", {"name": "reader", "role": "billing_reader"})
    assert (await desk("GET", f"tenants/{tenant['id']}/limits", key=reader["key"])).status == 200
    assert (await desk("GET", f"keys/{key['id']}/limits", key=reader["key"])).status == 403


async def test_a_key_that_was_rotated_shows_what_is_spent_of_its_own_budget_and_of_its_tenants(desk):
    document = {"budget": {"amount": "1", "period": "month"}, "prices": {"*": {"prompt": "1", "completion": "1"}}}
    assert (await desk("PUT", "policies/default", {"document": document}, if_match="*")).status == 200
    (tenant,) = (await desk.got("tenants"))["data"]
    narrowing = {"budget": {"amount": "0.001", "period": "day"}}
    made = await desk.made("keys", {"tenant_id": tenant["id"], "name": "narrow", "narrowing": narrowing})
    assert made["narrowing"] == narrowing
    first = await desk.got(f"keys/{made['id']}/limits")
    assert (first["ceilings"], first["budget"]["used_micros"], first["key_budget"]["used_micros"]) == ([], 0, 0)
    await answered(desk, 1, extra_headers={"authorization": f"Bearer {made['key']}"})
    successor = await desk.made(f"keys/{made['id']}/rotate", {"overlap_s": 3600})
    await answered(desk, 1, extra_headers={"authorization": f"Bearer {successor['key']}"})
    costs = [row["cost_micros"] for row in await desk.front.settled(2)]
    cost = sum(costs)
    assert min(costs) > 0
    for key in (made, successor):
        seen = await desk.got(f"keys/{key['id']}/limits")
        assert (seen["budget"]["period"], seen["budget"]["used_micros"]) == ("month", cost)
        assert 0 < seen["key_budget"].pop("reset_ms") <= 86_400_000
        assert seen["key_budget"] == {
            "period": "day",
            "hard": True,
            "currency": "USD",
            "amount_micros": 1000,
            "used_micros": cost,
            "remaining_micros": 1000 - cost,
        }
    (other,) = [key for key in (await desk.got("keys"))["data"] if key["narrowing"] is None]
    assert (await desk.got(f"keys/{other['id']}/limits"))["key_budget"] is None
    listed = (await desk.got("key_budgets"))["data"]
    assert {each["key_id"]: each["budget"] and each["budget"]["used_micros"] for each in listed} == {
        other["id"]: None,
        made["id"]: cost,
        successor["id"]: cost,
    }


async def test_budgets_of_keys_are_listed_as_the_keys_are(desk):
    (tenant,) = (await desk.got("tenants"))["data"]
    blue = await desk.made("tenants", {"name": "blue"})
    for number in range(5):
        owner = blue if number % 2 else tenant
        narrowing = {"budget": {"amount": str(number), "period": "week", "hard": False}} if number else None
        await desk.made("keys", {"tenant_id": owner["id"], "name": f"{number}", "narrowing": narrowing})
    keys = (await desk.got("keys"))["data"]
    assert (await desk("DELETE", f"keys/{keys[-1]['id']}")).status == 200
    query = "limit=2&order=desc"
    found: list[tuple[str, int | None]] = []
    while query:
        theirs, budgets = await desk.got(f"keys?{query}"), await desk.got(f"key_budgets?{query}")
        assert [each["key_id"] for each in budgets["data"]] == [each["id"] for each in theirs["data"]]
        assert budgets["next_cursor"] == theirs["next_cursor"]
        found += [(each["key_id"], each["budget"] and each["budget"]["amount_micros"]) for each in budgets["data"]]
        query = budgets["has_more"] and f"limit=2&order=desc&after={budgets['next_cursor']}"
    amounts = [None, None, 1_000_000, 2_000_000, 3_000_000, None]  # the first has none, the last is revoked
    assert found[::-1] == [(key["id"], amount) for key, amount in zip(keys, amounts, strict=True)]
    assert len((await desk.got(f"key_budgets?tenant_id={blue['id']}"))["data"]) == 2
    reader = await desk.made("admin_keys", {"name": "reader", "role": "billing_reader"})
    assert (await desk("GET", "key_budgets", key=reader["key"])).status == 403


async def test_limits_that_cannot_be_reached_are_not_made_up(open_front, fragile_redis):
    async with open_front(redis=settings.Redis(url=fragile_redis.url, timeout_ms=PATIENT_MS)) as front:
        desk = Desk(front)
        assert (await desk("PUT", "policies/default", {"document": LIMITED}, if_match="*")).status == 200
        (tenant,) = (await desk.got("tenants"))["data"]
        (standing,) = (await desk.got(f"tenants/{tenant['id']}/limits"))["ceilings"]
        assert standing["remaining"] == 5
        fragile_redis.kill()
        away = await desk("GET", f"tenants/{tenant['id']}/limits")
        assert (away.status, "retry-after" in away.headers) == (503, True)


async def test_a_policy_is_tried_on_posted_arrivals_before_it_counts(desk):
    arrivals = [
        {
            "at_s": 0.1 * number,
            "tenant": "default",
            "model": "demo",
            "num_prompt_tokens": 100,
            "num_completion_tokens": 20,
        }
        for number in range(50)
    ]
    now = await desk.made("policies/default/trial", {"arrivals": arrivals})
    assert (now["policy"], now["version"], now["currency"]) == ("default", 1, "USD")
    assert now["outcome"]["total"]["num_admitted"] == 50
    assert now["outcome"]["total"]["num_completion_tokens"] == 1000

    strict = {"limits": {"requests_per_minute": 10}, "prices": {"*": {"completion": "50"}}}
    tried = await desk.made("policies/default/trial", {"arrivals": arrivals, "document": strict})
    total = tried["outcome"]["total"]
    assert (tried["version"], total["num_admitted"], total["refused"]) == (None, 10, {"requests": 40})
    assert total["cost_micros"] == 10 * 20 * 50
    assert set(tried["outcome"]["classes"]["standard"]["ttft_ms"]) == {"p50", "p90", "p95", "p99", "max"}
    again = await desk.made("policies/default/trial", {"arrivals": arrivals, "document": strict})
    assert again == tried
    assert (await desk.got("policies/default"))["version"] == 1

    # Tenants of other policies keep theirs.
    await desk.made("policies", {"name": "other", "document": {}})
    blue = await desk.made("tenants", {"name": "blue", "policy": "other"})
    theirs = [arrival | {"tenant": blue["id"]} for arrival in arrivals]
    tried = await desk.made("policies/default/trial", {"arrivals": theirs, "document": strict})
    assert tried["outcome"]["total"]["num_admitted"] == 50

    # Keys are narrowed as they are.
    narrowing = {"limits": {"requests_per_minute": 5}}
    key = await desk.made("keys", {"tenant_id": blue["id"], "name": "narrow", "narrowing": narrowing})
    narrow = [arrival | {"key": key["id"]} for arrival in theirs]
    tried = await desk.made("policies/default/trial", {"arrivals": narrow, "document": strict})
    assert tried["outcome"]["total"]["refused"] == {"requests": 45}


async def test_a_policy_is_tried_on_what_the_ledger_recorded(desk):
    for text in ("a", "b", "c"):
        await answered(desk, messages=[{"role": "user", "content": text}])
    await desk.front.settled(3)
    row = desk.front.rows()[0]
    since = row["created_at"] - 10
    recorded = {"since": since, "until": since + 100}
    more = {"num_prompt_tokens": 5, "num_completion_tokens": 5}  # a correction is no request
    await desk.made("ledger/corrections", {"request_id": row["request_id"], "reason": "counted short", **more})
    document = {"limits": {"requests_per_minute": 2}}
    tried = await desk.made("policies/default/trial", {"recorded": recorded, "document": document})
    total = tried["outcome"]["total"]
    assert (total["num_requests"], total["num_admitted"], total["refused"]) == (3, 2, {"requests": 1})
    empty = await desk("POST", "policies/default/trial", {"recorded": recorded | {"until": since + 1}})
    assert (empty.status, empty.fields()) == (400, ["recorded"])


async def test_a_trial_that_cannot_be_run_names_what_is_wrong(desk):
    arrival = {"at_s": 0, "tenant": "a", "model": "demo", "num_prompt_tokens": 1, "num_completion_tokens": 1}
    for body, fields in (
        ({}, ["arrivals", "recorded"]),
        ({"arrivals": [arrival], "recorded": {"since": 0, "until": 1}}, ["arrivals", "recorded"]),
        ({"arrivals": []}, ["arrivals"]),
        ({"arrivals": [arrival | {"at_s": -1}]}, ["arrivals[0].at_s"]),
        ({"arrivals": [arrival | {"num_prompt_tokens": 10**9}]}, ["arrivals[0].num_prompt_tokens"]),
        ({"arrivals": [arrival | {"when": 1}]}, ["arrivals[0].when"]),
        ({"arrivals": [arrival] * 20_001}, ["arrivals"]),
        ({"arrivals": [arrival], "version": 7}, ["version"]),
        ({"arrivals": [arrival], "version": 1, "document": {}}, ["version"]),
        ({"arrivals": [arrival], "document": {"weight": 0}}, ["document.weight"]),
        ({"arrivals": [arrival], "document": {"sla_class": "gold"}}, ["document.sla_class"]),
        ({"arrivals": [arrival], "workers": {}}, ["workers"]),
        ({"recorded": {"since": 5}}, ["recorded.until"]),
    ):
        reply = await desk("POST", "policies/default/trial", body)
        assert (reply.status, reply.fields()) == (400, fields), body
    assert (await desk("POST", "policies/none/trial", {"arrivals": [arrival]})).status == 404


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("LIMIT_S", 0.01, "More than 0.01 s"),  # its process has not even begun by then
        ("COMMAND", (*trials.COMMAND[:-2], "-c", NO_STEPS), "More than 0 steps"),
    ],
)
async def test_a_trial_that_takes_too_long_is_given_up(desk, monkeypatch, name, value, says):
    monkeypatch.setattr(trials, name, value)
    arrival = {"at_s": 0, "tenant": "a", "model": "demo", "num_prompt_tokens": 1, "num_completion_tokens": 100}
    reply = await desk("POST", "policies/default/trial", {"arrivals": [arrival]})
    assert (reply.status, reply.fields()) == (400, ["arrivals"])
    assert says in reply.body["detail"]
    assert not desk.front.gw.trials.is_busy


async def test_a_trial_ends_when_nobody_waits_for_it(desk):
    arrival = {"tenant": "a", "model": "demo", "num_prompt_tokens": 1, "num_completion_tokens": 200}
    body = {"arrivals": [arrival | {"at_s": 0.01 * number} for number in range(20_000)]}
    asked = asyncio.create_task(desk("POST", "policies/default/trial", body))
    turn = desk.front.gw.trials
    await until(lambda: turn.is_busy)
    asked.cancel()
    await until(lambda: not turn.is_busy)


async def test_workers_that_have_told_what_steps_cost_are_tried_at_that_speed(desk):
    weights = (0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    stats = wire.Stats(0, 0, 64, 0, 0, 64, 0, 0, 0, 0, 0, 0.0, cost_weights=weights)
    desk.front.peer.send(stats)
    (worker,) = desk.front.gw.dispatch.workers()
    await until(lambda: worker.stats is not None and worker.stats.cost_weights == weights)
    arrival = {"at_s": 0, "tenant": "a", "model": "demo", "num_prompt_tokens": 1, "num_completion_tokens": 4}
    tried = await desk.made("policies/default/trial", {"arrivals": [arrival]})
    assert tried["workers"]["demo"]["weights"] == list(weights)
    assert tried["outcome"]["duration_s"] == pytest.approx(2.0)
