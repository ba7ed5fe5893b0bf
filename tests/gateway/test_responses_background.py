"""Responses in the background: written without their client, read again from any event on, cancelled, and said to have
failed when nobody writes them any more."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from decimal import Decimal
from typing import Any

import openai
import pytest

from gateway import store
from gateway.clock import Clock
from gateway.errors import Draining
from gateway.head import Head
from gateway.responses.events import Events
from gateway.responses.items import said_by_user
from gateway.responses.outlets import Log
from gateway.responses.requests import parse
from gateway.responses.running import FLUSH_S, Background, Running
from gateway.responses.shapes import begun
from gateway.responses.shelf import LOST, Kept, Shelf
from policies import settings
from policies.policy import Budget, Limits, Policy, Price
from tests.builders import until, when
from tests.gateway.conftest import KEY, Front
from tests.gateway.responding import END, another_tenant, ask

pytestmark = pytest.mark.usefixtures("patient_store")

ENDED = {"completed", "incomplete", "failed", "cancelled"}


async def over(client: openai.AsyncOpenAI, response_id: str) -> Any:
    """The response, once it has ended."""
    return await when(lambda: client.responses.retrieve(response_id), lambda response: response.status in ENDED)


async def whole(stream: Any) -> list[Any]:
    return [event async for event in stream]


def text_of(events: list[Any]) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def numbers(events: list[Any]) -> list[int]:
    return [event.sequence_number for event in events]


async def test_a_response_in_the_background_needs_no_client(open_front, store_settings):
    async with open_front(store=store_settings) as front:
        begun = await ask(front, background=True, metadata={"k": "v"})
        assert (begun.status, begun.background, begun.output, begun.usage) == ("queued", True, [], None)
        submit = await front.peer.submitted()
        front.peer.say(submit, [*front.ids("Hi there."), END], "stop", num_cached_tokens=2)
        response = await over(front.client, begun.id)
        assert (response.status, response.output_text, response.metadata) == ("completed", "Hi there.", {"k": "v"})
        assert response.usage.input_tokens_details.cached_tokens == 2
        async with front.gw.store.engine.connect() as connection:
            query = "SELECT request_id, endpoint, status, num_completion_tokens FROM ledger"
            (row,) = (await connection.exec_driver_sql(query)).all()
        assert row == (submit.request_id, "/v1/responses", 200, response.usage.output_tokens)


async def test_nor_does_it_while_it_is_being_stored(front: Front, monkeypatch):
    shelf, puts, may_put = type(front.gw.responses.shelf), asyncio.Event(), asyncio.Event()

    async def put(*asked: Any, real: Any = shelf.put) -> None:
        puts.set()
        await may_put.wait()
        await real(*asked)

    monkeypatch.setattr(shelf, "put", put)
    call = ask(front, background=True)
    await puts.wait()
    call.cancel()
    await front.client.models.list()  # the gateway has heard of it by now
    may_put.set()
    submit = await front.peer.submitted()
    front.peer.say(submit, [*front.ids("Hi there."), END], "stop")
    response = await over(front.client, submit.request_id.replace("req_", "resp_"))
    assert (response.status, response.output_text) == ("completed", "Hi there.")


async def test_a_stream_that_was_cut_is_gone_on_with_while_it_is_written_and_afterwards(open_front, store_settings):
    async with open_front(store=store_settings) as front:
        stream = await ask(front, background=True, stream=True)
        submit = await front.peer.submitted()
        front.peer.say(submit, front.ids("Hi"))
        seen = []
        async for event in stream:
            seen.append(event)
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        front.peer.say(submit, front.ids(" there"))
        response_id, last = seen[0].response.id, seen[-1].sequence_number
        again = await front.client.responses.retrieve(response_id, stream=True, starting_after=last)
        rest = asyncio.create_task(whole(again))
        front.peer.say(submit, [*front.ids("."), END], "stop")
        events = [*seen, *await rest]
        assert numbers(events) == list(range(len(events)))
        assert text_of(events) == events[-1].response.output_text == "Hi there."
        assert events[-1].type == "response.completed"
        for first in (0, 3, len(events) - 2):
            told = await whole(await front.client.responses.retrieve(response_id, stream=True, starting_after=first))
            assert told == events[first + 1 :]
        beyond = await front.client.responses.retrieve(response_id, stream=True, starting_after=2**63 - 2)
        assert await whole(beyond) == []
        with pytest.raises(openai.BadRequestError, match="starting_after"):
            await front.client.responses.retrieve(response_id, stream=True, starting_after=2**63 - 1)
        assert await whole(await front.client.responses.retrieve(response_id, stream=True)) == events
        await each_delta_is_padded(front, response_id)
        assert await front.client.responses.retrieve(response_id) == events[-1].response


async def each_delta_is_padded(front: Front, response_id: str) -> None:
    """Where whoever reads it again asks for that, though whoever asked first did not."""
    url = f"{front.url}/v1/responses/{response_id}?stream=true&include_obfuscation=true"
    async with front.http.get(url) as answer:
        events = [json.loads(event.partition(b"data: ")[2]) for event in (await answer.read()).split(b"\n\n")[:-1]]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert ["obfuscation" in event for event in events] == ["delta" in event for event in events]
    assert len({len(event["delta"] + event["obfuscation"]) for event in events if "delta" in event}) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_cancelled_and_stays_so(front: Front, stream: bool):
    call = await ask(front, background=True, stream=stream)
    response_id = (await anext(call)).response.id if stream else call.id
    submit = await front.peer.submitted()
    front.peer.say(submit, front.ids("Hi"))
    live = await front.client.responses.retrieve(response_id, stream=True)
    async for event in live:
        if event.type == "response.output_text.delta":
            break
    asked = asyncio.create_task(front.client.responses.cancel(response_id))
    assert (await front.peer.cancelled()).request_id == submit.request_id
    front.peer.say(submit, [], "cancelled")
    cancelled = await asked
    assert (cancelled.status, cancelled.output_text, cancelled.output[0].status) == ("cancelled", "Hi", "incomplete")
    (*_, last) = await whole(live)
    assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
    assert await front.client.responses.cancel(response_id) == cancelled
    assert await front.client.responses.retrieve(response_id) == cancelled
    (row,) = await front.settled(1)
    assert (row["status"], row["finish_reason"]) == (499, "cancelled")
    assert row["num_completion_tokens"] == len(front.ids("Hi"))


async def test_one_that_is_cancelled_before_it_may_be_delivered_says_nothing_of_it(front: Front):
    """Nothing is delivered before the disk knows that it may be."""
    marks, may_write = front.gw.ledger.marks, threading.Event()
    assert marks is not None
    marks._executor.submit(may_write.wait)
    response = await ask(front, background=True)
    submit = await front.peer.submitted()
    front.peer.say(submit, front.ids("Hi"))
    await until(lambda: any(mark._waiter is not None for mark in marks._asking))
    asked = asyncio.create_task(front.client.responses.cancel(response.id))
    await front.peer.cancelled()
    front.peer.say(submit, [], "cancelled")
    may_write.set()
    cancelled = await asked
    assert (cancelled.status, cancelled.output) == ("cancelled", [])
    events = await whole(await front.client.responses.retrieve(response.id, stream=True))
    assert (numbers(events), text_of(events)) == (list(range(len(events))), "")
    (row,) = await front.settled(1)
    assert (row["status"], row["num_completion_tokens"]) == (499, 0)


async def test_one_that_a_spent_budget_refuses_keeps_no_numbers_of_it(open_front):
    """It is read by all keys of the tenant: also by those that may not know what that spends."""
    policy = Policy(budget=Budget(Decimal("0.001")), prices={"*": Price(request=Decimal("0.002"))})
    async with open_front(policies={"default": policy}) as front:
        with pytest.raises(openai.RateLimitError, match=r"Limit 0\.001 USD, Spent 0\.00 USD"):
            await ask(front)
        response = await ask(front, background=True)
        failed = await when(
            lambda: front.client.responses.retrieve(response.id), lambda response: response.status == "failed"
        )
        assert failed.error.message.startswith("You exceeded your current quota: the budget of this project")
        events = [event async for event in await front.client.responses.retrieve(response.id, stream=True)]
        assert not [event for event in events if "Spent" in event.model_dump_json()]


async def test_one_that_is_deleted_is_broken_off(front: Front):
    response = await ask(front, background=True)
    submit = await front.peer.submitted()
    asked = asyncio.create_task(front.client.responses.delete(response.id))
    await front.peer.cancelled()
    front.peer.say(submit, [], "cancelled")
    await asked
    with pytest.raises(openai.NotFoundError):
        await front.client.responses.retrieve(response.id)


async def test_what_has_a_client_is_neither_cancelled_nor_streamed_again(front: Front):
    call = ask(front)
    front.peer.say(await front.peer.submitted(), [END], "stop")
    response = await call
    with pytest.raises(openai.BadRequestError, match="background"):
        await front.client.responses.cancel(response.id)
    with pytest.raises(openai.BadRequestError, match="background"):
        await front.client.responses.retrieve(response.id, stream=True)
    with pytest.raises(openai.BadRequestError, match="starting_after"):
        await front.client.responses.retrieve(response.id, extra_query={"starting_after": 3})
    with pytest.raises(openai.BadRequestError) as refused:
        await front.client.responses.retrieve(response.id, extra_query={"stream": "perhaps"})
    assert refused.value.param == "stream"


async def test_a_worker_that_fails_is_a_response_that_failed(front: Front):
    stream = await ask(front, background=True, stream=True)
    submit = await front.peer.submitted()
    front.peer.say(submit, front.ids("Hi"))
    front.peer.say(submit, [], "error")
    events = await whole(stream)
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
    failed = events[-1].response
    assert (failed.status, failed.error.code) == ("failed", "server_error")
    assert await front.client.responses.retrieve(failed.id) == failed
    with pytest.raises(openai.BadRequestError):  # before it is queued
        await ask(front, background=True, input="so " * 5000)


async def test_there_is_room_for_so_many_of_one_tenant_and_of_all(open_front):
    bounds = settings.Responses(max_background=2, max_background_per_tenant=1)
    async with open_front(responses=bounds) as front, another_tenant(front) as other:
        first = await ask(front, background=True)
        with pytest.raises(openai.RateLimitError):
            await ask(front, background=True)
        second = await other.responses.create(model="demo", input="Hello", background=True)
        with pytest.raises(openai.InternalServerError) as refused:
            await ask(front, background=True)
        assert refused.value.status_code == 503
        for _ in range(2):
            front.peer.say(await front.peer.submitted(), [END], "stop")
        await over(front.client, first.id)
        await over(other, second.id)
        third = await ask(front, background=True)
        front.peer.say(await front.peer.submitted(), [END], "stop")
        await over(front.client, third.id)


async def test_one_that_a_limit_refuses_has_failed_by_it(open_front):
    policy = Policy(limits=Limits(requests_per_minute=1))
    async with open_front(policies={"default": policy}) as front:
        first = await ask(front, background=True)
        front.peer.say(await front.peer.submitted(), [END], "stop")
        assert (await over(front.client, first.id)).status == "completed"
        failed = await over(front.client, (await ask(front, background=True)).id)
        assert (failed.status, failed.error.code, failed.output) == ("failed", "rate_limit_exceeded", [])


@pytest.mark.parametrize("stream", [False, True])
async def test_the_same_idempotency_key_starts_one(front: Front, stream: bool):
    headers = {"Idempotency-Key": "once"}
    first = await ask(front, background=True, stream=stream, extra_headers=headers)
    front.peer.say(await front.peer.submitted(), [*front.ids("Hi"), END], "stop")
    if stream:
        events = await whole(first)
        assert await whole(await ask(front, background=True, stream=True, extra_headers=headers)) == events
        response_id = events[0].response.id
    else:
        response_id = first.id
        assert (await ask(front, background=True, stream=False, extra_headers=headers)).id == response_id
    assert (await over(front.client, response_id)).output_text == "Hi"
    assert len(await front.settled(1)) == 1


async def test_what_nobody_writes_after_a_start_has_failed(open_front, tmp_path):
    """As a gateway leaves it that was killed."""
    async with open_front() as front:
        tenant_id = front.gw.auth.caller(KEY).tenant_id
        call = parse(b'{"model":"demo","input":"Hello","background":true}')
        response_id = "resp_" + "5" * 32
        await front.gw.responses.shelf.put(Kept.of(tenant_id, begun(call, response_id, 1, True), [said_by_user("Hi")]))
        assert (await front.client.responses.retrieve(response_id)).status == "queued"
    async with open_front() as front:
        failed = await front.client.responses.retrieve(response_id)
        assert (failed.status, failed.error.message) == ("failed", LOST.message)
        (event,) = await whole(await front.client.responses.retrieve(response_id, stream=True))
        assert (event.type, event.response) == ("response.failed", failed)
        # Who had heard more than was stored hears that, too; who has heard that, nothing.
        for last, rest in ((7, [event]), (event.sequence_number, [])):
            told = await front.client.responses.retrieve(response_id, stream=True, starting_after=last)
            assert await whole(told) == rest


async def test_a_shutdown_fails_what_is_being_written_in_so_many_words(open_front):
    async with open_front() as front:
        response = await ask(front, background=True)
        await front.peer.submitted()
    async with open_front() as front:
        failed = await front.client.responses.retrieve(response.id)
        assert (failed.status, failed.error.message) == ("failed", "This server is shutting down.")


async def test_the_end_is_stored_with_the_last_events_though_a_moment_passes_between(store_settings, clock):
    """As where its conversation is told first."""
    call = parse(b'{"model":"demo","input":"Hello","background":true}')
    events = Events(begun(call, "resp_" + "5" * 32, 1, True), 0)
    has_ended, may_be_told = asyncio.Event(), asyncio.Event()

    async def work(log: Log) -> None:
        last = events.failed(Draining("This server is shutting down."))
        has_ended.set()
        await may_be_told.wait()
        await log.end(last)

    async with store.opened(store_settings) as rooms:
        config = settings.Responses()
        shelf = Shelf(rooms, config, Clock())
        background = Background(config, shelf, clock, contextlib.nullcontext)
        running = Running("ten_1", events, Head(None, None, {}))
        running.log.add(events.queued())
        await shelf.put(Kept.of("ten_1", events.body, []))
        with background.room("ten_1") as place:
            background.start(running, place.pop_all(), work)
        await has_ended.wait()
        await until(clock.waits)
        clock.advance(FLUSH_S)
        for _ in range(5):
            assert await shelf.find("ten_1", running.id) is not None
        may_be_told.set()
        assert running.task is not None
        await asyncio.wait([running.task])
        assert await shelf.events(running.id, 0) == running.log.said
        assert b"event: response.failed" in running.log.said[-1]


async def test_there_is_no_more_room_for_many_that_come_at_once(open_front):
    async with open_front(responses=settings.Responses(max_background_per_tenant=3)) as front:
        asked = await asyncio.gather(*(ask(front, background=True) for _ in range(20)), return_exceptions=True)
        begun = [one for one in asked if not isinstance(one, BaseException)]
        assert len(begun) == 3
        assert all(isinstance(one, openai.RateLimitError) for one in asked if one not in begun)
        for _ in begun:
            front.peer.say(await front.peer.submitted(), [END], "stop")
        for one in begun:
            await over(front.client, one.id)
