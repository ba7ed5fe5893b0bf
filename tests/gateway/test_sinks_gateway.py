"""Sinks of a whole gateway: from an answered request to its receiver, and what the administration sees of it."""

from __future__ import annotations

import contextlib
import datetime
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
import sqlalchemy as sa

from gateway import store
from gateway.sinks import SinkInvalid
from policies import settings
from policies.sinks import Sink
from tests.builders import an_entry, until, when
from tests.gateway.conftest import Front
from tests.gateway.desk import Desk
from tests.gateway.receivers import KEY, SECRET, receiving
from tests.gateway.test_metrics import scraped, values

ENVIRON = {"LAGO_KEY": KEY, "HOOK_SECRET": SECRET}


@pytest.fixture
async def lago() -> AsyncIterator[Any]:
    async with receiving("lago") as receiver:
        yield receiver


@pytest.fixture
async def hook() -> AsyncIterator[Any]:
    async with receiving("webhook") as receiver:
        yield receiver


def sinks_of(lago: Any, hook: Any) -> dict[str, Sink]:
    meters = {"prompt": "in", "completion": "out"}
    return {
        "lago": Sink(kind="lago", url=lago.url, key_variable="LAGO_KEY", meters=meters),
        "hook": Sink(kind="webhook", url=f"{hook.url}?token=hidden", key_variable="HOOK_SECRET"),
    }


async def ask(front: Front) -> str:
    """The id of a request that was answered."""
    asking = front.chat()
    submit = await front.peer.submitted()
    front.peer.say(submit, [5, 6, 3], "stop")
    await asking
    return submit.request_id


async def settled(desk: Desk, name: str, state: str = "current", num_rows: int = 1) -> Any:
    """The sink's status, once it is so far."""
    return await when(
        lambda: desk.got(f"sinks/{name}"), lambda status: (status["state"], status["num_rows"]) == (state, num_rows)
    )


async def test_a_request_is_told_to_every_sink_and_a_restart_tells_nothing_twice(
    open_front, store_settings, lago, hook, caplog
):
    sections = {"store": store_settings, "environ": ENVIRON, "sinks": sinks_of(lago, hook)}
    with caplog.at_level(logging.INFO):
        async with open_front(**sections) as front:
            desk = Desk(front)
            request_ids = [await ask(front)]
            for name in ("lago", "hook"):
                await settled(desk, name)
            reply = await desk("GET", "sinks")
            assert [one["name"] for one in reply.body["data"]] == ["lago", "hook"]
            assert reply.body["data"][1]["receiver"] == hook.url.removesuffix("/events")
            assert not any(secret in str(reply.body) for secret in (KEY, SECRET, "hidden", "LAGO_KEY"))
        async with open_front(**sections) as front:
            request_ids.append(await ask(front))
            for name in ("lago", "hook"):
                status = await settled(Desk(front), name, num_rows=2)
                assert [one["position"] for one in status["positions"]] == [1, 1]
    assert hook.order == [f"{request_id}:row" for request_id in request_ids]
    assert set(lago.counted) == {
        f"{request_id}:{kind}" for request_id in request_ids for kind in ("prompt", "completion")
    }
    assert (lago.num_repeats, hook.num_repeats) == (0, 0)
    assert not any(secret in caplog.text for secret in (KEY, SECRET, "hidden"))


async def test_what_was_refused_is_listed_tried_again_or_given_up_and_the_audit_log_says_so(open_front, lago, hook):
    hook.customers = set()
    async with open_front(environ=ENVIRON, sinks=sinks_of(lago, hook)) as front:
        desk = Desk(front)
        first, second = await ask(front), await ask(front)
        await settled(desk, "hook", num_rows=2)
        page = await desk.got("sinks/hook/failures?limit=1")
        assert [(one["event_id"], one["is_due"]) for one in page["data"]] == [(f"{first}:row", False)]
        assert page["data"][0]["error"] == "status 400: who is that?"
        page = await desk.got(f"sinks/hook/failures?limit=1&after={page['next_cursor']}")
        assert [one["request_id"] for one in page["data"]] == [second]
        hook.customers = None
        assert await desk.made("sinks/hook/retry", {"event_ids": [f"{first}:row"]}) == {"num_events": 1}
        await until(lambda: hook.order)
        assert await desk.made("sinks/hook/discard", {}) in ({"num_events": 1}, {"num_events": 2})
        assert (await settled(desk, "hook", num_rows=2))["num_failures"] == 0
        assert hook.order == [f"{first}:row"]
        lines = (await desk.got("audit_log?limit=500"))["data"]
        assert {"sink.retried", "sink.discarded"} <= {line["action"] for line in lines}


async def test_asking_again_does_not_wait_for_the_receiver_s_hour(open_front, lago, hook):
    hook.script = [(429, {"retry-after": "3600"})]
    async with open_front(environ=ENVIRON, sinks=sinks_of(lago, hook)) as front:
        desk = Desk(front)
        request_id = await ask(front)
        status = await settled(desk, "hook", "waiting", num_rows=0)
        assert (status["last_error"], status["num_rows_behind"]) == ("status 429", 1)
        assert (await settled(desk, "lago"))["num_failures"] == 0  # one sink does not wait for another
        await until_measured(front, waiting={"hook": 1.0, "lago": 0.0})
        await desk.made("sinks/hook/retry", {})
        await settled(desk, "hook")
        assert hook.order == [f"{request_id}:row"]
        await until_measured(front, waiting={"hook": 0.0, "lago": 0.0})
        assert (await measured(front))["penstock_sink_events_total", "taken", "lago"] == 2


async def measured(front: Front) -> dict[tuple[str, ...], float]:
    return values((await scraped(front))[1])


async def until_measured(front: Front, waiting: dict[str, float]) -> None:
    """Of each sink what /metrics has to say in the end."""
    await when(
        lambda: measured(front),
        lambda told: {name: told["penstock_sink_waiting", name] for name in waiting} == waiting,
    )


async def test_tenants_come_by_the_customer_that_their_metadata_names(open_front, lago, hook):
    sink = Sink(
        kind="lago",
        url=lago.url,
        key_variable="LAGO_KEY",
        meters={"request": "r"},
        customer="metadata.subscription",
        since=datetime.date(2020, 1, 1),
    )
    async with open_front(environ=ENVIRON, sinks={"lago": sink}) as front:
        desk = Desk(front)
        await ask(front)
        status = await settled(desk, "lago")
        assert (status["num_rows_skipped"], status["num_events"]) == (1, 0)
        ((tenant,),) = ((await desk.got("tenants"))["data"],)
        assert [one["tenant_id"] for one in status["skipped"]] == [tenant["id"]]
        change = {"metadata": {"subscription": "sub_7"}}
        assert (await desk("PATCH", f"tenants/{tenant['id']}", change, if_match="*")).status == 200
        await ask(front)
        await settled(desk, "lago", num_rows=2)
        assert list(lago.counted.values()) == [("sub_7", "r", 1)]


async def test_questions_that_cannot_be_answered_are_refused_by_name(open_front, lago, hook):
    async with open_front(environ=ENVIRON, sinks=sinks_of(lago, hook)) as front:
        desk = Desk(front)
        assert (await desk("GET", "sinks/nobody")).status == 404
        assert (await desk("POST", "sinks/nobody/retry", {})).status == 404
        assert (await desk("POST", "sinks/hook/retry", {"event_ids": []})).fields() == ["event_ids"]
        assert (await desk("POST", "sinks/hook/retry", {"event_ids": ["a\0b"]})).fields() == ["event_ids[0]"]
        assert (await desk("POST", "sinks/hook/discard", {"all": True})).fields() == ["all"]
        assert (await desk("GET", "sinks/hook/failures?after=x")).fields() == ["after"]


async def test_a_gateway_whose_sink_has_no_key_does_not_start(open_front, lago, hook):
    with pytest.raises(SinkInvalid, match="LAGO_KEY, which the environment does not have"):
        async with open_front(sinks=sinks_of(lago, hook)):
            pass


async def test_two_gateways_over_one_postgresql_tell_each_row_once(open_front, postgres, tmp_path, lago, hook):
    """The one that delivers stops in the middle; the other goes on where it was."""
    sinks = sinks_of(lago, hook)
    rows = [an_entry(tenant_id="ten_x", settled_at=1_795_000_000 + number) for number in range(300)]
    hook.script = [500, "close after", 200, (503, {"retry-after": "1"})]
    async with contextlib.AsyncExitStack() as stack:
        first = contextlib.AsyncExitStack()
        one = await first.enter_async_context(
            open_front(store=settings.Store(data_dir=str(tmp_path / "a"), url=postgres), environ=ENVIRON, sinks=sinks)
        )
        tenant = (await Desk(one).got("tenants"))["data"][0]["id"]
        placed = []
        async with one.gw.store.engine.begin() as connection:
            await connection.execute(sa.insert(store.ledger_chains).values(id=77, opened_at=1, gateway="elsewhere"))
            for position, row in enumerate(rows, 1):
                values = {name: getattr(row, name) for name in row.__struct_fields__}
                placed.append(values | {"tenant_id": tenant, "chain": 77, "position": position})
            await connection.execute(sa.insert(store.ledger), placed)
        await until(lambda: len(hook.order) >= 20)
        await first.aclose()
        two = await stack.enter_async_context(
            open_front(store=settings.Store(data_dir=str(tmp_path / "b"), url=postgres), environ=ENVIRON, sinks=sinks)
        )
        for name in ("lago", "hook"):
            await settled(Desk(two), name, num_rows=300)
    assert hook.order == [f"{row.request_id}:row" for row in rows]
    assert len(lago.counted) == 600
