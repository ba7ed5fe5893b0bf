"""What clients see and owe when a worker is lost in the middle of their answers: all of it, once."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from policies import settings, wire
from tests.builders import until
from tests.gateway.conftest import HELLO, Front

FAST = settings.Workers(restart_backoff_s=0.01, max_restart_backoff_s=0.02)


@pytest.fixture
async def front(open_front):
    async with open_front(workers=FAST) as opened:
        yield opened


async def say_with_losses(front: Front, token_ids: list[int], cuts: list[int], logprobs: bool = False) -> None:
    """The whole answer, by as many workers as there are cuts, and one more."""
    for start, end in pairwise([0, *cuts, len(token_ids)]):
        submit = await front.peer.submitted()
        assert submit.emitted_token_ids.get(0, []) == token_ids[:start]
        for position in range(start, end):
            said = [wire.TokenLogprob(-position / 8, [], [])] if logprobs else None
            is_last = position == len(token_ids) - 1
            front.peer.say(submit, [token_ids[position]], "stop" if is_last else None, logprobs=said)
        if end < len(token_ids):
            (line,) = front.gw.dispatch._lines.values()
            (seat,) = line.seats.values()
            await until(lambda: seat.flights[submit.request_id].num_tokens == end)  # noqa: B023
            front.peer.hang_up()
            await until(lambda: not seat.flights)  # noqa: B023


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("cuts", [[0], [1], [2], [3, 5], [1, 2, 3]])
async def test_text_is_whole_wherever_it_is_cut_inside_a_character_too(front: Front, is_stream, cuts):
    token_ids = [*front.ids("🙂 né"), 3]
    assert len(token_ids) > 6, "a character is several tokens"
    call = front.chat(stream=is_stream, **({"stream_options": {"include_usage": True}} if is_stream else {}))
    await say_with_losses(front, token_ids, cuts)
    if is_stream:
        chunks = [chunk async for chunk in await call]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        usage = chunks[-1].usage
    else:
        answer = await call
        text, usage = answer.choices[0].message.content, answer.usage
    assert text == "🙂 né"
    assert usage.completion_tokens == len(token_ids)
    (row,) = await front.settled(1)
    assert (row["status"], row["finish_reason"]) == (200, "stop")
    assert row["num_completion_tokens"] == len(token_ids)
    assert row["num_prompt_tokens"] == usage.prompt_tokens


async def test_a_stop_string_is_found_across_a_loss(front: Front):
    call = front.chat(stop=["stone"])
    token_ids = front.ids("a white st")
    submit = await front.peer.submitted()
    front.peer.say(submit, token_ids)
    (line,) = front.gw.dispatch._lines.values()
    (seat,) = line.seats.values()
    await until(lambda: seat.flights and seat.flights[submit.request_id].num_tokens)
    front.peer.hang_up()
    again = await front.peer.submitted()
    front.peer.say(again, front.ids("one and more"))
    await front.peer.cancelled()
    front.peer.say(again, [], "cancelled")
    choice = (await call).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("a white ", "stop")


async def test_log_probabilities_go_on_across_a_loss(front: Front):
    token_ids = [*front.ids("🙂 ok"), 3]
    call = front.chat(logprobs=True)
    await say_with_losses(front, token_ids, [2, 4], logprobs=True)
    entries = (await call).choices[0].logprobs.content
    assert [entry.logprob for entry in entries] == [-position / 8 for position in range(len(token_ids) - 1)]
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == "🙂 ok"


async def test_a_client_that_hangs_up_in_the_pause_owes_what_it_had_and_holds_nothing(open_front):
    async with open_front(workers=settings.Workers(restart_backoff_s=60.0)) as front:
        body = {"model": "demo", "messages": HELLO, "stream": True}
        call = asyncio.create_task(front.http.post(f"{front.url}/v1/chat/completions", json=body))
        front.peer.say(await front.peer.submitted(), front.ids("Once upon a time"))
        answer = await call
        await answer.content.readline()
        front.peer.hang_up()
        await front.lost()
        assert front.gw.dispatch.num_waiting() == 1
        answer.close()
        (row,) = await front.settled(1)
        assert (row["status"], row["num_completion_tokens"]) == (499, len(front.ids("Once upon a time")))
        assert front.gw.dispatch.num_waiting() == 0
