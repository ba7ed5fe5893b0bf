"""Workers that are lost in the middle of answers: another one goes on, and readers see but a pause."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from gateway import errors
from policies import settings, wire
from tests.builders import a_submit, answer, dispatching, send, tokens, until
from tests.gateway.played import FAST, SCRIPT, held, lost, peers


async def test_an_answer_goes_on_behind_the_tokens_that_came(tmp_path):
    async with peers(tmp_path) as (dispatch, peer):
        flight = send(dispatch, a_submit(max_tokens=6))
        reading = asyncio.create_task(answer(flight))
        first = await peer.submitted()
        assert first.emitted_token_ids == {}
        peer.say(first, [10])
        peer.say(first, [11, 12])
        await until(lambda: flight.num_tokens == 3)
        peer.hang_up()
        second = await peer.submitted()
        assert second.emitted_token_ids == {0: [10, 11, 12]}
        assert second.sampling == first.sampling
        assert second.request_id == first.request_id
        peer.say(second, [13])
        peer.say(second, [14, 15], "length")
        assert tokens(await reading) == [10, 11, 12, 13, 14, 15]
        assert flight.num_tokens == 6
        assert held(dispatch) == 0


async def test_a_worker_that_is_lost_before_the_first_token_is_asked_for_nothing_else_by_the_next(tmp_path):
    async with peers(tmp_path) as (dispatch, peer):
        reading = asyncio.create_task(answer(send(dispatch, a_submit(max_tokens=2, num_sequences=2))))
        await peer.submitted()
        peer.hang_up()
        again = await peer.submitted()
        assert again.emitted_token_ids == {0: [], 1: []}
        for index in range(2):
            peer.say(again, [20 + index, 3], "stop", index=index)
        deltas = await reading
        assert [tokens(deltas, index) for index in range(2)] == [[20, 3], [21, 3]]


async def test_the_next_worker_is_told_which_answers_were_cut(tmp_path):
    async with peers(tmp_path) as (dispatch, peer):
        reading = asyncio.create_task(answer(flight := send(dispatch, a_submit(max_tokens=3, num_sequences=3))))
        first = await peer.submitted()
        for index in range(3):
            token_ids = [3] if index == 2 else [10]
            peer.send(wire.StepOutput([wire.Delta(first.request_id, index, token_ids, is_cut=index > 0)]))
        await until(lambda: flight.num_tokens == 3)
        peer.hang_up()
        again = await peer.submitted()
        assert (again.emitted_token_ids, again.cut_indices) == ({0: [10], 1: [10]}, [1])
        for index in range(2):
            peer.say(again, [11, 12], "length", index=index)
        ends = {delta.index: delta.finish.reason for delta in await reading if delta.finish}
        assert ends == {0: "length", 1: "length", 2: "length"}, "the last by its end token, and cut"


async def test_of_several_answers_only_those_go_on_that_have_not_ended(tmp_path):
    async with peers(tmp_path) as (dispatch, peer):
        reading = asyncio.create_task(answer(flight := send(dispatch, a_submit(max_tokens=3, num_sequences=3))))
        first = await peer.submitted()
        peer.say(first, [10], index=0)
        peer.say(first, [20, 3], "stop", index=1)
        await until(lambda: flight.num_tokens == 3)
        peer.hang_up()
        again = await peer.submitted()
        assert again.emitted_token_ids == {0: [10], 2: []}
        assert again.num_sequences == 3, "by which their seeds are told apart"
        peer.say(again, [11, 12], "length", index=0)
        peer.say(again, [30, 3], "stop", index=2)
        deltas = await reading
        assert [tokens(deltas, index) for index in range(3)] == [[10, 11, 12], [20, 3], [30, 3]]
        assert held(dispatch) == 0


@pytest.mark.parametrize(
    ("said", "sampling", "reason"),
    [([10, 11, 12, 13], {}, "length"), ([10, 3], {}, "stop"), ([10, 40], {"stop_token_ids": (40,)}, "stop")],
)
async def test_an_answer_that_was_complete_needs_nobody(tmp_path, said, sampling, reason):
    async with peers(tmp_path) as (dispatch, peer):
        flight = send(dispatch, a_submit(max_tokens=4, **sampling))
        submit = await peer.submitted()
        peer.say(submit, said)
        await until(lambda: flight.num_tokens == len(said))
        peer.hang_up()
        deltas = await answer(flight)
        assert tokens(deltas) == said
        assert deltas[-1].finish.reason == reason
        assert flight.is_over
        await until(lambda: dispatch.workers()[0].facts)
        assert held(dispatch) == 0
        assert peer.is_quiet()


async def test_an_answer_survives_one_worker_after_the_other_up_to_a_bound(tmp_path):
    limits = settings.Workers(restart_backoff_s=0.01, max_restart_backoff_s=0.02, max_failovers=2)
    async with peers(tmp_path, workers=limits) as (dispatch, peer):
        flight = send(dispatch, a_submit(max_tokens=100))
        for number in range(3):
            submit = await peer.submitted()
            assert submit.emitted_token_ids.get(0, []) == list(range(10, 10 + number))
            peer.say(submit, [10 + number])
            await until(lambda: flight.num_tokens == number + 1)  # noqa: B023
            peer.hang_up()
            await lost(dispatch)
        assert tokens(await flight.deltas()) == [10, 11, 12]
        with pytest.raises(errors.WorkerLost):
            await flight.deltas()
        await until(lambda: dispatch.workers()[0].facts)
        assert held(dispatch) == 0
        assert peer.is_quiet()


async def test_without_failovers_a_lost_worker_fails_what_it_had(tmp_path):
    async with peers(tmp_path, workers=settings.Workers(max_failovers=0)) as (dispatch, peer):
        flight = send(dispatch, a_submit())
        await peer.submitted()
        peer.hang_up()
        with pytest.raises(errors.WorkerLost):
            await flight.deltas()


async def test_an_answer_that_nobody_goes_on_with_fails_after_its_time(tmp_path, clock):
    async with peers(tmp_path, clock=clock, workers=settings.Workers(failover_wait_s=7.0)) as (dispatch, peer):
        flight = send(dispatch, a_submit(max_tokens=10))
        peer.say(await peer.submitted(), [10])
        await until(lambda: flight.num_tokens == 1)
        await peer.close()
        await lost(dispatch)
        clock.advance(6.9)
        assert not flight.finished
        assert dispatch.num_waiting() == 1
        clock.advance(0.2)
        assert tokens(await flight.deltas()) == [10]
        with pytest.raises(errors.WorkerLost):
            await flight.deltas()
        assert flight.is_over
        assert dispatch.num_waiting() == 0


async def test_a_replacement_that_refuses_is_asked_again_when_it_has_reported_until_time_is_up(tmp_path, clock):
    limits = settings.Workers(restart_backoff_s=0.01, failover_wait_s=7.0)
    async with peers(tmp_path, clock=clock, workers=limits) as (dispatch, peer):
        flight = send(dispatch, a_submit(max_tokens=10))
        peer.say(await peer.submitted(), [10])
        await until(lambda: flight.num_tokens == 1)
        peer.hang_up()
        await lost(dispatch)
        await until(lambda: min(clock.waits()) < 1.0)
        clock.advance(0.01)
        for _ in range(3):
            again = await peer.submitted()
            assert again.emitted_token_ids == {0: [10]}
            peer.send(wire.Failed(again.request_id, "overloaded", "too much to do"))
            await until(lambda: dispatch.num_waiting() == 1)
            assert peer.is_quiet()
            peer.report()
        await peer.submitted()
        peer.send(wire.Failed(flight.request.request_id, "overloaded", "too much to do"))
        await until(lambda: dispatch.num_waiting() == 1)
        clock.advance(7.0)
        await flight.deltas()
        with pytest.raises(errors.WorkerLost):
            await flight.deltas()


@pytest.mark.parametrize("code", ["context_length_exceeded", "invalid_request"])
async def test_a_replacement_that_cannot_go_on_is_no_fault_of_the_request(tmp_path, code):
    async with peers(tmp_path) as (dispatch, peer):
        flight = send(dispatch, a_submit(max_tokens=10))
        await peer.submitted()
        peer.hang_up()
        again = await peer.submitted()
        peer.send(wire.Failed(again.request_id, code, "this is another model"))
        with pytest.raises(errors.WorkerLost):
            await flight.deltas()
        assert held(dispatch) == 0


async def test_another_worker_goes_on_at_once(tmp_path):
    async with peers(tmp_path, 2) as (dispatch, one, other):
        flight = send(dispatch, a_submit(max_tokens=3))
        worker = flight.worker
        had, next_one = (one, other) if worker is dispatch.workers()[0] else (other, one)
        peer_submit = await had.submitted()
        had.say(peer_submit, [10])
        await until(lambda: flight.num_tokens == 1)
        await had.close()
        again = await next_one.submitted()
        assert again.emitted_token_ids == {0: [10]}
        next_one.say(again, [11, 12], "length")
        assert tokens(await answer(flight)) == [10, 11, 12]


async def test_what_returns_goes_before_what_is_new_and_after_what_is_more_important(tmp_path):
    async with peers(tmp_path, max_sequences=1) as (dispatch, peer):
        first = send(dispatch, a_submit(max_tokens=9))
        await peer.submitted()
        waiting = [
            send(dispatch, a_submit()),
            send(dispatch, a_submit(), sla_class="batch"),
            send(dispatch, a_submit()),
        ]
        await peer.submitted()  # a worker is given one beyond its batch
        peer.hang_up()
        await lost(dispatch)
        urgent = send(dispatch, a_submit(), sla_class="interactive")
        order = [(await peer.submitted()).request_id for _ in range(2)]
        assert order == [urgent.request.request_id, first.request.request_id]
        assert [flight.worker for flight in waiting] == [None] * 3


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_reader_that_leaves_in_the_pause_leaves_nothing_behind(tmp_path, clock, has_begun):
    async with peers(tmp_path, clock=clock) as (dispatch, peer):
        flight = send(dispatch, a_submit(max_tokens=9))
        submit = await peer.submitted()
        if has_begun:
            peer.say(submit, [10])
            await until(lambda: flight.num_tokens == 1)
        peer.hang_up()
        await lost(dispatch)
        assert dispatch.num_waiting() == 1
        flight.close()
        assert flight.is_over
        assert dispatch.num_waiting() == 0
        await until(lambda: min(clock.waits()) < 1.0)
        clock.advance(1.0)
        await until(lambda: dispatch.workers()[0].facts)
        assert peer.is_quiet()
        assert held(dispatch) == 0


@pytest.mark.parametrize("is_lost_first", [False, True])
async def test_a_sequence_whose_stop_string_was_found_is_not_taken_up_again(tmp_path, is_lost_first):
    async with peers(tmp_path) as (dispatch, peer):
        flight = send(dispatch, a_submit(max_tokens=9, num_sequences=2))
        submit = await peer.submitted()
        peer.say(submit, [10])
        peer.say(submit, [20], index=1)
        await until(lambda: flight.num_tokens == 2)
        if not is_lost_first:
            flight.cancel(submit.request_id, 0)
        peer.hang_up()
        await lost(dispatch)
        if is_lost_first:
            flight.cancel(submit.request_id, 0)
        while not isinstance(again := await peer._next(), wire.Submit):
            pass
        assert again.emitted_token_ids == {1: [20]}
        peer.say(again, [21], "stop", index=1)
        deltas = await answer(flight)
        assert [tokens(deltas, index) for index in range(2)] == [[10], [20, 21]]
        assert [delta.finish.reason for delta in deltas if delta.finish] == ["cancelled", "stop"]


async def test_when_the_last_sequence_stops_in_the_pause_the_request_is_over(tmp_path, clock):
    async with peers(tmp_path, clock=clock) as (dispatch, peer):
        flight = send(dispatch, a_submit(max_tokens=9))
        submit = await peer.submitted()
        peer.say(submit, [10])
        await until(lambda: flight.num_tokens == 1)
        peer.hang_up()
        await lost(dispatch)
        flight.cancel(submit.request_id, 0)
        assert (await answer(flight))[-1].finish.reason == "cancelled"
        assert flight.is_over
        assert dispatch.num_waiting() == 0


async def test_a_prompt_counts_as_found_as_the_first_worker_found_it(tmp_path):
    async with peers(tmp_path) as (dispatch, peer):
        flight = send(dispatch, a_submit(num_prompt_tokens=40, max_tokens=3))
        submit = await peer.submitted()
        peer.send(wire.StepOutput([wire.Delta(submit.request_id, 0, [10], num_cached_tokens=8)]))
        await until(lambda: flight.num_tokens == 1)
        peer.hang_up()
        peer.say(await peer.submitted(), [11, 12], "length", num_cached_tokens=32, engine_s=0.5, decode_s=0.25)
        deltas = await answer(flight)
        assert deltas[-1].finish.num_cached_tokens == 8
        assert flight.spent.engine_s == 0.5


async def test_the_time_with_all_workers_and_between_them_is_told(tmp_path, clock):
    async with peers(tmp_path, clock=clock, workers=settings.Workers(silence_timeout_s=1e6)) as (dispatch, peer):
        flight = send(dispatch, a_submit(max_tokens=3))
        submit = await peer.submitted()
        clock.advance(2.0)
        peer.say(submit, [10])
        await until(lambda: flight.num_tokens == 1)
        clock.advance(3.0)
        peer.hang_up()
        await lost(dispatch)
        await until(lambda: min(clock.waits()) < 1.0)
        clock.advance(0.5)
        again = await peer.submitted()
        peer.say(again, [11, 12], "length", queue_s=0.125, prefill_s=0.25, decode_s=0.5)
        await answer(flight)
        assert flight.queue_s == 0.5
        spent = flight.spent
        assert (spent.queue_s, spent.prefill_s, spent.decode_s) == (0.625, 2.25, 3.5)


async def test_a_cut_ends_what_waits_to_go_on(tmp_path, clock):
    async with peers(tmp_path, clock=clock) as (dispatch, peer):
        flight = send(dispatch, a_submit())
        await peer.submitted()
        peer.hang_up()
        await lost(dispatch)
        dispatch.cut()
        with pytest.raises(errors.Draining):
            await flight.deltas()
        assert dispatch.num_waiting() == 0


async def test_a_token_that_is_none_is_garbage(tmp_path):
    async with peers(tmp_path) as (dispatch, peer):
        flight = send(dispatch, a_submit(max_tokens=2))
        peer.say(await peer.submitted(), [-1])
        again = await peer.submitted()
        assert again.emitted_token_ids == {0: []}
        peer.say(again, [10, 11], "length")
        assert tokens(await answer(flight)) == [10, 11]


async def test_all_gateways_of_a_worker_go_on_when_it_is_back(start_scripted_worker):
    address = await start_scripted_worker("--step-s", 0.005)
    async with dispatching(address, workers=FAST) as one, dispatching(address, workers=FAST) as other:
        flights = [send(dispatch, a_submit(max_tokens=200)) for dispatch in (one, other) for _ in range(4)]
        await until(lambda: all(flight.num_tokens > 5 for flight in flights))
        os.kill(one.ready("scripted").pid, signal.SIGKILL)
        await lost(one)
        await lost(other)
        await start_scripted_worker(listen=address)
        assert [tokens(await answer(flight)) for flight in flights] == [SCRIPT * 50] * 8
        assert held(one) == held(other) == 0


async def test_a_gateway_that_drains_still_goes_on_with_what_it_lost(tmp_path):
    async with peers(tmp_path) as (dispatch, peer):
        flight = send(dispatch, a_submit(max_tokens=2))
        await peer.submitted()
        dispatch.draining = True
        peer.hang_up()
        peer.say(await peer.submitted(), [10, 11], "length")
        assert tokens(await answer(flight)) == [10, 11]


async def test_when_the_workers_are_closed_what_waits_to_go_on_is_told(tmp_path):
    async with peers(tmp_path, workers=settings.Workers(restart_backoff_s=60.0)) as (dispatch, peer):
        flight = send(dispatch, a_submit())
        await peer.submitted()
        peer.hang_up()
        await lost(dispatch)
        await dispatch.close(drain_s=0)
        with pytest.raises(errors.WorkerLost):
            await flight.deltas()
