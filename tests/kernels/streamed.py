"""Products of few rows, and what is done on the way, are what the operations say one by one."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
import triton
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernels.device import DEVICE, examples
from tests.kernels.graphs import ARCHITECTURE, BLOCK_SIZE, MAX_TOKENS, NUM_BLOCKS
from tests.worker.pools import extents_of
from worker.attention.base import Scores
from worker.attention.paged import TritonAttention
from worker.inputs import Span, lay_out, planned
from worker.kv_cache import KVCache, KVShape
from worker.models.forms import Fp8
from worker.models.fused import ROWS, WAYS, FusedDecoder, stored_of
from worker.models.linear import Means
from worker.models.linear.on_cuda import CudaFp8Linear
from worker.models.load import build_decoder
from worker.models.ops import TorchOps
from worker.models.shard import Shard
from worker.models.sources import PlainSource
from worker.models.triton_ops import TritonOps
from worker.triton import streamed as kernels
from worker.triton.device import float8_as

ACTIVATIONS = (None, "silu", "gelu", "gelu_tanh", "relu", "clamped_swiglu")
TOLERANCES: dict[torch.dtype, dict[str, float]] = {
    torch.float32: {"atol": 1e-4, "rtol": 1e-4},
    torch.float16: {"atol": 2e-2, "rtol": 1e-2},
    torch.bfloat16: {"atol": 5e-2, "rtol": 3e-2},
}


@settings(max_examples=examples(40), deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    num_rows=st.sampled_from(ROWS),
    num_outputs=st.sampled_from((1, 3, 8, 50)),
    num_inputs=st.sampled_from((8, 100, 256, 700)),
    blocks=st.sampled_from(((1, 256), (4, 128), (2, 64))),
    stages=st.sampled_from((1, 3)),
    activation=st.sampled_from(ACTIVATIONS),
    form=st.sampled_from(("plain", "int8", "fp8")),
    has_bias=st.booleans(),
    is_normed=st.booleans(),
    adds=st.booleans(),
    dtype=st.sampled_from(tuple(TOLERANCES)),
    seed=st.integers(0, 99),
)
def test_a_product_is_what_its_parts_are_one_by_one(
    num_rows, num_outputs, num_inputs, blocks, stages, activation, form, has_bias, is_normed, adds, dtype, seed
):
    torch.manual_seed(seed)
    num = num_outputs * (1 if activation is None else 2)
    matrix = torch.randn(num, num_inputs) / num_inputs**0.5
    kind = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "plain": dtype}[form]
    codes = (matrix * (30 if form == "int8" else 1)).to(kind).to(DEVICE)
    scales, norm = torch.rand(num, device=DEVICE) / 10, torch.rand(num_inputs, device=DEVICE)
    is_scaled, (float8, as_loaded) = form != "plain", float8_as(codes)
    bias = torch.randn(num).to(DEVICE, dtype)
    # Apart from each other by more than their size.
    x = torch.randn(num_rows, 2 * num_inputs).to(DEVICE, dtype)[:, :num_inputs]
    y = torch.randn(num_rows, num_outputs).to(DEVICE, dtype)
    before = y.clone()
    block_n, block_k = blocks
    kernels.stream[(triton.cdiv(num_outputs, block_n),)](
        codes.view(as_loaded), scales, bias, x, norm, y, num_outputs, num_inputs, x.stride(0), y.stride(0), 1e-5,
        ROWS=num_rows, FLOAT8=float8, SCALED=is_scaled, HAS_BIAS=has_bias, NORMED=is_normed, ACTIVATION=activation,
        ADDS=adds, BLOCK_N=block_n, BLOCK_K=block_k, STAGES=stages,
        EARLY=False,
    )  # fmt: skip
    normed = TorchOps().add_norm(x.float(), None, None, norm, 1e-5) if is_normed else x.float()
    weights = codes.float() * scales[:, None] if is_scaled else codes.float()
    expected = normed @ weights.T + (bias.float() if has_bias else 0.0)
    if activation is not None:
        expected = TorchOps().gate(expected, activation)
    expected = expected + before.float() if adds else expected
    torch.testing.assert_close(y.float(), expected, **TOLERANCES[dtype])


ALONE = Means()
LLAMA = replace(ARCHITECTURE, windows=(0, 0))
QWEN2 = replace(LLAMA, qkv_bias=True)
QWEN3 = replace(LLAMA, qk_norm="head", head_dim=32, ropes=(replace(LLAMA.ropes[0], rotary_dim=32),))
SCALED = replace(LLAMA, embedding_scale=3.0, logits_softcap=5.0, activation="gelu_tanh", tied=False)


def decoder(architecture, quantize="none", dtype=torch.float32, means=ALONE):
    generator = torch.Generator().manual_seed(3)

    def take(name, shape):
        random = torch.randn(shape, generator=generator)
        return (1 + random / 5 if name.endswith("norm.weight") else random * 0.2).to(DEVICE, dtype)

    source = PlainSource(take)
    return build_decoder(Shard.of(architecture), source, dtype, DEVICE, MAX_TOKENS, means, quantize)


@pytest.mark.parametrize("architecture", [LLAMA, QWEN2, QWEN3, SCALED], ids=["Llama", "Qwen2", "Qwen3", "scaled"])
@torch.inference_mode()
def test_a_step_says_what_the_decoder_says(architecture):
    model = decoder(architecture)
    ways = FusedDecoder.all_of(model, TritonOps())
    assert len(ways) == len(WAYS)
    shape = KVShape(architecture.num_layers, architecture.num_kv_heads, architecture.head_dim)
    cache = KVCache(shape, NUM_BLOCKS, BLOCK_SIZE, torch.float32, DEVICE)
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
    attention = TritonAttention(cache, Scores(architecture.attention_scale, (0, 0)), 4, num_processors=8)
    for num_rows in ROWS:
        extents, _ = extents_of(
            [(20 + 7 * row, 1, False) for row in range(num_rows)], BLOCK_SIZE, random.Random(num_rows), NUM_BLOCKS
        )
        spans = [Span([5 + row], each.start, each.block_ids, 1) for row, each in enumerate(extents)]
        inputs, plan = planned(lay_out(spans, BLOCK_SIZE), attention, DEVICE, None)
        expected = model.forward(inputs.token_ids, inputs.positions, inputs.rows, plan, TorchOps())
        for way in ways:
            logits = torch.full_like(expected, float("nan"))
            way.forward(inputs.token_ids, inputs.positions, plan, logits)
            torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("quantize", ["int8", "fp8", "int4"])
def test_codes_of_one_byte_are_read_as_they_lie_and_four_bits_are_left_to_others(quantize, monkeypatch):
    """As matrices lie on a device."""
    monkeypatch.setattr("worker.models.linear.has_triton", lambda device: True)
    model = decoder(replace(LLAMA, intermediate_size=128), quantize, means=Means(rounds_inputs=False))
    ways = FusedDecoder.all_of(model, TritonOps())
    assert len(ways) == (0 if quantize == "int4" else len(WAYS))


def test_what_torch_multiplies_in_float8_lies_as_any_other_matrix_does():
    codes, scales = torch.randn(32, 16, device=DEVICE).to(torch.float8_e4m3fn), torch.rand(32, device=DEVICE)
    bias = torch.randn(32, device=DEVICE)
    stored = CudaFp8Linear(Fp8(codes, scales), bias).stored()
    assert stored.codes.is_contiguous()
    assert (stored.float8, stored.codes.dtype) == float8_as(codes)
    assert torch.equal(stored.codes.view(codes.dtype).float(), codes.float())
    assert torch.equal(stored.scales, scales)
    assert torch.equal(stored.bias, bias.bfloat16())


def test_what_has_other_parts_is_not_served():
    gemma = decoder(LLAMA)
    gemma.layers[1].mlp_post_norm = torch.ones(64, device=DEVICE)
    assert FusedDecoder.all_of(gemma, TritonOps()) == []
    assert stored_of(None) is None


def test_what_says_something_else_is_told_and_not_used(monkeypatch, caplog):
    model, stored = decoder(LLAMA), stored_of
    monkeypatch.setattr(
        "worker.models.fused.stored_of", lambda linear: replace(stored(linear), codes=1.2 * stored(linear).codes)
    )
    assert FusedDecoder.all_of(model, TritonOps()) == []
    assert "are off by 0." in caplog.text


def test_what_does_not_run_is_told_and_not_used(monkeypatch, caplog):
    monkeypatch.setattr("worker.models.fused.kernels", None)
    assert FusedDecoder.all_of(decoder(LLAMA), TritonOps()) == []
    assert "do not run here" in caplog.text
