"""Classes, tenants and room: who is sent when, against a scripted worker on the real wire."""

from __future__ import annotations

import asyncio
import contextlib
import random

import msgspec
import pytest

from gateway import errors
from gateway.flights import launched
from policies import settings, wire
from policies.policy import Policy
from tests import builders
from tests.builders import a_submit, answer, dispatching, quiet, send, until
from tests.gateway.conftest import HELLO, KEY, Front, OpenFront
from tests.gateway.played import peers

SLOW = ("--fault", "mute")
WEIGHTS = ("--cost-weights", "0.1,0.01,0.01,0,0,0,0", "--stats-s", 0.01)
"""A step takes 0.1 s, a prompt token and a completion token 0.01 s each."""


def in_order(flights):
    """Their places in the order of being sent."""
    return sorted(range(len(flights)), key=lambda index: flights[index].sent_at)


async def test_the_more_important_class_goes_first_and_tenants_of_a_class_take_turns(start_scripted_worker):
    async with dispatching(await start_scripted_worker("--max-sequences", 1, "--step-s", 0.001)) as dispatch:
        running = [send(dispatch, a_submit(max_tokens=20)) for _ in range(2)]
        waiting = [
            send(dispatch, a_submit(), sla_class="batch", tenant_id="flood"),
            send(dispatch, a_submit(), tenant_id="flood"),
            send(dispatch, a_submit(), tenant_id="flood"),
            send(dispatch, a_submit(), tenant_id="flood"),
            send(dispatch, a_submit(), tenant_id="other"),
            send(dispatch, a_submit(), sla_class="interactive", tenant_id="flood"),
        ]
        assert dispatch.num_waiting() == 6
        await asyncio.gather(*map(answer, running + waiting))
    assert in_order(waiting) == [5, 1, 4, 2, 3, 0]


async def test_a_flood_of_important_requests_leaves_the_others_their_guaranteed_share(start_scripted_worker):
    async with dispatching(await start_scripted_worker("--max-sequences", 1, "--step-s", 0.0005)) as dispatch:
        running = [send(dispatch, a_submit(), sla_class="interactive") for _ in range(2)]
        flood = [send(dispatch, a_submit(), sla_class="interactive") for _ in range(60)]
        batch = [send(dispatch, a_submit(), sla_class="batch") for _ in range(5)]
        await asyncio.gather(*map(answer, running + flood + batch))
    places = in_order(flood + batch)
    assert [place for place, index in enumerate(places) if index >= 60] == [10, 20, 30, 40, 50]
    assert {flight.request.priority for flight in batch} == {0}  # the engine must not put back what is guaranteed


async def test_a_worker_is_told_what_is_left_of_the_promise_and_no_name(start_scripted_worker, clock):
    address = await start_scripted_worker("--max-sequences", 1, "--step-s", 0.001)
    async with dispatching(address, clock=clock) as dispatch:
        submit = a_submit(max_tokens=100_000)
        order = msgspec.structs.replace(builders.an_order(submit), deadline_at=clock.now() + 5.0, weight=2.0)
        other = a_submit(max_tokens=100_000)
        flights = [dispatch.submit("scripted", submit, order), send(dispatch, other, tenant_id="ten_2")]
        late = dispatch.submit("scripted", a_submit(), order)
        assert late.sent_at is None
        clock.advance(7.0)
        flights[0].close()
        await until(lambda: late.sent_at is not None)
        sent = [flight.request for flight in (*flights, late)]
    assert [request.tpot_s for request in sent] == [0.2] * 3
    assert (sent[0].ttft_s, sent[2].ttft_s) == (5.0, -2.0)
    assert sent[0].tenant == sent[2].tenant != sent[1].tenant
    assert len(sent[0].tenant) == 8
    assert [request.weight for request in sent] == [2.0, 1.0, 2.0]


async def test_what_goes_on_a_guarantee_is_promised_what_the_most_important_are(start_scripted_worker):
    async with dispatching(await start_scripted_worker("--max-sequences", 1, "--step-s", 0.0005)) as dispatch:
        important = [send(dispatch, a_submit(), sla_class="interactive") for _ in range(22)]
        batch = send(dispatch, a_submit(), sla_class="batch")
        await asyncio.gather(*map(answer, [*important, batch]))
    assert (batch.request.priority, batch.request.ttft_s, batch.request.tpot_s) == (0, 1.0, 1.0)


async def test_a_worker_full_of_less_important_requests_is_given_more_important_ones(start_scripted_worker):
    address = await start_scripted_worker("--max-sequences", 10, *SLOW)
    async with dispatching(address) as dispatch:
        batch = [send(dispatch, a_submit(), sla_class="batch") for _ in range(20)]
        assert [flight.sent_at is not None for flight in batch] == [True] * 11 + [False] * 9
        urgent = [send(dispatch, a_submit(), sla_class="interactive") for _ in range(20)]
        num_sent = sum(flight.sent_at is not None for flight in urgent)
        assert num_sent == 9  # all places but the one that its share keeps for the batch class
        assert {flight.request.priority for flight in batch} == {2}
        assert {flight.request.priority for flight in urgent} == {0}


async def test_nobody_is_displaced_by_their_equals(start_scripted_worker):
    async with dispatching(await start_scripted_worker("--max-sequences", 10, *SLOW)) as dispatch:
        for _ in range(11):
            send(dispatch, a_submit())
        assert send(dispatch, a_submit()).sent_at is None
        assert send(dispatch, a_submit(), sla_class="batch").sent_at is None


async def test_a_worker_gets_no_more_than_its_memory_holds(start_scripted_worker):
    address = await start_scripted_worker("--num-blocks", 10, "--stats-s", 1000, *SLOW)
    async with dispatching(address) as dispatch:
        flights = [send(dispatch, a_submit(num_prompt_tokens=60, max_tokens=40)) for _ in range(5)]
        assert [flight.sent_at is not None for flight in flights] == [True] * 3 + [False] * 2


async def test_prompts_that_share_memory_are_counted_as_the_worker_counts_them(start_scripted_worker):
    address = await start_scripted_worker("--num-blocks", 20, "--step-s", 0.05, "--stats-s", 0.01)
    async with dispatching(address) as dispatch:
        flights = [send(dispatch, a_submit(num_prompt_tokens=60, max_tokens=10_000)) for _ in range(3)]
        assert [flight.sent_at is not None for flight in flights] == [True, True, False]
        await until(lambda: flights[2].sent_at is not None)  # it said that it uses two blocks


async def test_each_class_has_its_own_bound(start_scripted_worker):
    address = await start_scripted_worker("--max-sequences", 1, *SLOW)
    async with dispatching(address, classes=builders.classes(max_waiting=2)) as dispatch:
        for _ in range(4):
            send(dispatch, a_submit())
        with pytest.raises(errors.QueueFull, match="class 'standard'") as refused:
            send(dispatch, a_submit())
        assert refused.value.retry_after_s is not None
        assert send(dispatch, a_submit(), sla_class="batch").sent_at is None
        by_class = {view.sla_class: view for view in dispatch.queues()}
        assert by_class["standard"].num_refused_full == 1


async def test_in_a_line_that_one_tenant_has_filled_each_other_one_finds_its_part(start_scripted_worker):
    address = await start_scripted_worker("--max-sequences", 1, *SLOW)
    async with dispatching(address, classes=builders.classes(max_waiting=4)) as dispatch:
        running = [send(dispatch, a_submit()) for _ in range(2)]
        flood = [send(dispatch, a_submit()) for _ in range(4)]
        others = [send(dispatch, a_submit(), tenant_id="other") for _ in range(2)]
        assert [flight.finished for flight in flood] == [False, False, True, True]
        assert not any(flight.finished for flight in running + others)
        with pytest.raises(errors.QueueFull, match="class 'standard'"):
            await flood[-1].deltas()
        for tenant_id in ("ten_1", "other"):
            with pytest.raises(errors.QueueFull):
                send(dispatch, a_submit(), tenant_id=tenant_id)
        assert dispatch.num_waiting() == 4
        by_class = {view.sla_class: view for view in dispatch.queues()}
        assert by_class["standard"].num_refused_full == 4


async def test_a_request_of_several_prompts_that_waits_leaves_its_place_to_nobody(start_scripted_worker):
    address = await start_scripted_worker("--max-sequences", 1, *SLOW)
    async with dispatching(address, classes=builders.classes(max_waiting=2)) as dispatch:
        for _ in range(2):
            send(dispatch, a_submit())
        source = launched(lambda submit, after: send(dispatch, submit), [a_submit() for _ in range(2)])
        with pytest.raises(errors.QueueFull):
            send(dispatch, a_submit(), tenant_id="other")
        source.close()
        assert send(dispatch, a_submit(), tenant_id="other").sent_at is None


async def test_each_class_waits_its_own_time(start_scripted_worker, clock):
    address = await start_scripted_worker("--max-sequences", 1, *SLOW)
    async with dispatching(address, clock=clock) as dispatch:
        for _ in range(2):
            send(dispatch, a_submit(), sla_class="interactive")
        flights = {name: send(dispatch, a_submit(), sla_class=name) for name in settings.CLASSES}
        clock.advance(20)
        assert {name for name, flight in flights.items() if flight.finished} == {"interactive"}
        clock.advance(100)
        assert {name for name, flight in flights.items() if flight.finished} == {"interactive", "standard"}
        with pytest.raises(errors.QueueTimeout):
            await flights["standard"].deltas()
        by_class = {view.sla_class: view for view in dispatch.queues()}
        assert by_class["standard"].num_timed_out == 1
        assert by_class["batch"].oldest_wait_s == 120


async def test_who_would_come_too_late_is_refused_at_once_and_told_when_to_come_back(start_scripted_worker):
    address = await start_scripted_worker("--max-sequences", 1, "--step-s", 10, *WEIGHTS)
    async with dispatching(address, classes=builders.classes(max_ttft_ms=7000.0)) as dispatch:
        await until(lambda: dispatch.queues()[0].predicted_ttft_ms is not None)
        for _ in range(2):
            send(dispatch, a_submit(max_tokens=28))
        # A request's work is 4 prompt tokens and 28 steps of 0.11 s: 3.12 s. The third in line would wait for three,
        # and then for its own prompt behind the two that are being computed.
        for _ in range(2):
            send(dispatch, a_submit(max_tokens=28))
        with pytest.raises(errors.SlowDown) as refused:
            send(dispatch, a_submit(max_tokens=28))
        assert refused.value.status == 503
        assert refused.value.code == "slow_down"
        assert refused.value.retry_after_s == pytest.approx(3 * 3.12 + 3 * 0.04 + 0.11 - 7.0)
        assert dispatch.num_waiting() == 2
        # A tenant that has none waiting is not late, because it does not wait behind all of them.
        assert send(dispatch, a_submit(max_tokens=28), tenant_id="other").sent_at is None


async def test_a_prompt_that_alone_takes_too_long_is_refused_while_nobody_waits(start_scripted_worker):
    address = await start_scripted_worker(*WEIGHTS)
    async with dispatching(address, classes=builders.classes(max_ttft_ms=3000.0)) as dispatch:
        await until(lambda: dispatch.queues()[0].predicted_ttft_ms is not None)
        with pytest.raises(errors.SlowDown):
            send(dispatch, a_submit(num_prompt_tokens=1000))
        assert len(await answer(send(dispatch, a_submit(num_prompt_tokens=10)))) == 8


async def test_how_far_predictions_were_off_is_told(start_scripted_worker):
    weights = ("--cost-weights", "100,10,10,0,0,0,0", "--stats-s", 0.01)
    address = await start_scripted_worker("--max-sequences", 1, "--step-s", 0.001, *weights)
    async with dispatching(address) as dispatch:
        await until(lambda: dispatch.queues()[0].predicted_ttft_ms is not None)
        await asyncio.gather(*[answer(send(dispatch, a_submit(max_tokens=3))) for _ in range(10)])
        (view,) = [view for view in dispatch.queues() if view.sla_class == "standard"]
        assert view.num_sent == 10
        assert view.num_predicted == 8  # those that waited
        assert view.median_error_ms > 100  # it is much faster than it says
        told = view.ttft_error
        assert told.num == 8
        assert told.mean_ms == told.bias_ms > 100
        assert sum(bucket.num for bucket in told.buckets if bucket.max_ms is None or bucket.max_ms > 100) == 8


async def test_what_is_given_up_before_its_first_token_proves_no_prediction_wrong(tmp_path):
    async with peers(tmp_path, max_sequences=1) as (dispatch, peer):
        weights = (100.0, 10.0, 10.0, 0.0, 0.0, 0.0, 0.0)
        peer.send(wire.Stats(0, 0, 64, 0, 0, 64, 0, 0, 0, 0, 0, 0.0, cost_weights=weights))
        await until(lambda: dispatch.queues()[0].predicted_ttft_ms is not None)
        *_, waited = flights = [send(dispatch, a_submit()) for _ in range(3)]
        submits = [await peer.submitted() for _ in range(2)]
        peer.say(submits[0], [72], "length")
        submits.append(await peer.submitted())
        waited.close()
        await peer.cancelled()
        for submit in submits[1:]:
            peer.say(submit, [], "cancelled")
        await until(lambda: all(flight.is_over for flight in flights))
        (view,) = [view for view in dispatch.queues() if view.sla_class == "standard"]
        assert (view.num_sent, view.num_predicted, view.ttft_error.num) == (3, 0, 0)


async def test_whoever_waited_in_vain_is_told_when_the_line_will_be_shorter(start_scripted_worker, clock):
    address = await start_scripted_worker("--max-sequences", 1, *SLOW, *WEIGHTS)
    classes = builders.classes(max_wait_s=10.0, max_ttft_ms=0.0)
    async with dispatching(address, clock=clock, classes=classes) as dispatch:
        await until(lambda: dispatch.queues()[0].predicted_ttft_ms is not None)
        for _ in range(2):
            send(dispatch, a_submit(max_tokens=28))
        early = [send(dispatch, a_submit(max_tokens=28)) for _ in range(20)]
        clock.advance(5)
        late = [send(dispatch, a_submit(max_tokens=28)) for _ in range(10)]
        clock.advance(5)
        # A request's work is 4 prompt tokens and 28 steps of 0.11 s: 3.12 s, and ten others are in line still.
        for flight in early:
            with pytest.raises(errors.QueueTimeout) as refused:
                await flight.deltas()
            assert refused.value.retry_after_s == pytest.approx(11 * 3.12 - 10)
        clock.advance(5)
        with pytest.raises(errors.QueueTimeout) as refused:
            await late[0].deltas()
        assert refused.value.retry_after_s == 1  # nobody is in line


async def test_a_worker_that_rests_finishes_and_gets_nothing_new(start_scripted_worker):
    addresses = [await start_scripted_worker("--step-s", 0.001) for _ in range(2)]
    async with dispatching(*addresses) as dispatch:
        resting, busy = dispatch.workers()
        running = send(dispatch, a_submit(max_tokens=50))
        assert running.worker is resting
        dispatch.rest(resting.name, True)
        flights = [send(dispatch, a_submit()) for _ in range(5)]
        assert {flight.worker for flight in flights} == {busy}
        assert len(builders.tokens(await answer(running))) == 50
        dispatch.rest(busy.name, True)
        late = send(dispatch, a_submit())
        assert late.worker is None
        dispatch.rest(resting.name, False)
        assert late.worker is resting


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_classes_and_tenants_do_no_place_is_lost(start_scripted_worker, seed):
    """A seeded walk of requests that finish, are cancelled or left, are too many or too late."""
    chance = random.Random(seed)
    options = ("--max-sequences", 4, "--num-blocks", 40, *WEIGHTS)
    workers = [await start_scripted_worker(*options) for _ in range(2)]
    classes = {
        name: msgspec.structs.replace(terms, max_waiting=15, max_ttft_ms=chance.choice([0.0, 5000.0]))
        for name, terms in settings.CLASSES.items()
    }
    async with dispatching(*workers, classes=classes) as dispatch:

        async def one() -> None:
            request = a_submit(chance.randint(1, 300), chance.randint(1, 40), chance.randint(1, 6))
            name, tenant = chance.choice(list(classes)), chance.choice("abc")
            try:
                flight = send(dispatch, request, sla_class=name, tenant_id=tenant)
            except (errors.QueueFull, errors.SlowDown):
                return
            with contextlib.suppress(errors.QueueFull):  # its place is another tenant's now
                async with flight:
                    num_open = flight.num_sequences
                    while num_open and chance.random() > 0.1:
                        num_open -= sum(delta.finish is not None for delta in await flight.deltas())

        async with asyncio.TaskGroup() as tasks:
            for _ in range(500):
                task = tasks.create_task(one())
                if chance.random() < 0.1:
                    await asyncio.sleep(0)
                    task.cancel()
                if chance.random() < 0.1:
                    await asyncio.wait([task])
        await quiet(dispatch)
        assert dispatch.num_waiting() == 0
        (line,) = dispatch._lines.values()
        for seat in line.seats.values():
            assert seat.flights == {}, f"seed {seed}"
            assert seat._room.num_sequences == 0
            assert (seat.num_sequences, seat._room.num_tokens, seat.num_pending_requests) == (0, 0, 0)
            assert (seat.num_pending_tokens, seat.num_pending_pairs) == (0, 0)


@pytest.mark.parametrize(
    ("asked", "served", "sla_class", "priority"),
    [
        (None, "default", "standard", 1),
        ("auto", "default", "standard", 1),
        ("priority", "priority", "interactive", 0),
        ("fast", "priority", "interactive", 0),
        ("flex", "flex", "batch", 2),
        ("scale", "default", "standard", 1),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_service_tier_asks_for_a_class_and_the_answer_names_it(
    front: Front, asked, served, sla_class, priority, stream
):
    call = asyncio.create_task(_chat(front, stream, **({} if asked is None else {"service_tier": asked})))
    submit = await front.peer.submitted()
    assert submit.priority == priority
    front.peer.say(submit, [3], "stop")
    assert await call == {served}
    (row,) = await front.settled(1)
    assert (row["sla_class"], row["service_tier"]) == (sla_class, served)


async def test_a_tier_that_the_policy_does_not_allow_is_served_as_one_that_it_does(open_front: OpenFront):
    policy = Policy(sla_class="batch", sla_classes=("standard",))
    async with open_front(policies={"default": policy}) as front:
        for asked, served in (("priority", "default"), ("auto", "flex")):
            call = asyncio.create_task(_chat(front, False, service_tier=asked))
            front.peer.say(await front.peer.submitted(), [3], "stop")
            assert await call == {served}


async def _chat(front: Front, stream: bool, **others: object) -> set[str]:
    """The tiers that the answer names."""
    body = {"model": "demo", "messages": HELLO, "stream": stream, **others}
    async with front.http.post(
        f"{front.url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {KEY}"}
    ) as response:
        assert response.status == 200, await response.text()
        data = await response.read()
    if not stream:
        return {msgspec.json.decode(data)["service_tier"]}
    events = [line[6:] for line in data.split(b"\n\n") if line.startswith(b"data: {")]
    return {msgspec.json.decode(event)["service_tier"] for event in events}
