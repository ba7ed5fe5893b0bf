"""All experts in a few launches say what they say one after another, and choose as transformers' routers choose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernels.device import DEVICE, examples
from worker.adapters.adapter import Adapter, Factor
from worker.adapters.step import TorchAdditions
from worker.models.architecture import Mixture
from worker.models.experts import Experts
from worker.models.experts_on_cuda import CudaExperts, max_blocks, pairs_at_once
from worker.models.forms import Form, Fp8, Int4, Int8, Plain
from worker.models.linear import linear_of
from worker.models.ops import TorchOps
from worker.models.stacks import Stack, Stacking
from worker.triton import experts as kernels

EASY: dict[str, Any] = {"deadline": None, "derandomize": True, "suppress_health_check": [HealthCheck.too_slow]}
TOLERANCES: dict[torch.dtype, dict[str, float]] = {
    torch.float32: {"atol": 2e-5, "rtol": 1e-4},
    torch.float16: {"atol": 2e-3, "rtol": 1e-2},
    torch.bfloat16: {"atol": 1e-2, "rtol": 3e-2},
}


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(DEVICE, dtype)


@st.composite
def mixtures(draw: st.DrawFn) -> Mixture:
    num_groups = draw(st.sampled_from((1, 1, 1, 2, 3, 8)))
    num_each = draw(st.sampled_from((2, 5, 8, 20) if num_groups > 1 else (1, 4, 7, 64, 160)))
    num_open = draw(st.integers(1, num_groups))
    return Mixture(
        num_groups * num_each,
        draw(st.integers(1, min(8, num_open * num_each))),
        draw(st.booleans()),
        num_groups=num_groups,
        num_chosen_groups=num_open,
        scores=draw(st.sampled_from(("softmax", "sigmoid") if num_each > 1 else ("softmax",))),
        scale=draw(st.sampled_from((1.0, 2.5))),
    )


def experts_of(mixture: Mixture, correction: torch.Tensor | None = None, stacks: Any = None) -> CudaExperts:
    gate_up, down = stacks or 2 * [Stack(torch.empty(mixture.num_experts, 2, 1, device=DEVICE))]
    return CudaExperts(mixture, gate_up, down, correction, is_repeatable=False)


def plain_choice(mixture: Mixture, logits: torch.Tensor, correction: torch.Tensor | None) -> Any:
    """By torch, where the tests of whole models hold it against transformers."""
    nothing: Any = None
    return Experts(mixture, nothing, [], [], correction)._choose(logits)


@settings(max_examples=examples(40), **EASY)
@given(mixture=mixtures(), num_tokens=st.integers(1, 4), corrected=st.booleans(), seed=st.integers(0, 99))
def test_experts_are_chosen_and_weighed_as_by_torch(mixture, num_tokens, corrected, seed):
    torch.manual_seed(seed)
    logits = 3 * noise(num_tokens, mixture.num_experts)
    correction = noise(mixture.num_experts) if corrected and mixture.scores == "sigmoid" else None
    weights, chosen = experts_of(mixture, correction).route(logits)
    expected, those = plain_choice(mixture, logits, correction)
    assert torch.equal(chosen.long(), those)
    torch.testing.assert_close(weights, expected)


def test_scores_that_vanish_weigh_as_nothing():
    mixture = Mixture(24, 3, True, scores="sigmoid", scale=2.5)
    logits = noise(4, 24)
    logits[0], logits[1], logits[2] = -100.0, -50.0, -45.0
    weights, _ = experts_of(mixture).route(logits)
    assert weights[0].tolist() == [0.0, 0.0, 0.0]
    torch.testing.assert_close(weights, plain_choice(mixture, logits, None)[0])


@pytest.mark.parametrize("num_groups", [1, 4])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_what_is_no_number_still_gets_experts_that_there_are(num_groups, scores):
    mixture = Mixture(24, 3, True, num_groups=num_groups, num_chosen_groups=min(2, num_groups), scores=scores)
    logits = noise(4, 24)
    logits[0], logits[1, 5:], logits[2, :23], logits[3] = torch.nan, torch.nan, -torch.inf, torch.inf
    _, chosen = experts_of(mixture).route(logits)
    assert 0 <= int(chosen.min()) <= int(chosen.max()) < 24


ROUTERS = {
    "mixtral": ("MixtralTopKRouter", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3MoeTopKRouter", {"num_experts": 12, "num_experts_per_tok": 4, "norm_topk_prob": True}),
    "olmoe": ("OlmoeTopKRouter", {"num_experts": 16, "num_experts_per_tok": 8, "norm_topk_prob": False}),
    "gpt_oss": ("GptOssTopKRouter", {"num_local_experts": 32, "num_experts_per_tok": 4}),
    "deepseek_v2": (
        "DeepseekV2TopkRouter",
        {"n_routed_experts": 40, "num_experts_per_tok": 6, "n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0}
        | {"topk_method": "group_limited_greedy"},
    ),
    "deepseek_v3": (
        "DeepseekV3TopkRouter",
        {"n_routed_experts": 32, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "norm_topk_prob": True},
    ),
}


@torch.inference_mode()
@pytest.mark.parametrize("family", list(ROUTERS))
def test_experts_are_chosen_and_weighed_as_by_the_router_of_transformers(family):
    """From config.json on: what of it becomes a Mixture is held against theirs as well."""
    transformers = pytest.importorskip("transformers")
    from importlib import import_module

    from worker.models.families import architecture_of

    name, changes = ROUTERS[family]
    base = {"hidden_size": 32, "intermediate_size": 16, "moe_intermediate_size": 16, "num_hidden_layers": 1}
    base |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
    config = transformers.AutoConfig.for_model(family, **{**base, **changes})
    architecture = {"deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3", "gpt_oss": "GptOss"}.get(
        family, name.removesuffix("TopKRouter")
    )
    written = {**config.to_dict(), "architectures": [f"{architecture}ForCausalLM"]}
    mixture = architecture_of(written).mixture
    router = getattr(import_module(f"transformers.models.{family}.modeling_{family}"), name)(config)
    torch.manual_seed(5)
    for parameter in router.parameters():
        parameter.normal_()
    correction = getattr(router, "e_score_correction_bias", None)
    if correction is not None:
        correction.normal_(0.0, 0.3)
        correction = correction.float().to(DEVICE)
    logits, expected, those = router(torch.randn(40, 32))
    weights, chosen = experts_of(mixture, correction).route(logits.float().to(DEVICE))
    # They leave open in which order.
    in_order, where = those.to(DEVICE).sort(-1)
    ours, whence = chosen.long().sort(-1)
    assert torch.equal(ours, in_order)
    torch.testing.assert_close(weights.gather(1, whence), expected.float().to(DEVICE).gather(1, where))


@settings(max_examples=examples(40), **EASY)
@given(
    num_experts=st.sampled_from((1, 2, 7, 64, 130)),
    num_pairs=st.sampled_from((1, 2, 15, 16, 17, 100, 128, 129, 400)),
    size=st.sampled_from((16, 32, 128)),
    favourites=st.integers(1, 130),
    seed=st.integers(0, 99),
)
def test_pairs_are_sorted_into_blocks_of_one_expert(num_experts, num_pairs, size, favourites, seed):
    torch.manual_seed(seed)
    chosen = torch.randint(min(favourites, num_experts), (num_pairs,), dtype=torch.int32, device=DEVICE)
    chosen = torch.randperm(num_experts, device=DEVICE).int()[chosen.long()]
    most = max_blocks(num_pairs, num_experts, size)
    order = torch.full((most * size,), -7, dtype=torch.int32, device=DEVICE)
    owners = torch.full((most + 1,), -7, dtype=torch.int32, device=DEVICE)
    bins = max(32, 1 << (num_experts - 1).bit_length())
    kernels.sort[(num_experts,)](chosen, order, owners, num_pairs, most, BLOCK_M=size, BINS=bins, CHUNK=128)
    num_blocks = int(owners[-1])
    assert num_blocks == sum(-(-num // size) for num in torch.bincount(chosen).tolist()) <= most
    assert owners[:num_blocks].tolist() == sorted(owners[:num_blocks].tolist())
    seen = []
    for block in range(num_blocks):
        pairs = order[block * size : (block + 1) * size]
        own = pairs[pairs < num_pairs]
        assert len(own)
        assert torch.equal(chosen[own.long()], owners[block].expand(len(own)))
        assert torch.equal(pairs, torch.cat((own, torch.full_like(pairs[len(own) :], num_pairs))))
        seen += own.tolist()
    by_expert = sorted(range(num_pairs), key=lambda pair: (int(chosen[pair]), pair))
    assert seen == by_expert


@given(num_pairs=st.integers(1, 5000), num_experts=st.integers(1, 512), size=st.sampled_from((16, 32, 64, 128)))
def test_there_are_blocks_enough_whoever_is_chosen(num_pairs, num_experts, size):
    """The worst case: as many experts as there can be have one pair more than fills blocks."""
    others = min(num_experts, num_pairs)
    spare = num_pairs - others
    assert max_blocks(num_pairs, num_experts, size) == others + spare // size


def form_of(kind: str, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> Form:
    if kind == "plain":
        return Plain(noise(num_outputs, num_inputs, dtype=dtype) / num_inputs**0.5)
    if kind == "int4":
        codes = torch.randint(256, (num_outputs, num_inputs // 2), dtype=torch.uint8, device=DEVICE)
        scales, offsets = (torch.rand(2, num_outputs, num_inputs // 32) / num_inputs**0.5).to(DEVICE)
        return Int4(codes, scales / 4, -2 * offsets, 32)
    scales = torch.rand(num_outputs, device=DEVICE) / (50 * num_inputs**0.5)
    if kind == "int8":
        return Int8(torch.randint(-127, 128, (num_outputs, num_inputs), dtype=torch.int8, device=DEVICE), scales)
    return Fp8((torch.randn(num_outputs, num_inputs) * 50).to(torch.float8_e4m3fn).to(DEVICE), scales)


class Layer:
    """Experts of one layer, in one stack and each by itself."""

    def __init__(self, mixture, hidden, inner, kind="plain", dtype=torch.float32, biased=False, is_repeatable=False):
        num = mixture.num_experts
        products = []
        for num_outputs, num_inputs in ((2 * inner, hidden), (hidden, inner)):
            stacking = Stacking(num)
            forms = [form_of(kind, num_outputs, num_inputs, dtype) for _ in range(num)]
            bias = noise(num, num_outputs, dtype=dtype) if biased else None
            views = [stacking.put(form) for form in forms]
            assert all(torch.equal(*pair) for pair in zip(map(dense, views), map(dense, forms), strict=True))
            wide = [Plain(form.dense(torch.float32)) for form in forms]
            biases = [None] * num if bias is None else list(bias.float())
            products.append((stacking.finish(bias), [linear_of(*pair) for pair in zip(wide, biases, strict=True)]))
        (gate_up, gate_ups), (down, downs) = products
        self.plain = Experts(mixture, None, gate_ups, downs)
        self.ours = CudaExperts(mixture, gate_up, down, None, is_repeatable)

    def expected(self, x, logits, activation="silu"):
        """In float32 throughout."""
        return self.plain._apart(x.float(), logits, TorchOps(), activation, 0, None)


def dense(form: Form) -> torch.Tensor:
    return form.dense(torch.float32)


@settings(max_examples=examples(40), **EASY)
@given(
    num_experts=st.sampled_from((1, 3, 8, 20)),
    num_chosen=st.integers(1, 8),
    num_tokens=st.sampled_from((1, 2, 5, 17, 40)),
    sizes=st.sampled_from(((8, 8), (33, 17), (64, 96), (130, 70), (256, 64))),
    kind=st.sampled_from(("plain", "plain", "int8", "fp8", "int4")),
    activation=st.sampled_from(("silu", "gelu_tanh", "clamped_swiglu")),
    crowd=st.sampled_from(("even", "one", "few")),
    biased=st.booleans(),
    is_repeatable=st.booleans(),
    dtype=st.sampled_from(tuple(TOLERANCES)),
    seed=st.integers(0, 99),
)
def test_experts_at_once_say_what_they_say_one_after_another(
    num_experts, num_chosen, num_tokens, sizes, kind, activation, crowd, biased, is_repeatable, dtype, seed
):
    torch.manual_seed(seed)
    mixture = Mixture(num_experts, min(num_chosen, num_experts), True)
    if kind == "int4":
        sizes = (sizes[0] + -sizes[0] % 32, sizes[1] + -sizes[1] % 32)  # whole groups
    layer = Layer(mixture, *sizes, kind, dtype, biased, is_repeatable)
    x, logits = noise(num_tokens, sizes[0], dtype=dtype), noise(num_tokens, num_experts)
    if crowd != "even":  # the others are empty, or nearly
        logits[:, : 1 if crowd == "one" else mixture.num_chosen] += 20.0
    got = layer.ours(x, logits, activation)
    assert got.dtype is dtype
    torch.testing.assert_close(got.float(), layer.expected(x, logits, activation), **TOLERANCES[dtype])


@pytest.mark.parametrize(("num_tokens", "kind"), [(0, "plain"), (70, "plain"), (300, "plain"), (300, "int4")])
def test_prompts_are_cut_into_larger_tiles_and_say_the_same(num_tokens, kind):
    torch.manual_seed(num_tokens)
    layer = Layer(Mixture(3, 2, False), 96, 224, kind)
    x, logits = noise(num_tokens, 96), noise(num_tokens, 3)
    if not num_tokens:
        assert layer.ours(x, logits, "silu").shape == (0, 96)
        return
    assert pairs_at_once(2 * num_tokens, 3) == (64 if num_tokens == 70 else 128)
    torch.testing.assert_close(layer.ours(x, logits, "silu"), layer.expected(x, logits), **TOLERANCES[torch.float32])


def test_rows_that_are_apart_in_memory_are_read_where_they_are():
    torch.manual_seed(3)
    layer = Layer(Mixture(4, 2, True), 48, 32)
    x, logits = noise(6, 96)[:, :48], noise(6, 4)
    torch.testing.assert_close(layer.ours(x, logits, "silu"), layer.expected(x, logits), **TOLERANCES[torch.float32])


def test_a_repeatable_row_has_the_same_bits_in_any_company():
    torch.manual_seed(4)
    layer = Layer(Mixture(4, 2, True), 64, 48, dtype=torch.bfloat16, is_repeatable=True)
    x, logits = noise(150, 64, dtype=torch.bfloat16), noise(150, 4)
    together = layer.ours(x, logits, "silu")
    for rows in (slice(0, 1), slice(7, 9), slice(20, 150)):
        assert torch.equal(layer.ours(x[rows], logits[rows], "silu"), together[rows])


def test_a_repeatable_row_has_the_same_bits_beside_those_that_have_experts_of_their_own():
    torch.manual_seed(5)
    layer = Layer(Mixture(4, 2, True), 200, 96, is_repeatable=True)
    router = linear_of(Plain(noise(4, 200)))
    experts = replace(layer.plain, router=router, together=layer.ours)
    factor = Factor(noise(3, 96), noise(200, 3), 0)
    adapter = Adapter("theirs", "", 3, {(0, ("down", expert)): (factor,) for expert in range(4)}, 0)
    x, own, others = noise(9, 200), [2, 7], [0, 1, 3, 4, 5, 6, 8]

    def said(rows, changed):
        groups = [(adapter, [rows.index(row)]) for row in changed]
        additions = TorchAdditions.of(groups, DEVICE, range(len(rows))) if changed else None
        return experts(x[rows], TorchOps(), "silu", 0, additions)

    every = list(range(9))
    beside, alone = said(every, own), said(every, [])
    assert torch.equal(beside[others], alone[others])
    assert (beside[own] - alone[own]).abs().min(0).values.max() > 0.1
    torch.testing.assert_close(said(own, own), beside[own], **TOLERANCES[torch.float32])
    additions = TorchAdditions.of([(adapter, every)], DEVICE, every)
    expected = layer.plain._apart(x, router.wide(x), TorchOps(), "silu", 0, additions)
    torch.testing.assert_close(beside[own], expected[own], **TOLERANCES[torch.float32])


def test_matrices_that_are_not_alike_are_not_stacked():
    one, other = form_of("plain", 8, 16, torch.float32), form_of("int8", 8, 16, torch.float32)
    fours = form_of("int4", 8, 64, torch.float32)
    moved = replace(fours, order=torch.randperm(64, device=DEVICE))
    for first, second in ((one, other), (other, one), (fours, moved), (fours, replace(fours, group=64))):
        stacking = Stacking(2)
        assert torch.equal(dense(stacking.put(first)), dense(first))
        assert stacking.put(second) is second
        assert stacking.finish(None) is None


def test_a_choice_of_one_of_equals_is_the_first():
    _, chosen = experts_of(Mixture(8, 3, True)).route(torch.zeros(2, 8, device=DEVICE))
    assert chosen.tolist() == [[0, 1, 2]] * 2
