"""Adapters in the gateway: loaded when the workers have read them, models of their own to clients, swapped in use."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from typing import Any

import pytest

from gateway import adapters
from gateway.prices import Prices
from policies import wire
from policies.policy import Policy, Price
from policies.pricelist import Listed, Origin, PriceList
from tests.builders import a_caller, until
from tests.gateway.desk import Desk, Reply

BILLIE = {"name": "billie", "model": "demo", "source": "/adapters/billie"}


@pytest.fixture
def desk(front) -> Desk:
    return Desk(front)


async def heard(desk: Desk, kind: type[Any]) -> Any:
    message = await desk.front.peer._next()
    assert isinstance(message, kind), message
    return message


async def loading(desk: Desk, body: dict[str, object] = BILLIE, digest: str = "d1") -> Reply:
    """As one worker answers that can use it."""
    asking = asyncio.create_task(desk("POST", "adapters", body))
    asked = await heard(desk, wire.LoadAdapter)
    assert (asked.source, asked.digest) == (body["source"], "")
    desk.front.peer.send(wire.AdapterLoaded(asked.adapter, digest, 16, 1000))
    reply = await asking
    again = await heard(desk, wire.LoadAdapter)  # as one that is served, by the digest of the files that were tried
    assert (again.adapter, again.digest) == (asked.adapter, digest)
    return reply


async def names(desk: Desk) -> list[str]:
    return [model.id async for model in desk.front.client.models.list()]


async def test_one_is_a_model_of_its_own_as_soon_as_the_workers_have_read_it(desk):
    reply = await loading(desk)
    assert reply.status == 201
    assert (reply.body["rank"], reply.body["num_bytes"], reply.body["digest"]) == (16, 1000, "d1")
    assert await names(desk) == ["demo", "billie"]
    assert await desk.got("adapters/billie") == reply.body
    assert (await desk.got("adapters?model=demo"))["data"] == [reply.body]

    task = desk.front.chat(model="billie")
    submit = await desk.front.peer.submitted()
    assert submit.adapter == reply.body["adapter_id"]
    desk.front.peer.say(submit, [5, 3], "stop")
    assert (await task).model == "billie"
    (row,) = await desk.front.settled(1)
    assert row["model"] == "billie"

    task = desk.front.chat()
    submit = await desk.front.peer.submitted()
    assert submit.adapter == ""
    desk.front.peer.say(submit, [5, 3], "stop")
    assert (await task).model == "demo"
    (entry,) = (await desk.got("audit_log?object_kind=adapter"))["data"]
    assert (entry["action"], entry["object_id"], entry["before"]) == ("adapter.loaded", "billie", None)


async def test_one_that_a_worker_refuses_is_refused_by_its_reason_and_the_base_goes_on(desk):
    asking = asyncio.create_task(desk("POST", "adapters", BILLIE))
    asked = await heard(desk, wire.LoadAdapter)
    desk.front.peer.send(wire.AdapterRefused(asked.adapter, "it is for another base"))
    reply = await asking
    assert (reply.status, reply.fields()) == (400, ["source"])
    assert "it is for another base" in reply.body["detail"]
    assert (await heard(desk, wire.UnloadAdapter)).adapter == asked.adapter
    assert await names(desk) == ["demo"]
    task = desk.front.chat()
    desk.front.peer.say(await desk.front.peer.submitted(), [5, 3], "stop")
    await task


@pytest.mark.parametrize(
    ("change", "field"),
    [({"model": "other"}, "model"), ({"name": "demo"}, "name"), ({"name": ""}, "name"), ({"source": 3}, "source")],
)
async def test_what_cannot_be_meant_is_refused_by_its_field(desk, change, field):
    reply = await desk("POST", "adapters", {**BILLIE, **change})
    assert (reply.status, reply.fields()) == (400, [field])
    assert desk.front.peer.is_quiet()


async def test_requests_under_way_keep_the_old_version_and_new_ones_get_the_new(desk):
    first = (await loading(desk)).body
    task = desk.front.chat(model="billie")
    submit = await desk.front.peer.submitted()
    second = (await loading(desk, {**BILLIE, "source": "/adapters/billie2"}, "d2")).body
    assert (second["version"], first["adapter_id"] != second["adapter_id"]) == (2, True)
    other = desk.front.chat(model="billie")
    later = await desk.front.peer.submitted()
    assert [submit.adapter, later.adapter] == [first["adapter_id"], second["adapter_id"]]
    tell(desk)
    desk.front.peer.say(later, [5, 3], "stop")
    new = await other
    assert desk.front.peer.is_quiet()  # the old one is in use
    desk.front.peer.say(submit, [5, 3], "stop")
    old = await task
    assert old.system_fingerprint != new.system_fingerprint
    tell(desk)
    assert (await heard(desk, wire.UnloadAdapter)).adapter == first["adapter_id"]


async def test_one_that_is_unloaded_is_served_no_more_but_to_those_who_have_begun(desk):
    adapter = (await loading(desk)).body
    task = desk.front.chat(model="billie")
    submit = await desk.front.peer.submitted()
    gone = await desk("DELETE", "adapters/billie")
    assert (gone.status, gone.body["unloaded_at"] is not None) == (200, True)
    assert await names(desk) == ["demo"]
    assert (await desk("DELETE", "adapters/billie")).status == 404
    status, body, _ = await desk.front.post("/v1/completions", {"model": "billie", "prompt": "a"}, authorization="x")
    assert status in (401, 404), body
    desk.front.peer.say(submit, [5, 3], "stop")
    await task
    tell(desk)
    assert (await heard(desk, wire.UnloadAdapter)).adapter == adapter["adapter_id"]


async def test_a_worker_that_comes_later_loads_all_before_it_is_sent_a_request(desk):
    adapter = (await loading(desk)).body
    desk.front.peer.hang_up()
    await desk.front.lost()
    await until(lambda: any(model.ready for model in desk.front.gw.dispatch.models()))
    task = desk.front.chat(model="billie")
    again = await heard(desk, wire.LoadAdapter)
    assert (again.adapter, again.source, again.digest) == (adapter["adapter_id"], "/adapters/billie", "d1")
    submit = await desk.front.peer.submitted()
    desk.front.peer.send(wire.Failed(submit.request_id, "adapter_unavailable", "its files are gone"))
    with pytest.raises(Exception, match="cannot answer at the moment") as caught:
        await task
    assert caught.value.status_code == 503


async def test_a_worker_that_could_not_read_one_reads_it_again_when_it_is_asked_for_a_while_later(desk, monkeypatch):
    adapter = (await loading(desk)).body
    desk.front.peer.hang_up()
    await desk.front.lost()
    await until(lambda: any(model.ready for model in desk.front.gw.dispatch.models()))
    await heard(desk, wire.LoadAdapter)
    desk.front.peer.send(wire.AdapterRefused(adapter["adapter_id"], "/adapters/billie has no adapter_config.json"))

    task = desk.front.chat()  # of which the worker speaks after that
    desk.front.peer.say(await desk.front.peer.submitted(), [5, 3], "stop")
    await task
    task = desk.front.chat(model="billie")
    submit = await desk.front.peer.submitted()  # not told again so soon
    desk.front.peer.send(wire.Failed(submit.request_id, "adapter_unavailable", "this worker has no such adapter"))
    with pytest.raises(Exception, match="cannot answer at the moment"):
        await task

    monkeypatch.setattr(adapters, "AGAIN_S", 0.0)
    for kind in (wire.LoadAdapter, None):
        task = desk.front.chat(model="billie")
        if kind is not None:
            again = await heard(desk, kind)
            assert (again.adapter, again.source, again.digest) == (adapter["adapter_id"], "/adapters/billie", "d1")
            desk.front.peer.send(wire.AdapterLoaded(again.adapter, "d1", 16, 1000))
        submit = await desk.front.peer.submitted()
        assert submit.adapter == adapter["adapter_id"]
        desk.front.peer.say(submit, [5, 3], "stop")
        assert (await task).model == "billie"


async def test_a_tenant_uses_those_that_its_policy_names(desk):
    await loading(desk)
    changed = await desk("PUT", "policies/default", {"document": {"models": ["demo"]}}, if_match="*")
    assert changed.status == 200, changed
    assert await names(desk) == ["demo"]
    with pytest.raises(Exception, match="does not exist") as caught:
        await desk.front.chat(model="billie")
    assert caught.value.status_code == 404


async def test_adapters_of_the_settings_are_served_from_the_start(open_front):
    async with open_front(adapters={"billie": "/adapters/billie"}) as front:
        asked = await heard(Desk(front), wire.LoadAdapter)
        assert (asked.source, asked.digest) == ("/adapters/billie", "")
        assert await names(Desk(front)) == ["demo", "billie"]


def test_an_adapter_has_its_own_price_or_that_of_its_model():
    caller = a_caller(Policy(prices={"demo": Price(prompt=Decimal(1))}))
    listed = PriceList([Listed(1, "own", "*", 50, Price(prompt=Decimal(2))), Listed(2, "*", "*", 50, Price())])

    class Board:
        prices = listed

    prices = Prices(Board(), lambda: 100.0, base_of={"billie": "demo", "own": "demo"}.get)
    found = [prices.find(caller, model, "standard") for model in ("demo", "billie", "own")]
    assert [priced.version for priced in found] == ["policy:default@1", "policy:default@1;model=demo", "list:1"]
    assert found[0].rates == found[1].rates
    assert Origin.of("policy:default@1;model=demo;discount=0.1") == Origin(None, "default", 1, Decimal("0.1"), "demo")


def tell(desk: Desk) -> None:
    """The worker's state, with which the gateway looks who still uses what."""
    desk.front.peer.send(wire.Stats(0, 1, 64, 1, 0, 63, 0, 0, 0, 0, 0, 0.0))
