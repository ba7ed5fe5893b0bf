"""The proof of kernels whose memory ends in every call, at each of its allocations in turn, before the call is let be.

``python -m tests.worker.exhausted SHARED_OBJECT NUM_THREADS``: of kernels that were built with failing_new.h. Prints
how often memory has run out; exits with 1 where what comes after that is not what torch says.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from policies.terms import Sampling
from tests.worker.pools import filled
from tests.worker.test_chunk_parts import BLOCK_SIZE, HEAD_DIM, NUM_KV_HEADS, attended
from worker.native import Library, Seen
from worker.proof import failures
from worker.sampling import in_torch, race
from worker.sampling.wishes import wish_of

CALLS = (
    *("attend", "linear", "linear_int8", "linear_int4", "linear_as_floats", "adapt"),
    *("maxima", "penalise", "rank", "draw", "code", "whole", "follow"),
)
WISHES: list[dict[str, Any]] = [
    *({"temperature": 0.0}, {}, {"top_k": 900}, {"top_p": 0.9}, {"min_p": 0.01}, {"temperature": 3.0, "top_p": 0.99}),
]


class Exhausted(Library):
    """Each call is made again until it goes well, and memory then lasts for one allocation more."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.num_failures = 0
        self._left = ctypes.c_int64.in_dll(ctypes.CDLL(path), "penstock_allocations")
        self._restore: Callable[[], object] = lambda: None
        for name in CALLS:
            if hasattr(self, f"_{name}"):
                setattr(self, f"_{name}", self._again(getattr(self, f"_{name}")))

    def adapt(self, groups: Tensor, rank: int, first: int, x: Tensor, y: Tensor) -> None:
        before = y.clone()
        self._restore = lambda: y.copy_(before)
        super().adapt(groups, rank, first, x, y)
        self._restore = lambda: None

    def penalise(self, logits: Tensor, every: Iterable[Seen], maxima: Tensor | None = None) -> None:
        before = logits.clone()
        self._restore = lambda: logits.copy_(before)
        super().penalise(logits, every, maxima)
        self._restore = lambda: None

    def _again(self, function: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            for num in itertools.count():
                self._left.value = num
                try:
                    function(*arguments)
                except MemoryError:
                    self.num_failures += 1
                    self._restore()
                else:
                    return
                finally:
                    self._left.value = -1

        return call


def draws(kernels: Library) -> bool:
    """Whether tokens of a large vocabulary are torch's, whatever is asked, and each row by a thread of its own."""
    asked = [Sampling(1, **wish) for wish in WISHES]
    keys = [(seed, 5) for seed in range(len(asked))]
    wishes = b"".join(race.start(*key) + wish_of(sampling) for key, sampling in zip(keys, asked, strict=True))
    logits = torch.randn(len(asked), 20_000, generator=torch.Generator().manual_seed(1))
    few = np.zeros(20_000 // 32, dtype=np.int32)
    few[[3, 40]] = -1
    for masks in ((), [few.ctypes.data] * len(asked)):
        x = logits.clone()
        drawn = kernels.draw(x, kernels.maxima(x), wishes, masks=masks, num_words=len(few))
        if masks:
            masked = torch.full_like(logits, -torch.inf)
            for word in few.nonzero()[0]:
                masked[:, 32 * word : 32 * word + 32] = logits[:, 32 * word : 32 * word + 32]
            logits = masked
        if drawn != in_torch.draw(logits, asked, keys)[:, None].tolist():
            return False
    return True


def joins(kernels: Library) -> bool:
    """Whether threads that have never attended, and wait for what others hold, join parts as one thread does."""
    cache = filled(NUM_KV_HEADS, HEAD_DIM, 700, BLOCK_SIZE, torch.float32)
    chunks = [(33, 11_000), (100, 6_000)]
    expected = attended(cache, chunks, library=Library(kernels.path))
    torch.set_num_threads(torch.get_num_threads() + 4)
    return torch.equal(attended(cache, chunks, library=kernels), expected)


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[2]))
    kernels = Exhausted(sys.argv[1])
    is_right = draws(kernels) and not list(failures(kernels)) and joins(kernels)
    print(kernels.num_failures)
    sys.exit(not is_right)
