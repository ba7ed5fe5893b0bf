"""Whole answers by the engine on tiny random models: what transformers generates, whatever the schedule."""

import itertools
import math
import random
from functools import cache

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import wire
from policies.settings import Engine as EngineSettings
from policies.settings import Speculation
from policies.terms import Sampling
from tests.worker.test_models import LATENT
from tests.worker.tiny import VOCAB_SIZE, checkpoint
from worker.engine import Engine
from worker.runner import Runner
from worker.sampler import Sampler

BLOCK_SIZE = 8
MAX_TOKENS = 14
FAMILIES = {
    "llama": ("LlamaForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 9}),
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}),
    "gemma2": ("Gemma2ForCausalLM", {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 24}),
    "gemma3": ("Gemma3ForCausalLM", {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 24}),
    "phi3": ("Phi3ForCausalLM", {"partial_rotary_factor": 0.5}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4, "sliding_window": 9}),
    "gpt-oss": (
        "GptOssForCausalLM",
        {"head_dim": 16, "sliding_window": 9, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "deepseek-v3": ("DeepseekV3ForCausalLM", {**LATENT, "n_routed_experts": 4}),
}
STEMS = [[random.Random(seed).randrange(3, VOCAB_SIZE) for _ in range(60)] for seed in range(3)]


class Families:
    """Each model once: as transformers has it, and on our runner with a pool of 64 blocks."""

    def __init__(self, directory):
        self.directory = directory
        self.oracle = cache(self._oracle)
        self.runner = cache(self._runner)
        self.generated = cache(self._generated)

    def _oracle(self, family):
        architecture, changes = FAMILIES[family]
        return checkpoint(self.directory / family, architecture, **changes)

    def _runner(self, family):
        self.oracle(family)
        runner = Runner.load(
            str(self.directory / family),
            EngineSettings(device="cpu", dtype="float32", num_threads=1, block_size=BLOCK_SIZE, max_kv_bytes=8 << 20),
        )
        assert runner.num_blocks >= 64
        return runner

    def _generated(self, family, prompt):
        """MAX_TOKENS tokens of greedy generate."""
        whole = self.oracle(family).generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            eos_token_id=None,
        )
        return whole[0, len(prompt) :].tolist()

    def engine(self, family, num_blocks=64, **changes):
        runner = self.runner(family)
        runner.num_blocks = num_blocks  # fewer than there are: the rest stays untouched
        ticks = itertools.count()
        sampler = Sampler(runner.vocab_size, runner.eos_token_ids)
        return Engine(runner, sampler, EngineSettings(**changes), lambda: float(next(ticks)))


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    return Families(tmp_path_factory.mktemp("families"))


def run(engine, arrivals):
    """Steps until all is answered; ``arrivals`` are (step, Submit). The answers and finishes by (request id, index)."""
    answers, finishes = {}, {}
    arrivals = sorted(arrivals, key=lambda arrival: arrival[0])
    for step in itertools.count():
        while arrivals and arrivals[0][0] <= step:
            assert engine.add(arrivals.pop(0)[1]) is None
        if not arrivals and not engine.has_work:
            return answers, finishes
        deltas, failed = engine.step()
        engine.audit()
        assert not failed
        for delta in deltas:
            answers.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
            if delta.finish:
                finishes[delta.request_id, delta.index] = delta.finish
        assert step < 5000


@st.composite
def schedules(draw):
    """Requests with when they come, and an engine for them; many begin alike, and blocks are few."""
    arrivals = []
    for number in range(draw(st.integers(1, 6))):
        stem = draw(st.sampled_from(STEMS))
        prompt = stem[: draw(st.sampled_from([1, 7, 8, 16, 24, 33, 48]))]
        prompt = prompt + draw(st.sampled_from([[], [5], [6, 7, 8]]))
        submit = wire.Submit(
            request_id=str(number),
            prompt_token_ids=prompt,
            sampling=Sampling(max_tokens=draw(st.integers(1, MAX_TOKENS)), temperature=0.0, ignore_eos=True),
            num_sequences=draw(st.sampled_from([1, 1, 2])),
            priority=draw(st.sampled_from([0, 0, 1])),
        )
        arrivals.append((draw(st.integers(0, 12)), submit))
    changes = {
        "num_blocks": draw(st.sampled_from([9, 12, 64])),
        "max_step_tokens": draw(st.sampled_from([3, 16, 200])),
        "max_prefill_tokens_beside_decodes": draw(st.sampled_from([1, 5, 64])),
        "max_sequences": draw(st.sampled_from([1, 2, 8])),
        "prefix_cache": draw(st.sampled_from([True, True, False])),
    }
    return arrivals, changes


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=25, deadline=None)
@given(schedule=schedules())
def test_greedy_answers_are_those_of_generate_on_any_schedule(families, family, schedule):
    arrivals, changes = schedule
    answers, _ = run(families.engine(family, **changes), arrivals)
    for _, submit in arrivals:
        expected = families.generated(family, tuple(submit.prompt_token_ids))[: submit.sampling.max_tokens]
        for index in range(submit.num_sequences):
            assert answers[submit.request_id, index] == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_are_those_of_generate_after_preemption_and_from_the_cache(families, family):
    def asking(name, prompt, priority=0):
        return wire.Submit(
            name, prompt, Sampling(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True), priority=priority
        )

    prompts = {"first": STEMS[0][:30], "second": STEMS[1][:29], "urgent": STEMS[2][:33], "again": STEMS[1][:29]}
    arrivals = [
        (0, asking("first", prompts["first"], 1)),
        (0, asking("second", prompts["second"], 1)),
        (6, asking("urgent", prompts["urgent"], 0)),
        (40, asking("again", prompts["again"], 1)),
    ]
    # A draft that is right would let one finish before another comes.
    engine = families.engine(family, num_blocks=11, max_step_tokens=20, speculation=Speculation(enabled=False))
    answers, finishes = run(engine, arrivals)
    for name, prompt in prompts.items():
        assert answers[name, 0] == families.generated(family, tuple(prompt))
    assert finishes["second", 0].num_preemptions >= 1
    assert finishes["again", 0].num_cached_tokens >= BLOCK_SIZE


@settings(max_examples=25, deadline=None)
@given(schedule=schedules(), seed=st.integers(0, (1 << 64) - 1))
def test_a_seeded_request_is_answered_alike_alone_and_in_any_crowd(families, schedule, seed):
    arrivals, changes = schedule
    sampling = Sampling(
        max_tokens=MAX_TOKENS,
        seed=seed,
        temperature=1.3,
        top_p=0.95,
        frequency_penalty=0.4,
        repetition_penalty=1.1,
        ignore_eos=True,
        num_logprobs=2,
    )
    seeded = wire.Submit("seeded", STEMS[0][:40], sampling, num_sequences=2, priority=1)
    alone, _ = run(families.engine("llama"), [(0, seeded)])
    crowded, _ = run(families.engine("llama", **changes), [*arrivals, (3, seeded)])
    for index in range(2):
        assert crowded["seeded", index] == alone["seeded", index]
        assert len(alone["seeded", index]) == MAX_TOKENS
    assert alone["seeded", 0] != alone["seeded", 1]


@settings(max_examples=40, deadline=None)
@given(
    schedule=schedules(),
    seed=st.integers(0, (1 << 64) - 1),
    temperature=st.sampled_from([0.0, 1.3]),
    cuts=st.lists(st.integers(0, 2 * MAX_TOKENS), max_size=3).map(sorted),
)
def test_an_answer_that_moves_from_engine_to_engine_is_the_undisturbed_one(families, schedule, seed, temperature, cuts):
    """Each engine is left after so many steps of the answer in all, in the middle of whatever else it does."""
    arrivals, changes = schedule
    whole = wire.Submit(
        "whole",
        STEMS[0][:20],
        Sampling(
            max_tokens=MAX_TOKENS,
            seed=seed,
            temperature=temperature,
            top_p=0.95,
            presence_penalty=0.3,
            frequency_penalty=0.4,
            repetition_penalty=1.1,
            logit_bias={11: 2.0, 12: -100.0},
            min_tokens=6,
            stop_token_ids=(13, 14, 15, 16),
        ),
        num_sequences=2,
    )
    undisturbed, _ = run(families.engine("llama"), [(0, whole)])
    told = {0: [], 1: []}
    ended = set()
    for cut in [*cuts, math.inf]:
        engine = families.engine("llama", **{**changes, "num_blocks": 64})
        left = {index: told[index] for index in told if index not in ended}
        assert engine.add(msgspec.structs.replace(whole, emitted_token_ids=left)) is None
        for _, other in arrivals:
            engine.add(other)
        while len(ended) < 2 and sum(map(len, told.values())) < cut:
            for delta in engine.step()[0]:
                if delta.request_id == "whole":
                    told[delta.index] += delta.token_ids
                    if delta.finish is not None:
                        ended.add(delta.index)
        if len(ended) == 2:
            break
    assert told == {index: undisturbed["whole", index] for index in range(2)}


def test_a_seeded_answer_is_the_same_after_preemption(families):
    seeded = wire.Submit("seeded", STEMS[0][:40], Sampling(max_tokens=MAX_TOKENS, seed=11, ignore_eos=True), priority=1)
    urgent = wire.Submit("urgent", STEMS[1][:40], Sampling(max_tokens=4, seed=2, ignore_eos=True), priority=0)
    alone, _ = run(families.engine("llama"), [(0, seeded)])
    crowded, finishes = run(families.engine("llama", num_blocks=9), [(0, seeded), (5, urgent)])
    assert finishes["seeded", 0].num_preemptions == 1
    assert crowded["seeded", 0] == alone["seeded", 0]
