"""Heads that are turned on their way into the pool arrive there as those that are turned first and written then."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernels.attention import each_alone
from tests.kernels.device import DEVICE, examples
from tests.worker.pools import extents_of, held, slots_of
from worker.attention.base import Scores
from worker.attention.paged import TritonAttention
from worker.kv_cache import KVCache, KVShape
from worker.models.ops import Turning, TurnsFirst
from worker.models.rope import Rotary
from worker.models.shapes import SHAPES
from worker.models.triton_ops import TritonOps

FLOAT8 = torch.float8_e4m3fn
EASY = {"deadline": None, "derandomize": True, "suppress_health_check": [HealthCheck.too_slow]}


@settings(max_examples=examples(24), **EASY)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 30), st.sampled_from((1, 1, 3, 9))), min_size=1, max_size=2),
    padding=st.integers(0, 1),
    group=st.integers(1, 3),
    num_kv_heads=st.integers(1, 3),
    dims=st.sampled_from(((16, 16), (80, 80), (96, 24), (128, 64))),
    qk_norm=st.sampled_from(("none", "head", "width")),
    dtype=st.sampled_from((torch.float32, torch.float16, torch.bfloat16)),
    kept=st.sampled_from(((None, False), (torch.int8, True), (FLOAT8, True), (FLOAT8, False))),
    min_dense_tokens=st.sampled_from((2, 1000)),
    in_one=st.booleans(),
    seed=st.integers(0, 99),
)
def test_one_launch_leaves_what_two_leave(
    lengths, padding, group, num_kv_heads, dims, qk_norm, dtype, kept, min_dense_tokens, in_one, seed
):
    torch.manual_seed(seed)
    head_dim, rotary_dim = dims
    num_heads, size = group * num_kv_heads, 16
    extents, num_blocks = extents_of([(*length, False) for length in lengths], size, random.Random(seed))
    slots = slots_of(extents, size)
    slots = torch.cat((slots, slots.new_full((padding,), -1))).to(DEVICE)
    architecture = replace(
        SHAPES["S"], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, qk_norm=qk_norm
    )
    rope = replace(architecture.ropes[0], rotary_dim=rotary_dim)
    angles = Rotary(rope, 1000, DEVICE).at(torch.randint(0, 900, (len(slots),), device=DEVICE))
    widths = (num_heads * head_dim, num_kv_heads * head_dim) if qk_norm == "width" else (head_dim, head_dim)
    norms = (None, None) if qk_norm == "none" else tuple(torch.randn(width).to(DEVICE) for width in widths)
    qkv = torch.randn(len(slots), (num_heads + 2 * num_kv_heads) * head_dim).to(DEVICE, dtype)
    left, outputs = [], []
    for attend in (TritonOps.attend, TurnsFirst.attend):
        shape = KVShape(2, num_kv_heads, head_dim)
        cache = KVCache(shape, num_blocks, size, kept[0] or dtype, DEVICE, scaled=kept[1])
        for tensor in held(cache):
            tensor.view(torch.uint8).zero_()
        attention = TritonAttention(
            cache, Scores(0.2, (0, 0)), num_heads, num_processors=4, min_dense_tokens=min_dense_tokens,
            varlen_attn=each_alone if in_one else None,
            tensor_scales=[(0.5, 0.25)] * 2 if kept == (FLOAT8, False) else (),
        )  # fmt: skip
        plan, heads = attention.plan(extents, slots), qkv.clone()
        out = attend(TritonOps(), plan, 1, heads, architecture, Turning(*angles, *norms))
        outputs.append(out[: len(slots) - padding])
        left.append([heads[:, : num_heads * head_dim], *(tensor.view(torch.uint8) for tensor in held(cache))])
    torch.testing.assert_close(*outputs, atol=0, rtol=0)
    for ours, twice in zip(*left, strict=True):
        assert torch.equal(ours, twice)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="only a device has launches to count")
def test_a_layer_has_one_launch_fewer():
    attention = TritonAttention(KVCache(KVShape(1, 2, 64), 4, 16, torch.bfloat16, DEVICE), Scores(0.2, (0,)), 4)
    extents, _ = extents_of([(20, 1, False)], 16, random.Random(0), 4)
    plan = attention.plan(extents, slots_of(extents, 16).to(DEVICE))
    architecture = replace(SHAPES["S"], num_heads=4, num_kv_heads=2, head_dim=64)
    angles, counts = torch.zeros(2, 1, 64, device=DEVICE), []
    for attend in (TritonOps.attend, TurnsFirst.attend):
        for _ in range(2):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                attend(TritonOps(), plan, 0, torch.zeros(1, 512, device=DEVICE), architecture, Turning(*angles))
                torch.cuda.synchronize()
        names = ("turn", "turn_and_write", "write", "attend", "reduce")
        counts.append(sum(event.name in names for event in profile.events()))
    assert counts[0] == counts[1] - 1
