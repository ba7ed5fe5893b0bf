"""The exact cache as clients see it: what the header says, what the answer says, and what the ledger keeps."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from policies import policy, settings, wire
from policies.policy import Policy
from tests.builders import until
from tests.gateway.conftest import HELLO
from tests.gateway.peer import Peer

GREEDY: dict[str, Any] = {"temperature": 0}


async def outcome_of(task: asyncio.Task[Any]) -> tuple[str, Any]:
    raw = await task
    return raw.headers["x-penstock-cache"], raw.parse()


def ask(front, **others: Any) -> asyncio.Task[Any]:
    """A chat completion under way, with its headers."""
    call = {"model": "demo", "messages": HELLO, **GREEDY, **others}
    return asyncio.create_task(front.client.chat.completions.with_raw_response.create(**call))


async def answered(front, text: str = "Hi there", **others: Any) -> tuple[str, Any]:
    """One that the worker has to answer."""
    asking = ask(front, **others)
    submit = await front.peer.submitted()
    front.peer.say(submit, [*front.ids(text), 3], "stop", num_cached_tokens=2)
    return await outcome_of(asking)


async def test_the_second_time_the_answer_is_the_same_and_nothing_is_computed(front):
    outcome, first = await answered(front)
    assert outcome == "miss"
    outcome, second = await outcome_of(ask(front))
    assert outcome == "hit"
    assert second.choices == first.choices
    assert second.id != first.id, "another request, with a row of its own"
    assert first.usage.prompt_tokens_details.cached_tokens == 2
    assert second.usage.prompt_tokens_details.cached_tokens == 0, "the engine reused nothing: it saw nothing"
    assert (second.usage.prompt_tokens, second.usage.completion_tokens) == (
        first.usage.prompt_tokens,
        first.usage.completion_tokens,
    )
    rows = await front.settled(2)
    assert [(row["status"], row["num_completion_tokens"], row["num_cached_tokens"]) for row in rows] == [
        (200, first.usage.completion_tokens, 2),
        (200, first.usage.completion_tokens, 0),
    ]
    assert front.peer.is_quiet()


async def test_an_answer_that_ends_without_an_end_token_is_kept_to_its_last_word(front):
    asking = ask(front)
    submit = await front.peer.submitted()
    front.peer.say(submit, front.ids('{"city": "Paris"}'))
    front.peer.say(submit, [], "stop")  # its grammar allowed nothing more
    _, first = await outcome_of(asking)
    outcome, second = await outcome_of(ask(front))
    assert outcome == "hit"
    assert first.choices[0].message.content == second.choices[0].message.content == '{"city": "Paris"}'


async def test_many_log_probabilities_are_told_again_a_few_at_a_time(front):
    told = {**GREEDY, "n": 2, "logprobs": True, "top_logprobs": 2, "stop": ["END"]}
    asking, token_ids = front.chat(**told), front.ids("a river ") * 20
    submit = await front.peer.submitted()
    for index, text in enumerate(("naïve", "END")):
        ids = token_ids + front.ids(text)
        logprobs = [wire.TokenLogprob(-1.0 - place - index / 2, [4, 5], [-1.0, -2.0]) for place in range(len(ids))]
        front.peer.say(submit, ids, "length", index=index, logprobs=logprobs)
    first = await asking
    stream = await front.chat(**told, stream=True, stream_options={"include_usage": True})
    assert stream.response.headers["x-penstock-cache"] == "hit"
    chunks = [chunk async for chunk in stream]
    for choice in first.choices:
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices and chunk.choices[0].index == choice.index]
        entries = [each.logprobs.content for each in mine if each.logprobs]
        assert [each for some in entries for each in some] == choice.logprobs.content
        assert max(map(len, entries)) <= 32 < len(choice.logprobs.content)
        assert "".join(each.delta.content or "" for each in mine) == choice.message.content
        assert mine[-1].finish_reason == choice.finish_reason
    assert chunks[-1].usage.completion_tokens == first.usage.completion_tokens


async def test_an_answer_that_was_given_whole_is_replayed_as_a_stream_and_back(front):
    await answered(front)
    stream = await front.chat(**GREEDY, stream=True, stream_options={"include_usage": True})
    assert stream.response.headers["x-penstock-cache"] == "hit"
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hi there"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage.completion_tokens == len(front.ids("Hi there")) + 1
    outcome, _ = await outcome_of(ask(front))
    assert outcome == "hit"


async def test_a_stream_and_a_body_share_one_flight_though_the_first_hangs_up(front):
    stream = await begun_stream(front)
    joined = ask(front)
    other_stream = asyncio.create_task(
        front.client.chat.completions.create(model="demo", messages=HELLO, stream=True, **GREEDY)
    )
    await until(lambda: len(readers(front)) == 3)
    await stream.close()
    submit = front.submit
    (row,) = await front.settled(1)
    assert row["status"] == 499
    front.peer.say(submit, front.ids(" there"))
    front.peer.say(submit, [3], "stop")
    outcome, body = await outcome_of(joined)
    assert outcome == "shared"
    assert body.choices[0].message.content == "Hi there"
    chunks = [chunk async for chunk in await other_stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hi there"
    assert front.peer.is_quiet(), "nothing was cancelled, and nothing computed twice"
    assert [row["status"] for row in await front.settled(3)] == [499, 200, 200]


async def begun_stream(front) -> Any:
    """A stream whose first token the client has."""
    opening = front.chat(**GREEDY, stream=True)
    front.submit = await front.peer.submitted()
    front.peer.say(front.submit, front.ids("Hi"))
    stream = await opening
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    return stream


def readers(front) -> list[Any]:
    return [reader for run in front.gw.cache._runs.values() for reader in run.readers]


async def test_when_everybody_has_hung_up_the_worker_hears_of_it(front):
    stream = await begun_stream(front)
    joined = ask(front)
    await until(lambda: len(readers(front)) == 2)
    await stream.close()
    joined.cancel()
    assert (await front.peer.cancelled()).request_id == front.submit.request_id


@pytest.mark.parametrize(
    ("others", "headers", "outcomes"),
    [
        ({}, {"cache-control": "no-store"}, ["bypass", "bypass"]),
        ({}, {"cache-control": "no-cache"}, ["miss", "miss"]),
        ({"temperature": 1}, {}, ["bypass", "bypass"]),
        ({"temperature": 1, "seed": 7}, {}, ["miss", "hit"]),
        ({"temperature": 0, "logprobs": False}, {}, ["miss", "hit"]),
    ],
    ids=str,
)
async def test_which_requests_take_part(front, others, headers, outcomes):
    seen = []
    for expected in outcomes:
        asking = ask(front, **others, extra_headers=headers)
        if expected != "hit":
            front.peer.say(await front.peer.submitted(), [*front.ids("Hi"), 3], "stop")
        seen.append((await outcome_of(asking))[0])
    assert seen == outcomes


async def test_a_policy_turns_it_off_or_lets_every_request_in(open_front):
    off = Policy(cache=policy.Cache(exact="off"))
    async with open_front(policies={"default": off}) as front:
        assert [(await answered(front))[0] for _ in range(2)] == ["bypass", "bypass"]


async def test_sampled_answers_are_kept_where_the_policy_says_so(open_front):
    every = Policy(cache=policy.Cache(exact="all"))
    async with open_front(policies={"default": every}) as front:
        assert (await answered(front, temperature=1))[0] == "miss"
        assert (await outcome_of(ask(front, temperature=1)))[0] == "hit"
        assert (await answered(front, temperature=0.9))[0] == "miss"


async def test_a_stop_string_ends_a_replay_where_it_ended_the_answer(front):
    asking = ask(front, stop=[" the"])
    submit = await front.peer.submitted()
    front.peer.say(submit, front.ids("Hi there"))
    cancel = await front.peer.cancelled()
    front.peer.say(submit, front.ids(" you"), index=cancel.index or 0)
    front.peer.say(submit, [], "cancelled")
    outcome, first = await outcome_of(asking)
    assert (outcome, first.choices[0].message.content, first.choices[0].finish_reason) == ("miss", "Hi", "stop")
    outcome, second = await outcome_of(ask(front, stop=[" the"]))
    assert outcome == "hit"
    assert second.choices == first.choices
    assert second.usage.completion_tokens == first.usage.completion_tokens
    assert (await answered(front))[0] == "miss", "without it the answer is another one"


async def test_a_replay_tells_a_stop_string_to_whom_it_is_to_be_told(front):
    asking = ask(front, stop=[" the"])
    submit = await front.peer.submitted()
    front.peer.say(submit, front.ids("Over the hill"))
    await front.peer.cancelled()
    front.peer.say(submit, [], "cancelled")
    assert (await outcome_of(asking))[1].choices[0].message.content == "Over"
    for keeps in (True, False):
        outcome, again = await outcome_of(ask(front, stop=[" the"], extra_body={"include_stop_str_in_output": keeps}))
        assert (outcome, again.choices[0].message.content) == ("hit", "Over the" if keeps else "Over")


async def test_prompts_of_one_completion_are_found_together(front):
    async def complete(prompts: list[str]) -> tuple[str, Any]:
        call = front.client.completions.with_raw_response.create(
            model="demo", prompt=prompts, n=2, echo=True, max_tokens=4, temperature=0
        )
        asking = asyncio.create_task(call)
        if prompts != again:
            for _ in prompts:
                submit = await front.peer.submitted()
                for index in (1, 0):
                    ids = front.ids(f" {len(submit.prompt_token_ids)}{index}")
                    front.peer.say(submit, ids, "length", index=index)
        return await outcome_of(asking)

    again: list[str] = []
    seen = [await complete(["one", "one two three"])]
    again = ["one", "one two three"]
    seen += [await complete(again), await complete(["one two three", "one"])]
    assert [outcome for outcome, _ in seen] == ["miss", "hit", "miss"]
    assert seen[1][1].choices == seen[0][1].choices
    assert len({choice.text for choice in seen[0][1].choices}) == 4


async def test_a_failure_is_told_to_all_who_wait_and_kept_for_nobody(front):
    asking = [ask(front), ask(front)]
    submit = await front.peer.submitted()
    await until(lambda: len(readers(front)) == 2)
    front.peer.send(wire.Failed(submit.request_id, "overloaded", "no"))
    for failed in await asyncio.gather(*asking, return_exceptions=True):
        assert failed.status_code == 503
    assert (await answered(front))[0] == "miss"


async def test_nothing_is_kept_without_room_for_it_but_equal_requests_still_share(open_front):
    async with open_front(cache=settings.Cache(max_bytes=0)) as front:
        asking = [ask(front), ask(front)]
        submit = await front.peer.submitted()
        await until(lambda: len(readers(front)) == 2)
        front.peer.say(submit, [*front.ids("Hi"), 3], "stop")
        assert sorted([(await outcome_of(task))[0] for task in asking]) == ["miss", "shared"]
        assert (await answered(front))[0] == "miss"


async def test_an_answer_longer_than_one_may_be_is_not_kept(open_front):
    async with open_front(cache=settings.Cache(max_entry_bytes=20)) as front:
        assert [(await answered(front))[0] for _ in range(2)] == ["miss", "miss"]


async def test_every_prefix_carries_the_salt_of_its_tenant(front):
    asking = [ask(front), ask(front, temperature=1)]
    salts = set()
    for _ in asking:
        submit = await front.peer.submitted()
        salts.add(submit.cache_salt)
        front.peer.say(submit, [3], "stop")
    await asyncio.gather(*asking)
    (salt,) = salts
    assert len(salt) == 16


async def test_what_a_client_salts_is_kept_for_equal_salts_alone(front):
    outcomes = [(await answered(front))[0]]
    for salt in ("ann", "bob"):
        outcomes += [(await answered(front, extra_body={"cache_salt": salt}))[0]]
    for salt in (None, "ann", "bob"):
        outcomes += [(await outcome_of(ask(front, extra_body={"cache_salt": salt})))[0]]
    assert outcomes == ["miss"] * 3 + ["hit"] * 3


async def test_so_are_the_prefixes_of_its_prompts(open_front):
    asked: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": HELLO},
        "/v1/completions": {"prompt": "Hello"},
        "/v1/responses": {"input": "Hello"},
        "/v1/responses/compact": {"input": "Hello"},
        "/v1/embeddings": {"input": "Hello"},
    }
    async with open_front(peer=Peer(pooling=wire.Pooling("mean"), num_dimensions=2)) as front:
        for path, said in asked.items():
            salts = []
            for salt in (None, "ann", "ann", "bob"):
                asking = asyncio.create_task(front.post(path, {"model": "demo", **said, "cache_salt": salt}))
                submit = await front.peer.submitted()
                salts.append(submit.cache_salt)
                front.peer.send(wire.Failed(submit.request_id, "overloaded", "no"))
                await asking
            assert salts[1] == salts[2], path
            assert (len(set(salts)), {len(salt) for salt in salts}) == (3, {16}), path
            status, refusal, _ = await front.post(path, {"model": "demo", **said, "cache_salt": ""})
            assert (status, refusal["error"]["param"]) == (400, "cache_salt"), path
