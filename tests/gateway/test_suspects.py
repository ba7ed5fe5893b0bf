"""A request that ends its workers: it ends alone, and whoever was beside it completes."""

from __future__ import annotations

import asyncio

import pytest

from gateway import errors
from policies import settings
from policies.suspicion import NUM_AHEAD
from tests.builders import a_submit, answer, send, tokens, until
from tests.gateway.played import FAST, held, lost, peers


def view(dispatch, sla_class="standard"):
    return next(view for view in dispatch.queues() if view.sla_class == sla_class)


async def losing(dispatch, peer, num_losses, num_flights):
    """Each time with everything that the worker was sent."""
    for _ in range(num_losses):
        for _ in range(num_flights):
            await peer.submitted()
        peer.hang_up()
        await lost(dispatch)


async def test_after_two_losses_they_go_on_one_by_one_and_together_once_they_are_ahead(tmp_path):
    async with peers(tmp_path) as (dispatch, peer):
        flights = [send(dispatch, a_submit(max_tokens=100)) for _ in range(3)]
        await losing(dispatch, peer, num_losses=2, num_flights=3)
        assert (view(dispatch).num_returning, view(dispatch).num_suspects) == (3, 3)
        for number, flight in enumerate(flights):
            submit = await peer.submitted()
            assert submit.request_id == flight.request.request_id
            new = send(dispatch, a_submit(max_tokens=100))
            assert (await peer.submitted()).request_id == new.request.request_id, "who was there for no loss may join"
            peer.say(submit, [10] * (NUM_AHEAD - 1))
            await until(lambda: flight.num_tokens == NUM_AHEAD - 1)  # noqa: B023
            assert peer.is_quiet()
            assert view(dispatch).num_suspects == 2 - number
            peer.say(submit, [10])
            await until(lambda: flight.num_tokens == NUM_AHEAD)  # noqa: B023
        assert view(dispatch).num_returning == 0


async def test_the_one_that_is_lost_again_goes_on_alone_before_anybody_and_ends_with_that_worker(tmp_path):
    async with peers(tmp_path) as (dispatch, peer):
        deadly, innocent = [send(dispatch, a_submit(max_tokens=40)) for _ in range(2)]
        await losing(dispatch, peer, num_losses=2, num_flights=2)
        assert (await peer.submitted()).request_id == deadly.request.request_id
        peer.hang_up()
        await lost(dispatch)
        urgent = send(dispatch, a_submit(max_tokens=1), sla_class="interactive")
        assert (await peer.submitted()).request_id == deadly.request.request_id
        assert peer.is_quiet(), "while it is there nobody else is"
        peer.hang_up()
        with pytest.raises(errors.EndsWorkers) as caught:
            await deadly.deltas()
        assert caught.value.headers() == {"x-should-retry": "false"}
        submits = [await peer.submitted() for _ in range(2)]
        assert [submit.request_id for submit in submits] == [
            urgent.request.request_id,
            innocent.request.request_id,
        ]
        for submit, flight, num_tokens in zip(submits, (urgent, innocent), (1, 40), strict=True):
            peer.say(submit, [10] * num_tokens, "length")
            assert tokens(await answer(flight)) == [10] * num_tokens
        assert held(dispatch) == 0


async def test_one_that_must_be_alone_leaves_a_worker_with_answers_to_the_others(tmp_path):
    async with peers(tmp_path, 2) as (dispatch, one, other):
        deadly = send(dispatch, a_submit(max_tokens=40))
        had, spare = (one, other) if deadly.worker is dispatch.workers()[0] else (other, one)
        dispatch.rest(next(worker.name for worker in dispatch.workers() if worker is not deadly.worker), True)
        number = dispatch.workers().index(deadly.worker)
        for _ in range(3):
            await had.submitted()
            had.hang_up()
            await lost(dispatch, number)
        dispatch.rest(dispatch.workers()[number].name, True)
        dispatch.rest(dispatch.workers()[1 - number].name, False)
        assert (await spare.submitted()).request_id == deadly.request.request_id
        reading = asyncio.create_task(answer(send(dispatch, a_submit(max_tokens=1))))
        await until(lambda: dispatch.workers()[number].facts)
        dispatch.rest(dispatch.workers()[number].name, False)
        submit = await had.submitted()
        had.say(submit, [10], "length")
        assert tokens(await reading) == [10]


async def test_a_suspect_that_nobody_wants_any_more_keeps_nobody_waiting(tmp_path):
    async with peers(tmp_path) as (dispatch, peer):
        gone, waiting = [send(dispatch, a_submit(max_tokens=40)) for _ in range(2)]
        await losing(dispatch, peer, num_losses=2, num_flights=2)
        submit = await peer.submitted()
        gone.close()
        await peer.cancelled()
        peer.say(submit, [], "cancelled")
        assert (await peer.submitted()).request_id == waiting.request.request_id
        waiting.close()
        await peer.cancelled()
        peer.say(submit.__class__(waiting.request.request_id, [], submit.sampling), [], "cancelled")
        await until(lambda: held(dispatch) == 0)


async def test_where_few_losses_are_allowed_they_end_as_lost_workers(tmp_path):
    limits = settings.Workers(restart_backoff_s=FAST.restart_backoff_s, max_failovers=1)
    async with peers(tmp_path, workers=limits) as (dispatch, peer):
        flight = send(dispatch, a_submit())
        await losing(dispatch, peer, num_losses=2, num_flights=1)
        with pytest.raises(errors.WorkerLost):
            await flight.deltas()
