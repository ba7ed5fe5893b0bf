"""Responses that go on from a conversation and are added to it: one at a time, and as they ended."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from gateway.conversations import shelf as shelves
from policies import settings
from tests.builders import until
from tests.gateway.conftest import Front, OpenFront
from tests.gateway.peer import Peer
from tests.gateway.responding import ASSISTANT, END, another_tenant, answered, ask, prompt_of, turn
from tests.gateway.test_conversations import begun, said, texts_of
from tests.gateway.test_responses_background import over
from tests.gateway.test_responses_shelf import Wall

pytestmark = pytest.mark.usefixtures("patient_store")


async def events_of(call: asyncio.Task[Any]) -> list[Any]:
    return [event async for event in await call]


async def test_a_response_goes_on_from_a_conversation_and_is_added_to_it(open_front: OpenFront, store_settings):
    async with open_front(store=store_settings) as front:
        mine = await begun(front, "Hello")
        first = await answered(front, input="And?", conversation=mine, instructions="Be brief.")
        assert first.conversation.id == mine
        assert await texts_of(front.client, mine) == ["Hello", "And?", "Hi there."]
        prompt, second = await prompt_of(front, ask(front, input="So?", conversation={"id": mine}))
        told = [("user", "Hello"), ("user", "And?"), ("assistant", "Hi there."), ("user", "So?")]
        assert prompt == "".join([turn(role, text) for role, text in told]) + ASSISTANT
        assert await texts_of(front.client, mine) == ["Hello", "And?", "Hi there.", "So?", "Yes."]
        items = [item async for item in front.client.conversations.items.list(mine, order="asc")]
        (given,) = (await front.client.responses.input_items.list(second.id)).data
        assert [item.id for item in items[-2:]] == [given.id, second.output[0].id]
        assert (await front.client.responses.retrieve(second.id)).conversation.id == mine


async def test_what_was_given_comes_with_an_id_of_its_own_however_often_it_is_said(front: Front):
    mine = await begun(front)
    first = await answered(front, conversation=mine)
    again = first.output[0].model_dump(exclude_none=True)
    await answered(front, input=[again, said("And?")], conversation=mine)
    items = [item async for item in front.client.conversations.items.list(mine, order="asc")]
    assert [item.content[0].text for item in items] == ["Hello", "Hi there.", "Hi there.", "And?", "Hi there."]
    assert len({item.id for item in items}) == 5


async def test_a_stream_is_added_before_its_last_event(front: Front):
    mine = await begun(front)
    call = ask(front, conversation=mine, stream=True)
    front.peer.say(await front.peer.submitted(), [*front.ids("Hi there."), END], "stop")
    async for event in await call:
        if event.type == "response.completed":
            assert await texts_of(front.client, mine) == ["Hello", "Hi there."]
            assert event.response.conversation.id == mine
            await answered(front, input="And?", conversation=mine)  # nobody holds it any more
    assert await texts_of(front.client, mine) == ["Hello", "Hi there.", "And?", "Hi there."]


async def test_one_in_the_background_is_added_when_it_has_ended(front: Front):
    mine = await begun(front)
    queued = await ask(front, conversation=mine, background=True)
    submit = await front.peer.submitted()
    assert (queued.conversation.id, await texts_of(front.client, mine)) == (mine, [])
    with pytest.raises(openai.BadRequestError) as locked:
        await ask(front, conversation=mine)
    assert locked.value.code == "conversation_locked"
    front.peer.say(submit, [*front.ids("Hi there."), END], "stop")
    assert (await over(front.client, queued.id)).conversation.id == mine
    assert await texts_of(front.client, mine) == ["Hello", "Hi there."]
    await answered(front, conversation=mine)


async def test_a_cut_answer_is_added_and_one_that_failed_or_was_cancelled_is_not(front: Front):
    mine = await begun(front)
    cut = ask(front, input="1", conversation=mine, max_output_tokens=1)
    front.peer.say(await front.peer.submitted(), front.ids("Hi")[:1], "length")
    assert (await cut).status == "incomplete"
    before = await texts_of(front.client, mine)
    assert (before[0], len(before)) == ("1", 2)

    failed = ask(front, input="2", conversation=mine)
    front.peer.say(await front.peer.submitted(), [], "error")
    with pytest.raises(openai.InternalServerError):
        await failed
    streamed = ask(front, input="3", conversation=mine, stream=True)
    submit = await front.peer.submitted()
    front.peer.say(submit, front.ids("Hi"))
    stream = await streamed
    await anext(stream)
    front.peer.say(submit, [], "error")
    assert [event.type async for event in stream][-1] == "response.failed"
    queued = await ask(front, input="4", conversation=mine, background=True)
    await front.peer.submitted()
    assert (await front.client.responses.cancel(queued.id)).status == "cancelled"
    await front.peer.cancelled()
    assert await texts_of(front.client, mine) == before
    await answered(front, input="5", conversation=mine)
    assert (await texts_of(front.client, mine))[2:] == ["5", "Hi there."]


async def test_a_client_that_hangs_up_leaves_the_conversation_as_it_was_and_free(front: Front):
    mine = await begun(front)
    call = ask(front, conversation=mine)
    await front.peer.submitted()
    call.cancel()
    await front.peer.cancelled()
    await until(lambda: not front.gw.conversations._held)
    patient = front.client.with_options(max_retries=20)
    again = asyncio.create_task(patient.responses.create(model="demo", input="And?", conversation=mine))
    front.peer.say(await front.peer.submitted(), [*front.ids("Hi there."), END], "stop")
    await again
    assert await texts_of(front.client, mine) == ["And?", "Hi there."]


async def test_one_that_is_cancelled_again_while_it_ends_leaves_the_conversation_free(front: Front, monkeypatch):
    conversations, lets_go, may_go = type(front.gw.conversations), asyncio.Event(), asyncio.Event()

    async def let_go(*asked: Any, real: Any = conversations._let_go) -> None:
        lets_go.set()
        await may_go.wait()
        await real(*asked)

    monkeypatch.setattr(conversations, "_let_go", let_go)
    mine, background = await begun(front), front.gw.responses.background
    queued = await ask(front, conversation=mine, background=True)
    submit = await front.peer.submitted()
    (running,) = background._running.values()
    first = asyncio.create_task(front.client.responses.cancel(queued.id))
    await front.peer.cancelled()
    front.peer.say(submit, [], "cancelled")
    await lets_go.wait()
    again = asyncio.create_task(background.cancel(running))
    await asyncio.sleep(0)
    may_go.set()
    assert {(await first).status, (await again).status} == {"cancelled"}
    await answered(front, conversation=mine)


async def test_one_that_is_being_added_is_cancelled_no_more(front: Front, monkeypatch):
    conversations, adds, may_add = type(front.gw.conversations), asyncio.Event(), asyncio.Event()

    async def add(*asked: Any, real: Any = conversations.add) -> None:
        adds.set()
        await may_add.wait()
        await real(*asked)

    monkeypatch.setattr(conversations, "add", add)
    mine, background = await begun(front), front.gw.responses.background
    queued = await ask(front, conversation=mine, background=True)
    front.peer.say(await front.peer.submitted(), [*front.ids("Hi there."), END], "stop")
    await adds.wait()
    (running,) = background._running.values()
    cancelled = asyncio.create_task(background.cancel(running))
    await asyncio.sleep(0)
    may_add.set()
    response = await over(front.client, queued.id)
    assert ((await cancelled).status, response.status, response.output_text) == ("completed", "completed", "Hi there.")
    assert await texts_of(front.client, mine) == ["Hello", "Hi there."]


async def test_while_one_is_written_another_is_refused_and_items_may_be_added(open_front: OpenFront, store_settings):
    async with open_front(store=store_settings) as front:
        mine, other = await begun(front), await begun(front)
        first = ask(front, conversation=mine)
        submit = await front.peer.submitted()
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as locked:
                await ask(front, conversation=mine, stream=stream)
            assert (locked.value.code, locked.value.param) == ("conversation_locked", "conversation")
            assert locked.value.response.headers["x-should-retry"] == "true"
        await answered(front, conversation=other)
        assert (
            await front.client.responses.input_tokens.count(model="demo", conversation=mine, input="x")
        ).input_tokens
        await front.client.conversations.items.create(mine, items=[said("Beside")])  # type: ignore[list-item]
        front.peer.say(submit, [*front.ids("Hi there."), END], "stop")
        await first
        assert await texts_of(front.client, mine) == ["Beside", "Hello", "Hi there."]


async def test_whoever_says_no_more_that_he_writes_has_lost_his_hold(front: Front):
    conversations = front.gw.conversations
    wall = conversations._wall = Wall()
    mine = await begun(front)
    lost = ask(front, conversation=mine)
    submit = await front.peer.submitted()
    wall.now += shelves.HOLD_S - 1
    await conversations.sweep()
    wall.now += shelves.HOLD_S - 1
    with pytest.raises(openai.BadRequestError):
        await ask(front, conversation=mine)
    wall.now += 1
    await answered(front, input="Second", conversation=mine)
    front.peer.say(submit, [*front.ids("Late."), END], "stop")
    await lost
    assert await texts_of(front.client, mine) == ["Second", "Hi there.", "Hello", "Late."]


def dies_adding(front: Front, monkeypatch: pytest.MonkeyPatch, moment: str) -> asyncio.Event:
    """The gateway comes to where a turn is added, before that or behind it, and no further; set when it has."""
    conversations, reached = type(front.gw.conversations), asyncio.Event()

    async def add(*asked: Any, real: Any = conversations.add) -> None:
        if moment == "behind":
            await real(*asked)
        reached.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(conversations, "add", add)
    return reached


@pytest.mark.parametrize("moment", ["before", "behind"])
async def test_a_gateway_that_dies_leaves_a_response_and_its_turn_or_neither(
    open_front: OpenFront, store_settings, monkeypatch, moment
):
    """What others find when it has come to the transaction that adds the turn, and to no further one."""
    async with open_front(store=store_settings) as front:
        mine, reached = await begun(front, "Hello"), dies_adding(front, monkeypatch, moment)
        call = ask(front, input="And?", conversation=mine)
        submit = await front.peer.submitted()
        front.peer.say(submit, [*front.ids("Hi there."), END], "stop")
        await reached.wait()
        try:
            stored = await front.client.responses.retrieve(submit.request_id.replace("req_", "resp_"))
        except openai.NotFoundError:
            assert (moment, await texts_of(front.client, mine)) == ("before", ["Hello"])
        else:
            assert (moment, await texts_of(front.client, mine)) == ("behind", ["Hello", "And?", "Hi there."])
            assert (stored.conversation.id, stored.output_text) == (mine, "Hi there.")
        call.cancel()


@pytest.mark.parametrize("moment", ["before", "behind"])
async def test_of_one_in_the_background_as_well(open_front: OpenFront, store_settings, monkeypatch, moment):
    """And the end that others find is whole, its last event included."""
    async with open_front(store=store_settings) as front:
        mine, shelf = await begun(front, "Hello"), front.gw.responses.shelf
        reached = dies_adding(front, monkeypatch, moment)
        queued = await ask(front, input="And?", conversation=mine, background=True)
        submit = await front.peer.submitted()
        front.peer.say(submit, [*front.ids("Hi there."), END], "stop")
        await reached.wait()
        (running,) = front.gw.responses.background._running.values()
        kept = await shelf.find(running.tenant_id, queued.id)
        assert kept is not None
        kinds = [event.partition(b"\n")[0].removeprefix(b"event: ") for event in await shelf.events(queued.id, 0)]
        if moment == "before":
            assert (kept.is_open, await texts_of(front.client, mine)) == (True, ["Hello"])
            assert b"response.completed" not in kinds
        else:
            assert (kept.status, await texts_of(front.client, mine)) == ("completed", ["Hello", "And?", "Hi there."])
            assert (kinds[0], kinds[-1]) == (b"response.created", b"response.completed")
            assert not await shelf.end_elsewhere(kept, "failed"), "nobody can say that it was lost"


async def test_one_that_was_cancelled_at_another_gateway_is_no_turn(front: Front):
    mine = await begun(front, "Hello")
    queued = await ask(front, input="And?", conversation=mine, background=True)
    submit = await front.peer.submitted()
    (running,) = front.gw.responses.background._running.values()
    kept = await front.gw.responses.shelf.find(running.tenant_id, queued.id)
    async with running.storing:  # it does not notice before it ends
        assert kept is not None
        assert await front.gw.responses.shelf.end_elsewhere(kept, "cancelled")
        front.peer.say(submit, [*front.ids("Hi there."), END], "stop")
        await front.settled(1)
    await until(lambda: not front.gw.responses.background._running)
    assert (await front.client.responses.retrieve(queued.id)).status == "cancelled"
    assert await texts_of(front.client, mine) == ["Hello"]
    await answered(front, conversation=mine)


async def test_an_answer_whose_conversation_is_gone_is_given_and_says_so(front: Front):
    for stream in (False, True):
        mine = await begun(front)
        call = ask(front, conversation=mine, stream=stream)
        submit = await front.peer.submitted()
        await front.client.conversations.delete(mine)
        front.peer.say(submit, [*front.ids("Hi there."), END], "stop")
        response = (await events_of(call))[-1].response if stream else await call
        assert (response.output_text, response.conversation) == ("Hi there.", None)
        assert (await front.client.responses.retrieve(response.id)).conversation is None


async def test_what_is_not_stored_itself_is_added_all_the_same(front: Front):
    mine = await begun(front)
    for stream in (False, True):
        call = ask(front, conversation=mine, store=False, stream=stream)
        front.peer.say(await front.peer.submitted(), [*front.ids("Hi there."), END], "stop")
        response = (await events_of(call))[-1].response if stream else await call
        with pytest.raises(openai.NotFoundError):
            await front.client.responses.retrieve(response.id)
    assert await texts_of(front.client, mine) == ["Hello", "Hi there."] * 2


async def test_with_truncation_the_oldest_turns_are_left_out_of_the_prompt_and_stay_in_the_conversation(open_front):
    async with open_front(peer=Peer(max_model_tokens=120)) as front:
        mine = await begun(front, *["old " * 30] * 3)
        with pytest.raises(openai.BadRequestError) as too_long:
            await ask(front, conversation=mine)
        assert (too_long.value.code, too_long.value.param) == ("context_length_exceeded", "input")
        prompt, _ = await prompt_of(front, ask(front, conversation=mine, truncation="auto"))
        assert prompt.count("old") < 90
        assert (await texts_of(front.client, mine))[-2:] == ["Hello", "Yes."]
        assert len(await texts_of(front.client, mine)) == 5


async def test_neither_another_tenants_nor_one_without_room_is_gone_on_from(front: Front, monkeypatch):
    mine = await begun(front, "1", "2")
    async with another_tenant(front) as other:
        for call in (
            other.responses.create(model="demo", input="Hello", conversation=mine),
            other.responses.input_tokens.count(model="demo", input="Hello", conversation=mine),
        ):
            with pytest.raises(openai.NotFoundError) as missing:
                await call
            assert (missing.value.code, missing.value.param) == ("conversation_not_found", "conversation")
    monkeypatch.setattr("gateway.api.items.MAX_ITEMS", 2)
    with pytest.raises(openai.BadRequestError) as full:
        await ask(front, conversation=mine)
    assert full.value.param == "conversation"
    assert front.peer.is_quiet()


async def test_a_response_of_a_conversation_is_gone_on_from_there(front: Front):
    response = await answered(front, conversation=await begun(front))
    with pytest.raises(openai.BadRequestError) as refused:
        await ask(front, previous_response_id=response.id)
    assert (refused.value.param, response.conversation.id in refused.value.message) == ("previous_response_id", True)


async def test_none_is_gone_on_from_where_nothing_may_be_stored_any_more(open_front: OpenFront):
    async with open_front() as front:
        mine = await begun(front)
    async with open_front(responses=settings.Responses(store=False)) as front:
        with pytest.raises(openai.BadRequestError) as refused:
            await ask(front, conversation=mine)
        assert "Nothing is stored" in refused.value.message


async def test_an_empty_input_is_none_and_refused_only_where_there_is_nothing_else_to_answer(front: Front):
    first = await answered(front)
    for empty in ("", []):
        prompt, _ = await prompt_of(front, ask(front, input=empty, previous_response_id=first.id))
        assert prompt == (await prompt_of(front, ask(front, input=None, previous_response_id=first.id)))[0]
        assert "Be brief" in (await prompt_of(front, ask(front, input=empty, instructions="Be brief.")))[0]
        for path in ("/v1/responses", "/v1/responses/input_tokens"):
            status, refused, _ = await front.post(path, {"model": "demo", "input": empty})
            assert (status, refused["error"]["param"]) == (400, "input")
            assert refused["error"]["code"] == "missing_required_parameter"
            assert "nothing to answer" in refused["error"]["message"]
