"""``context_management``: a conversation that has become long is made short on the way to its answer."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import openai
import pytest

from gateway import reply
from gateway.responses.compaction import ASKING, READING
from policies import settings, wire
from tests.builders import PATIENCE_S, until
from tests.gateway.conftest import Front
from tests.gateway.desk import Desk
from tests.gateway.responding import ASSISTANT, END, another_tenant, ask, prompt_of, turn
from tests.gateway.talking import talking
from tests.gateway.test_conversations import said

pytestmark = pytest.mark.usefixtures("patient_store")

SUMMARY = "They said hello."
SHORT = {"context_management": [{"type": "compaction", "compact_threshold": 1}]}
GIVEN = [said("Hello"), said("Hi there.", "assistant"), said("And?")]
"""What can be made short, and what the user has just said."""
SUMMED_UP = turn("user", "Hello") + turn("user", READING + SUMMARY) + turn("user", "And?")


async def asked(front: Front, **others: Any) -> tuple[list[str], Any]:
    """What the model read for the summary and for the answer, and the response."""
    call = ask(front, **{"input": GIVEN, **SHORT, **others})
    first = await front.peer.submitted()
    front.peer.say(first, [*front.ids(SUMMARY), END], "stop")
    prompt, response = await prompt_of(front, call)
    return [front.text._tokenizer.decode(first.prompt_token_ids, skip_special_tokens=False), prompt], response


async def test_what_is_too_long_is_summed_up_and_answered_from_there(front: Front):
    prompts, response = await asked(front, instructions="Be brief.")
    told = turn("system", "Be brief.") + turn("user", "Hello") + turn("assistant", "Hi there.")
    assert prompts == [told + turn("user", ASKING) + ASSISTANT, turn("system", "Be brief.") + SUMMED_UP + ASSISTANT]
    assert [item.type for item in response.output] == ["compaction", "message"]
    assert (response.output_text, response.status) == ("Yes.", "completed")
    summary, answer = await front.settled(2)
    assert (summary["endpoint"], answer["endpoint"]) == ("/v1/responses/compact", "/v1/responses")
    assert answer["request_id"][4:] == response.id[5:] != summary["request_id"][4:]
    for name, rows in (
        ("input_tokens", "num_prompt_tokens"),
        ("output_tokens", "num_completion_tokens"),
    ):
        assert getattr(response.usage, name) == summary[rows] + answer[rows]
    stored = await front.client.responses.retrieve(response.id)
    assert [item.id for item in stored.output] == [item.id for item in response.output]
    items = (await front.client.responses.input_items.list(response.id)).data
    assert len({item.id for item in [*items, *response.output]}) == 5


async def test_what_goes_on_from_it_reads_what_it_stands_for_whatever_stands_before_it(front: Front):
    _, first = await asked(front)
    behind = SUMMED_UP + turn("assistant", "Yes.") + turn("user", "So?") + ASSISTANT
    assert (await prompt_of(front, ask(front, input="So?", previous_response_id=first.id)))[0] == behind
    output = [item.model_dump(exclude_unset=True, warnings=False) for item in first.output]
    for before in (GIVEN, [], [said("Not read.")]):
        assert (await prompt_of(front, ask(front, input=[*before, *output, said("So?")])))[0] == behind
    # It is made short again, and so is one that was.
    prompts, second = await asked(front, input="So?", previous_response_id=first.id)
    assert prompts[0] == SUMMED_UP + turn("assistant", "Yes.") + turn("user", ASKING) + ASSISTANT
    kept = turn("user", "Hello") + turn("user", "And?") + turn("user", READING + SUMMARY)
    assert prompts[1] == kept + turn("user", "So?") + ASSISTANT
    short = await prompt_of(front, ask_compact(front, previous_response_id=second.id), SUMMARY)
    assert short[0] == kept + turn("user", "So?") + turn("assistant", "Yes.") + turn("user", ASKING) + ASSISTANT
    assert [item.type for item in short[1].output] == ["message"] * 3 + ["compaction"]


def ask_compact(front: Front, **others: Any) -> asyncio.Task[Any]:
    return asyncio.create_task(front.client.responses.compact(model="demo", **others))


async def test_it_is_streamed_before_the_answer_and_over_a_socket(front: Front):
    stream_of = ask(front, input=GIVEN, stream=True, **SHORT)
    front.peer.say(await front.peer.submitted(), [*front.ids(SUMMARY), END], "stop")
    front.peer.say(await front.peer.submitted(), [*front.ids("Yes."), END], "stop")
    events = [event.to_dict() async for event in await stream_of]
    kinds = [event["type"] for event in events]
    assert kinds[:5] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.output_item.done",
        "response.output_item.added",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[3]["item"] == events[-1]["response"]["output"][0]
    assert [event["output_index"] for event in events[2:-1]] == [0, 0] + [1] * (len(events) - 5)
    async with talking(front) as socket:
        await socket.ask(GIVEN, store=False, **SHORT)
        await socket.say(SUMMARY)
        assert await socket.say("Yes.") == SUMMED_UP + ASSISTANT
        first = (await socket.events())[-1]["response"]
        await socket.ask("So?", store=False, previous_response_id=first["id"])
        assert await socket.say() == SUMMED_UP + turn("assistant", "Yes.") + turn("user", "So?") + ASSISTANT


async def test_a_stream_that_waits_for_its_summary_is_kept_alive(open_front, monkeypatch):
    monkeypatch.setattr(reply, "HEADERS_AFTER_S", 0.0)
    asked = {"model": "demo", "input": GIVEN, "stream": True, **SHORT}
    async with open_front(server=settings.Server(heartbeat_s=0.01)) as front:
        for others in ({}, {"store": False}, {"background": True}):
            call = asyncio.create_task(front.http.post(f"{front.url}/v1/responses", json={**asked, **others}))
            submit = await front.peer.submitted()
            async with asyncio.timeout(PATIENCE_S), await call as answer:
                assert await answer.content.readuntil(b"\n\n") == b": keep-alive\n\n"
                assert await answer.content.readuntil(b"\n\n") == b": keep-alive\n\n"
                front.peer.say(submit, [*front.ids(SUMMARY), END], "stop")
                front.peer.say(await front.peer.submitted(), [*front.ids("Yes."), END], "stop")
                told = events_of(await answer.read())
            assert [event["sequence_number"] for event in told] == list(range(len(told)))
            assert [item["type"] for item in told[-1]["response"]["output"]] == ["compaction", "message"]


@pytest.mark.parametrize("store", [True, False])
async def test_what_fails_while_a_stream_waits_for_its_summary_is_the_streams_end(front: Front, monkeypatch, store):
    monkeypatch.setattr(reply, "HEADERS_AFTER_S", 0.0)
    call = {"model": "demo", "input": GIVEN, "stream": True, "store": store, **SHORT}
    async with front.http.post(f"{front.url}/v1/responses", json=call) as answer:
        submit = await front.peer.submitted()
        front.peer.send(wire.Failed(submit.request_id, "overloaded", "too late for a status"))
        told = events_of(await answer.read())
    kinds = [event["type"] for event in told]
    assert kinds == ["response.created", "response.in_progress", "error", "response.failed"]
    assert (answer.status, told[-1]["response"]["error"]["code"]) == (200, "server_error")
    (row,) = await front.settled(1)
    assert (row["status"], row["endpoint"]) == (503, "/v1/responses/compact")
    monkeypatch.setattr(reply, "HEADERS_AFTER_S", 20.0)
    asked = asyncio.create_task(front.http.post(f"{front.url}/v1/responses", json=call))
    front.peer.send(wire.Failed((await front.peer.submitted()).request_id, "overloaded", "in time for a status"))
    async with await asked as answer:
        assert answer.status == 503
    # Whoever goes away while it is written has it cancelled.
    monkeypatch.setattr(reply, "HEADERS_AFTER_S", 0.0)
    async with front.http.post(f"{front.url}/v1/responses", json=call):
        submit = await front.peer.submitted()
    assert (await front.peer.cancelled()).request_id == submit.request_id
    front.peer.say(submit, [], "cancelled")
    await front.settled(3)


def events_of(stream: bytes) -> list[Any]:
    lines = stream.splitlines()
    return [json.loads(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: ")]


async def test_what_is_short_enough_or_cannot_be_made_shorter_is_answered_as_it_is(front: Front):
    def at(threshold: int | None) -> dict[str, Any]:
        return {"context_management": [{"type": "compaction", "compact_threshold": threshold}]}

    length = (await front.client.responses.input_tokens.count(model="demo", input=GIVEN)).input_tokens
    for given, threshold in ((GIVEN, length), (GIVEN, None), ([said("Hello"), said("And?")], 1)):
        _, response = await prompt_of(front, ask(front, input=given, **at(threshold)))
        assert [item.type for item in response.output] == ["message"]
    _, response = await asked(front, **at(length - 1))
    assert [item.type for item in response.output] == ["compaction", "message"]
    _, response = await prompt_of(front, ask(front, context_management=[]))
    assert [item.type for item in response.output] == ["message"]


async def test_a_conversation_and_the_background_have_it_too(front: Front):
    conversation = await front.client.conversations.create(items=GIVEN[:2])
    _, response = await asked(front, input="And?", conversation=conversation.id)
    assert response.conversation.id == conversation.id
    items = (await front.client.conversations.items.list(conversation.id, order="asc")).data
    assert [item.type for item in items] == ["message", "message", "message", "compaction", "message"]
    prompt, _ = await prompt_of(front, ask(front, input="So?", conversation=conversation.id))
    assert prompt == SUMMED_UP + turn("assistant", "Yes.") + turn("user", "So?") + ASSISTANT
    call = ask(front, input=GIVEN, background=True, stream=True, **SHORT)
    front.peer.say(await front.peer.submitted(), [*front.ids(SUMMARY), END], "stop")
    front.peer.say(await front.peer.submitted(), [*front.ids("Yes."), END], "stop")
    events = [event async for event in await call]
    assert [item.type for item in events[-1].response.output] == ["compaction", "message"]


async def test_no_summary_is_written_for_one_that_finds_no_place_in_the_background(open_front):
    async with open_front(responses=settings.Responses(max_background_per_tenant=1)) as front:
        first = await ask(front, background=True)
        submit = await front.peer.submitted()
        with pytest.raises(openai.RateLimitError) as refused:
            async with asyncio.timeout(PATIENCE_S):
                await ask(front, input=GIVEN, background=True, **SHORT)
        assert "in the background already" in refused.value.message
        front.peer.say(submit, [*front.ids("Hi."), END], "stop")
        (row,) = await front.settled(1)
        assert row["request_id"][4:] == first.id[5:], "nothing is owed for the other"
        await until(lambda: not front.gw.responses.background.writes(first.id))
        _, response = await asked_in_background(front)
        assert response.status == "completed", "its place was given back"


async def asked_in_background(front: Front) -> tuple[str, Any]:
    """What the model read for the answer, and the response at its end."""
    call = ask(front, input=GIVEN, background=True, **SHORT)
    front.peer.say(await front.peer.submitted(), [*front.ids(SUMMARY), END], "stop")
    prompt, queued = await prompt_of(front, call)
    await until(lambda: not front.gw.responses.background.writes(queued.id))
    return prompt, await front.client.responses.retrieve(queued.id)


async def test_limits_count_the_summary_as_a_request(front: Front):
    desk = Desk(front)
    await desk.made("policies", {"name": "few", "document": {"limits": {"requests_per_minute": 1}}})
    tenant = await desk.made("tenants", {"name": "t", "policy": "few"})
    key = (await desk.made("keys", {"tenant_id": tenant["id"], "name": "k"}))["key"]
    client = front.client.with_options(api_key=key)
    limited = replace(front, client=client)
    call = ask(limited, input=GIVEN, **SHORT)
    front.peer.say(await front.peer.submitted(), [*front.ids(SUMMARY), END], "stop")
    with pytest.raises(openai.RateLimitError):
        await call
    (row,) = await front.settled(1)
    assert row["endpoint"] == "/v1/responses/compact"
    with pytest.raises(openai.RateLimitError):
        await ask(limited, input=GIVEN, **SHORT)
    assert len(front.rows()) == 1


async def test_it_is_its_tenants_alone(front: Front):
    _, response = await asked(front)
    item = response.output[0].model_dump(exclude_unset=True)
    async with another_tenant(front) as other:
        with pytest.raises(openai.BadRequestError) as refused:
            await other.responses.create(model="demo", input=[item, said("Tell me.")])
    assert (refused.value.code, refused.value.param) == ("invalid_encrypted_content", "input[0].encrypted_content")


async def test_what_is_gone_on_from_has_as_many_items_as_a_conversation(front: Front, monkeypatch):
    monkeypatch.setattr("gateway.responses.shelf.MAX_ITEMS", 5)
    _, first = await prompt_of(front, ask(front))
    _, second = await prompt_of(front, ask(front, previous_response_id=first.id))
    for call in (
        ask(front, previous_response_id=second.id, input=[said("One"), said("Two")]),
        ask(front, previous_response_id=(await prompt_of(front, ask(front, previous_response_id=second.id)))[1].id),
    ):
        with pytest.raises(openai.BadRequestError, match="may have 5 items at most") as refused:
            await call
        assert refused.value.param == "previous_response_id"
