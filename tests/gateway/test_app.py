"""The parts together: what a request leaves behind, and how the house is closed."""

from __future__ import annotations

import asyncio

import pytest

from gateway import ending
from policies import settings
from tests.builders import until


async def test_an_answer_comes_from_the_real_worker_and_is_in_the_ledger(house):
    num_before = len(await house.ledger_rows())
    async with house.client() as client:
        answer = await client.chat.completions.create(
            model=house.model, messages=[{"role": "user", "content": "Hello"}], max_tokens=8, temperature=0
        )
    assert answer.choices[0].message.content
    (row,) = (await house.ledger_rows())[num_before:]
    assert (row.status, row.num_prompt_tokens) == (200, answer.usage.prompt_tokens)
    assert row.num_completion_tokens == answer.usage.completion_tokens


async def test_a_client_that_hangs_up_leaves_nothing_behind(house):
    num_before = len(await house.ledger_rows())
    async with house.stream("Tell me a long story.", max_tokens=400, ignore_eos=True) as answer:
        await answer.take(3)
    await house.quiet()
    assert await house.num_used_blocks() == await house.num_open_requests() == 0
    (row,) = (await house.ledger_rows())[num_before:]
    assert (row.status, row.finish_reason) == (499, "cancelled")
    assert 1 <= row.num_completion_tokens < 400


async def test_a_stop_lets_running_streams_finish_and_refuses_new_requests(start_house):
    house = start_house("--step-s", 0.02)
    async with house.http() as session, house.stream("Count", max_tokens=30) as answer:
        await answer.take(2)
        stop = Stopped()
        draining = asyncio.ensure_future(house.inside(ending.drain(house.gw, house._doors, stop)))
        await until(lambda: house.gw.dispatch.draining)
        body = {"model": house.model, "prompt": "Late"}
        async with session.post("/v1/completions", json=body) as late, session.get("/readyz") as readiness:
            assert (late.status, (await late.json())["error"]["code"]) == (503, "draining")
            assert late.headers["connection"] == "close"
            assert readiness.status == 503
        assert len(await answer.text()) > 20
        await draining
    (row,) = await house.ledger_rows(status=200)
    assert row.num_completion_tokens == 30


@pytest.mark.parametrize("hurried", [True, False])
async def test_streams_that_do_not_finish_in_time_are_cut_and_told_so(start_house, hurried):
    house = start_house("--step-s", 0.02, server=settings.Server(drain_s=30 if hurried else 0.05))
    async with house.stream("Count", max_tokens=4000) as answer:
        await answer.take(2)
        stop = Stopped()
        if hurried:
            stop.urgent.set()
        await house.inside(ending.drain(house.gw, house._doors, stop))
        events = [event async for event in answer.events()]
    assert events[-1]["error"]["code"] == "draining"
    (row,) = await house.ledger_rows()
    assert (row.status, row.finish_reason) == (503, "error")
    assert 1 <= row.num_completion_tokens < 4000


async def test_the_whole_way_with_postgresql(start_house, postgres, tmp_path):
    house = start_house("--num-tokens", 5, store=settings.Store(data_dir=str(tmp_path / "data"), url=postgres))
    async with house.client() as client:
        for _ in range(3):
            await client.completions.create(model=house.model, prompt="Hello", max_tokens=9)
    rows = await house.ledger_rows()
    assert [(row.status, row.num_completion_tokens) for row in rows] == [(200, 5)] * 3


class Stopped:
    """A stop that was asked for without a signal."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.urgent = asyncio.Event()
