"""Every attention says what the plain one says, over pools whose blocks lie anyhow."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.attention.varlen
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.pools import extents_of, filled, held, slots_of
from worker.attention import (
    Backend,
    Extent,
    GatheredAttention,
    NativeAttention,
    ReferenceAttention,
    RepeatableAttention,
    Scores,
    SegmentAttention,
)
from worker.attention.dense import varlen
from worker.attention.shared import beginnings
from worker.kv_cache import KVCache
from worker.native import library


def backends_of(cache: KVCache, scores: Scores, num_heads: int, dtype: torch.dtype | None = None) -> dict[str, Backend]:
    backends: dict[str, Backend] = {
        "segments": SegmentAttention(cache, scores),
        "gathered": GatheredAttention(cache, scores),
        "repeatable": RepeatableAttention(cache, scores),
    }
    kernels = library()
    if kernels is not None and NativeAttention.serves(cache, dtype):
        backends["native"] = NativeAttention(cache, scores, kernels, num_heads)
    return backends


def assert_agree(
    sequences: list[tuple[int, int, bool]],
    group: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    windows: tuple[int, int],
    softcap: float,
    dtype: torch.dtype,
    seed: int,
    num_alike: int = 0,
    num_shared_blocks: int = 0,
    stored: torch.dtype | None = None,
    has_sinks: bool = False,
) -> None:
    """Two layers, the second over what the first step wrote; the KV that each backend leaves is the same too.

    The first num_alike sequences begin with the same blocks. stored: the pool's type, where it is not the queries'.
    Slots of nobody, and those that no layer's window reaches back to, hold NaN.
    """
    torch.manual_seed(seed)
    extents, num_blocks = extents_of(sequences, block_size, random.Random(seed))
    for index in range(1, num_alike):
        alike = (*extents[0].block_ids[:num_shared_blocks], *extents[index].block_ids[num_shared_blocks:])
        extents[index] = extents[index]._replace(block_ids=alike)
    cache = filled(num_kv_heads, head_dim, num_blocks, block_size, stored or dtype, scaled=stored is torch.int8)
    num_heads, num_tokens = group * num_kv_heads, sum(extent.num_tokens for extent in extents)
    sinks = tuple(4 * torch.randn(2, num_heads)) if has_sinks else ()
    scores = Scores(0.7 * head_dim**-0.5, windows, softcap, sinks)
    slots = slots_of(extents, block_size)
    heads = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
    queries, keys, values = heads.split((num_heads, num_kv_heads, num_kv_heads), 1)
    strange = torch.ones(num_blocks * block_size, dtype=torch.bool)
    for extent in extents:
        first = max(0, extent.start - max(windows) + 1) if min(windows) > 0 else 0
        strange[
            slots_of([extent._replace(num_tokens=extent.start + extent.num_tokens, start=0)], block_size)[first:]
        ] = False
    for tensor in held(cache):
        if tensor.is_floating_point():
            tensor[:, strange] = float("nan")
    before = [tensor.clone() for tensor in held(cache)]
    plain = ReferenceAttention(cache, scores).plan(extents, slots)
    expected = [plain.attend(layer, queries, keys, values) for layer in (0, 1)]
    after = [tensor.clone() for tensor in held(cache)]
    tolerance: dict[str, Any] = {"atol": 2e-5, "rtol": 1e-4} if dtype is torch.float32 else {"atol": 3e-2, "rtol": 3e-2}
    for name, backend in backends_of(cache, scores, num_heads, dtype).items():
        for tensor, kept in zip(held(cache), before, strict=True):
            tensor.copy_(kept)
        plan = backend.plan(extents, slots)
        for layer in (0, 1):
            got = plan.attend(layer, queries, keys, values)
            torch.testing.assert_close(got, expected[layer], **tolerance, msg=lambda text, name=name: f"{name}: {text}")
        for tensor, left in zip(held(cache), after, strict=True):
            assert torch.equal(tensor.nan_to_num(7.0), left.nan_to_num(7.0)), name


@settings(max_examples=60, deadline=None)
@given(
    sequences=st.lists(
        st.tuples(st.integers(0, 70), st.sampled_from((1, 1, 1, 2, 3, 5, 17, 40)), st.booleans()),
        min_size=1,
        max_size=5,
    ),
    group=st.integers(1, 10),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from((8, 16, 32, 48, 64, 96)),
    block_size=st.sampled_from((8, 16, 20)),
    windows=st.tuples(st.sampled_from((0, 1, 7, 16, 33)), st.sampled_from((0, 50))),
    softcap=st.sampled_from((0.0, 0.0, 5.0)),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    stored=st.sampled_from((None, None, torch.bfloat16, torch.int8)),
    has_sinks=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_every_attention_agrees_with_the_plain_one(**case):
    assert_agree(**case)


@pytest.mark.parametrize("softcap", [0.0, 4.0])
@pytest.mark.parametrize(("windows", "has_sinks"), [((0, 0), False), ((300, 700), False), ((0, 128), True)])
def test_they_agree_where_one_task_or_one_tile_is_not_enough(windows, has_sinks, softcap):
    sequences = [(1500, 1, False), (511, 1, True), (512, 1, True), (700, 300, False), (0, 600, True), (1023, 4, False)]
    assert_agree(sequences, 3, 2, 32, 16, windows, softcap, torch.float32, seed=3, has_sinks=has_sinks)


@pytest.mark.parametrize("stored", [None, torch.int8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [0.0, 4.0])
@pytest.mark.parametrize(("group", "head_dim", "block_size"), [(1, 48, 20), (3, 64, 32), (7, 64, 16), (8, 96, 32)])
def test_a_beginning_that_decodes_share_is_read_for_all_of_them_at_once(
    group, head_dim, block_size, softcap, dtype, stored
):
    num_shared = -(-1300 // block_size)
    start = num_shared * block_size
    sequences = [(start + past, 1, past % 2 == 0) for past in (0, 3, 40, 700, 1, 2, 90, 5)]
    sequences += [(start + 9, 4, False), (start + 70, 60, False), (300, 1, True), (40, 1, False)]
    alike = (10, num_shared, stored, group == 8)
    assert_agree(sequences, group, 2, head_dim, block_size, (0, 90), softcap, dtype, group, *alike)


def test_torch_reads_a_beginning_that_decodes_share_once():
    cache = filled(2, 32, 64, 16, torch.float32)
    extents = [Extent(row, 1, 400 + row, [*range(20), *range(20 + 6 * row, 26 + 6 * row)]) for row in range(6)]
    plan = SegmentAttention(cache, Scores(0.2, (0,))).plan(extents, slots_of(extents, 16))
    (beginning,) = plan.common
    assert beginning.num_tokens == 320
    assert beginning.rows == list(range(6))
    capped = SegmentAttention(cache, Scores(0.2, (0,), 5.0)).plan(extents, slots_of(extents, 16))
    assert not capped.common, "scores that are capped have no log-sum-exp"


def test_decodes_are_found_to_begin_alike_as_far_as_they_do():
    blocks = np.arange(200, dtype=np.int32).reshape(10, 20)
    blocks[[1, 4, 5, 7, 9], :12] = blocks[3, :12]
    blocks[9, 10:] = -1
    lengths = np.array([640, 640, 640, 600, 640, 385, 640, 321, 640, 640], dtype=np.int32)
    shares, sharers = beginnings(blocks, lengths, 32)
    assert shares.tolist() == [[0, 6, 320]]
    assert sharers.tolist() == [1, 3, 4, 5, 7, 9]
    assert len(beginnings(blocks[:6], lengths[:6], 32)[0]) == 1
    assert len(beginnings(blocks[:5], lengths[:5], 32)[0]) == 0
    assert len(beginnings(blocks, np.minimum(lengths, 256), 32)[0]) == 0


def test_what_else_is_in_the_batch_does_not_change_a_decode_by_a_bit():
    torch.manual_seed(1)
    extents, num_blocks = extents_of([(600, 1, True), (90, 1, False), (5, 30, True)], 16, random.Random(1))
    cache = filled(2, 32, num_blocks, 16, torch.float32)
    heads = torch.randn(32, 10, 32)
    queries, keys, values = heads.split((6, 2, 2), 1)
    for backend in backends_of(cache, Scores(0.2, (0, 0)), 6).values():
        if isinstance(backend, GatheredAttention):
            continue  # pads all decodes to one length
        crowd = backend.plan(extents, slots_of(extents, 16)).attend(0, queries, keys, values)
        alone = backend.plan(extents[:1], slots_of(extents[:1], 16)).attend(0, queries[:1], keys[:1], values[:1])
        assert torch.equal(crowd[:1], alone)


@pytest.mark.parametrize("stored", [None, torch.int8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", range(1, 9))
def test_chunks_of_any_shape_agree(group, dtype, stored):
    head_dim = (64, 96, 128, 256)[group % 4]
    sequences = [(0, 61, True), (37, 5, False), (255, 257, False), (640, 33, True)]
    windows, softcap = ((0, 0), (0, 100), (37, 300))[group % 3], (0.0, 30.0)[group % 2]
    assert_agree(
        sequences, group, 2, head_dim, (16, 32, 24)[group % 3], windows, softcap, dtype, seed=group, stored=stored
    )


@pytest.mark.parametrize(("window", "has_sinks"), [(0, False), (3000, False), (3000, True)])
def test_chunks_whose_past_several_tasks_read_agree(window, has_sinks):
    sequences = [(4500, 70, False), (2100, 40, True)]
    assert_agree(sequences, 3, 2, 64, 32, (window, 0), 0.0, torch.bfloat16, seed=1, has_sinks=has_sinks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_company_and_what_lies_in_unwritten_slots_do_not_change_a_chunk_by_a_bit(dtype):
    torch.manual_seed(1)
    extents, num_blocks = extents_of(
        [(2300, 150, False), (90, 9, True), (600, 1, True), (0, 41, False)], 16, random.Random(1)
    )
    cache = filled(2, 64, num_blocks, 16, dtype)
    kernels = library()
    if kernels is None:
        pytest.skip("no compiled kernels here")
    heads = torch.randn(sum(extent.num_tokens for extent in extents), 10, 64).to(dtype)
    backend = NativeAttention(cache, Scores(0.2, (0, 0)), kernels, 6)
    crowd = backend.plan(extents, slots_of(extents, 16)).attend(0, *heads.split((6, 2, 2), 1))
    written = [tensor.clone() for tensor in (cache.keys[0], cache.values[0])]
    for extent in extents:
        own = slots_of([Extent(0, extent.start + extent.num_tokens, 0, extent.block_ids)], 16)
        for tensor, kept in zip((cache.keys[0], cache.values[0]), written, strict=True):
            tensor.fill_(float("nan"))
            tensor[:, own] = kept[:, own]
        rows = slice(extent.row, extent.row + extent.num_tokens)
        lone = Extent(0, extent.num_tokens, extent.start, extent.block_ids)
        alone = backend.plan([lone], slots_of([lone], 16)).attend(0, *heads[rows].split((6, 2, 2), 1))
        assert torch.equal(crowd[rows], alone)


@pytest.mark.parametrize("sink", [1000.0, -1000.0])
def test_a_sink_above_all_scores_takes_everything_and_one_below_them_nothing(sink):
    torch.manual_seed(4)
    extents, num_blocks = extents_of([(40, 1, False), (3, 20, True)], 16, random.Random(4))
    cache = filled(2, 32, num_blocks, 16, torch.float32)
    heads = torch.randn(21, 10, 32).split((6, 2, 2), 1)
    plain = ReferenceAttention(cache, Scores(0.2, (0, 9))).plan(extents, slots_of(extents, 16)).attend(1, *heads)
    backends = backends_of(cache, Scores(0.2, (0, 9), 0.0, (torch.full((6,), sink),) * 2), 6)
    for backend in backends.values():
        out = backend.plan(extents, slots_of(extents, 16)).attend(1, *heads)
        torch.testing.assert_close(out, torch.zeros_like(out) if sink > 0 else plain)


@pytest.mark.parametrize("size", [1e-20, 1.0, 1e20])
def test_int8_is_off_by_half_a_step_of_each_head_at_most(size):
    """A step is a 127th of the head's largest number."""
    torch.manual_seed(2)
    cache = filled(3, 48, 4, 8, torch.int8, scaled=True)
    slots = torch.tensor([5, 30, 0, 17])
    keys, values = torch.randn(2, 4, 3, 48) * size
    keys[1, 2] = 0.0
    cache.write(1, slots, keys, values)
    for row, kept in zip((keys, values), cache.read(1, slots, torch.float32), strict=True):
        off = (row.transpose(0, 1) - kept).abs().amax(-1)
        assert (off <= torch.clamp(row.transpose(0, 1).abs().amax(-1), min=1e-12) / 127 * 0.5001).all()


def test_what_is_no_number_stays_none_in_int8():
    cache = filled(2, 32, 4, 16, torch.int8, scaled=True)
    scores, extent = Scores(0.2, (0, 0)), Extent(0, 1, 3, [2])
    heads = torch.randn(1, 10, 32)
    heads[0, 7, 4] = float("nan")
    for backend in backends_of(cache, scores, 6, torch.float32).values():
        out = backend.plan([extent], slots_of([extent], 16)).attend(0, *heads.split((6, 2, 2), 1))
        assert out[0, 96:].isnan().all()
        assert not out[0, :96].isnan().any()


def test_a_block_is_copied_with_its_scales():
    cache = filled(2, 32, 4, 8, torch.int8, scaled=True)
    expected = cache.read(1, torch.arange(8, 16), torch.float32)
    cache.copy_block(1, 3)
    assert all(map(torch.equal, cache.read(1, torch.arange(24, 32), torch.float32), expected))


CPU = torch.device("cpu")


def of_torch_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=()):
    """As it says what it takes, and does; there is none on the CPU."""
    assert window_size == (-1, 0)
    assert cu_seq_q.tolist()[-1] == len(query)
    heads = (each.transpose(0, 1) for each in (query, key, value))
    parts = zip(*(torch.tensor_split(each, cu_seq_q[1:-1].long(), dim=1) for each in heads), strict=True)
    mixed = [F.scaled_dot_product_attention(*part, is_causal=True, scale=scale, enable_gqa=True) for part in parts]
    return torch.cat(mixed, 1).transpose(0, 1)


def of_later(*args, scale, window_size, enable_gqa=False):
    assert enable_gqa
    return of_torch_2_11(*args, scale=scale, window_size=window_size)


def in_turns(query, key, value, *args, scale, window_size):
    return of_torch_2_11(query, key.repeat(1, 2, 1), value.repeat(1, 2, 1), *args, scale=scale, window_size=window_size)


def refusing(query, key, value, *args, scale, window_size):
    raise RuntimeError("Number of heads in key/value must divide number of heads in query")


def without_scale(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
    raise AssertionError("it cannot be asked for what is wanted")


@pytest.mark.parametrize(
    ("there", "serves"),
    [(of_torch_2_11, True), (of_later, True), (in_turns, False), (refusing, False), (without_scale, False)],
)
def test_torchs_attention_of_several_prompts_is_used_where_it_shares_keys_among_heads(monkeypatch, there, serves):
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", there)
    varlen.cache_clear()
    found = varlen(CPU)
    varlen.cache_clear()
    assert (found is not None) == serves
    if found is not None:
        heads = torch.randn(3, 4, 8).split((2, 1, 1), 1)
        bounds = torch.tensor([0, 3], dtype=torch.int32)
        alone = of_torch_2_11(*heads, bounds, bounds, 3, 3, scale=0.1, window_size=(-1, 0))
        torch.testing.assert_close(found(*heads, bounds, bounds, 3, 3, scale=0.1, window_size=(-1, 0)), alone)


def test_keys_that_heads_share_are_not_copied_for_each_of_them(monkeypatch):
    """Nor is torch asked to: on CUDA, where there is a mask, it would copy them."""
    attend, asked = F.scaled_dot_product_attention, []

    def noted(queries, keys, values, **how):
        asked.extend([each, len(each) * each[0, 0].numel()] for each in (keys, values))
        assert keys.shape[:2] == values.shape[:2] == queries.shape[:2]
        assert not how.get("enable_gqa")
        return attend(queries, keys, values, **how)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    for group, num_kv_heads in ((4, 1), (3, 2)):
        extents, num_blocks = extents_of([(30, 1, False), (0, 1, True), (20, 5, False)], 16, random.Random(1))
        cache = filled(num_kv_heads, 16, num_blocks, 16, torch.float32)
        heads = torch.randn(7, (group + 2) * num_kv_heads, 16)
        plan = GatheredAttention(cache, Scores(0.25, (0,))).plan(extents, slots_of(extents, 16))
        plan.attend(0, *heads.split((group * num_kv_heads, num_kv_heads, num_kv_heads), 1))
    assert len(asked) == 8
    assert all(each.untyped_storage().nbytes() == 4 * num_numbers for each, num_numbers in asked)
