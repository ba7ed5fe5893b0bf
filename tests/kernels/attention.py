"""Triton's paged attention says what the plain one says, whatever the shapes, and however the work is cut."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernels.device import DEVICE, examples
from tests.worker.pools import extents_of, filled, slots_of
from worker.attention.base import Extent, Scores, Shape
from worker.attention.gathered import GatheredAttention
from worker.attention.paged import TritonAttention
from worker.attention.paged_cut import Cutter, Tile
from worker.attention.reference import ReferenceAttention
from worker.kv_cache import KVCache, KVShape

TOLERANCES: dict[torch.dtype, dict[str, float]] = {
    torch.float32: {"atol": 2e-5, "rtol": 1e-4},
    torch.float16: {"atol": 5e-3, "rtol": 5e-3},
    torch.bfloat16: {"atol": 3e-2, "rtol": 3e-2},
}


def heads_for(extents: list[Extent], num_heads: int, cache: KVCache, dtype: torch.dtype) -> Any:
    """Queries, keys and values as the model hands them over: slices of one tensor."""
    num_kv_heads, _, head_dim = cache.keys[0].shape
    num_tokens = sum(extent.num_tokens for extent in extents)
    heads = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim).to(DEVICE, dtype)
    return heads.split((num_heads, num_kv_heads, num_kv_heads), 1)


def tensors_of(cache: KVCache) -> list[torch.Tensor]:
    return [*cache.keys, *cache.values]


def assert_agrees(
    sequences: list[tuple[int, int, bool]],
    group: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    windows: tuple[int, int],
    softcap: float,
    dtype: torch.dtype,
    seed: int,
    num_processors: int = 4,
    has_sinks: bool = False,
    **how: Any,
) -> None:
    """Two layers, the second over what the first step wrote; the KV that is left is the same to the bit."""
    torch.manual_seed(seed)
    extents, num_blocks = extents_of(sequences, block_size, random.Random(seed))
    cache = filled(num_kv_heads, head_dim, num_blocks, block_size, dtype, DEVICE)
    num_heads = group * num_kv_heads
    sinks = tuple(4 * torch.randn(2, num_heads, device=DEVICE)) if has_sinks else ()
    scores = Scores(0.7 * head_dim**-0.5, windows, softcap, sinks)
    slots = slots_of(extents, block_size).to(DEVICE)
    queries, keys, values = heads_for(extents, num_heads, cache, dtype)
    before = [tensor.clone() for tensor in tensors_of(cache)]
    plain = ReferenceAttention(cache, scores).plan(extents, slots)
    expected = [plain.attend(layer, queries, keys, values) for layer in (0, 1)]
    after = [tensor.clone() for tensor in tensors_of(cache)]
    for tensor, kept in zip(tensors_of(cache), before, strict=True):
        tensor.copy_(kept)
    # Whatever else lies in the pool is nobody's business, least of all when it is NaN.
    own = torch.cat(
        [
            slots_of([Extent(0, extent.start + extent.num_tokens, 0, extent.block_ids)], block_size)[first:]
            for extent in extents
            for first in [max(0, extent.start - max(windows) + 1) if min(windows) > 0 else 0]
        ]
    )
    foreign = torch.ones(num_blocks * block_size, dtype=torch.bool)
    foreign[own] = False
    for tensor in (*tensors_of(cache), *after):
        tensor[:, foreign.to(DEVICE)] = float("nan")
    plan = TritonAttention(cache, scores, num_heads, num_processors=num_processors, **how).plan(extents, slots)
    for layer in (0, 1):
        torch.testing.assert_close(plan.attend(layer, queries, keys, values), expected[layer], **TOLERANCES[dtype])
    for tensor, left in zip(tensors_of(cache), after, strict=True):
        assert torch.equal(tensor.nan_to_num(7.0), left.nan_to_num(7.0))


@settings(max_examples=examples(24), deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    sequences=st.lists(
        st.tuples(st.integers(0, 200), st.sampled_from((1, 1, 1, 2, 3, 5, 17, 33)), st.booleans()),
        min_size=1,
        max_size=3,
    ),
    group=st.integers(1, 20),
    num_kv_heads=st.integers(1, 2),
    head_dim=st.sampled_from((8, 64, 80, 96, 128)),
    block_size=st.sampled_from((16, 20, 32, 256)),
    windows=st.tuples(st.sampled_from((0, 1, 7, 16, 33)), st.sampled_from((0, 50, 200))),
    softcap=st.sampled_from((0.0, 0.0, 5.0)),
    dtype=st.sampled_from((torch.float32, torch.float16, torch.bfloat16)),
    num_processors=st.sampled_from((1, 8, 64)),
    has_sinks=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_it_agrees_with_the_plain_one(**case):
    assert_agrees(**case)


@pytest.mark.parametrize(
    ("windows", "has_sinks", "softcap"), [((0, 0), True, 4.0), ((300, 700), False, 0.0), ((0, 700), True, 0.0)]
)
def test_long_contexts_dealt_to_many_programs_agree(windows, has_sinks, softcap):
    sequences = [(1100, 1, False), (511, 1, True), (730, 4, False), (600, 20, True), (0, 1, True)]
    sizes = (3, 1, 32, 16, windows, softcap, torch.float32)
    assert_agrees(sequences, *sizes, seed=3, num_processors=64, has_sinks=has_sinks)


@pytest.mark.parametrize("num_drafts", [1, 4, 16])
def test_a_draft_to_verify_agrees(num_drafts):
    assert_agrees([(700, num_drafts + 1, False)], 4, 2, 64, 32, (0, 0), 0.0, torch.bfloat16, 5, num_processors=64)


def test_heads_of_256_numbers_and_one_kv_head_for_all_agree():
    assert_agrees([(300, 1, False), (20, 30, True)], 8, 1, 256, 16, (0, 64), 0.0, torch.bfloat16, seed=2)
    assert_agrees([(300, 1, False), (20, 30, True)], 40, 1, 64, 16, (0, 64), 0.0, torch.float32, seed=2)


def test_long_chunks_go_through_torch_and_agree():
    sequences = [(0, 40, True), (100, 33, False), (60, 1, True), (0, 2, True)]
    assert_agrees(sequences, 3, 2, 32, 16, (0, 0), 0.0, torch.float32, seed=4, min_dense_tokens=30)
    assert_agrees(sequences, 3, 2, 32, 16, (0, 64), 0.0, torch.float32, seed=4, min_dense_tokens=30)
    assert_agrees(sequences, 3, 2, 32, 16, (0, 0), 0.0, torch.float32, seed=4, min_dense_tokens=30, has_sinks=True)


def each_alone(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bounds: torch.Tensor,
    *_: Any,
    scale: float,
    **how: Any,
) -> torch.Tensor:
    """As torch's varlen_attn, which the CPU has not."""
    assert how == {"window_size": (-1, 0)}
    heads = (each.transpose(0, 1) for each in (queries, keys, values))
    parts = zip(*(torch.tensor_split(each, bounds[1:-1].long(), dim=1) for each in heads), strict=True)
    mixed = [F.scaled_dot_product_attention(*part, is_causal=True, scale=scale, enable_gqa=True) for part in parts]
    return torch.cat(mixed, 1).transpose(0, 1)


IN_ONE: dict[str, Any] = {"varlen_attn": each_alone if DEVICE.type == "cpu" else None, "min_dense_tokens": 40}


@pytest.mark.parametrize(
    "sequences",
    [
        [(60, 1, True), (0, 40, False), (0, 3, True)],
        [(0, 30, True), (60, 1, True), (0, 12, False), (100, 45, False), (0, 1, True)],
    ],
    ids=["side by side", "apart"],
)
def test_whole_prompts_go_through_torch_in_one_launch_and_agree(sequences):
    dtype = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
    assert_agrees(sequences, 3, 2, 32, 16, (0, 0), 0.0, dtype, seed=4, **IN_ONE)
    extents, num_blocks = extents_of(sequences, 16, random.Random(4))
    cache = filled(2, 32, num_blocks, 16, dtype, DEVICE)
    whole = [extent for extent in extents if not extent.start]

    def together(extents: list[Extent], windows: tuple[int, int] = (0, 0)) -> list[Extent]:
        return TritonAttention(cache, Scores(0.2, windows), 6, num_processors=4, **IN_ONE).outline(extents).together

    assert together(extents) == whole
    assert together(extents, (0, 64)) == whole
    assert together(extents, (0, 16)) == []  # some see less than all before them
    assert together(whole[1:]) == []  # too few to pay


def test_with_one_split_company_does_not_change_a_row_by_a_bit():
    torch.manual_seed(1)
    extents, num_blocks = extents_of([(600, 1, True), (90, 1, False), (5, 1, True)], 16, random.Random(1))
    cache = filled(2, 32, num_blocks, 16, torch.float32, DEVICE)
    queries, keys, values = heads_for(extents, 6, cache, torch.float32)
    backend = TritonAttention(cache, Scores(0.2, (0, 0)), 6, num_processors=64, max_splits=1)
    crowd = backend.plan(extents, slots_of(extents, 16).to(DEVICE)).attend(0, queries, keys, values)
    lone = backend.plan(extents[:1], slots_of(extents[:1], 16).to(DEVICE))
    assert torch.equal(crowd[:1], lone.attend(0, queries[:1], keys[:1], values[:1]))


@pytest.mark.parametrize(("dtype", "window"), [(torch.bfloat16, 0), (torch.bfloat16, 40), (torch.float32, 40)], ids=str)
def test_a_repeatable_row_has_the_same_bits_from_any_chunk_and_in_any_company(window, dtype):
    torch.manual_seed(2)
    size, chance = 16, random.Random(3)
    (whole, other), num_blocks = extents_of([(0, 140, True), (30, 5, False)], size, chance)
    cache = filled(2, 32, num_blocks, size, dtype, DEVICE)
    backend = TritonAttention(cache, Scores(0.2, (window, window)), 6, num_processors=64, is_repeatable=True)
    queries, keys, values = heads_for([whole, other], 6, cache, dtype)
    slots = slots_of([whole, other], size).to(DEVICE)
    together = backend.plan([whole, other], slots).attend(0, queries, keys, values)
    for start, stop in ((0, 140), (0, 65), (64, 65), (127, 139), (139, 140)):
        rows = slice(start, stop)
        plan = backend.plan([Extent(0, stop - start, start, whole.block_ids)], slots[rows])
        got = plan.attend(0, queries[rows], keys[rows], values[rows])
        if DEVICE.type == "cpu" and dtype is torch.float32:
            # The interpreter multiplies by numpy, whose last bit depends on the processor and on a row's place.
            torch.testing.assert_close(got, together[rows], atol=1e-6, rtol=1e-5)
        else:
            assert torch.equal(got, together[rows])


def assert_serves(backend: TritonAttention, shape: Shape, steps: list[list[tuple[int, int]]], seed: int) -> Any:
    """A fixed plan, over one step of (start, num_tokens) each after another, as a captured graph would be: the same
    launches, over what was put into the same places. Returns it."""
    chance, cache = random.Random(seed), backend.cache
    num_blocks = len(cache.keys[0][0]) // cache.block_size
    held_slots = torch.full((shape.num_rows,), -1, device=DEVICE)
    places = torch.zeros(backend.num_places(shape, num_blocks), dtype=torch.int32, device=DEVICE)
    fixed = backend.fixed(shape, held_slots, places)
    for step in steps:
        extents, _ = extents_of([(*each, False) for each in step], cache.block_size, chance, num_blocks)
        slots = slots_of(extents, cache.block_size).to(DEVICE)
        queries, keys, values = heads_for([Extent(0, shape.num_rows, 0, ())], backend.num_heads, cache, torch.float32)
        used = len(slots)
        numbers = np.concatenate(fixed.numbers(extents))
        places[: len(numbers)] = torch.from_numpy(numbers).to(DEVICE)
        held_slots.fill_(-1)[:used] = slots
        before = [tensor.clone() for tensor in tensors_of(cache)]
        got = fixed.attend(0, queries, keys, values)
        after = [tensor.clone() for tensor in tensors_of(cache)]
        for tensor, kept in zip(tensors_of(cache), before, strict=True):
            tensor.copy_(kept)
        if used:
            plain = ReferenceAttention(cache, backend.scores).plan(extents, slots)
            expected = plain.attend(0, queries[:used], keys[:used], values[:used])
            torch.testing.assert_close(got[:used], expected, **TOLERANCES[torch.float32])
        assert all(torch.equal(*pair) for pair in zip(tensors_of(cache), after, strict=True))
    return fixed


@pytest.mark.parametrize(("num_tokens", "window"), [(1, 0), (1, 40), (5, 0)])
def test_a_fixed_plan_serves_one_step_after_another(num_tokens, window):
    torch.manual_seed(num_tokens)
    chance = random.Random(num_tokens)
    backend = TritonAttention(
        filled(2, 32, 80, 16, torch.float32, DEVICE), Scores(0.2, (window, window)), 6, num_processors=6
    )
    starts = ([200, 3, 17], [0], [], [40, 230, 1, 100], [5, 5])
    steps = [[(start, chance.randint(1, num_tokens)) for start in each] for each in starts]
    fixed = assert_serves(backend, Shape(4 * num_tokens, 4 * num_tokens, num_tokens), steps, num_tokens)
    assert fixed.most == 3, "some of what follows is dealt to several programs"


BESIDE = [
    [(200, 1), (3, 40), (17, 1), (100, 4)],
    [(0, 64)],
    [],
    [(270, 1), (0, 1), (50, 2)],
    [(200, 33), (5, 9), (40, 11), (0, 1), (90, 1), (33, 1)],
]
FEWER_BESIDE = [[(300, 1), (3, 11), (17, 1), (90, 3)], [(0, 16)], [], [(150, 9), (0, 1), (33, 1)]]
"""Where many heads make many tiles of few tokens."""


@pytest.mark.parametrize(
    ("group", "window", "num_rows", "steps", "num_processors"),
    [(3, 0, 64, BESIDE, 2), (3, 0, 64, BESIDE, 16), (1, 40, 64, BESIDE, 16), (40, 0, 16, FEWER_BESIDE, 8)],
)
def test_a_fixed_plan_serves_chunks_beside_decodes_and_drafts(group, window, num_rows, steps, num_processors):
    torch.manual_seed(group)
    cache, scores = filled(2, 16, 80, 16, torch.float32, DEVICE), Scores(0.2, (window, window))
    backend = TritonAttention(cache, scores, 2 * group, num_processors=num_processors)
    fixed = assert_serves(backend, Shape(num_rows, 6), steps, group)
    assert len(fixed.launches) == (1 if group == 40 else 2)


def test_what_a_fixed_plan_leaves_room_for_is_enough_for_all_and_what_is_split_is_held_to_its_scratch():
    chance = random.Random(5)
    for _ in range(300):
        group, num_kv_heads = chance.choice([1, 3, 4, 8, 16, 40]), chance.choice([1, 2, 8])
        processors, window = chance.choice([1, 8, 132]), chance.choice([0, 0, 100])
        num_rows, num_sequences, most = (
            chance.choice([16, 64, 300]),
            chance.randint(1, 20),
            chance.choice([0, 40, 4000]),
        )
        cutter = Cutter(group, num_kv_heads, 128, 2, window, processors, 64, False)
        bounds = sorted(chance.sample(range(1, num_rows), num_sequences - 1) if num_sequences <= num_rows else [])
        counts = [end - begin for begin, end in zip([0, *bounds], [*bounds, num_rows], strict=True)]
        extents = [Extent(0, count, chance.choice([0, 50, 9000]), ()) for count in counts]
        tiles = cutter.tiles_of(num_rows)
        cut = cutter.recut(extents, tiles, most)
        for tile, most_items, share in zip(tiles, cutter.most_items(num_rows, num_sequences), cut.shares, strict=True):
            assert share.tile == tile
            assert len(share.items) <= most_items
        assert cut.num_split_rows <= len(tiles) * most
        assert sorted(cut.extents) == sorted(extents)


def test_decodes_and_short_drafts_are_launched_apart_from_chunks():
    cutter = Cutter(4, 8, 128, 2, 0, 132, 64, False)
    extents = [Extent(row, count, 100, ()) for row, count in enumerate([1, 200, 1, 8, 9])]
    few, many = cutter.cut(extents).shares
    assert few.tile == Tile.of(4, 8, 128, 2)
    assert few.tile.is_small
    assert many.tile == Tile.of(4, 200, 128, 2)
    assert not many.tile.is_small
    assert [share.tile for share in cutter.cut(extents[:1]).shares] == [Tile.of(4, 1, 128, 2)]
    assert [share.tile for share in cutter.cut(extents[1:2]).shares] == [many.tile]
    assert cutter.cut([]).shares == []


@pytest.mark.parametrize(("scaled", "dtype"), [(True, torch.float16), (False, torch.bfloat16)])
def test_a_float8_pool_holds_what_torch_would_round_to_and_is_read_as_that(scaled, dtype):
    torch.manual_seed(2)
    sequences = [(0, 20, False), (0, 1, True), (0, 90, False)]
    extents, num_blocks = extents_of(sequences, 32, random.Random(2))
    scores, scales = Scores(0.1, (0, 70)), [(0.01, 0.02), (0.5, 0.25)]
    cache = KVCache(KVShape(2, 2, 64), num_blocks, 32, torch.float8_e4m3fn, DEVICE, scaled=scaled)
    wide = KVCache(KVShape(2, 2, 64), num_blocks, 32, torch.float32, DEVICE)
    slots = slots_of(extents, 32).to(DEVICE)
    queries, keys, values = heads_for(extents, 8, cache, dtype)
    plan = TritonAttention(
        cache, scores, 8, num_processors=64, tensor_scales=() if scaled else scales
    ).plan(extents, slots)  # fmt: skip
    plain = ReferenceAttention(wide, scores).plan(extents, slots)
    for layer in (0, 1):
        rounded = []
        for part, scale in zip((keys, values), scales[layer], strict=True):
            scale = part.float().abs().amax(-1, keepdim=True) / 448.0 if scaled else torch.tensor(scale, device=DEVICE)
            rounded.append((part.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale)
        expected = plain.attend(layer, queries.float(), *rounded)
        got = plan.attend(layer, queries, keys, values)
        torch.testing.assert_close(got.float(), expected, **TOLERANCES[dtype])
        held = cache.keys[layer][:, slots].float()
        scale = cache.key_scales[layer][:, slots, None] if scaled else scales[layer][0]
        torch.testing.assert_close((held * scale).transpose(0, 1), rounded[0], atol=0, rtol=1e-6)


@pytest.mark.parametrize("kept", [torch.float8_e4m3fn, torch.int8])
def test_a_pool_of_codes_with_scales_is_written_and_read_as_torch_does(kept):
    torch.manual_seed(3)
    extents, num_blocks = extents_of([(70, 1, False), (0, 40, True), (33, 3, False)], 32, random.Random(3))
    scores = Scores(0.1, (0, 50))
    pools = [KVCache(KVShape(2, 2, 64), num_blocks, 32, kept, DEVICE, scaled=True) for _ in "ab"]
    assert TritonAttention.serves(pools[0], 8)
    every = torch.arange(num_blocks * 32, device=DEVICE)
    for layer in (0, 1):
        past = torch.randn(2, len(every), 2, 64, device=DEVICE)
        for pool in pools:
            pool.write(layer, every, *past)
    slots = slots_of(extents, 32).to(DEVICE)
    queries, keys, values = heads_for(extents, 8, pools[0], torch.float32)
    ours = TritonAttention(pools[0], scores, 8, num_processors=64).plan(extents, slots)
    plain = GatheredAttention(pools[1], scores).plan(extents, slots)
    for layer in (0, 1):
        got, expected = (plan.attend(layer, queries, keys, values) for plan in (ours, plain))
        torch.testing.assert_close(got, expected, **TOLERANCES[torch.float32])
        for one, other in zip(*(pool.read(layer, every, torch.float32) for pool in pools), strict=True):
            torch.testing.assert_close(one, other, atol=0, rtol=1e-6)
