"""Log-probabilities of prompts are those that transformers finds, however a prompt is cut, lost and found."""

from __future__ import annotations

import contextlib
import itertools
import random
import time

import pytest
import torch

from policies import framing, wire
from policies.terms import Sampling
from tests.worker.peer import Peer, running
from tests.worker.test_vectors import engine_of, loaded, some_texts
from tests.worker.tiny import checkpoint
from worker.admission import refusal
from worker.channel import listen
from worker.loop import Loop


def submit(request_id, token_ids, num_top=2, num_sequences=1, **others):
    sampling = Sampling(4, num_logprobs=0, num_prompt_logprobs=num_top, ignore_eos=True)
    return wire.Submit(request_id, token_ids, sampling, num_sequences, **others)


def answered(engine, *submits):
    """All deltas of each."""
    told = {each.request_id: [] for each in submits}
    for each in submits:
        assert engine.add(each) is None
    for _ in range(10_000):
        if not engine.has_work:
            return told
        deltas, failed = engine.step()
        assert not failed
        engine.audit()
        for delta in deltas:
            if delta.request_id in told:
                told[delta.request_id].append(delta)
    raise AssertionError("the engine does not come to an end")


@torch.inference_mode()
def assert_told(model, token_ids, deltas, num_top):
    """Once, with the first token, and as it is."""
    assert [delta.prompt_logprobs is None for delta in deltas] == [False] + [True] * (len(deltas) - 1)
    told = deltas[0].prompt_logprobs
    assert deltas[0].token_ids
    logprobs = model(torch.tensor([token_ids])).logits[0].log_softmax(-1)
    assert len(told) == len(token_ids) - 1
    for position, each in enumerate(told):
        row = logprobs[position]
        assert each.logprob == pytest.approx(row[token_ids[position + 1]].item(), abs=1e-3)
        assert each.top_logprobs == pytest.approx(row.topk(num_top).values.tolist(), abs=1e-3)
        assert len(each.top_token_ids) == num_top
        assert all(
            row[i].item() == pytest.approx(p, abs=1e-3)
            for i, p in zip(each.top_token_ids, each.top_logprobs, strict=True)
        )


@pytest.mark.parametrize("num_top", [0, 3])
def test_they_are_those_of_transformers_in_chunks_and_beside_answers(tmp_path, num_top):
    model = checkpoint(tmp_path, "Qwen3ForCausalLM", head_dim=16)
    engine = engine_of(loaded(tmp_path), max_step_tokens=32, max_sequences=8)
    for number in range(3):
        engine.add(wire.Submit(f"answer-{number}", [3 + number] * 20, Sampling(12, ignore_eos=True)))
    texts = some_texts(1)
    submits = [submit(str(number), text, num_top) for number, text in enumerate(texts)]
    random.Random(2).shuffle(submits)
    told = answered(engine, *submits)
    for number, text in enumerate(texts):
        assert_told(model, text, told[str(number)], num_top)


def test_more_of_the_likeliest_than_there_are_tokens_are_all_of_them(tmp_path):
    model = checkpoint(tmp_path, "Qwen3ForCausalLM", head_dim=16)
    runner = loaded(tmp_path)
    engine = engine_of(runner, max_step_tokens=32, max_sequences=8)
    text = max(some_texts(1), key=len)[:9]
    told = answered(engine, submit("a", text, 1 << 40), wire.Submit("beside it", text, Sampling(4)))
    assert_told(model, text, told["a"], runner.vocab_size)
    assert told["beside it"]
    assert engine.add(submit("b", text, -1)).code == "invalid_request"


def test_they_outlast_memory_that_runs_out_while_they_are_found(tmp_path, monkeypatch):
    model = checkpoint(tmp_path, "Qwen3ForCausalLM", head_dim=16)
    runner = loaded(tmp_path)
    engine = engine_of(runner, max_step_tokens=32, max_sequences=8)
    logits_of, times = runner.logits_of, itertools.count()

    def short(hidden):
        if next(times) in (2, 7, 20):
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
        return logits_of(hidden)

    monkeypatch.setattr(runner, "logits_of", short)
    monkeypatch.setattr("worker.scoring.ROWS", 8)
    texts = some_texts(1)
    told = answered(engine, *[submit(str(number), text, 1) for number, text in enumerate(texts)])
    for number, text in enumerate(texts):
        assert_told(model, text, told[str(number)], 1)


def test_what_the_prefix_cache_holds_hides_none_of_them(tmp_path):
    model = checkpoint(tmp_path, "LlamaForCausalLM")
    engine = engine_of(loaded(tmp_path))
    (text,) = some_texts(4, (80,))
    answered(engine, wire.Submit("before", text, Sampling(4, ignore_eos=True)))
    told = answered(engine, submit("now", text))["now"]
    assert_told(model, text, told, 2)
    assert told[-1].finish.num_cached_tokens == 0
    again = answered(engine, wire.Submit("after", text, Sampling(4, ignore_eos=True)))["after"]
    assert again[-1].finish.num_cached_tokens > 0


def test_several_answers_to_one_prompt_are_told_of_it_once(tmp_path):
    model = checkpoint(tmp_path, "LlamaForCausalLM")
    engine = engine_of(loaded(tmp_path), max_step_tokens=16)
    (text,) = some_texts(5, (50,))
    told = answered(engine, submit("a", text, num_sequences=3))["a"]
    assert_told(model, text, told, 2)
    assert {delta.index for delta in told} == {0, 1, 2}


def test_they_outlast_a_pool_that_is_too_small(tmp_path):
    model = checkpoint(tmp_path, "LlamaForCausalLM")
    bytes_a_block = 2 * 3 * 2 * 8 * 8 * 4
    engine = engine_of(loaded(tmp_path, max_kv_bytes=18 * bytes_a_block), max_step_tokens=16, max_sequences=6)
    texts = some_texts(3, (60, 70, 33, 80, 12, 95))
    for number, text in enumerate(texts):
        assert engine.add(wire.Submit(f"answer-{number}", text[:9], Sampling(30, ignore_eos=True))) is None
    engine.step()
    told = answered(engine, *[submit(str(number), text, 2, 1, priority=-number) for number, text in enumerate(texts)])
    assert engine.stats().num_preemptions
    for number, text in enumerate(texts):
        assert_told(model, text, told[str(number)], 2)


def test_whoever_goes_on_elsewhere_has_told_them_there(tmp_path):
    checkpoint(tmp_path, "LlamaForCausalLM")
    engine = engine_of(loaded(tmp_path))
    told = answered(engine, submit("a", [5, 6, 7], emitted_token_ids={0: [8]}))["a"]
    assert all(delta.prompt_logprobs is None for delta in told)


def test_prompts_that_are_told_in_one_step_need_a_frame_each(tmp_path, monkeypatch):
    checkpoint(tmp_path, "LlamaForCausalLM")
    runner = loaded(tmp_path)
    engine, address = engine_of(runner), f"unix:{tmp_path}/worker"
    ready = wire.Ready("tiny", 1024, runner.vocab_size, [0], 4, 256, 8, "cpu", "float32", 1)
    with contextlib.closing(listen(address)) as listener:
        loop = Loop(engine, listener, wire.Hello(wire.VERSION, "tiny-0"), ready, time.monotonic)
        with running(loop), Peer(address) as gateway:
            submits = [submit(str(number), text, 2) for number, text in enumerate(some_texts(5, (40, 41, 42)))]
            monkeypatch.setattr(framing, "MAX_FRAME_BYTES", 2000)  # two of them do not fit
            gateway.send(*submits)
            for each in submits:
                assert len(gateway.finish(each.request_id)) == 4


def test_a_model_that_cannot_say_them_says_so(tmp_path):
    checkpoint(tmp_path, "LlamaForCausalLM")
    runner = loaded(tmp_path)
    runner.scores_prompts = False
    refused = refusal(submit("a", [5, 6, 7]), runner)
    assert refused is not None
    assert refused.code == "invalid_request"
    assert "log-probabilities of prompts" in refused.reason
