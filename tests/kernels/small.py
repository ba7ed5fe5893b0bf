"""Triton's small operations say what torch's say, and a whole model computed with them says what the plain one says."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies.settings import Engine
from tests.kernels.device import DEVICE, examples
from tests.worker import tiny
from worker.attention.base import Scores
from worker.attention.paged import TritonAttention
from worker.kv_cache import KVCache, KVShape
from worker.models.load import load_decoder, read_architecture
from worker.models.ops import TorchOps, Turning
from worker.models.rope import Rotary
from worker.models.shapes import SHAPES
from worker.models.triton_ops import TritonOps
from worker.runner import Runner

TOLERANCES: dict[torch.dtype, dict[str, float]] = {
    torch.float32: {"atol": 2e-6, "rtol": 2e-5},
    torch.float16: {"atol": 4e-3, "rtol": 4e-3},
    torch.bfloat16: {"atol": 3e-2, "rtol": 3e-2},
}
DTYPES = st.sampled_from(tuple(TOLERANCES))
EASY = {"deadline": None, "derandomize": True, "suppress_health_check": [HealthCheck.too_slow]}


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(DEVICE, dtype)


@settings(max_examples=examples(20), **EASY)
@given(
    num_tokens=st.integers(0, 4),
    size=st.sampled_from((8, 48, 100, 1000)),
    has_delta=st.booleans(),
    has_post=st.booleans(),
    has_pre=st.booleans(),
    dtype=DTYPES,
    seed=st.integers(0, 99),
)
def test_adding_and_norming_agrees(num_tokens, size, has_delta, has_post, has_pre, dtype, seed):
    torch.manual_seed(seed)
    # Rows as the model has them: apart from each other by more than their size.
    x, delta = noise(num_tokens, size, dtype=dtype), noise(num_tokens, 2 * size, dtype=dtype)[:, :size]
    post, pre = noise(size), noise(size)
    told = (delta if has_delta else None, post if has_post else None, pre if has_pre else None, 1e-5)
    ours, torchs = x.clone(), x.clone()
    got, expected = TritonOps().add_norm(ours, *told), TorchOps().add_norm(torchs, *told)
    torch.testing.assert_close(ours, torchs, **TOLERANCES[dtype])
    torch.testing.assert_close(got, expected, **TOLERANCES[dtype])
    assert (got is ours) == (expected is torchs)


@settings(max_examples=examples(20), **EASY)
@given(
    num_tokens=st.integers(1, 3),
    group=st.integers(1, 5),
    num_kv_heads=st.integers(1, 3),
    dims=st.sampled_from(((16, 16), (64, 64), (80, 80), (96, 24), (128, 64))),
    qk_norm=st.sampled_from(("none", "head", "width")),
    dtype=DTYPES,
    seed=st.integers(0, 99),
)
def test_norming_and_turning_heads_agrees(num_tokens, group, num_kv_heads, dims, qk_norm, dtype, seed):
    torch.manual_seed(seed)
    head_dim, rotary_dim = dims
    num_heads = group * num_kv_heads
    architecture = replace(
        SHAPES["S"], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, qk_norm=qk_norm
    )
    rope = replace(architecture.ropes[0], rotary_dim=rotary_dim)
    angles = Rotary(rope, 1000, DEVICE).at(torch.randint(0, 900, (num_tokens,), device=DEVICE))
    widths = (num_heads * head_dim, num_kv_heads * head_dim) if qk_norm == "width" else (head_dim, head_dim)
    norms = (None, None) if qk_norm == "none" else (noise(widths[0]), noise(widths[1]))
    qkv = noise(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    ours, torchs = qkv.clone(), qkv.clone()
    for ops, heads in ((TritonOps(), ours), (TorchOps(), torchs)):
        ops.turn(heads, architecture, Turning(*angles, *norms))
    torch.testing.assert_close(ours, torchs, **TOLERANCES[dtype])
    values_at = (num_heads + num_kv_heads) * head_dim
    assert torch.equal(ours[:, values_at:], qkv[:, values_at:])


@settings(max_examples=examples(20), **EASY)
@given(
    num_tokens=st.integers(0, 3),
    size=st.sampled_from((1, 48, 1024, 1500)),
    activation=st.sampled_from(("silu", "gelu", "gelu_tanh", "relu", "clamped_swiglu")),
    spread=st.sampled_from((1.0, 100.0)),
    dtype=DTYPES,
)
def test_gates_agree(num_tokens, size, activation, spread, dtype):
    torch.manual_seed(size)
    gate_up = noise(num_tokens, 2 * size, dtype=dtype) * spread
    got, expected = TritonOps().gate(gate_up, activation), TorchOps().gate(gate_up, activation)
    torch.testing.assert_close(got / spread**2, expected / spread**2, **TOLERANCES[dtype])


GEMMA: dict[str, Any] = {
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
}
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("Qwen3ForCausalLM", {"head_dim": 16}),
    ("Gemma3ForCausalLM", GEMMA),
    ("Olmo2ForCausalLM", {}),
]


@pytest.mark.parametrize(("name", "changes"), MODELS, ids=[name for name, _ in MODELS])
def test_a_model_computed_by_kernels_says_what_the_plain_one_says(name, changes, tmp_path):
    """Sequences grow beside each other, cut and mixed anyhow; prompts, drafts and decodes in one batch."""
    tiny.checkpoint(tmp_path, name, **changes)
    engine = Engine(block_size=tiny.BLOCK_SIZE, attention="reference", device=DEVICE.type, dtype="float32")
    plain = Runner.load(str(tmp_path), engine)
    architecture = read_architecture(tmp_path)
    model = load_decoder(tmp_path, architecture, torch.float32, DEVICE, 128)
    shape = KVShape(architecture.num_layers, architecture.num_kv_heads, architecture.head_dim)
    cache = KVCache(shape, 30, tiny.BLOCK_SIZE, torch.float32, DEVICE)
    scores = Scores(architecture.attention_scale, architecture.windows, architecture.attention_softcap)
    attention = TritonAttention(cache, scores, architecture.num_heads, num_processors=8)
    ours = Runner(model, cache, attention, TritonOps(), 128)
    prompts = [[5, 9, 33, 2, 8, 41, 7, 60, 11, 3, 90], [17, 3], [44]]
    walks = [tiny.Walk(runner, prompts, 4, random.Random(7)) for runner in (plain, ours)]
    assert walks[0].token_ids == walks[1].token_ids
    for logits in zip(walks[0].logits, walks[1].logits, strict=True):
        torch.testing.assert_close(*map(torch.stack, logits), atol=2e-4, rtol=1e-3)
