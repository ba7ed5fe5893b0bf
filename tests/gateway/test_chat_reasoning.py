"""What a model thinks before it answers, where clients hand it back, as OpenAI's own client does it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.builders import until
from tests.gateway.conftest import HELLO, Front, OpenFront
from tests.gateway.responding import ask
from tests.gateway.test_chat_tools import THINKING, WEATHER, say, tool

pytestmark = pytest.mark.usefixtures("patient_store")
SAID = "I think.\n</think>\n\nHello"
UNTOLD: Any = {"include_reasoning": False}


@pytest.fixture
async def front(open_front: OpenFront):
    async with open_front(model={"template": THINKING}) as opened:
        yield opened


async def test_an_answer_that_was_cut_while_it_thought_can_be_gone_on_from(front: Front):
    call = front.chat(stream=True)
    await say(front, "I think", "length")
    said: dict[str, Any] = {}
    async for chunk in await call:
        for name, text in chunk.choices[0].delta.model_dump(exclude_none=True, exclude={"role"}).items():
            said[name] = said.get(name, "") + text
    assert said == {"reasoning_content": "I think"}
    turns: Any = [*HELLO, {"role": "assistant", "content": None, **said}, {"role": "user", "content": "Go on."}]
    again = front.chat(messages=turns)
    await say(front, SAID)
    assert (await again).choices[0].message.content == "Hello"


@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_that_nobody_wants_is_counted_and_not_told(front: Front, stream: bool, store: bool):
    options = {"stream_options": {"include_usage": True}} if stream else {}
    call = front.chat(stream=stream, store=store, tools=[tool("get_weather")], extra_body=UNTOLD, **options)
    await say(front, SAID + WEATHER, num_tokens=1)
    answer = await call
    if stream:
        chunks = [chunk async for chunk in answer]
        deltas, usage = [chunk.choices[0].delta for chunk in chunks if chunk.choices], chunks[-1].usage
        assert "".join(delta.content or "" for delta in deltas) == "Hello"
        told = [delta.model_extra for delta in deltas]
        assert deltas[0].role == "assistant"
    else:
        (choice,), usage = answer.choices, answer.usage
        assert (choice.message.content, choice.finish_reason) == ("Hello", "tool_calls")
        told = [choice.message.model_extra]
    assert all("reasoning_content" not in (extra or {}) for extra in told)
    assert usage.completion_tokens_details.reasoning_tokens > 0


async def test_reasoning_that_came_after_the_last_that_a_client_was_sent_before_it_hung_up_is_not_owed(front: Front):
    body = {"model": "demo", "messages": HELLO, "stream": True, **UNTOLD}
    async with front.http.post(f"{front.url}/v1/chat/completions", json=body) as answer:
        submit = await front.peer.submitted()
        ((_, flight),) = front.gw.dispatch.flights()
        token_ids = front.ids("I think.")
        front.peer.say(submit, token_ids[:1])
        assert b'"role":"assistant"' in await answer.content.readuntil(b"\n\n")
        front.peer.say(submit, token_ids[1:])
        await until(lambda: flight.num_tokens == len(token_ids) and not flight._arrived)
        answer.close()
        await front.peer.cancelled()
    front.peer.say(submit, [], "cancelled")
    (row,) = await front.settled(1)
    assert (row["status"], row["num_completion_tokens"], row["num_reasoning_tokens"]) == (499, 1, 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_has_no_item_of_reasoning_that_nobody_wants(front: Front, stream: bool):
    call = ask(front, stream=stream, extra_body=UNTOLD)
    saying = asyncio.create_task(say(front, SAID, num_tokens=1))
    answer = await call
    if stream:
        events = [event async for event in answer]
        assert not [event.type for event in events if "reasoning" in event.type]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        answer = events[-1].response
    await saying
    assert [(item.type, item.content[0].text) for item in answer.output] == [("message", "Hello")]
    assert answer.usage.output_tokens_details.reasoning_tokens > 0
