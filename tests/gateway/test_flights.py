"""A request of more prompts than are under way at a time: what was let in is answered to its end."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from gateway import flights
from policies import settings, wire
from tests.builders import until
from tests.gateway.conftest import Front, OpenFront
from tests.gateway.desk import Desk
from tests.gateway.elsewhere import elsewhere, says
from tests.gateway.peer import Peer
from tests.gateway.test_adapters import BILLIE, loading


@pytest.fixture(autouse=True)
def two_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flights, "MAX_AT_ONCE", 2)


def asked(front: Front, num_prompts: int, **others: object) -> asyncio.Task[Any]:
    body = {"model": "demo", "prompt": ["a", "b", "c", "d"][:num_prompts], "max_tokens": 9, **others}
    return asyncio.create_task(front.post("/v1/completions", body))


def tell(front: Front, submit: wire.Submit) -> None:
    for index in range(submit.num_sequences):
        front.peer.say(submit, [*front.ids("Hi"), 3], "stop", index=index)


async def assert_answered(asking: asyncio.Task[Any], num_prompts: int) -> None:
    status, body, _ = await asking
    assert status == 200, body
    assert [choice["text"].strip() for choice in body["choices"]] == ["Hi"] * num_prompts


async def test_its_later_prompts_are_computed_also_where_the_gateway_takes_nothing_new(front: Front):
    asking = asked(front, 4)
    begun = [await front.peer.submitted() for _ in range(2)]
    front.gw.dispatch.draining = True
    for _ in range(2):
        tell(front, begun.pop(0))
        begun.append(await front.peer.submitted())
    assert (await front.post("/v1/completions", {"model": "demo", "prompt": "e"}))[0] == 503
    for submit in begun:
        tell(front, submit)
    await assert_answered(asking, 4)


async def test_its_later_prompts_are_computed_also_where_the_line_takes_nobody(open_front: OpenFront):
    classes = {name: msgspec.structs.replace(terms, max_waiting=1) for name, terms in settings.CLASSES.items()}
    async with open_front(peer=Peer(max_sequences=1), classes=classes) as front:
        asking = asked(front, 3)
        first, second = [await front.peer.submitted() for _ in range(2)]
        wide = asked(front, 1, n=2)  # it waits for two places
        await until(lambda: front.gw.dispatch.num_waiting() == 1)
        tell(front, first)
        third = await front.peer.submitted()
        assert (await front.post("/v1/completions", {"model": "demo", "prompt": "e"}))[0] == 503
        tell(front, second)
        tell(front, third)
        tell(front, await front.peer.submitted())
        await assert_answered(wide, 2)
        await assert_answered(asking, 3)


async def test_all_of_it_is_answered_by_the_weights_that_it_began_with(front: Front):
    desk = Desk(front)
    adapter = (await loading(desk)).body
    asking = asked(front, 3, model="billie")
    begun = [await front.peer.submitted() for _ in range(2)]
    await loading(desk, {**BILLIE, "source": "/adapters/billie2"}, "d2")
    tell(front, begun.pop(0))
    begun.append(await front.peer.submitted())
    assert {submit.adapter for submit in begun} == {adapter["adapter_id"]}
    for submit in begun:
        tell(front, submit)
    await assert_answered(asking, 3)


async def test_an_upstream_is_asked_for_its_later_prompts_also_where_nothing_new_is_taken(open_front: OpenFront):
    gap = asyncio.Event()
    async with elsewhere(says("Hi", gap=gap)) as far, open_front(upstreams=(far.upstream(model="far"),)) as front:
        asking = asked(front, 4, model="far")
        (pool,) = front.gw.upstreams.pools()
        await until(lambda: pool.num_open == 2)
        front.gw.dispatch.draining = True
        gap.set()
        await assert_answered(asking, 4)
