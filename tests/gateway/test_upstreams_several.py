"""One request of several prompts, of which workers have some and an upstream others."""

from __future__ import annotations

import asyncio

import msgspec

from policies import settings
from tests.builders import until
from tests.gateway.conftest import OpenFront
from tests.gateway.elsewhere import elsewhere, says
from tests.gateway.peer import Peer
from tests.gateway.test_upstreams_and_workers import emptied, filled


async def test_where_the_last_one_is_refused_the_first_ones_wait_for_no_worker(open_front: OpenFront):
    classes = {
        name: msgspec.structs.replace(terms, ttft_ms=600_000.0, max_ttft_ms=0.0, max_waiting=1)
        for name, terms in settings.CLASSES.items()
    }
    gap = asyncio.Event()
    async with elsewhere(says("one ", "two", gap=gap)) as far:
        relief = far.upstream(model="demo", overflow=True, max_concurrent=1)
        async with open_front(peer=Peer(max_sequences=1), upstreams=(relief,), classes=classes) as front:
            first, held = await filled(front)
            # One waits for a worker, one is sent to the upstream, one waits there, and there is no room for another.
            body = {"model": "demo", "prompt": ["a", "b", "c", "d"], "max_tokens": 50}
            status, refused, _ = await front.post("/v1/completions", body)
            assert (status, refused["error"]["code"]) == (503, "server_is_overloaded")
            (pool,) = front.gw.upstreams.pools()
            await until(lambda: pool.num_open == pool.num_waiting == 0)
            assert front.gw.dispatch.num_waiting() == 0
            await emptied(front, first, held)
            assert front.peer.is_quiet()
