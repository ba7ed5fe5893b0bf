"""POST /v1/completions: text goes on as it stands."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from policies import wire
from tests.gateway.conftest import Front
from tests.gateway.texts import byte_fallback


def complete(front: Front, **call: Any) -> asyncio.Task[Any]:
    return asyncio.create_task(front.client.completions.create(model="demo", **call))


async def test_a_prompt_goes_on_for_sixteen_tokens_unless_told_otherwise(front: Front):
    call = complete(front, prompt="The river")
    submit = await front.peer.submitted()
    assert submit.prompt_token_ids == front.ids("The river")
    assert submit.sampling.max_tokens == 16
    front.peer.say(submit, front.ids(" runs"), "length")
    answer = await call
    assert answer.object == "text_completion"
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (" runs", "length")


async def test_token_ids_are_taken_as_they_are(front: Front):
    call = complete(front, prompt=[5, 6, 7])
    submit = await front.peer.submitted()
    assert submit.prompt_token_ids == [5, 6, 7]
    front.peer.say(submit, [], "length")
    assert (await call).usage.prompt_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_have_several_answers_each(front: Front, stream: bool):
    call = complete(front, prompt=["one", "two two"], n=2, stream=stream)
    submits = [await front.peer.submitted(), await front.peer.submitted()]
    assert [submit.num_sequences for submit in submits] == [2, 2]
    assert submits[0].request_id != submits[1].request_id
    for submit, words in zip(submits, (("a", "b"), ("c", "d")), strict=True):
        for index, word in enumerate(words):
            front.peer.say(submit, front.ids(word), "length", index=index)
    answer = await call
    texts = ["", "", "", ""]
    if stream:
        async for chunk in answer:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
    else:
        for choice in answer.choices:
            texts[choice.index] += choice.text
        num_prompt_tokens = len(front.ids("one")) + len(front.ids("two two"))
        assert answer.usage.prompt_tokens == num_prompt_tokens
    assert texts == ["a", "b", "c", "d"]
    (row,) = front.rows()
    assert row["num_sequences"] == 4
    assert row["num_prompt_tokens"] == sum(len(submit.prompt_token_ids) for submit in submits)


async def test_when_one_of_several_prompts_fails_the_others_are_cancelled(front: Front):
    call = asyncio.create_task(front.post("/v1/completions", {"model": "demo", "prompt": ["one", "two"]}))
    submits = [await front.peer.submitted(), await front.peer.submitted()]
    front.peer.send(wire.Failed(submits[0].request_id, "internal", "it broke", engine_s=0.25))
    assert (await front.peer.cancelled()).request_id == submits[1].request_id
    front.peer.say(submits[1], [], "cancelled", engine_s=0.5)
    status, body, _ = await call
    assert status == 500
    assert "it broke" not in body["error"]["message"]
    (row,) = front.rows()
    assert (row["cost_micros"], row["num_prompt_tokens"], row["engine_us"]) == (0, 0, 750_000)


@pytest.mark.parametrize("prompt", ["The river", [40, 41, 42]])
async def test_echo_begins_with_the_prompt(front: Front, prompt: str | list[int]):
    call = complete(front, prompt=prompt, echo=True, stream=True)
    submit = await front.peer.submitted()
    front.peer.say(submit, front.ids(" runs"), "length")
    text = "".join([chunk.choices[0].text async for chunk in await call])
    assert text == (prompt if isinstance(prompt, str) else front.text.decode(prompt)) + " runs"


async def test_logprobs_are_parallel_lists(front: Front):
    call = complete(front, prompt="The", logprobs=1)
    submit = await front.peer.submitted()
    assert submit.sampling.num_logprobs == 1
    tokens = front.ids(" river 🙂")
    other = front.ids("x")[0]
    logprobs = [wire.TokenLogprob(-2.0, [other], [-0.25]) for _ in tokens]
    front.peer.say(submit, [*tokens, 3], "stop", logprobs=[*logprobs, logprobs[0]])
    answer = (await call).choices[0].logprobs
    assert len(answer.tokens) == len(answer.token_logprobs) == len(answer.top_logprobs) == len(tokens)
    assert answer.top_logprobs[0] == {"x": -0.25, answer.tokens[0]: -2.0}
    texts = [front.text.decode(tokens[:n]) for n in range(len(tokens))]
    assert answer.text_offset == [len(text.replace("\ufffd", "")) for text in texts]


async def test_logprobs_end_where_the_text_ends(front: Front):
    call = complete(front, prompt="The", logprobs=0, stop=" END")
    submit = await front.peer.submitted()
    tokens = front.ids("river END")
    front.peer.say(submit, tokens, logprobs=[wire.TokenLogprob(-1.0, [], []) for _ in tokens])
    await front.peer.cancelled()
    front.peer.say(submit, [], "cancelled", logprobs=[])
    choice = (await call).choices[0]
    assert choice.text == "river"
    assert "".join(choice.logprobs.tokens) == "river"


async def test_a_first_space_is_part_of_text_that_goes_on(open_front):
    async with open_front(model={"tokenizer": byte_fallback()}) as front:
        call = complete(front, prompt="The")
        submit = await front.peer.submitted()
        front.peer.say(submit, front.ids("river"), "length")
        assert (await call).choices[0].text == " river"
