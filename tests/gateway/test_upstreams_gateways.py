"""An upstream that several gateways ask."""

from __future__ import annotations

import asyncio

from tests.builders import until
from tests.gateway.conftest import OpenFront
from tests.gateway.elsewhere import elsewhere, says
from tests.gateway.test_upstreams_trouble import streamed


async def test_what_it_may_be_sent_is_divided_among_them_and_none_is_left_without(open_front: OpenFront):
    gap = asyncio.Event()
    async with (
        elsewhere(says("one ", "two", gap=gap)) as far,
        open_front(upstreams=(far.upstream(max_concurrent=5),)) as front,
    ):
        pool = front.gw.upstreams.of("far")
        assert pool is not None
        front.gw.gateways.num_gateways = 2
        calls = [asyncio.create_task(streamed(front)) for _ in range(3)]
        await until(lambda: pool.num_open + pool.num_waiting == 3)
        assert (pool.num_open, pool.num_waiting) == (2, 1)
        front.gw.gateways.num_gateways = 9
        assert [server.max_open for server in pool.servers] == [1]
        gap.set()
        await asyncio.gather(*calls)
