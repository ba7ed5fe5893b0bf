"""What the engine spent on a request, in its row, however the request ended."""

from __future__ import annotations

import asyncio
from decimal import Decimal

import pytest

from gateway.reply import account
from policies import wire
from policies.policy import Policy, Price
from tests.builders import until
from tests.gateway.conftest import HELLO, Front
from tests.gateway.peer import Peer

SPENT = {"engine_s": 0.0123456, "kv_block_s": 1.5, "num_drafted_tokens": 8, "num_accepted_tokens": 5}
IN_THE_ROW = {"engine_us": 12_346, "kv_block_ms": 1500, "num_drafted_tokens": 8, "num_accepted_tokens": 5}


def spent_in(row):
    return {name: row[name] for name in IN_THE_ROW}


async def test_a_row_says_what_the_engine_spent(front: Front):
    call = front.chat()
    submit = await front.peer.submitted()
    front.peer.say(submit, [*front.ids("Hi"), 3], "stop", **SPENT)
    await call
    (row,) = front.rows()
    assert spent_in(row) == IN_THE_ROW


async def test_usage_says_how_many_tokens_were_guessed_where_any_were(front: Front):
    call = front.chat()
    front.peer.say(await front.peer.submitted(), [*front.ids("Hi"), 3], "stop", **SPENT)
    details = (await call).usage.completion_tokens_details
    assert (details.drafted_tokens, details.accepted_tokens) == (8, 5)

    call = front.chat(stream=True, stream_options={"include_usage": True}, seed=1)
    front.peer.say(await front.peer.submitted(), [*front.ids("Hi"), 3], "stop", **SPENT)
    last = [chunk async for chunk in await call][-1]
    assert last.usage.completion_tokens_details.drafted_tokens == 8

    call = front.chat(seed=2)
    front.peer.say(await front.peer.submitted(), [3], "stop")
    assert not hasattr((await call).usage.completion_tokens_details, "drafted_tokens")


async def test_where_engine_seconds_have_a_price_they_are_in_the_cost(open_front):
    price = Price(engine_second=Decimal("0.5"))
    async with open_front(policies={"default": Policy(prices={"*": price})}) as front:
        call = front.chat()
        front.peer.say(await front.peer.submitted(), [*front.ids("Hi"), 3], "stop", engine_s=0.25)
        await call
        (row,) = front.rows()
    assert (row["engine_us"], row["cost_micros"]) == (250_000, 125_000)


async def test_several_answers_are_one_sum(front: Front):
    call = front.chat(n=2)
    submit = await front.peer.submitted()
    for index in range(2):
        front.peer.say(submit, [3], "stop", index=index, **SPENT)
    await call
    (row,) = front.rows()
    assert (row["engine_us"], row["num_drafted_tokens"]) == (24_691, 16)


async def test_a_request_that_failed_owes_nothing_and_says_what_it_took(front: Front):
    call = asyncio.create_task(front.post("/v1/chat/completions", {"model": "demo", "messages": HELLO}))
    submit = await front.peer.submitted()
    front.peer.send(wire.Failed(submit.request_id, "internal", "it broke", *SPENT.values()))
    assert (await call)[0] == 500
    (row,) = front.rows()
    assert spent_in(row) == IN_THE_ROW
    assert (row["num_prompt_tokens"], row["cost_micros"]) == (0, 0)


@pytest.mark.parametrize("streams", [True, False])
async def test_the_row_of_a_client_that_hung_up_waits_for_the_last_word_of_the_worker(front: Front, streams: bool):
    body = {"model": "demo", "messages": HELLO, "stream": streams}
    call = asyncio.create_task(front.post("/v1/chat/completions", body))
    submit = await front.peer.submitted()
    front.peer.say(submit, front.ids("Once"))
    call.cancel()
    await front.peer.cancelled()
    assert not front.rows()
    front.peer.say(submit, [], "cancelled", **SPENT)
    (row,) = await front.settled(1)
    assert (row["status"], spent_in(row)) == (499, IN_THE_ROW)


async def test_the_row_does_not_wait_for_a_worker_that_is_lost(front: Front, monkeypatch):
    monkeypatch.setattr(account, "LAST_WORD_S", 1e9)
    call = asyncio.create_task(front.post("/v1/chat/completions", {"model": "demo", "messages": HELLO}))
    await front.peer.submitted()
    call.cancel()
    await front.peer.cancelled()
    front.peer.hang_up()
    (row,) = await front.settled(1)
    assert (row["status"], row["engine_us"]) == (499, 0)


async def test_the_row_does_not_wait_for_ever_for_a_worker_that_says_nothing(front: Front, monkeypatch):
    monkeypatch.setattr(account, "LAST_WORD_S", 0.05)
    call = asyncio.create_task(front.post("/v1/chat/completions", {"model": "demo", "messages": HELLO}))
    submit = await front.peer.submitted()
    call.cancel()
    await front.peer.cancelled()
    (row,) = await front.settled(1)
    assert (row["status"], row["engine_us"]) == (499, 0)
    front.peer.say(submit, [], "cancelled", **SPENT)
    again = front.chat()
    front.peer.say(await front.peer.submitted(), [3], "stop")
    await again


async def test_a_request_that_never_reached_a_worker_is_not_waited_for(front: Front, monkeypatch):
    monkeypatch.setattr(account, "LAST_WORD_S", 1e9)
    (worker,) = front.gw.dispatch.workers()
    front.gw.dispatch.rest(worker.name, True)
    call = asyncio.create_task(front.post("/v1/chat/completions", {"model": "demo", "messages": HELLO}))
    await until(front.gw.dispatch.num_waiting)
    call.cancel()
    (row,) = await front.settled(1)
    assert (row["status"], row["engine_us"], row["num_prompt_tokens"]) == (499, 0, 0)


@pytest.mark.parametrize("streams", [True, False])
async def test_of_several_prompts_those_that_no_worker_was_given_are_not_owed(open_front, streams: bool):
    async with open_front(peer=Peer(max_sequences=1)) as front:
        prompts = [[number] * 10 for number in (5, 6, 7, 8)]
        body = {"model": "demo", "prompt": prompts, "stream": streams}
        call = asyncio.create_task(front.post("/v1/completions", body))
        submits = [await front.peer.submitted(), await front.peer.submitted()]
        await until(lambda: front.gw.dispatch.num_waiting() == 2)
        call.cancel()
        for submit in submits:
            await front.peer.cancelled()
            front.peer.say(submit, [], "cancelled")
        (row,) = await front.settled(1)
        assert (row["status"], row["num_prompt_tokens"]) == (499, 20)
