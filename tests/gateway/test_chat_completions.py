"""POST /v1/chat/completions as OpenAI's own client sees it, whole and streamed."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
import sqlalchemy as sa

from gateway import store
from policies import settings, wire
from tests.builders import an_entry
from tests.gateway.conftest import HELLO, KEY, Front


async def test_an_answer_has_text_usage_and_a_row_in_the_ledger(front: Front):
    call = front.chat(max_tokens=20, seed=7)
    submit = await front.peer.submitted()
    assert submit.sampling.max_tokens == 20
    assert submit.sampling.seed == 7
    front.peer.say(submit, front.ids("The capital is "))
    front.peer.say(submit, [*front.ids("Arden."), 3], "stop", num_cached_tokens=2)
    answer = await call
    assert answer.choices[0].message.content == "The capital is Arden."
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    num_tokens = len(front.ids("The capital is ")) + len(front.ids("Arden.")) + 1
    assert answer.usage.prompt_tokens == len(submit.prompt_token_ids)
    assert answer.usage.completion_tokens == num_tokens
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + num_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0
    assert answer.service_tier == "default"
    assert answer.system_fingerprint.startswith("fp_")
    (row,) = front.rows()
    assert row["request_id"] == submit.request_id == answer._request_id
    assert (row["status"], row["finish_reason"], row["num_completion_tokens"]) == (200, "stop", num_tokens)
    assert (row["num_prompt_tokens"], row["num_cached_tokens"]) == (answer.usage.prompt_tokens, 2)
    assert row["duration_ms"] >= row["ttft_ms"] > 0


TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_client_says_of_its_request_is_in_the_ledger(open_front, store_settings, stream):
    """Also what PostgreSQL cannot write as it is, and would refuse with all that is written beside it."""
    async with open_front(store=store_settings) as front:
        call = front.chat(
            stream=stream,
            user="me\0\N{SNOWMAN}",
            safety_identifier="i" * 128,
            metadata={"team": "a\0b", "k\0": '"\\u0000"'},
            extra_headers={"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"},
        )
        front.peer.say(await front.peer.submitted(), [3], "stop")
        answer = await call
        if stream:
            async for _ in answer:
                pass
        await front.gw.ledger.settle(an_entry())
        async with front.gw.store.engine.connect() as connection:
            row, other = (await connection.execute(sa.select(store.ledger).order_by("position"))).all()
    assert (row.end_user, row.safety_identifier, row.trace_id) == ("me\ufffd\N{SNOWMAN}", "i" * 128, TRACE)
    assert json.loads(row.metadata) == {"team": "a\ufffdb", "k\ufffd": '"\\u0000"'}
    assert (other.end_user, other.safety_identifier, other.metadata, other.trace_id) == (None, None, None, None)


async def test_the_prompt_is_the_rendered_conversation(front: Front):
    call = front.chat(messages=[{"role": "system", "content": "Be brief."}, *HELLO])
    submit = await front.peer.submitted()
    rendered = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert submit.prompt_token_ids == front.ids(rendered)
    front.peer.say(submit, [3], "stop")
    assert (await call).choices[0].message.content == ""


async def test_a_stream_gives_the_same_text_piece_by_piece(front: Front):
    call = front.chat(stream=True, stream_options={"include_usage": True})
    submit = await front.peer.submitted()
    tokens = front.ids("Seven white stones 🙂!")
    front.peer.say(submit, tokens[:1])
    stream = await call
    first = await anext(stream)
    assert first.choices[0].delta.role == "assistant"
    assert first.choices[0].delta.content == ""
    texts, ids, created = [], {first.id}, {first.created}
    for token in tokens[1:]:
        front.peer.say(submit, [token])
    front.peer.say(submit, [3], "stop", num_cached_tokens=1)
    chunks = [chunk async for chunk in stream]
    *body, last, usage = chunks
    for chunk in body:
        assert chunk.object == "chat.completion.chunk"
        assert chunk.choices[0].finish_reason is None
        assert chunk.usage is None
        texts.append(chunk.choices[0].delta.content)
    ids |= {chunk.id for chunk in chunks}
    created |= {chunk.created for chunk in chunks}
    assert "".join(texts) == "Seven white stones 🙂!"
    assert all("\ufffd" not in text for text in texts)
    assert len(ids) == len(created) == 1
    assert last.choices[0].finish_reason == "stop"
    assert usage.choices == []
    assert usage.usage.completion_tokens == len(tokens) + 1
    assert usage.usage.prompt_tokens_details.cached_tokens == 1


async def test_each_choice_of_several_ends_by_itself(front: Front):
    call = front.chat(n=2)
    submit = await front.peer.submitted()
    assert submit.num_sequences == 2
    front.peer.say(submit, front.ids("one"), index=0)
    front.peer.say(submit, [*front.ids("two"), 3], "stop", index=1, num_cached_tokens=9)
    front.peer.say(submit, front.ids(" stone"), "length", index=0)
    answer = await call
    assert [(choice.index, choice.message.content, choice.finish_reason) for choice in answer.choices] == [
        (0, "one stone", "length"),
        (1, "two", "stop"),
    ]
    assert answer.usage.prompt_tokens == len(submit.prompt_token_ids)
    # The sibling found the prefill that both share, which was computed all the same.
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    (row,) = front.rows()
    assert (row["num_sequences"], row["finish_reason"]) == (2, "length,stop")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_across_tokens_ends_the_answer_and_the_sequence(front: Front, stream: bool):
    call = front.chat(stop=["\n\nHuman:"], stream=stream)
    submit = await front.peer.submitted()
    tokens = front.ids("Yes.\n\nHuman: and")
    ends = next(n for n in range(len(tokens)) if "\n\nHuman:" in front.text.decode(tokens[:n]))
    for token in tokens:
        front.peer.say(submit, [token])
    cancel = await front.peer.cancelled()
    assert (cancel.request_id, cancel.index) == (submit.request_id, 0)
    front.peer.say(submit, [], "cancelled", num_cached_tokens=4)
    answer = await call
    if stream:
        chunks = [chunk async for chunk in answer]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Yes."
        assert chunks[-1].choices[0].finish_reason == "stop"
    else:
        assert answer.choices[0].message.content == "Yes."
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens == ends
        assert answer.usage.prompt_tokens_details.cached_tokens == 4
    (row,) = front.rows()
    assert (row["finish_reason"], row["num_completion_tokens"], row["num_cached_tokens"]) == ("stop", ends, 4)


async def test_a_worker_that_is_lost_after_the_stop_string_costs_nothing(front: Front):
    call = front.chat(stop="stone")
    submit = await front.peer.submitted()
    front.peer.say(submit, front.ids("white stone"))
    await front.peer.cancelled()
    front.peer.hang_up()
    assert (await call).choices[0].message.content == "white "


async def test_logprobs_come_with_token_and_bytes(front: Front):
    call = front.chat(logprobs=True, top_logprobs=2, stream=True)
    submit = await front.peer.submitted()
    assert submit.sampling.num_logprobs == 2
    tokens = front.ids("🙂 ok")
    logprobs = [wire.TokenLogprob(-0.5, [token, 300], [-0.5, float("-inf")]) for token in tokens]
    for token, logprob in zip(tokens, logprobs, strict=True):
        front.peer.say(submit, [token], logprobs=[logprob])
    front.peer.say(submit, [3], "stop", logprobs=[logprobs[0]])
    entries = [
        entry
        async for chunk in await call
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content
    ]
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == "🙂 ok"
    assert entries[0].token == "\\xf0"
    assert entries[0].logprob == -0.5
    assert [top.logprob for top in entries[0].top_logprobs] == [-0.5, -9999.0]
    assert len(entries) == len(tokens)


async def test_a_last_token_without_text_has_its_logprob_in_a_stream_too(front: Front):
    call = front.chat(logprobs=True, stream=True, extra_body={"ignore_eos": True})
    submit = await front.peer.submitted()
    front.peer.say(submit, front.ids("so"), logprobs=[wire.TokenLogprob(-1.0, [], []) for _ in front.ids("so")])
    front.peer.say(submit, [3], "length", logprobs=[wire.TokenLogprob(-2.0, [], [])])
    chunks = [chunk.choices[0] async for chunk in await call]
    entries = [entry for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content]
    assert [entry.token for entry in entries][-1] == "<|im_end|>"
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "so"


async def test_logprobs_of_a_whole_answer(front: Front):
    call = front.chat(logprobs=True)
    submit = await front.peer.submitted()
    tokens = front.ids("stones")
    front.peer.say(submit, tokens, "length", logprobs=[wire.TokenLogprob(-1.0, [], []) for _ in tokens])
    entries = (await call).choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == "stones"
    assert all(entry.top_logprobs == [] for entry in entries)


async def test_no_top_logprobs_are_none_at_all(front: Front):
    call = front.chat(logprobs=False, top_logprobs=0)
    submit = await front.peer.submitted()
    assert submit.sampling.num_logprobs is None
    front.peer.say(submit, front.ids("stones"), "length")
    assert (await call).choices[0].logprobs is None


async def test_vllms_sampling_extras_reach_the_worker(front: Front):
    extras = {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "min_tokens": 2,
        "stop_token_ids": [7],
        "ignore_eos": True,
    }
    call = front.chat(max_completion_tokens=9, max_tokens=100, logit_bias={"5": -100}, top_p=0, extra_body=extras)
    submit = await front.peer.submitted()
    sampling = submit.sampling
    assert (sampling.max_tokens, sampling.top_k, sampling.min_p, sampling.min_tokens) == (9, 5, 0.1, 2)
    assert (sampling.repetition_penalty, sampling.stop_token_ids, sampling.ignore_eos) == (1.2, (7,), True)
    assert sampling.logit_bias == {5: -100.0}
    assert 0 < sampling.top_p < 0.001
    front.peer.say(submit, [3], "stop")
    await call


async def test_without_a_ceiling_the_answer_may_fill_the_context(front: Front):
    call = front.chat()
    submit = await front.peer.submitted()
    assert submit.sampling.max_tokens == 4096 - len(submit.prompt_token_ids)
    front.peer.say(submit, [3], "stop")
    await call


async def test_requests_without_a_seed_draw_one(front: Front):
    calls = [front.chat(), front.chat()]
    submits = [await front.peer.submitted(), await front.peer.submitted()]
    assert submits[0].sampling.seed != submits[1].sampling.seed
    for submit in submits:
        front.peer.say(submit, [3], "stop")
    await asyncio.gather(*calls)


async def test_every_answer_is_named_and_timed(front: Front):
    call = asyncio.create_task(front.post("/v1/chat/completions", {"model": "demo", "messages": HELLO}))
    submit = await front.peer.submitted()
    front.peer.say(submit, [3], "stop")
    _, body, headers = await call
    assert headers["x-request-id"] == submit.request_id
    assert body["id"] == "chatcmpl-" + submit.request_id.removeprefix("req_")
    assert headers["openai-version"] == "2020-10-01"
    assert int(headers["openai-processing-ms"]) >= 0
    status, _, refused = await front.post("/v1/chat/completions", {})
    assert status == 400
    assert refused["x-request-id"].startswith("req_")
    caller = front.gw.auth.caller(KEY)
    assert caller is not None
    assert headers["openai-organization"] == refused["openai-organization"] == caller.organization_id
    status, _, unknown = await front.post("/v1/chat/completions", {}, authorization="Bearer sk-wrong")
    assert (status, "openai-organization" in unknown) == (401, False)


async def test_the_worker_may_refuse_before_the_stream_begins(front: Front):
    call = front.chat(stream=True)
    submit = await front.peer.submitted()
    front.peer.send(wire.Failed(submit.request_id, "overloaded", "no room"))
    with pytest.raises(openai.InternalServerError) as refused:
        await call
    assert refused.value.status_code == 503
    assert refused.value.response.headers["retry-after-ms"] == "1000"
    (row,) = await front.settled(1)
    assert (row["status"], row["num_prompt_tokens"], row["finish_reason"]) == (503, 0, "error")


async def test_a_failure_in_mid_stream_is_its_last_event(open_front):
    async with open_front(workers=settings.Workers(max_failovers=0)) as front:
        call = front.chat(stream=True)
        submit = await front.peer.submitted()
        front.peer.say(submit, front.ids("The answer"))
        stream = await call
        await anext(stream)
        front.peer.hang_up()
        with pytest.raises(openai.APIError, match="worker"):
            async for _ in stream:
                pass
        (row,) = await front.settled(1)
        assert (row["status"], row["num_completion_tokens"]) == (503, len(front.ids("The answer")))


async def test_tools_are_shown_to_the_template(open_front):
    template = "{% for tool in tools %}{{ tool.function.name }} {% endfor %}{{ messages[0].content }}"
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    async with open_front(model={"template": template}) as front:
        call = front.chat(tools=[tool])
        submit = await front.peer.submitted()
        assert submit.prompt_token_ids == front.ids("weather Hello")
        front.peer.say(submit, [3], "stop")
        await call


async def test_a_client_that_hangs_up_while_it_waits_is_cancelled_and_settled(front: Front):
    call = asyncio.create_task(front.post("/v1/chat/completions", {"model": "demo", "messages": HELLO}))
    submit = await front.peer.submitted()
    front.peer.say(submit, front.ids("Once"))
    call.cancel()
    assert (await front.peer.cancelled()).request_id == submit.request_id
    front.peer.say(submit, [], "cancelled")
    (row,) = await front.settled(1)
    assert (row["status"], row["finish_reason"]) == (499, "cancelled")
    assert row["num_prompt_tokens"] == len(submit.prompt_token_ids)


async def test_a_client_that_hangs_up_in_mid_stream_owes_what_it_was_sent(front: Front):
    call = front.chat(stream=True)
    submit = await front.peer.submitted()
    front.peer.say(submit, front.ids("Once upon"))
    stream = await call
    await anext(stream)
    await anext(stream)
    await stream.close()
    assert (await front.peer.cancelled()).request_id == submit.request_id
    front.peer.say(submit, front.ids(" a time"))
    front.peer.say(submit, [], "cancelled")
    (row,) = await front.settled(1)
    assert (row["status"], row["num_completion_tokens"]) == (499, len(front.ids("Once upon")))
