"""POST /v1/completions: text goes on as it stands."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from policies import wire
from policies.policy import Limits, Policy
from tests.builders import PATIENCE_S
from tests.gateway.conftest import Front
from tests.gateway.peer import Peer
from tests.gateway.responding import END
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


@pytest.mark.parametrize("asked", [{}, {"extra_body": {"model": "demo"}, "echo": True}])
async def test_without_a_prompt_a_text_is_written_from_its_beginning(front: Front, asked):
    call = complete(front, prompt=None, **asked)
    submit = await front.peer.submitted()
    assert submit.prompt_token_ids == [3]  # what ends a text, as this tokenizer has no token that begins one
    front.peer.say(submit, front.ids("The river"), "length")
    answer = await call
    assert (answer.choices[0].text, answer.usage.prompt_tokens) == ("The river", 1)


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
    assert len(answer.tokens) == len(answer.token_logprobs) == len(answer.top_logprobs) == len(tokens) + 1
    assert answer.tokens[-1] == front.text.vocabulary.token_text(END)
    assert answer.top_logprobs[0] == {"x": -0.25, answer.tokens[0]: -2.0}
    texts = [front.text.decode(tokens[:n]) for n in range(len(tokens) + 1)]
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


def scored(logprob: float, *top: tuple[int, float]) -> wire.TokenLogprob:
    return wire.TokenLogprob(logprob, [token_id for token_id, _ in top], [each for _, each in top])


def told(submit: wire.Submit, front: Front, token_ids: list[int], finish: str | None = "length") -> None:
    """The first step of a prompt whose own tokens are scored: -0.1, -0.2 and so on."""
    prompt = submit.prompt_token_ids
    said = [scored(-0.1 * place, (5, -0.05)) for place in range(1, len(prompt))]
    own = [scored(-0.5, (6, -0.5))] * len(token_ids)
    times = 0.0, 0.0, 0.0
    end = finish and wire.Finish(finish, 0, 0, *times, has_end_token=finish == "stop")  # type: ignore[arg-type]
    delta = wire.Delta(submit.request_id, 0, token_ids, own, end, prompt_logprobs=said)
    front.peer.send(wire.StepOutput([delta]))


@pytest.mark.parametrize("prompt", ["one two", "<|im_start|>one 🙂<|im_end|> two<|im_end|>"])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_tells_how_likely_the_prompt_was(front: Front, stream: bool, prompt: str):
    call = complete(front, prompt=prompt, echo=True, logprobs=1, max_tokens=3, stream=stream)
    submit = await front.peer.submitted()
    assert (submit.sampling.num_logprobs, submit.sampling.num_prompt_logprobs) == (1, 1)
    answer_ids = front.ids(" three")[:3]
    told(submit, front, answer_ids)
    answer = await call
    choices = [chunk.choices[0] async for chunk in answer] if stream else [answer.choices[0]]
    parts = [choice.logprobs for choice in choices if choice.logprobs is not None]
    text = "".join(choice.text for choice in choices)
    tokens = [token for part in parts for token in part.tokens]
    logprobs = [logprob for part in parts for logprob in part.token_logprobs]
    offsets = [offset for part in parts for offset in part.text_offset]
    num = len(submit.prompt_token_ids)
    assert text.startswith(prompt)
    whole = [(at, token) for at, token in zip(offsets, tokens, strict=True) if not token.startswith("\\x")]
    assert "".join(token for _, token in whole) == text.replace("🙂", "")
    assert [text[at : at + len(token)] for at, token in whole] == [token for _, token in whole]
    assert logprobs[0] is None
    assert logprobs[1:num] == pytest.approx([-0.1 * place for place in range(1, num)])
    assert logprobs[num:] == [-0.5] * len(answer_ids)
    assert parts[0].top_logprobs[0] is None


@pytest.mark.parametrize("stream", [False, True])
async def test_whoever_scores_a_text_counts_on_one_token_behind_it(front: Front, stream: bool):
    """As lm-eval does, which takes the last entry away; also where the model would have ended there."""
    call = complete(front, prompt="one two", echo=True, logprobs=1, max_tokens=1, stream=stream)
    submit = await front.peer.submitted()
    told(submit, front, [END], "stop")
    answer = await call
    choices = [chunk.choices[0] async for chunk in answer] if stream else [answer.choices[0]]
    assert "".join(choice.text for choice in choices) == "one two"
    parts = [choice.logprobs for choice in choices if choice.logprobs is not None]
    assert len([token for part in parts for token in part.tokens]) == len(submit.prompt_token_ids) + 1
    assert parts[-1].token_logprobs[-1] == -0.5
    assert (parts[-1].tokens[-1], parts[-1].text_offset[-1]) == (front.text.vocabulary.token_text(END), 7)


@pytest.mark.parametrize("reason", ["length", "stop"])
async def test_a_prompt_is_scored_without_an_answer(front: Front, reason):
    """Whether or not the model would have ended the text there."""
    call = complete(front, prompt="one two", echo=True, logprobs=0, max_tokens=0)
    submit = await front.peer.submitted()
    assert submit.sampling.max_tokens == 1
    told(submit, front, front.ids("x")[:1], reason)
    answer = await call
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == ("one two", "length")
    assert len(choice.logprobs.tokens) == len(submit.prompt_token_ids)
    assert answer.usage.completion_tokens == 0
    (row,) = await front.settled(1)
    assert (row["num_completion_tokens"], row["cache"]) == (0, "bypass")


@pytest.mark.parametrize(
    ("prompt", "num"), [([5] * 380, {"n": 128}), ([[5] * 380] * 64, {"n": 2}), ([5] * 380, {"best_of": 128})]
)
async def test_prompts_are_told_so_often_that_an_answer_can_hold_it(front: Front, prompt, num):
    """Once for each answer that echoes one: what fits alone may be too much in so many."""
    call = {"model": "demo", "prompt": prompt, "echo": True, "logprobs": 20, "max_tokens": 1, **num}
    async with asyncio.timeout(PATIENCE_S):
        status, answer, _ = await front.post("/v1/completions", call)
    assert (status, answer["error"]["param"]) == (400, "logprobs"), answer
    assert front.peer.is_quiet()


async def test_the_best_of_several_are_given_and_all_are_counted(front: Front):
    call = complete(front, prompt="one", n=2, best_of=4, max_tokens=2)
    submit = await front.peer.submitted()
    assert (submit.num_sequences, submit.sampling.num_logprobs) == (4, 0)
    for index, (word, logprob) in enumerate((("a", -3.0), ("b", -1.0), ("c", -2.0), ("d", -4.0))):
        ids = front.ids(word)
        front.peer.say(submit, ids, "length", index=index, logprobs=[scored(logprob)] * len(ids))
    answer = await call
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "b"), (1, "c")]
    assert all(choice.logprobs is None for choice in answer.choices)
    assert answer.usage.completion_tokens == sum(len(front.ids(word)) for word in "abcd")


async def test_what_came_behind_a_stop_string_makes_no_answer_less_likely(front: Front):
    """Drafted tokens come several at once."""
    call = complete(front, prompt="one", best_of=2, stop="\n")
    submit = await front.peer.submitted()
    for index, (word, likely) in enumerate((("a", -1.0), ("b", -2.0))):
        ids, behind = front.ids(word), front.ids(" and more") if word == "a" else []
        logprobs = [scored(likely)] * (len(ids) + 1) + [scored(-50.0)] * len(behind)
        front.peer.say(submit, [*ids, *front.ids("\n"), *behind], "length", index=index, logprobs=logprobs)
    answer = await call
    assert [choice.text for choice in answer.choices] == ["a"]
    assert answer.usage.completion_tokens == len(front.ids("a\n")) + len(front.ids("b\n"))


@pytest.mark.parametrize(
    ("call", "param"),
    [
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 1000}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"suffix": " end"}, "suffix"),
        ({"suffix": " end", "echo": True}, "echo"),
    ],
)
async def test_what_does_not_go_together_is_refused(front: Front, call, param):
    status, answer, _ = await front.post("/v1/completions", {"model": "demo", "prompt": "one", **call})
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert front.peer.is_quiet()


async def test_answers_that_a_limit_cuts_at_their_first_tokens_have_what_was_found_and_told_of_their_prompt(open_front):
    policy = Policy(limits=Limits(tokens_per_minute=41))
    async with open_front(policies={"default": policy}) as front:
        call = complete(front, prompt=[5] * 40, n=2, max_tokens=8, echo=True, logprobs=0)
        submit = await front.peer.submitted()
        said = [scored(-0.1)] * 39
        first, second = (
            wire.Delta(submit.request_id, index, [7], [scored(-0.5)], num_cached_tokens=32, prompt_logprobs=told)
            for index, told in ((0, None), (1, said))
        )
        front.peer.send(wire.StepOutput([first, second]))
        answer = await call
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
    assert answer.usage.completion_tokens == 1
    assert answer.usage.prompt_tokens_details.cached_tokens == 32
    assert [len(choice.logprobs.tokens) for choice in answer.choices] == [41, 40]


async def test_a_hole_is_filled_in_by_models_that_were_trained_to(open_front):
    tokenizer = byte_fallback()
    names = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|endoftext|>"]
    tokenizer = type(tokenizer).from_str(tokenizer.to_str())
    tokenizer.add_special_tokens(names)
    before, after, middle, end = (tokenizer.token_to_id(name) for name in names)
    async with open_front(model={"tokenizer": tokenizer}, peer=Peer(vocab_size=700)) as front:
        call = complete(front, prompt=["one", "two"], suffix=" three")
        for word in ("one", "two"):
            submit = await front.peer.submitted()
            ids = submit.prompt_token_ids
            assert [ids[0], ids[-1]] == [before, middle]
            assert ids[1 : ids.index(after)] == front.ids(word)
            assert ids[ids.index(after) + 1 : -1] == front.ids("three")  # which the tokenizer has begin with a space
            assert end in submit.sampling.stop_token_ids
            front.peer.say(submit, [*front.ids("and"), end], "stop")
        assert [choice.text.strip() for choice in (await call).choices] == ["and", "and"]
