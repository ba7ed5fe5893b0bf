"""Chunks of prompts whose past several tasks read: what these add up to is joined on the way, and little is held."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.worker.compiling import kernels
from tests.worker.pools import filled, slots_of
from worker.attention.base import Extent, Scores
from worker.attention.native import NativeAttention

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 16, 4, 64, 16
MAX_BYTES = 6 << 20
"""Of some threads; what all parts of the chunk below add up to takes 17 MiB."""
GROWTH = f"""
import resource, torch
from tests.worker.compiling import kernels
from tests.worker.test_chunk_parts import attended
from worker.kv_cache import KVCache, KVShape

torch.set_num_threads(2)
start = 32_000
cache = KVCache(KVShape(2, {NUM_KV_HEADS}, {HEAD_DIM}), start // {BLOCK_SIZE} + 16, {BLOCK_SIZE}, torch.bfloat16,
                torch.device("cpu"))
for numbers in (cache.keys[0], cache.values[0]):
    numbers.fill_(0.01)
attended(cache, [(256, 0)])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
attended(cache, [(256, start)])
print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


def attended(cache, chunks, is_repeatable=False, library=None):
    """What the kernels, or a ``library``'s, make of chunks of so many tokens from there on, over the same blocks."""
    extents, row = [], 0
    for num_tokens, start in chunks:
        extents.append(Extent(row, num_tokens, start, list(range(-(-(start + num_tokens) // BLOCK_SIZE)))))
        row += num_tokens
    generator = torch.Generator().manual_seed(row)
    qkv = torch.randn(row, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM, generator=generator).to(cache.keys[0].dtype)
    scores = Scores(HEAD_DIM**-0.5, (0, 0))
    backend = NativeAttention(cache, scores, library or kernels(), NUM_HEADS, is_repeatable)
    plan = backend.plan(extents, slots_of(extents, BLOCK_SIZE))
    return plan.attend(0, *qkv.split([NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], 1))


@pytest.mark.skipif(sys.platform != "linux", reason="it is told in kilobytes there")
def test_what_waits_to_be_joined_takes_no_more_memory_however_long_the_past_is():
    kernels()
    grown = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True).stdout
    assert int(grown) < MAX_BYTES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_repeatable", [False, True])
def test_parts_are_joined_to_the_same_bits_by_any_number_of_threads(dtype, is_repeatable):
    """One behind the other, and by more threads than there are cores for, so that they end in any order."""
    cache = filled(NUM_KV_HEADS, HEAD_DIM, 700, BLOCK_SIZE, dtype)
    chunks = [(33, 11_000), (5, 0), (100, 6_000), (16, 2_100)]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = attended(cache, chunks, is_repeatable)
        for num_threads in (2, 7):
            torch.set_num_threads(num_threads)
            for _ in range(3):
                assert torch.equal(attended(cache, chunks, is_repeatable), alone)
    finally:
        torch.set_num_threads(before)
