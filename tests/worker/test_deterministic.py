"""engine.deterministic: the same bits in any company, however prompts are cut, whoever loses blocks."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import wire
from policies.settings import Engine as EngineSettings
from policies.terms import Sampling
from tests.worker.peer import WorkerProcess
from tests.worker.peft_files import adapter_files
from tests.worker.test_speculation import Hindsight, everything
from tests.worker.tiny import Walk, checkpoint
from worker.attention import (
    Extent,
    NativeAttention,
    RepeatableAttention,
    Scores,
    TwoPools,
    WindowedAttention,
)
from worker.engine import Engine
from worker.inputs import Span
from worker.kv_cache import KVCache, KVShape, KVType
from worker.models import ModelError
from worker.models.ops import sigmoids
from worker.native import library
from worker.runner import Runner
from worker.sampler import Sampler
from worker.speculation import Speculation

SIZES = {
    "vocab_size": 331,
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}
CAPPED = {"sliding_window": 40, "query_pre_attn_scalar": 24, "final_logit_softcapping": 5.0}
OF_LATENTS = {
    **SIZES,
    "num_key_value_heads": 6,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 88,
    "first_k_dense_replace": 1,
}
MODELS = {
    "llama": ("LlamaForCausalLM", SIZES),
    "qwen3, odd widths": ("Qwen3ForCausalLM", {**SIZES, "hidden_size": 96, "intermediate_size": 200, "head_dim": 16}),
    "gemma2": ("Gemma2ForCausalLM", {**SIZES, **CAPPED}),
}
LATENTS = {
    "deepseek-v2": ("DeepseekV2ForCausalLM", {**OF_LATENTS, "q_lora_rank": None, "kv_lora_rank": 20}),
    "deepseek-v3": ("DeepseekV3ForCausalLM", {**OF_LATENTS, "q_lora_rank": 40, "n_group": 2, "topk_group": 1}),
}
WAYS = [
    *itertools.product(MODELS, ("float32", "bfloat16"), ("none",), ("auto", "torch")),
    *itertools.product(("llama",), ("float32", "bfloat16"), ("int8", "int4"), ("auto", "torch")),
    *itertools.product(("llama", "gemma2"), ("float32", "bfloat16"), ("none",), ("auto", "torch"), ("int8",)),
    ("deepseek-v2", "float32", "none", "auto"),
    ("deepseek-v3", "float32", "none", "auto"),
    ("deepseek-v3", "bfloat16", "int8", "auto", "int8"),
]
BLOCK_SIZE = 8
LENGTHS = (1, 7, 16, 40, 90, 260)


class Models:
    """Each of them on a runner, in each way to compute it."""

    def __init__(self, directory):
        self._directory = directory
        self._written = cache(self._write)
        self.runner = cache(self._runner)

    def _write(self, model):
        architecture, changes = {**MODELS, **LATENTS}[model]
        directory = self._directory / model
        checkpoint(directory, architecture, **changes)
        return directory

    def _runner(self, model, dtype, quantize, attention, kv_dtype="auto", deterministic=True, **changes):
        engine = EngineSettings(
            device="cpu",
            dtype=dtype,
            quantize=quantize,
            kv_dtype=kv_dtype,
            attention=attention,
            num_threads=2,
            block_size=BLOCK_SIZE,
            max_kv_bytes=8 << 20,
            deterministic=deterministic,
            **changes,
        )
        return Runner.load(str(self._written(model)), engine, may_part=bool(changes))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return Models(tmp_path_factory.mktemp("models"))


def bits(logits):
    return torch.stack(logits).view(torch.int32)


def walked(runner, prompts, seed, num_new=6):
    return Walk(runner, prompts, num_new, random.Random(seed))


@pytest.mark.parametrize("way", WAYS, ids=", ".join)
def test_a_token_has_the_same_logits_however_steps_are_cut_and_mixed(models, way):
    runner = models.runner(*way)
    source = random.Random(5)
    prompts = [[source.randrange(3, 331) for _ in range(length)] for length in LENGTHS]
    whole = walked(runner, prompts, 0)
    for seed in (1, 2):
        other = walked(runner, prompts, seed)
        assert other.token_ids == whole.token_ids
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(other.logits, whole.logits, strict=True))
    alone = walked(runner, prompts[3:4], 3)
    assert torch.equal(bits(alone.logits[0]), bits(whole.logits[3]))


@pytest.mark.parametrize("shape", [(7, 12), (300, 250), (1000, 256)])
def test_experts_are_scored_row_by_row(shape):
    logits = 3 * torch.randn(shape, generator=torch.Generator().manual_seed(1))
    together = sigmoids(logits)
    torch.testing.assert_close(together, logits.sigmoid())
    assert torch.equal(together, torch.cat([sigmoids(row[None]) for row in logits]))


@pytest.mark.parametrize(("window", "is_apart"), [(0, False), (40, False), (700, False), (40, True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("stored", [None, torch.int8])
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_long_histories_are_attended_to_alike_from_any_chunk(window, is_apart, dtype, stored, backend):
    """And where layers with windows have a pool apart, as in one pool."""
    num_heads, num_kv_heads, head_dim, length = 6, 2, 32, 4500
    generator = torch.Generator().manual_seed(1)
    chance = random.Random(2)
    shape, kv_type = KVShape(1, num_kv_heads, head_dim), KVType(stored or dtype, stored is not None)
    cpu = torch.device("cpu")
    kernels = library()
    if backend == "native" and kernels is None:
        pytest.skip("the kernels cannot be built here")

    def over(pool, window):
        scores = Scores(0.3, (window,))
        if backend == "native":
            return NativeAttention(pool, scores, kernels, num_heads, is_repeatable=True)
        return RepeatableAttention(pool, scores)

    attention = over(KVCache(shape, 600, BLOCK_SIZE, kv_type.dtype, cpu, kv_type.is_scaled), window)
    blocks = chance.sample(range(600), -(-length // BLOCK_SIZE))
    slots = torch.tensor([blocks[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in range(length)])
    rows = torch.randn((length, num_heads + 2 * num_kv_heads, head_dim), generator=generator).to(dtype)
    expected = torch.empty(length, num_heads * head_dim, dtype=dtype)

    def attend(start, stop, layer=0):
        part = rows[start:stop].contiguous()
        plan = attention.plan([Extent(0, stop - start, start, blocks[: -(-stop // BLOCK_SIZE)])], slots[start:stop])
        return plan.attend(layer, part[:, :num_heads], part[:, num_heads:-num_kv_heads], part[:, -num_kv_heads:])

    for start in range(0, length, 1500):
        expected[start : start + 1500] = attend(start, start + 1500)
    if is_apart:
        two = TwoPools(replace(shape, num_layers=2), (0, window), (600, 600), BLOCK_SIZE, kv_type, cpu)
        two.companions.copy_(torch.randperm(600, generator=generator))
        attention = WindowedAttention(over(two.caches[0], 0), over(two.caches[1], window), two, is_repeatable=True)
        for start in range(0, length, 1500):
            attend(start, start + 1500, layer=1)
    for _ in range(25):
        start = chance.choice((0, 250, 2040, 4090, chance.randrange(length - 1)))
        stop = min(length, start + chance.choice((1, 2, 5, 17, 130, 700)))
        found = attend(start, stop, int(is_apart))
        assert torch.equal(found.view(torch.int16), expected[start:stop].view(torch.int16)), (start, stop)


@st.composite
def crowds(draw):
    """Requests that begin alike, and when they come."""
    source = random.Random(1)
    stem = [source.randrange(3, 331) for _ in range(40)] * 5
    arrivals = []
    for number in range(draw(st.integers(1, 5))):
        prompt = stem[: draw(st.sampled_from([1, 8, 30, 64, 130]))] + draw(st.sampled_from([[], [5], [6, 7, 8]]))
        sampling = Sampling(
            max_tokens=draw(st.integers(1, 10)),
            seed=draw(st.integers(0, 99)),
            temperature=draw(st.sampled_from([0.0, 1.0])),
            top_p=draw(st.sampled_from([0.9, 1.0])),
            frequency_penalty=draw(st.sampled_from([0.0, 0.4])),
            ignore_eos=True,
            num_logprobs=draw(st.sampled_from([None, 0, 3])),
        )
        submit = wire.Submit(
            str(number),
            prompt,
            sampling,
            num_sequences=draw(st.sampled_from([1, 2])),
            priority=draw(st.sampled_from([0, 1])),
        )
        arrivals.append((draw(st.integers(0, 10)), submit))
    changes = {
        "num_blocks": draw(st.sampled_from([20, 24, 64])),
        "max_step_tokens": draw(st.sampled_from([3, 16, 200])),
        "max_prefill_tokens_beside_decodes": draw(st.sampled_from([1, 5, 64])),
        "max_sequences": draw(st.sampled_from([1, 2, 8])),
        "prefix_cache": draw(st.sampled_from([True, True, False])),
    }
    return arrivals, changes


def answers_of(runner, arrivals, num_blocks=64, drafts=None, **changes):
    """Tokens and log-probabilities by (request id, index)."""
    runner.num_blocks = num_blocks
    ticks = itertools.count()
    sampler = Sampler(runner.vocab_size, runner.eos_token_ids, by_row=True)
    engine = Engine(runner, sampler, EngineSettings(**changes), lambda: float(next(ticks)), speculation=drafts)
    engine.speculates = drafts is not None
    found: dict[tuple[str, int], list] = {}
    arrivals = sorted(arrivals, key=lambda arrival: arrival[0])
    for step in itertools.count():
        while arrivals and arrivals[0][0] <= step:
            assert engine.add(arrivals.pop(0)[1]) is None
        if not arrivals and not engine.has_work:
            return found
        deltas, failed = engine.step()
        assert not failed
        for delta in deltas:
            said = found.setdefault((delta.request_id, delta.index), [])
            said += zip(delta.token_ids, delta.logprobs or itertools.repeat(None), strict=False)
    return found


@pytest.mark.parametrize("way", WAYS, ids=", ".join)
@settings(max_examples=6, deadline=None)
@given(crowd=crowds(), seed=st.integers(0, 99), wrong=st.sampled_from([0.0, 0.2, 0.6]))
def test_an_answer_and_its_logprobs_are_the_same_alone_and_in_any_crowd(models, way, crowd, seed, wrong):
    """Some of it guessed by one who knows the answers and changes some tokens of them."""
    runner = models.runner(*way)
    arrivals, changes = crowd
    expected = {}
    for _, submit in arrivals:
        expected |= answers_of(runner, [(0, submit)], prefix_cache=False)
    known = {key: [token_id for token_id, _ in said] for key, said in expected.items()}
    drafts = Speculation([Hindsight(known, random.Random(seed), wrong)], 9, everything, float)
    assert answers_of(runner, arrivals, drafts=drafts, **changes) == expected


@pytest.mark.parametrize(("dtype", "attention"), [("bfloat16", "auto"), ("float32", "torch")])
@settings(max_examples=6, deadline=None)
@given(crowd=crowds())
def test_it_is_also_the_same_where_layers_with_windows_have_a_pool_apart(models, dtype, attention, crowd):
    one = models.runner("gemma2", dtype, "none", attention)
    two = models.runner("gemma2", dtype, "none", attention, max_sequences=8, max_step_tokens=200)
    assert one.apart is None
    assert two.apart is not None
    arrivals, changes = crowd
    expected = {}
    for _, submit in arrivals:
        expected |= answers_of(one, [(0, submit)], prefix_cache=False)
    assert answers_of(two, arrivals, **changes) == expected


@pytest.mark.parametrize("attention", ["auto", "torch"])
def test_without_it_logits_depend_on_the_company(models, attention):
    """Else the tests above would show nothing."""
    runner = models.runner("llama", "float32", "none", attention, deterministic=False)
    source = random.Random(5)
    prompts = [[source.randrange(3, 331) for _ in range(length)] for length in LENGTHS]
    one, other = (walked(runner, prompts, seed) for seed in (0, 1))
    assert not torch.equal(bits(one.logits[-1][: LENGTHS[-1]]), bits(other.logits[-1][: LENGTHS[-1]]))


def test_what_cannot_be_kept_is_refused(models):
    with pytest.raises(ModelError, match=r"engine\.tensor_parallel 4"):
        Runner.load(str(models._written("llama")), EngineSettings(deterministic=True, tensor_parallel=4))


def test_a_span_that_asks_for_several_logits_has_those_of_single_ones(models):
    runner = models.runner("llama", "bfloat16", "none", "auto")
    token_ids = [(7 * place + 3) % 331 for place in range(50)]
    blocks = list(range(8))
    whole = runner.forward([Span(token_ids, 0, blocks, 50)])
    runner.forward([Span(token_ids[:40], 0, blocks, 0)])
    assert torch.equal(runner.forward([Span(token_ids[40:45], 40, blocks, 5)]), whole[40:45])
    for at in range(45, 50):
        assert torch.equal(runner.forward([Span(token_ids[at : at + 1], at, blocks, 1)]), whole[at : at + 1])


@pytest.mark.parametrize(("dtype", "attention"), [("bfloat16", "auto"), ("bfloat16", "torch"), ("float32", "auto")])
def test_an_adapter_s_rows_are_repeated_too(tmp_path, dtype, attention):
    base = checkpoint(tmp_path / "base", "LlamaForCausalLM", **SIZES)
    runner = Runner.load(
        str(tmp_path / "base"),
        EngineSettings(
            device="cpu",
            dtype=dtype,
            attention=attention,
            num_threads=2,
            block_size=BLOCK_SIZE,
            max_kv_bytes=8 << 20,
            deterministic=True,
        ),
    )
    adapters = [None]
    for seed, rank in enumerate((8, 33)):
        adapter_files(tmp_path / str(seed), base, seed, r=rank)
        adapters.append(runner.load_adapter(str(seed), str(tmp_path / str(seed)), 1 << 26))
    source = random.Random(5)
    prompts = [[source.randrange(3, 331) for _ in range(length)] for length in (40, 7, 33, 90, 60)]
    chosen = [adapters[place] for place in (0, 1, 2, 1, 1)]
    whole, other = (Walk(runner, prompts, 6, random.Random(seed), chosen) for seed in (0, 1))
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(other.logits, whole.logits, strict=True))
    # Nor does it show in them that a neighbour wants a vector, which no step has that is computed at once.
    neighbour = Span(prompts[2], 0, list(range(5, 10)), 0, num_hidden=1)
    for adapter in adapters:
        span = Span(prompts[0], 0, list(range(5)), 40, adapter=adapter)
        assert torch.equal(runner.forward([span, neighbour]), runner.forward([span]))
        # Nor that it wants log-probabilities of its own prompt, as it does in a last chunk of several tokens.
        assert torch.equal(runner.forward([replace(span, num_hidden=40)]), runner.forward([span]))


def test_a_worker_says_that_its_answers_repeat(models):
    with WorkerProcess(models._written("llama"), deterministic=True) as worker, worker.connect() as gateway:
        assert gateway.ready.deterministic
        gateway.submit("a", [5, 6, 7], 4)
        assert len(gateway.finish("a")) == 4
