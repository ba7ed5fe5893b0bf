"""Workers that leave while they write: they let go of their answers, and others go on with them."""

from __future__ import annotations

import asyncio
import random

import pytest

from policies import settings, wire
from tests import builders
from tests.builders import a_submit, answer, dispatching, send, tokens, until
from tests.gateway.played import SCRIPT, held, peers


async def test_a_worker_that_rests_lets_go_of_what_it_has_when_another_has_room(tmp_path):
    async with peers(tmp_path, 2) as (dispatch, one, other):
        flight = send(dispatch, a_submit(max_tokens=5, num_sequences=2))
        worker = flight.worker
        had, next_one = (one, other) if worker is dispatch.workers()[0] else (other, one)
        submit = await had.submitted()
        had.say(submit, [10])
        had.say(submit, [20])
        had.say(submit, [30], index=1)
        await until(lambda: flight.num_tokens == 3)
        dispatch.rest(worker.name, True)
        assert (await had.cancelled()).index is None
        assert held(dispatch) == 4, "there is a place for it where it goes"
        had.say(submit, [40])  # on its way before the worker was told
        had.say(submit, [], "cancelled", engine_s=1.0)
        had.say(submit, [50], "cancelled", index=1, engine_s=2.0)
        again = await next_one.submitted()
        assert again.emitted_token_ids == {0: [10, 20, 40], 1: [30, 50]}
        next_one.say(again, [60, 61], "length", engine_s=4.0)
        next_one.say(again, [70], "stop", index=1, engine_s=8.0)
        deltas = await answer(flight)
        assert [tokens(deltas, index) for index in range(2)] == [[10, 20, 40, 60, 61], [30, 50, 70]]
        assert [delta.finish.reason for delta in deltas if delta.finish] == ["length", "stop"]
        assert flight.spent.engine_s == 15.0
        assert held(dispatch) == 0
        assert flight.suspicion.num_losses == 0


async def test_a_worker_that_rests_finishes_what_nobody_else_has_room_for(tmp_path):
    async with peers(tmp_path) as (dispatch, peer):
        flight = send(dispatch, a_submit(max_tokens=3))
        submit = await peer.submitted()
        dispatch.rest(flight.worker.name, True)
        peer.say(submit, [10, 11, 12], "length")
        assert tokens(await answer(flight)) == [10, 11, 12]
        assert peer.is_quiet()


async def test_a_worker_that_says_that_it_drains_lets_go_of_what_it_has(tmp_path):
    async with peers(tmp_path, 2) as (dispatch, one, other):
        flight = send(dispatch, a_submit(max_tokens=3))
        had, next_one = (one, other) if flight.worker is dispatch.workers()[0] else (other, one)
        submit = await had.submitted()
        had.say(submit, [10])
        had.report(draining=True)
        await had.cancelled()
        had.say(submit, [], "cancelled")
        again = await next_one.submitted()
        next_one.say(again, [11, 12], "length")
        assert tokens(await answer(flight)) == [10, 11, 12]


async def test_what_a_draining_worker_refuses_another_one_takes(tmp_path):
    async with peers(tmp_path) as (dispatch, peer):
        reading = asyncio.create_task(answer(flight := send(dispatch, a_submit(max_tokens=1))))
        submit = await peer.submitted()
        peer.send(wire.Failed(submit.request_id, "draining", "the worker takes no new requests"))
        await until(lambda: dispatch.num_waiting() == 1)
        peer.hang_up()
        again = await peer.submitted()
        peer.say(again, [10], "length")
        assert tokens(await reading) == [10]
        assert flight.suspicion.num_losses == 0


async def test_a_worker_that_dies_while_it_lets_go_has_let_go(tmp_path):
    async with peers(tmp_path, 2) as (dispatch, one, other):
        flight = send(dispatch, a_submit(max_tokens=3))
        had, next_one = (one, other) if flight.worker is dispatch.workers()[0] else (other, one)
        had.say(await had.submitted(), [10])
        await until(lambda: flight.num_tokens == 1)
        dispatch.rest(flight.worker.name, True)
        await had.cancelled()
        had.hang_up()
        again = await next_one.submitted()
        assert again.emitted_token_ids == {0: [10]}
        next_one.say(again, [11, 12], "length")
        assert tokens(await answer(flight)) == [10, 11, 12]
        assert held(dispatch) == 0


async def test_a_reader_that_leaves_while_its_answer_moves_ends_it(tmp_path):
    async with peers(tmp_path, 2) as (dispatch, one, other):
        flight = send(dispatch, a_submit(max_tokens=3))
        had, next_one = (one, other) if flight.worker is dispatch.workers()[0] else (other, one)
        submit = await had.submitted()
        dispatch.rest(flight.worker.name, True)
        await had.cancelled()
        flight.close()
        await had.cancelled()
        had.say(submit, [], "cancelled")
        await until(lambda: flight.is_over)
        assert held(dispatch) == 0
        assert next_one.is_quiet()


async def test_who_comes_is_promised_no_more_than_is_left_behind_those_that_go_on_first(tmp_path, clock):
    async with peers(tmp_path, 2, clock, max_sequences=1) as (dispatch, *played):
        weights = (0.1, 0.01, 0.01, 0.0, 0.0, 0.0, 0.0)
        for peer in played:
            peer.send(wire.Stats(0, 0, 64, 0, 0, 64, 0, 0, 0, 0, 0, 0.0, cost_weights=weights))
        await until(lambda: all(worker.stats for worker in dispatch.workers()))
        for _ in range(4):
            send(dispatch, a_submit(max_tokens=28))
        before = {view.sla_class: view.predicted_ttft_ms for view in dispatch.queues()}
        played[0].hang_up()  # and as the clock stands still it does not come back
        await until(lambda: dispatch.num_waiting() == 2)
        after = {view.sla_class: view.predicted_ttft_ms for view in dispatch.queues()}
        # The work of each is 4 prompt tokens and 28 steps of 0.11 s: 3.12 s; that of whoever comes 0.12 s.
        for sla_class, wait_s in (("interactive", 0.0), ("standard", 2 * 3.12 + 0.12)):
            assert after[sla_class] - before[sla_class] == pytest.approx(1e3 * wait_s), sla_class


@pytest.mark.parametrize("seed", range(3))
async def test_after_any_mix_of_losses_rests_and_leaving_every_answer_is_whole_and_nothing_is_held(tmp_path, seed):
    """A seeded walk over two workers that are shot, put to rest and woken."""
    chance = random.Random(seed)
    command = builders.scripted("--max-sequences", 4, "--stats-s", 0.02, "--step-s", 0.001)
    limits = settings.Workers(restart_backoff_s=0.01, max_restart_backoff_s=0.02, max_failovers=1000)
    num_shots = 0
    async with dispatching(replicas=2, command=command, workers=limits) as dispatch:
        whole = []

        async def one() -> None:
            num_sequences, num_tokens = chance.randint(1, 3), chance.randint(1, 60)
            async with send(dispatch, a_submit(max_tokens=num_tokens, num_sequences=num_sequences)) as flight:
                deltas = []
                num_open = num_sequences
                while num_open and chance.random() > 0.01:
                    deltas += (arrived := await flight.deltas())
                    num_open -= sum(delta.finish is not None for delta in arrived)
                if not num_open:
                    expected = (SCRIPT * num_tokens)[:num_tokens]
                    assert [tokens(deltas, index) for index in range(num_sequences)] == [expected] * num_sequences
                    whole.append(flight)

        async def disturb() -> None:
            nonlocal num_shots
            while True:
                await asyncio.sleep(0.05)
                worker = chance.choice(dispatch.workers())
                match chance.randrange(4):
                    # Where a start takes long, workers that are shot for ever would come to nothing.
                    case 0 if num_shots < 10 and worker.facts is not None and worker._process is not None:
                        num_shots += 1
                        worker._process.kill()
                    case 1:
                        dispatch.rest(worker.name, True)
                    case _:
                        dispatch.rest(worker.name, False)

        disturbing = asyncio.create_task(disturb())
        async with asyncio.timeout(builders.PATIENCE_S), asyncio.TaskGroup() as tasks:
            for _ in range(150):
                tasks.create_task(one())
                await asyncio.sleep(0.002)
            for worker in dispatch.workers():
                dispatch.rest(worker.name, False)
        disturbing.cancel()
        await until(lambda: all(worker.facts for worker in dispatch.workers()))
        await until(lambda: held(dispatch) == 0)  # who left a moment ago is let go when its worker says so
        assert len(whole) > 50, f"seed {seed}"
        assert dispatch.num_waiting() == 0
