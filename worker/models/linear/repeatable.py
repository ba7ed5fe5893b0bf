"""Products whose rows do not depend on each other: always of the same number of rows at once, whatever there is to do.

A library chooses by the number of rows how it multiplies, and another way adds up in another order. With a number that
never changes it chooses once. Where it adds up alike for several numbers, which is found out when the matrix is made,
many rows go in larger pieces.
"""

from __future__ import annotations

import torch
from torch import Tensor

from worker.models.linear.base import Linear

SIZES = {"cpu": (512, 128, 64, 16, 1), "cuda": (1024, 512, 256, 128, 64, 16, 1)}
"""Rows that may be multiplied at once."""
PREFERRED = {"cpu": 16, "cuda": 64}
"""For a few rows: about as fast as one of them."""
NUM_TRIALS = 2


class RepeatableLinear:
    """A Linear over one that multiplies any number of rows, if not with the same bits."""

    __slots__ = ("_inner", "_sizes", "in_features", "out_features")

    def __init__(self, inner: Linear, device: torch.device, dtype: torch.dtype) -> None:
        """``dtype`` of what it will be multiplied with."""
        self.in_features, self.out_features = inner.in_features, inner.out_features
        self._inner = inner
        self._sizes = _alike(inner, device, dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        return self._in_pieces(x, x.new_empty((len(x), self.out_features)), False)

    def wide(self, x: Tensor) -> Tensor:
        """See Linear."""
        return self._in_pieces(x, x.new_empty((len(x), self.out_features), dtype=torch.float32), True)

    def _in_pieces(self, x: Tensor, y: Tensor, is_wide: bool) -> Tensor:
        at, num_rows = 0, len(x)
        while at < num_rows:
            # The largest piece that is full, or the smallest, filled up.
            size = next((size for size in self._sizes if size <= num_rows - at), self._sizes[-1])
            stop = min(num_rows, at + size)
            # A copy: where a tensor begins in memory may change how it is read, too.
            piece = x.new_zeros((size, x.shape[1]))
            piece[: stop - at] = x[at:stop]
            product = self._inner.wide(piece) if is_wide else self._inner(piece)
            y[at:stop] = product[: stop - at]
            at = stop
        return y


@torch.inference_mode()
def _alike(inner: Linear, device: torch.device, dtype: torch.dtype) -> tuple[int, ...]:
    """Numbers of rows with which each row has the same bits in any place, largest first."""
    sizes = SIZES[device.type]
    for base in (PREFERRED[device.type], 1):
        trials = [_Trial(inner, base, seed, device, dtype) for seed in range(NUM_TRIALS)]
        if all(trial.agrees(base) for trial in trials):
            return tuple(size for size in sizes if size >= base and all(trial.agrees(size) for trial in trials))
    raise AssertionError("one row alone has one place")


class _Trial:
    """One row among zeros, in the first place of ``base`` rows, is what it is to be everywhere."""

    def __init__(self, inner: Linear, base: int, seed: int, device: torch.device, dtype: torch.dtype) -> None:
        self._inner = inner
        source = torch.Generator().manual_seed(seed)
        self._rows = torch.randn((base, inner.in_features), generator=source).to(device, dtype)
        expected = []
        for row in self._rows:
            alone = torch.zeros_like(self._rows)
            alone[0] = row
            expected.append(inner.wide(alone)[0])
        self._expected = torch.stack(expected)

    def agrees(self, size: int) -> bool:
        """So many rows at once, each of those of this trial in several places."""
        base = len(self._rows)
        count = -(-size // base)
        product = self._inner.wide(self._rows.repeat(count, 1)[:size])
        turned = self._inner.wide(self._rows.roll(1, 0).repeat(count, 1)[:size])
        wanted = self._expected.repeat(count, 1)[:size]
        return torch.equal(product, wanted) and torch.equal(turned, self._expected.roll(1, 0).repeat(count, 1)[:size])
