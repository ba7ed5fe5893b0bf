"""Requests to workers and answers back, against a scripted worker: another process on the real wire."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from gateway import errors
from policies import wire
from tests import builders
from tests.builders import answer, dispatching, quiet, tokens
from tests.gateway.played import peers


async def test_an_answer_arrives_whole_and_in_order(start_scripted_worker):
    async with dispatching(await start_scripted_worker("--token-ids", "5,6,7")) as dispatch:
        deltas = await answer(builders.send(dispatch, builders.a_submit(max_tokens=7)))
    assert tokens(deltas) == [5, 6, 7, 5, 6, 7, 5]
    assert deltas[-1].finish is not None
    assert deltas[-1].finish.reason == "length"


async def test_a_slow_reader_finds_everything_in_one_piece(start_scripted_worker):
    async with dispatching(await start_scripted_worker()) as dispatch:
        slow = builders.send(dispatch, builders.a_submit(max_tokens=50))
        async with slow:
            while not slow.finished:
                await answer(builders.send(dispatch, builders.a_submit(max_tokens=5)))
            assert len(tokens(await slow.deltas())) == 50


async def test_every_sequence_of_a_request_gets_its_own_answer(start_scripted_worker):
    async with dispatching(await start_scripted_worker()) as dispatch:
        deltas = await answer(builders.send(dispatch, builders.a_submit(max_tokens=6, num_sequences=3)))
    assert {index: len(tokens(deltas, index)) for index in range(3)} == {0: 6, 1: 6, 2: 6}


async def test_a_reader_that_leaves_takes_its_sequences_along(start_scripted_worker):
    async with dispatching(await start_scripted_worker("--step-s", 0.001, "--stats-s", 0.01)) as dispatch:
        async with builders.send(dispatch, builders.a_submit(max_tokens=100_000)) as flight:
            await flight.deltas()
        await quiet(dispatch)


async def test_one_sequence_is_cancelled_and_its_sisters_go_on(tmp_path):
    async with peers(tmp_path) as (dispatch, peer):
        flight = builders.send(dispatch, builders.a_submit(max_tokens=2, num_sequences=2))
        submit = await peer.submitted()
        peer.say(submit, [10])
        await flight.deltas()
        flight.cancel(submit.request_id, 0)
        assert await peer.cancelled() == wire.Cancel(submit.request_id, 0)
        peer.say(submit, [], "cancelled")
        peer.say(submit, [20, 21], "length", index=1)
        deltas = await answer(flight)
    assert tokens(deltas, 1) == [20, 21]
    ends = {delta.index: delta.finish.reason for delta in deltas if delta.finish}
    assert ends == {0: "cancelled", 1: "length"}


async def test_a_model_of_no_name_is_not_found(start_scripted_worker):
    async with dispatching(await start_scripted_worker()) as dispatch:
        for ask in (dispatch.ready, dispatch.text, lambda name: builders.send(dispatch, builders.a_submit(), name)):
            with pytest.raises(errors.ModelNotFound):
                ask("gpt-6")


async def test_a_worker_gets_what_fills_its_batch_and_the_rest_waits_in_order(start_scripted_worker):
    async with dispatching(await start_scripted_worker("--max-sequences", 2, "--step-s", 0.001)) as dispatch:
        flights = [builders.send(dispatch, builders.a_submit(max_tokens=5)) for _ in range(20)]
        assert [flight.sent_at is not None for flight in flights] == [True] * 3 + [False] * 17
        assert dispatch.num_waiting() == 17
        for flight in flights:
            assert len(tokens(await answer(flight))) == 5
    sent_at = [flight.sent_at for flight in flights]
    assert sent_at == sorted(sent_at)


async def test_the_worker_with_the_least_to_do_is_chosen(start_scripted_worker):
    addresses = [await start_scripted_worker("--fault", "mute") for _ in range(3)]
    async with dispatching(*addresses) as dispatch:
        wide = builders.send(dispatch, builders.a_submit(num_sequences=4))
        flights = [builders.send(dispatch, builders.a_submit()) for _ in range(8)]
        held = dict.fromkeys(dispatch.workers(), 0)
        for flight in flights:
            held[flight.worker] += 1
        assert held.pop(wide.worker) == 0
        assert list(held.values()) == [4, 4]


async def test_a_request_wider_than_any_batch_gets_a_worker_to_itself(start_scripted_worker):
    async with dispatching(await start_scripted_worker("--max-sequences", 2)) as dispatch:
        first = builders.send(dispatch, builders.a_submit(max_tokens=5))
        wide = builders.send(dispatch, builders.a_submit(max_tokens=5, num_sequences=9))
        assert wide.sent_at is None
        await answer(first)
        assert len(await answer(wide)) >= 9


async def test_a_line_that_is_full_refuses(start_scripted_worker):
    address = await start_scripted_worker("--max-sequences", 1, "--fault", "mute")
    async with dispatching(address, classes=builders.classes(max_waiting=2)) as dispatch:
        for _ in range(4):
            builders.send(dispatch, builders.a_submit())
        with pytest.raises(errors.QueueFull) as refused:
            builders.send(dispatch, builders.a_submit())
        assert refused.value.status == 503


async def test_who_leaves_the_line_makes_room_in_it(start_scripted_worker):
    address = await start_scripted_worker("--max-sequences", 1, "--fault", "mute")
    async with dispatching(address, classes=builders.classes(max_waiting=1)) as dispatch:
        for _ in range(2):
            builders.send(dispatch, builders.a_submit())
        async with builders.send(dispatch, builders.a_submit()):
            assert dispatch.num_waiting() == 1
        assert dispatch.num_waiting() == 0


async def test_a_request_that_waited_its_time_is_refused_and_later_ones_wait_on(start_scripted_worker, clock):
    address = await start_scripted_worker("--max-sequences", 1, "--fault", "mute")
    async with dispatching(address, classes=builders.classes(max_wait_s=60), clock=clock) as dispatch:
        for _ in range(2):
            builders.send(dispatch, builders.a_submit())
        early = builders.send(dispatch, builders.a_submit())
        clock.advance(10)
        late = builders.send(dispatch, builders.a_submit())
        clock.advance(49)
        assert not early.finished
        clock.advance(1)
        with pytest.raises(errors.QueueTimeout):
            await early.deltas()
        assert not late.finished
        clock.advance(10)
        with pytest.raises(errors.QueueTimeout):
            await late.deltas()


async def test_a_refusal_by_the_worker_reaches_the_reader_and_frees_its_place(start_scripted_worker):
    async with dispatching(await start_scripted_worker("--max-sequences", 1, "--fault", "refuse")) as dispatch:
        for _ in range(5):
            with pytest.raises(errors.ServiceUnavailable):
                await answer(builders.send(dispatch, builders.a_submit(num_sequences=2)))


async def test_when_draining_new_requests_are_refused_and_running_ones_finish(start_scripted_worker):
    async with dispatching(await start_scripted_worker("--step-s", 0.001)) as dispatch:
        running = builders.send(dispatch, builders.a_submit(max_tokens=20))
        dispatch.draining = True
        with pytest.raises(errors.Draining):
            builders.send(dispatch, builders.a_submit())
        assert len(tokens(await answer(running))) == 20


async def test_a_cut_ends_every_flight_at_once(start_scripted_worker):
    address = await start_scripted_worker("--max-sequences", 1, "--fault", "mute")
    async with dispatching(address) as dispatch:
        flights = [builders.send(dispatch, builders.a_submit()) for _ in range(4)]
        dispatch.cut()
        for flight in flights:
            with pytest.raises(errors.Draining):
                await flight.deltas()
        assert dispatch.num_waiting() == 0


@pytest.mark.parametrize("seed", range(3))
async def test_after_any_mix_of_finishing_leaving_and_cancelling_nothing_is_held(start_scripted_worker, seed):
    """A seeded walk: no place in a worker and no place in line is lost."""
    chance = random.Random(seed)
    workers = [await start_scripted_worker("--max-sequences", 4, "--stats-s", 0.01) for _ in range(2)]
    async with dispatching(*workers, classes=builders.classes(max_waiting=20)) as dispatch:

        async def one() -> None:
            request = builders.a_submit(max_tokens=chance.randint(1, 40), num_sequences=chance.randint(1, 6))
            try:
                flight = builders.send(dispatch, request)
            except errors.QueueFull:
                return
            async with flight:
                num_open = flight.num_sequences
                while num_open and chance.random() > 0.2:
                    num_open -= sum(delta.finish is not None for delta in await flight.deltas())
                    if chance.random() < 0.2:
                        flight.cancel(flight.request.request_id, chance.randrange(flight.num_sequences))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(500):
                task = tasks.create_task(one())
                if chance.random() < 0.1:
                    await asyncio.sleep(0)
                    task.cancel()
                if chance.random() < 0.05:
                    await asyncio.wait([task])
        await quiet(dispatch)
        assert dispatch.num_waiting() == 0
        full = [builders.send(dispatch, builders.a_submit(max_tokens=100_000)) for _ in range(11)]
        assert [flight.sent_at is not None for flight in full] == [True] * 10 + [False], f"seed {seed}"


async def test_nothing_arrives_after_a_cut(start_scripted_worker):
    async with dispatching(await start_scripted_worker("--step-s", 0.001, "--stats-s", 0.01)) as dispatch:
        flight = builders.send(dispatch, builders.a_submit(max_tokens=100_000))
        await flight.deltas()
        dispatch.cut()
        await quiet(dispatch)  # the worker has answered to the cancellation
        rest = []
        with contextlib.suppress(errors.Draining):
            while True:
                rest += await flight.deltas()
        assert all(delta.finish is None for delta in rest)
