"""HTTP in, tokens out, ledger settled: the real gateway, a real worker, the demo model, OpenAI's own client."""

from __future__ import annotations

import asyncio
import random

import pytest

PROMPTS = [
    "Hello!",
    "Count to ten.",
    "Tell me a story about a fox.",
    "What is the capital of France?",
    "What is 3 + 4?",
]


COMPUTED = {"cache-control": "no-store"}
"""What is tested here is computing the same again, not finding it again."""


async def ask(client, house, prompt, **parameters):
    messages = [{"role": "user", "content": prompt}]
    return await client.chat.completions.create(
        model=house.model, messages=messages, extra_headers=COMPUTED, **parameters
    )


async def read(stream):
    """The text and the usage of a streamed answer."""
    parts, usage = [], None
    async for chunk in stream:
        usage = chunk.usage or usage
        parts += [choice.delta.content or "" for choice in chunk.choices]
    return "".join(parts), usage


@pytest.mark.parametrize("prompt", PROMPTS)
async def test_a_stream_says_what_the_whole_answer_says(house, prompt):
    async with house.client() as client:
        whole = await ask(client, house, prompt, temperature=0, max_tokens=60)
        options = {"include_usage": True}
        text, usage = await read(
            await ask(client, house, prompt, temperature=0, max_tokens=60, stream=True, stream_options=options)
        )
    assert text == whole.choices[0].message.content
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


async def test_a_seeded_answer_is_the_same_alone_and_in_a_crowd(house):
    parameters = {"seed": 7, "temperature": 1.0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
    async with house.client() as client:
        alone = await ask(client, house, PROMPTS[2], n=3, **parameters)
        crowd = [ask(client, house, f"{prompt} {turn}", max_tokens=40) for turn, prompt in enumerate(4 * PROMPTS)]
        among, *_ = await asyncio.gather(ask(client, house, PROMPTS[2], n=3, **parameters), *crowd)
    texts = [choice.message.content for choice in alone.choices]
    assert [choice.message.content for choice in among.choices] == texts
    assert len(set(texts)) > 1


async def test_a_prompt_that_begins_like_an_earlier_one_is_partly_cached(house):
    story = " ".join(f"Part {number}: the fox went on." for number in range(60))
    async with house.client() as client:
        first = await ask(client, house, f"{story} And then?", max_tokens=1)
        second = await ask(client, house, f"{story} Who was it?", max_tokens=1)
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert first.usage.prompt_tokens_details.cached_tokens < 64
    assert 0.8 * second.usage.prompt_tokens <= cached < second.usage.prompt_tokens


async def test_a_stop_string_ends_the_answer_before_it_and_leaves_no_part_of_it(house):
    async with house.client() as client:
        full = (await ask(client, house, "Count to ten.", temperature=0, max_tokens=60)).choices[0].message.content
        middle = len(full) // 2
        stop = full[middle : middle + 3]
        text, _ = await read(await ask(client, house, "Count to ten.", temperature=0, stop=stop, stream=True))
    assert text == full[: full.index(stop)]


async def test_what_clients_counted_is_what_the_ledger_holds(house):
    """A seeded mix of whole, streamed and abandoned answers: the sums agree to the token."""
    rng = random.Random(20)
    counted = []
    before = {row.request_id for row in await house.ledger_rows()}
    async with house.client() as client:

        async def one(turn):
            prompt = f"{rng.choice(PROMPTS)} ({turn})"
            match rng.choice(["whole", "streamed", "abandoned"]):
                case "whole":
                    answer = await ask(client, house, prompt, max_tokens=rng.randint(1, 30), n=rng.choice([1, 1, 2]))
                    counted.append(answer.usage.total_tokens)
                case "streamed":
                    options = {"include_usage": True}
                    stream = await ask(client, house, prompt, max_tokens=30, stream=True, stream_options=options)
                    counted.append((await read(stream))[1].total_tokens)
                case "abandoned":
                    async with house.stream(prompt, max_tokens=1500, ignore_eos=True) as answer:
                        await answer.take(rng.randint(1, 5))

        await asyncio.gather(*(one(turn) for turn in range(40)))
    await house.quiet()
    rows = [row for row in await house.ledger_rows() if row.request_id not in before]
    assert len(rows) == 40
    finished = [row.num_prompt_tokens + row.num_completion_tokens for row in rows if row.status == 200]
    assert sorted(finished) == sorted(counted)
    assert all(1 <= row.num_completion_tokens < 1500 for row in rows)
    assert await house.num_used_blocks() == 0


async def test_a_reader_that_stops_reading_slows_nobody_else(house):
    async with (
        house.stream("Tell me a long story.", max_tokens=1500, ignore_eos=True) as slow,
        house.client() as client,
    ):
        await slow.take(1)
        for prompt in PROMPTS:
            assert (await ask(client, house, prompt, max_tokens=10)).choices[0].finish_reason
        assert len(await slow.text()) > 1000
