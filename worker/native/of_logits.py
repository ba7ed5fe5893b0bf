"""The compiled kernels that make tokens of logits."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from ctypes import c_int, c_int64, c_void_p

import torch
from torch import Tensor

from worker.native.outcome import may_fail
from worker.native.structures import Draws, Rankings, Seen

TILE_LOGITS = 64
"""Of a tile of the sampler's."""
MAX_TRIES = 64
"""Of a row of the sampler's."""


class OfLogits:
    """Logits and maxima are float32 and contiguous."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        self._maxima = loaded.penstock_maxima
        self._maxima.argtypes = (c_void_p, c_int64, c_int64, c_void_p, c_int)
        self._refresh_maxima = loaded.penstock_refresh_maxima
        self._refresh_maxima.argtypes = (c_void_p, c_int64, c_void_p, c_void_p, c_int64)
        self._refresh_maxima.restype = None
        self._penalise = loaded.penstock_penalise
        self._penalise.argtypes = (c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int)
        self._rank, self._draw = loaded.penstock_rank, loaded.penstock_draw
        for function in (self._rank, self._draw):
            function.argtypes = (c_void_p, c_int)
        may_fail(self._maxima, self._penalise, self._rank, self._draw)

    def maxima(self, logits: Tensor) -> Tensor:
        """The largest of each 32 logits, NaN where one is: logits [rows, vocab_size] float32 -> [rows, tiles, 2], two
        for each tile of 64.
        """
        out = logits.new_empty((logits.shape[0], -(-logits.shape[1] // TILE_LOGITS), 2))
        self._maxima(logits.data_ptr(), *logits.shape, out.data_ptr(), torch.get_num_threads())
        return out

    def refresh_maxima(self, logits: Tensor, maxima: Tensor, places: Tensor) -> None:
        """``maxima``, after the logits at ``places`` [count] i64, of all rows end to end, have changed."""
        self._refresh_maxima(logits.data_ptr(), logits.shape[1], maxima.data_ptr(), places.data_ptr(), len(places))

    def penalise(self, logits: Tensor, every: Iterable[Seen], maxima: Tensor | None = None) -> None:
        """In place, what sequences have seen of logits [rows, vocab_size], and ``maxima`` with them: whoever makes the
        structures keeps what they point to."""
        held = list(every)
        array = (Seen * len(held))(*held)
        at, threads = None if maxima is None else maxima.data_ptr(), torch.get_num_threads()
        self._penalise(ctypes.addressof(array), len(held), logits.data_ptr(), logits.shape[1], at, threads)

    def rank(
        self, logits: Tensor, maxima: Tensor, num: int, rows: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of logits [.., vocab_size] with these ``maxima``, or some rows of them: the logarithm of the sum of all
        exponentials [rows] f32, NaN where they are no distribution; and but for those the ``num`` largest, at most
        MAX_TRIES and vocab_size, [rows, num] f32, and their tokens i64, of equal ones the lowest first.
        """
        num_rows = len(logits) if rows is None else len(rows)
        totals, values = logits.new_empty(num_rows), logits.new_zeros((num_rows, num))
        tokens = torch.zeros((num_rows, num), dtype=torch.int64)
        at = None if rows is None else _array(rows)
        rankings = Rankings(
            rows=num_rows,
            vocab_size=logits.shape[1],
            places=num,
            logits=logits.data_ptr(),
            maxima=maxima.data_ptr(),
            at=None if at is None else ctypes.addressof(at),
            totals=totals.data_ptr(),
            values=values.data_ptr(),
            tokens=tokens.data_ptr(),
        )
        self._rank(ctypes.addressof(rankings), torch.get_num_threads())
        return totals, values, tokens

    def draw(
        self,
        logits: Tensor,
        maxima: Tensor,
        wishes: bytes,
        num_tries: int = 1,
        rows: Sequence[int] | None = None,
        masks: Sequence[int] = (),
        num_words: int = 0,
        forced: Sequence[int] = (),
    ) -> list[list[int]]:
        """Tokens from each row of logits [rows, vocab_size] f32, whose ``maxima`` these are: of each row as many as
        ``num_tries``, at most MAX_TRIES, in the order in which they would be drawn without those before them; of a row
        that cuts the unlikely off the first one alone. -1 where there are none, or the logits are no distribution.
        ``wishes``: of each row one, see ``worker.sampling.wishes``; ``rows``: of these alone. ``masks``: of each that
        is drawn the address of ``num_words`` with a bit for each token that may come (see masks.h), 0 where all may.
        They are laid over some rows, whose logits and maxima are not to be used without them any more. ``forced``: of
        each that is drawn the token that comes if none of its logits is NaN or +inf, below 0 where that is to be seen.
        """
        num_rows, vocab_size = logits.shape
        num = num_rows if rows is None else len(rows)
        chosen = (c_int64 * (num * num_tries))()
        at = None if rows is None else _array(rows)
        bits = _array(masks) if masks else None
        known = _array(forced) if forced else None
        draws = Draws(
            rows=num,
            vocab_size=vocab_size,
            logits=logits.data_ptr(),
            maxima=maxima.data_ptr(),
            wishes=wishes,
            chosen=ctypes.addressof(chosen),
            tries=num_tries,
            at=None if at is None else ctypes.addressof(at),
            bits=None if bits is None else ctypes.addressof(bits),
            words=num_words,
            forced=None if known is None else ctypes.addressof(known),
        )
        # Nothing of torch's, whose code is far away behind a step that has read all weights.
        self._draw(ctypes.addressof(draws), 1 if num == 1 else torch.get_num_threads())
        tokens = chosen[:]
        return [tokens[first : first + num_tries] for first in range(0, len(tokens), num_tries)]


def _array(numbers: Sequence[int]) -> ctypes.Array[c_int64]:
    """For a call; sooner made than a tensor."""
    return (c_int64 * len(numbers))(*numbers)
