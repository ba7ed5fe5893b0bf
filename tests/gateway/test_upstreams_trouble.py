"""Upstreams in every way in which they can go wrong, and what clients, other upstreams and the ledger have of it."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from aiohttp import web

from gateway.upstreams import answering
from tests.builders import PATIENCE_S, until
from tests.gateway.conftest import HELLO, Front, OpenFront
from tests.gateway.elsewhere import (
    Heard,
    breaks,
    chunk,
    elsewhere,
    event,
    fails,
    hangs,
    says,
    several,
    stalls,
    streams,
)

ASKED = {"model": "far", "messages": HELLO}
CHAT = "/v1/chat/completions"


async def streamed(front: Front, **others: Any) -> tuple[str, Any]:
    """The text that came, and the error that ended it, if one did."""
    text, failure = "", None
    async with front.http.post(front.url + CHAT, json={**ASKED, "stream": True, **others}) as answer:
        if answer.status != 200:
            return "", (await answer.json())["error"]
        async for line in answer.content:
            if line.startswith(b"data: {"):
                said = json.loads(line[6:])
                failure = said.get("error") or failure
                for choice in said.get("choices", ()):
                    text += choice["delta"].get("content") or ""
    return text, failure


def garbled(body: bytes, content_type: str = "application/json"):
    async def answer(heard: Heard) -> web.StreamResponse:
        return web.Response(body=body, content_type=content_type)

    return answer


async def drips(heard: Heard) -> web.StreamResponse:
    """A byte at a time, and never a whole line."""
    response = await heard.stream()
    while True:
        await response.write(b" ")
        await asyncio.sleep(0.01)


async def never_ends_a_line(heard: Heard) -> web.StreamResponse:
    response = await heard.stream()
    await response.write(b"data: ")
    for _ in range(64):
        await response.write(b"x" * 1024)
    return response


async def goes_on(heard: Heard) -> web.StreamResponse:
    """A word at a time, and never the last one."""
    response = await heard.stream()
    while True:
        await event(response, chunk(content="on "))
        await asyncio.sleep(0.01)


NESTED = b"[" * 100_000
CASES = [
    (fails(500), 502, "upstream_failed"),
    (fails(503), 502, "upstream_failed"),
    (fails(401), 502, "upstream_refused"),
    (fails(402), 502, "upstream_refused"),
    (fails(404), 502, "upstream_failed"),
    (fails(302, Location="http://127.0.0.1:9/"), 502, "upstream_failed"),
    (fails(429, retry_after="77"), 429, "upstream_rate_limited"),
    (fails(400, "too hot"), 400, None),
    (fails(422, "too cold"), 400, None),
    (fails(500, body=b"<html>" * 50_000), 502, "upstream_failed"),
    (garbled(b"no json"), 502, "upstream_failed"),
    (garbled(b""), 502, "upstream_failed"),
    (garbled(b"{}"), 502, "upstream_failed"),
    (garbled(NESTED), 502, "upstream_failed"),
    (garbled(b'{"choices": [{"index": 7, "message": {"content": "x"}}]}'), 502, "upstream_failed"),
    (garbled(b'{"choices": "many"}'), 502, "upstream_failed"),
    (garbled(b"\xff\xfe"), 502, "upstream_failed"),
    (breaks(), 502, None),
]


@pytest.mark.parametrize("streams", [False, True])
async def test_each_failure_before_the_first_byte_is_an_error_of_its_own_and_owes_nothing(open_front, streams):
    async with elsewhere() as far:
        terms = far.upstream(breaker_failures=1000, max_answer_bytes=1 << 17)
        async with open_front(upstreams=(terms,)) as front:
            for behaviour, status, code in CASES:
                far.scripts = [behaviour]
                async with front.http.post(front.url + CHAT, json={**ASKED, "stream": streams}) as answer:
                    error = (await answer.json())["error"]
                    assert answer.status == status, (behaviour, error)
                    assert code in (error["code"], None), error
                    if status == 429:
                        assert answer.headers["retry-after"] == "77"
                    if status == 400:
                        assert error["message"].startswith("too ")
                        assert error["type"] == "invalid_request_error"
            assert (await streamed(front))[0] == "one two three"
            rows = await front.settled(len(CASES) + 1)
            assert {row["cost_micros"] for row in rows} == {0}
            assert sum(row["num_prompt_tokens"] for row in rows[:-1]) == 0
            assert front.gw.upstreams.of("far").num_open == 0
            assert front.gw.upstreams.view("far-1").num_open == 0


@pytest.mark.parametrize("streams", [False, True])
async def test_one_that_does_not_begin_in_time_is_hung_up_on(open_front, streams):
    async with elsewhere(hangs) as far:
        terms = far.upstream(timeout_s=0.3, first_byte_timeout_s=0.3, idle_timeout_s=0.3)
        async with open_front(upstreams=(terms,)) as front:
            status, refused, _ = await front.post(CHAT, {**ASKED, "stream": streams})
            assert (status, refused["error"]["code"]) == (504, "upstream_timeout")
            (row,) = await front.settled(1)
            assert (row["cost_micros"], row["num_prompt_tokens"]) == (0, 0)
            assert front.gw.upstreams.of("far").num_open == 0


@pytest.mark.parametrize(
    "behaviour",
    [
        breaks("one "),
        stalls("one "),
        streams(chunk(content="one "), "no json"),
        streams(chunk(content="one "), {"error": {"message": "out of memory", "code": 500}}),
        streams(chunk(content="one ")),
        streams(chunk(content="one "), chunk(index=3, content="x")),
    ],
)
async def test_a_stream_that_goes_wrong_in_the_middle_ends_with_an_error_and_owes_what_was_delivered(
    open_front, behaviour
):
    async with (
        elsewhere(behaviour) as far,
        open_front(upstreams=(far.upstream(idle_timeout_s=1.0, max_retries=3),)) as front,
    ):
        text, failure = await streamed(front)
        assert text == "one "
        assert failure["code"] in ("upstream_failed", "upstream_timeout")
        assert "memory" not in failure["message"]
        (row,) = await front.settled(1)
        assert (row["num_completion_tokens"], row["counted_by"], row["finish_reason"]) == (1, "gateway", "error")
        assert len(far.heard) == 1  # what has begun is not asked again


@pytest.mark.parametrize("behind", ["no json", {"error": {"message": "out of memory", "code": 500}}])
async def test_what_goes_wrong_behind_the_end_of_an_answer_takes_nothing_of_it(open_front, behind):
    said = streams(chunk(content="one "), chunk(finish="stop"), behind)
    async with elsewhere(said) as far, open_front(upstreams=(far.upstream(),)) as front:
        assert await streamed(front) == ("one ", None)
        assert (await front.post(CHAT, ASKED))[0] == 200


@pytest.mark.parametrize("behaviour", [drips, never_ends_a_line])
async def test_streams_without_an_end_of_a_line_end_here(open_front, behaviour):
    async with elsewhere(behaviour) as far:
        terms = far.upstream(timeout_s=0.5, max_answer_bytes=1 << 14, first_byte_timeout_s=0.4)
        async with open_front(upstreams=(terms,)) as front:
            _, failure = await streamed(front)
            assert failure["code"] in ("upstream_timeout", "upstream_failed")


async def test_a_stream_that_goes_on_for_too_long_ends_here(open_front: OpenFront):
    async with elsewhere(goes_on) as far, open_front(upstreams=(far.upstream(timeout_s=2.0),)) as front:
        async with asyncio.timeout(PATIENCE_S):
            text, failure = await streamed(front)
        assert text.startswith("on on ")
        assert failure["code"] == "upstream_timeout"
        (row,) = await front.settled(1)
        assert (row["finish_reason"], row["num_completion_tokens"] > 1) == ("error", True)
        await until(lambda: not front.gw.upstreams.view("far-1").num_open)


async def test_what_was_not_answered_is_sent_again(open_front: OpenFront):
    async with elsewhere() as far, open_front(upstreams=(far.upstream(max_retries=2),)) as front:
        far.scripts = [fails(500), breaks()]
        assert (await streamed(front))[0] == "one two three"
        assert len(far.heard) == 3
        far.scripts = [fails(400)]
        assert (await streamed(front))[1]["type"] == "invalid_request_error"
        assert len(far.heard) == 4  # it would be refused again
        far.scripts = [fails(503, retry_after="3600"), says("too late")]
        assert (await streamed(front))[1]["code"] == "upstream_failed"
        assert len(far.heard) == 5  # nobody waits for so long
        rows = await front.settled(3)
        assert [row["num_completion_tokens"] for row in rows] == [3, 0, 0]
        assert front.gw.upstreams.view("far-1").num_retries == 2


async def test_retries_never_make_a_storm(open_front: OpenFront):
    async with elsewhere(fails(500)) as far:
        terms = far.upstream(max_retries=5, retry_share=0.1, breaker_failures=1000)
        async with open_front(upstreams=(terms,)) as front:
            await asyncio.gather(*[front.post(CHAT, ASKED) for _ in range(40)])
            # 40 were sent first; the budget had five saved and a tenth of them, and half a retry a second.
            assert 40 < len(far.heard) <= 40 + 5 + 4 + 10


async def test_a_breaker_opens_and_closes(open_front: OpenFront, monkeypatch):
    async with elsewhere(fails(500)) as far:
        terms = far.upstream(breaker_failures=3, breaker_open_s=3600)
        async with open_front(upstreams=(terms,)) as front:
            for _ in range(3):
                assert (await front.post(CHAT, ASKED))[0] == 502
            status, refused, headers = await front.post(CHAT, ASKED)
            assert (status, refused["error"]["code"]) == (503, "upstream_unavailable")
            assert int(headers["retry-after"]) >= 1
            assert len(far.heard) == 3
            view = front.gw.upstreams.view("far-1")
            assert (view.state, view.num_openings, view.last_failure) == ("open", 1, "HTTP 500")
            async with front.http.get(f"{front.url}/v1/models") as models:
                assert [each["penstock"]["state"] for each in (await models.json())["data"]][1] == "failed"
            far.always = says("there")
            monkeypatch.setattr(front.gw.clock, "now", lambda: time.monotonic() + 3600)
            assert front.gw.upstreams.view("far-1").state == "half_open"
            assert (await streamed(front))[0] == "there"
            assert front.gw.upstreams.view("far-1").state == "closed"


def state_of_far(front: Front) -> str:
    (state,) = [model.state for model in front.gw.upstreams.models() if model.name == "far"]
    return state


async def test_a_probe_sees_that_one_is_gone_and_that_it_is_back(open_front: OpenFront):
    async with elsewhere() as far:
        far.is_there = False
        terms = far.upstream(breaker_failures=1, breaker_open_s=3600, probe_s=0.05)
        async with open_front(upstreams=(terms,)) as front:
            await until(lambda: front.gw.upstreams.view("far-1").state == "open")
            assert (await front.post(CHAT, ASKED))[0] == 503
            far.is_there = True
            await until(lambda: front.gw.upstreams.view("far-1").state == "half_open")
            assert state_of_far(front) == "ready"
            assert (await streamed(front))[0] == "one two three"
            assert not [heard for heard in far.heard if heard.gone.is_set()]


@pytest.mark.parametrize(("probe_s", "state"), [(3600.0, "failed"), (0.0, "ready")])
async def test_one_that_may_be_tried_again_is_not_ready_before_its_probe_has_seen_it(
    open_front: OpenFront, monkeypatch, probe_s, state
):
    """Where it has none, nobody but the next request finds out."""
    async with elsewhere(fails(500)) as far:
        terms = far.upstream(breaker_failures=1, breaker_open_s=1.0, probe_s=probe_s, max_retries=0)
        async with open_front(upstreams=(terms,)) as front:
            assert (await front.post(CHAT, ASKED))[0] == 502
            assert (front.gw.upstreams.view("far-1").state, state_of_far(front)) == ("open", "failed")
            monkeypatch.setattr(front.gw.clock, "now", lambda: time.monotonic() + 10.0)
            assert (front.gw.upstreams.view("far-1").state, state_of_far(front)) == ("half_open", state)
            far.always = says("there")
            assert (await streamed(front))[0] == "there"
            assert (front.gw.upstreams.view("far-1").state, state_of_far(front)) == ("closed", "ready")


@pytest.mark.parametrize("status", [402, 500])
async def test_another_one_answers_where_the_first_does_not(open_front: OpenFront, status):
    async with several(2) as (near, far):
        near.always = fails(status)
        upstreams = (near.upstream("a", max_retries=2), far.upstream("b", priority=1))
        async with open_front(upstreams=upstreams) as front:
            assert (await streamed(front))[0] == "one two three"
            (row,) = await front.settled(1)
            assert row["upstream"] == "b"
            assert (len(near.heard), len(far.heard)) == (1, 1)


async def test_another_model_stands_in_where_none_of_its_own_answers(open_front: OpenFront):
    async with several(2) as (near, far):
        near.always = fails(500)
        upstreams = (
            near.upstream("a", breaker_failures=1, breaker_open_s=3600, fallbacks=("other",), max_retries=1),
            far.upstream("b", "other", upstream_model="theirs"),
        )
        async with open_front(upstreams=upstreams) as front:
            for _ in range(2):
                assert (await streamed(front))[0] == "one two three"
            assert far.bodies[0]["model"] == "theirs"
            assert len(near.heard) == 1
            rows = await front.settled(2)
            assert {(row["model"], row["upstream"]) for row in rows} == {("far", "b")}


async def test_the_sooner_of_two_is_heard_and_the_other_hung_up_on_and_not_billed(open_front: OpenFront, monkeypatch):
    async with several(2) as (slow, fast):
        upstreams = (slow.upstream("a", hedge=True), fast.upstream("b", priority=1))
        async with open_front(upstreams=upstreams) as front:
            for _ in range(20):  # until it is known how long it takes
                await streamed(front)
            slow.always = hangs
            assert (await streamed(front))[0] == "one two three"
            rows = await front.settled(21)
            assert [row["upstream"] for row in rows] == ["a"] * 20 + ["b"]
            assert rows[-1]["num_completion_tokens"] == 3
            async with asyncio.timeout(PATIENCE_S):
                await slow.heard[-1].gone.wait()
            view = front.gw.upstreams.view("a")
            assert (view.num_hedges, view.num_open) == (1, 0)


async def test_weights_divide_what_is_asked(open_front: OpenFront):
    async with several(2) as (one, two):
        upstreams = (one.upstream("a", weight=9.0, choice="weight"), two.upstream("b", choice="weight"))
        async with open_front(upstreams=upstreams) as front:
            await asyncio.gather(*[front.post(CHAT, ASKED) for _ in range(60)])
            assert len(one.heard) > 2 * len(two.heard)
            assert len(one.heard) + len(two.heard) == 60
            assert one.num_connections <= 60


async def test_many_clients_that_leave_leave_nothing(open_front: OpenFront):
    async with elsewhere(stalls("one ")) as far, open_front(upstreams=(far.upstream(max_concurrent=8),)) as front:

        async def leave() -> None:
            async with front.http.post(front.url + CHAT, json={**ASKED, "stream": True}) as answer:
                await answer.content.readline()

        far.always = stalls("one ")
        await asyncio.gather(*[leave() for _ in range(8)])
        waiting = [asyncio.create_task(front.post(CHAT, ASKED)) for _ in range(12)]
        far.always = hangs
        pool = front.gw.upstreams.of("far")
        await until(lambda: pool.num_open == 8 and pool.num_waiting == 4)
        for task in waiting:
            task.cancel()
        await until(lambda: pool.num_open == pool.num_waiting == 0)
        await until(lambda: all(heard.gone.is_set() for heard in far.heard))
        assert front.gw.upstreams.view("far-1").num_open == 0
        await front.settled(20)


async def test_nobody_waits_for_upstreams_that_are_all_gone(open_front: OpenFront):
    async with elsewhere() as far:
        held = asyncio.Event()

        async def fails_later(heard: Heard) -> web.StreamResponse:
            await held.wait()
            return web.Response(status=500)

        far.always = fails_later
        terms = far.upstream(max_concurrent=1, breaker_failures=1, breaker_open_s=3600)
        async with open_front(upstreams=(terms,)) as front:
            calls = [asyncio.create_task(front.post(CHAT, ASKED)) for _ in range(3)]
            await until(lambda: front.gw.upstreams.of("far").num_waiting == 2)
            held.set()
            statuses = sorted([status for status, _, _ in await asyncio.gather(*calls)])
            assert statuses == [502, 503, 503]


async def test_an_unexpected_failure_on_the_way_is_an_internal_error(front: Front, open_front, monkeypatch):
    def wrong(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(answering, "Reader", wrong)
    async with elsewhere() as far:
        from gateway.upstreams.known import Key, Known

        front.gw.upstreams._settled["far-1"] = Known(far.upstream(), Key(""), "settings")
        front.gw.upstreams.follow(front.gw.directory)
        status, refused, _ = await front.post(CHAT, ASKED)
        assert (status, refused["error"]["code"]) == (500, "internal_error")
        assert front.gw.upstreams.view("far-1").num_open == 0


async def test_room_at_one_that_stands_in_for_another_goes_to_whoever_has_waited_longest(open_front: OpenFront):
    gap = asyncio.Event()
    async with elsewhere(fails(500)) as down, elsewhere(says("one ", "two", gap=gap)) as there:
        far = down.upstream(fallbacks=("small",), breaker_failures=1, breaker_open_s=3600)
        small = there.upstream("small-1", "small", max_concurrent=1)
        async with open_front(upstreams=(far, small)) as front:
            assert (await streamed(front))[1]["code"] == "upstream_failed"  # and is not asked again

            def num_here() -> int:
                return sum(pool.num_open + pool.num_waiting for pool in front.gw.upstreams.pools())

            calls = []
            for model in ("far", "small", "far"):
                messages = [{"role": "user", "content": f"{len(calls)}"}]
                calls.append(asyncio.create_task(streamed(front, model=model, messages=messages)))
                await until(lambda: num_here() == len(calls))
            gap.set()
            assert [text for text, _ in await asyncio.gather(*calls)] == ["one two"] * 3
            assert [body["messages"][0]["content"] for body in there.bodies] == ["0", "1", "2"]


async def test_an_answer_of_many_vectors_may_be_longer_than_others(open_front):
    terms = {"kinds": ("embeddings",), "max_answer_bytes": 1 << 15, "max_retries": 0}
    async with elsewhere() as far, open_front(upstreams=(far.upstream(**terms),)) as front:

        async def answer(heard):
            vector = [0.123456789] * 10
            return web.json_response({"data": [{"index": i, "embedding": vector} for i in range(num_given)]})

        far.always = answer
        num_given = 257
        found = await front.client.embeddings.create(model="far", input=["a"] * 257)
        assert len(found.data) == 257
        num_given = 1000
        status, refused, _ = await front.post("/v1/embeddings", {"model": "far", "input": ["a"] * 256})
        assert (status, refused["error"]["code"]) == (502, "upstream_failed")
