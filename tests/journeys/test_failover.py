"""Real workers that are shot under their streams: each stream ends as it does undisturbed, and is owed once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest

from benchmarks import failover
from policies import settings
from tests.builders import until
from tests.failing_worker import DEADLY_PROMPT
from tests.house import running


@pytest.mark.parametrize("num_workers", [1, 2])
async def test_streams_whose_worker_is_shot_go_on(tmp_path, num_workers):
    with running(tmp_path, **failover.sections(num_workers)) as house:
        findings = await failover.measure(house, num_rounds=2, num_streams=8, num_tokens=300, seed=1)
        assert findings.is_good, findings.told()
        assert len(findings.lost) >= 4
        assert findings.num_delivered == findings.num_owed == 3 * 8 * 300
        await house.quiet()
        assert await house.num_used_blocks() == 0


async def test_a_worker_that_an_operator_drains_or_the_system_stops_lets_its_streams_go(tmp_path):
    with running(tmp_path, **failover.sections(2)) as house:
        dispatch = house.gw.dispatch
        # As long as its context allows, and with little in it that could be guessed, so that it is still under way when
        # all this has happened.
        wanted = {"max_tokens": 3900, "temperature": 1, "seed": 1, "ignore_eos": True}
        async with house.stream("Tell me a story.", **wanted) as answer:
            undisturbed = await answer.text()
        async with house.stream("Tell me a story.", **wanted) as answer:
            await answer.take(3)
            (worker,) = [worker for worker, flights in failover.held(house).items() if flights]
            await house.inside(rested(dispatch, worker))
            await until(lambda: not failover.held(house)[worker])
            (other,) = [worker for worker, flights in failover.held(house).items() if flights]
            await house.inside(rested(dispatch, worker, False))
            os.kill(other.facts.pid, signal.SIGTERM)  # it drains
            await until(lambda: failover.held(house)[worker])
            rest = await answer.text()
        assert undisturbed.endswith(rest)
        (before, after) = await house.ledger_rows()
        assert before.num_completion_tokens == after.num_completion_tokens
        assert after.status == 200


async def rested(dispatch, worker, is_resting=True):
    dispatch.rest(worker.name, is_resting)


async def test_a_prompt_that_ends_its_workers_ends_alone_and_its_neighbours_complete(tmp_path):
    sections = failover.sections(2)
    sections["workers"] = settings.Workers(restart_backoff_s=0.05, max_restart_backoff_s=0.1)
    command = (sys.executable, "-m", "tests.failing_worker")
    with running(tmp_path, command=command, **sections) as house:
        async with house.http() as http:

            async def completed(prompt):
                body = {"model": house.model, "prompt": prompt, "max_tokens": 150, "ignore_eos": True, "temperature": 0}
                async with http.post("/v1/completions", json=body) as response:
                    return response.status, response.headers, await response.json()

            neighbours = [asyncio.create_task(completed(f"{number}. Once upon a time")) for number in range(6)]
            await until(lambda: failover.have_come_to(house, 6, 2))
            status, headers, body = await completed(DEADLY_PROMPT)
            assert (status, body["error"]["code"], headers["x-should-retry"]) == (500, "ends_workers", "false")
            for status, _, body in await asyncio.gather(*neighbours):
                assert status == 200, body
                assert body["usage"]["completion_tokens"] == 150
        assert sum(worker.num_lives for worker in house.gw.dispatch.workers()) <= 2 + 4
        await until(lambda: all(worker.facts for worker in house.gw.dispatch.workers()))
        await house.quiet()
        assert await house.num_used_blocks() == 0
