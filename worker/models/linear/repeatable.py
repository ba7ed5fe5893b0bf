"""Products whose rows do not depend on each other: always of the same number of rows at once, whatever there is to do.

A library chooses by the number of rows how it multiplies, and another way adds up in another order. With a number that
never changes it chooses once. Where it adds up alike for several numbers, which is tried out when a matrix of that
shape is first multiplied with, many rows go in larger pieces.
"""

from __future__ import annotations

import torch
from torch import Tensor

from worker.models.linear.base import Linear

SIZES = {"cpu": (512, 128, 64, 16, 1), "cuda": (1024, 512, 256, 128, 64, 16, 1)}
"""Rows that may be multiplied at once."""
PREFERRED = {"cpu": 16, "cuda": 64}
"""Where there are few: they take about as long as one."""
NUM_TRIALS = 2

_found: dict[tuple[object, ...], tuple[int, ...]] = {}


class RepeatableLinear:
    """A Linear over one that multiplies any number of rows, if not with the same bits."""

    __slots__ = ("_inner", "in_features", "out_features")

    def __init__(self, inner: Linear) -> None:
        self.in_features, self.out_features = inner.in_features, inner.out_features
        self._inner = inner

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        return self._in_pieces(x, x.dtype)

    def wide(self, x: Tensor) -> Tensor:
        """See Linear."""
        return self._in_pieces(x, torch.float32)

    def _in_pieces(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        y = x.new_empty((len(x), self.out_features), dtype=dtype)
        sizes = sizes_of(self._inner, x.device, x.dtype)
        at, num_rows = 0, len(x)
        while at < num_rows:
            # The largest piece that is full, or the smallest, filled up.
            size = next((size for size in sizes if size <= num_rows - at), sizes[-1])
            stop = min(num_rows, at + size)
            # A copy: where a tensor begins in memory may change how it is read, too.
            piece = x.new_zeros((size, self.in_features))
            piece[: stop - at] = x[at:stop]
            product = self._inner(piece) if dtype is x.dtype else self._inner.wide(piece)
            y[at:stop] = product[: stop - at]
            at = stop
        return y


@torch.inference_mode()
def sizes_of(inner: Linear, device: torch.device, dtype: torch.dtype) -> tuple[int, ...]:
    """Numbers of rows with which each row has the same bits in any place, largest first."""
    num_heads = getattr(inner, "num_heads", 1)
    kind = (type(inner), num_heads, inner.in_features, inner.out_features, device, dtype, torch.get_num_threads())
    if kind not in _found:
        _found[kind] = _alike(inner, device, dtype)
    return _found[kind]


def _alike(inner: Linear, device: torch.device, dtype: torch.dtype) -> tuple[int, ...]:
    for base in (PREFERRED[device.type], 1):
        trials = [_Trial(inner, base, seed, device, dtype) for seed in range(NUM_TRIALS)]
        if all(trial.agrees(base) for trial in trials):
            sizes = [size for size in SIZES[device.type] if size >= base]
            return tuple(size for size in sizes if all(trial.agrees(size) for trial in trials))
    raise AssertionError("one row alone has one place")


class _Trial:
    """Some rows, and what each of them is among zeros in the first place of ``base``: so it shall be everywhere."""

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
        """So many rows at once, each of those of this trial in two places at least."""
        base = len(self._rows)
        for shift in (0, 1):
            turn = torch.arange(size, device=self._rows.device).add_(shift) % base
            if not torch.equal(self._inner.wide(self._rows[turn]), self._expected[turn]):
                return False
        return True
