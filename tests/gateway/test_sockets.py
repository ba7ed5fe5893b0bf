"""Responses over a WebSocket: the same events as over HTTP, in order within a lane, side by side among lanes."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest

from policies import wire
from tests.builders import until
from tests.gateway.desk import Desk
from tests.gateway.responding import ASSISTANT, END, answered, turn
from tests.gateway.talking import talking


def without_times(events: list[Any]) -> Any:
    """What two answers to the same have in common."""
    told, response = json.dumps(events, sort_keys=True), events[-1]["response"]
    for once in (response["id"][5:], str(response["created_at"])):
        assert once in told
        told = told.replace(once, "0")
    return json.loads(re.sub(r'"completed_at": \d+', '"completed_at": 0', told))


async def test_a_response_is_the_one_that_a_stream_over_http_tells(front):
    asked = {"instructions": "Be brief.", "metadata": {"a": "b"}, "max_output_tokens": 50, "user": "u"}
    stream = await front.client.responses.create(model="demo", input="Hello", stream=True, **asked)
    submit = await front.peer.submitted()
    front.peer.say(submit, [*front.ids("Hi there."), END], "stop")
    over_http = [event.to_dict() async for event in stream]
    async with talking(front) as socket:
        await socket.ask(**asked)
        await socket.say("Hi there.")
        events = await socket.events()
    assert {event["type"] for event in over_http} >= {"response.created", "response.completed"}
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert without_times(events) == without_times(over_http)
    first, second = await front.settled(2)
    same = (
        "tenant_id",
        "key_id",
        "model",
        "endpoint",
        "status",
        "num_prompt_tokens",
        "num_completion_tokens",
        "end_user",
    )
    assert {name: first[name] for name in same} == {name: second[name] for name in same}
    assert second["request_id"][4:] == events[0]["response"]["id"][5:]
    stored = await front.client.responses.retrieve(events[0]["response"]["id"])
    assert stored.to_dict() == events[-1]["response"]


async def test_what_is_not_stored_is_gone_on_from_while_the_connection_lasts(front):
    async with talking(front) as socket:
        first = await socket.answered("One", "First.", store=False)
        await socket.ask("Two", store=False, previous_response_id=first["id"])
        prompt = await socket.say("Second.")
        assert prompt == turn("user", "One") + turn("assistant", "First.") + turn("user", "Two") + ASSISTANT
        second = (await socket.events())[-1]["response"]
        assert second["previous_response_id"] == first["id"]
        # The lane has the latest alone; another one may go on from it, and it may be gone on from no less.
        await socket.ask("Three", store=False, previous_response_id=first["id"])
        assert await socket.refusal() == (400, "previous_response_not_found", "previous_response_id")
        for lane, others in (("fork", {"stream_id": "fork"}), (None, {})):
            await socket.ask("Three", store=False, previous_response_id=second["id"], **others)
            assert (await socket.say()).count("<|im_start|>user") == 3
            events = await socket.events()
            assert {event.get("stream_id") for event in events} == {lane}
        # One that is stored, but went on from one that is not, is gone on from here alone.
        third = events[-1]["response"]
        fourth = await socket.answered("Four", previous_response_id=third["id"], store=True)
        assert fourth["store"]
        await socket.ask("Five", previous_response_id=fourth["id"])
        assert (await socket.say()).count("<|im_start|>user") == 5
        await socket.events()
    async with talking(front) as another:
        await another.ask("Two", previous_response_id=second["id"])
        assert await another.refusal() == (400, "previous_response_not_found", "previous_response_id")
    with pytest.raises(openai.BadRequestError, match="not found"):
        await front.client.responses.create(model="demo", input="Five", previous_response_id=fourth["id"])


async def test_what_is_stored_is_gone_on_from_anywhere(front):
    kept = await answered(front, "Over HTTP.")
    async with talking(front) as socket:
        await socket.ask("And now?", previous_response_id=kept.id)
        assert "Over HTTP." in await socket.say("Over a socket.")
        second = (await socket.events())[-1]["response"]
    third = await answered(front, "Over HTTP again.", previous_response_id=second["id"])
    assert third.previous_response_id == second["id"]


async def test_one_that_generates_nothing_is_there_to_be_gone_on_from_and_costs_nothing(front):
    async with talking(front) as socket:
        await socket.ask("Here is a long file.", generate=False, store=False, instructions="Be brief.")
        events = await socket.events()
        assert [event["type"] for event in events] == [
            "response.created",
            "response.in_progress",
            "response.completed",
        ]
        warm = events[-1]["response"]
        assert (warm["output"], warm["usage"]["total_tokens"]) == ([], 0)
        await socket.ask("Sum it up.", store=False, previous_response_id=warm["id"])
        assert await socket.say() == turn("user", "Here is a long file.") + turn("user", "Sum it up.") + ASSISTANT
        await socket.events()
        await socket.ask("x", generate=False, model="other")
        assert await socket.refusal() == (404, "model_not_found", "model")
    assert len(await front.settled(1)) == 1


async def test_a_lane_has_its_turns_and_lanes_go_side_by_side(front):
    async with talking(front) as socket:
        for number in (1, 2):
            for lane in ("a", "b.-_1"):
                await socket.ask(f"{lane}{number}", stream_id=lane)
        begun = [await front.peer.submitted(), await front.peer.submitted()]
        assert [socket.read(submit.prompt_token_ids) for submit in begun] == [
            turn("user", "a1") + ASSISTANT,
            turn("user", "b.-_11") + ASSISTANT,
        ]
        assert front.peer.is_quiet()
        front.peer.say(begun[1], [*front.ids("Done."), END], "stop")
        assert {event["stream_id"] for event in await socket.events()} == {"b.-_1"}
        assert await socket.say() == turn("user", "b.-_12") + ASSISTANT
        assert {event["stream_id"] for event in await socket.events()} == {"b.-_1"}
        front.peer.say(begun[0], [*front.ids("Done."), END], "stop")
        assert {event["stream_id"] for event in await socket.events()} == {"a"}
        assert await socket.say() == turn("user", "a2") + ASSISTANT
        assert {event["stream_id"] for event in await socket.events()} == {"a"}


async def test_sixteen_are_answered_at_once_and_the_others_wait(front):
    async with talking(front) as socket:
        for number in range(18):
            await socket.ask(f"n{number}", stream_id=f"lane{number}", max_output_tokens=8)
        begun = [await front.peer.submitted() for _ in range(16)]
        assert front.peer.is_quiet()
        front.peer.say(begun[3], [*front.ids("Done."), END], "stop")
        assert {event["stream_id"] for event in await socket.events()} == {"lane3"}
        assert "n16" in await socket.say()
        assert {event["stream_id"] for event in await socket.events()} == {"lane16"}
        assert "n17" in await socket.say()


async def test_a_client_that_leaves_has_all_of_its_responses_cancelled_and_pays_for_what_it_had(front):
    async with talking(front) as socket:
        for lane in ("a", "b"):
            await socket.ask(lane, stream_id=lane)
        begun = [await front.peer.submitted(), await front.peer.submitted()]
        front.peer.say(begun[0], front.ids("Hi there."))
        while (await socket.next())["type"] != "response.output_text.delta":
            pass
        assert front.gw.sockets.num_open == 1
    gone = {(await front.peer.cancelled()).request_id for _ in range(2)}
    assert gone == {submit.request_id for submit in begun}
    for submit in begun:
        front.peer.say(submit, [], "cancelled")
    rows = {row["request_id"]: row for row in await front.settled(2)}
    assert [rows[submit.request_id]["status"] for submit in begun] == [499, 499]
    assert rows[begun[0].request_id]["num_completion_tokens"] == len(front.ids("Hi there."))
    await until(lambda: not front.gw.sockets.num_open)


async def test_limits_are_those_of_requests(front):
    desk = Desk(front)
    await desk.made("policies", {"name": "few", "document": {"limits": {"requests_per_minute": 1}}})
    tenant = await desk.made("tenants", {"name": "t", "policy": "few"})
    key = (await desk.made("keys", {"tenant_id": tenant["id"], "name": "k"}))["key"]
    async with talking(front, authorization=f"Bearer {key}") as socket:
        await socket.answered()
        await socket.ask()
        event = await socket.next()
        assert (event["status"], event["error"]["type"], event["error"]["code"]) == (
            429,
            "requests",
            "rate_limit_exceeded",
        )
        headers = event["error"]["headers"]
        assert float(headers["retry-after"]) > 0
        assert (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-remaining-requests"]) == ("1", "0")
        assert headers["x-request-id"].startswith("req_")


async def test_a_failure_in_the_middle_is_an_error_and_a_response_that_failed(front):
    async with talking(front) as socket:
        await socket.ask(stream_id="s")
        submit = await front.peer.submitted()
        front.peer.say(submit, front.ids("Hi"))
        front.peer.send(wire.Failed(submit.request_id, "internal", "it broke"))
        events = await socket.events()
        assert (events[-1]["type"], events[-1]["status"], events[-1]["stream_id"]) == ("error", 500, "s")
        assert events[-1]["error"]["type"] == "server_error"
        failed = await socket.next()
        assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
        assert failed["sequence_number"] == events[-1]["sequence_number"] + 1
        # Others are answered all the same.
        await socket.answered()
