"""Two upstreams that are asked for one answer: which of them it is of, and what becomes of the other one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from tests.builders import until
from tests.gateway.conftest import Front, OpenFront
from tests.gateway.elsewhere import Elsewhere, fails, hangs, says, several
from tests.gateway.test_upstreams_trouble import streamed


@pytest.fixture
async def pair() -> AsyncIterator[Sequence[Elsewhere]]:
    async with several(2) as both:
        yield both


@pytest.fixture
async def front(open_front: OpenFront, pair: Sequence[Elsewhere]) -> AsyncIterator[Front]:
    """Where it is known how long the first one takes to begin, so that the second is asked when it takes longer."""
    first, second = pair
    async with open_front(upstreams=(first.upstream("a", hedge=True), second.upstream("b", priority=1))) as opened:
        for _ in range(20):
            await streamed(opened)
        yield opened


async def test_whoever_is_heard_is_the_one_that_an_operator_sees(front, pair):
    first, second = pair
    first.always, gap = hangs, asyncio.Event()
    second.always = says("one ", "two", gap=gap)
    reading = asyncio.create_task(streamed(front))
    await until(lambda: any(call.num_tokens for _, call in front.gw.upstreams.flights()))
    ((_, call),) = front.gw.upstreams.flights()
    assert call.upstream == "b"
    gap.set()
    assert await reading == ("one two", None)


async def test_one_that_failed_beside_the_other_keeps_no_place(front, pair):
    first, second = pair
    gap, answers = asyncio.Event(), says("one ", "two")

    async def takes_its_time(heard):
        await gap.wait()
        return await answers(heard)

    first.always, second.always = takes_its_time, fails(500)
    reading = asyncio.create_task(streamed(front))
    await until(lambda: front.gw.upstreams.view("b").num_failed)
    await until(lambda: not front.gw.upstreams.view("b").num_open)
    assert front.gw.upstreams.view("a").num_open == 1
    gap.set()
    assert await reading == ("one two", None)
    assert [row["upstream"] for row in await front.settled(21)][-1] == "a"
