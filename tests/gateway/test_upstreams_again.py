"""A request that is sent to an upstream again, beside all the others that have to do with it."""

from __future__ import annotations

import asyncio

from aiohttp import web

from tests.builders import until
from tests.gateway.conftest import OpenFront
from tests.gateway.elsewhere import Heard, elsewhere, fails, says
from tests.gateway.test_upstreams_trouble import streamed


async def test_one_that_comes_back_is_next_and_never_one_too_many(open_front: OpenFront):
    all_wait, gap, num_there = asyncio.Event(), asyncio.Event(), []
    fail, answer = fails(500), says("there")

    async def fails_later(heard: Heard) -> web.StreamResponse:
        await all_wait.wait()
        return await fail(heard)

    async def after_the_gap(heard: Heard) -> web.StreamResponse:
        num_there.append(front.gw.upstreams.view("far-1").num_open)
        await gap.wait()
        return await answer(heard)

    async with elsewhere(after_the_gap) as far:
        far.scripts = [fails_later]
        async with open_front(upstreams=(far.upstream(max_concurrent=1, max_retries=1),)) as front:
            asking = []
            for number in range(3):
                messages = [{"role": "user", "content": f"{number}"}]
                asking.append(asyncio.create_task(streamed(front, messages=messages)))
                await until(lambda: len(list(front.gw.upstreams.flights())) == len(asking))
            all_wait.set()
            await until(lambda: front.gw.upstreams.view("far-1").num_retries)
            await until(lambda: len(far.heard) == 2)
            gap.set()
            assert await asyncio.gather(*asking) == [("there", None)] * 3
            assert [body["messages"][0]["content"] for body in far.bodies] == ["0", "1", "0", "2"]
            assert num_there == [1, 1, 1]
