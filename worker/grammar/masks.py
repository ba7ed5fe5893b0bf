"""The masks of a step: of each sequence that keeps to a grammar, the tokens that may come next, one bit each."""

from __future__ import annotations

from collections.abc import Sequence as Run

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLExecutor

from worker.grammar.errors import GuideLost
from worker.grammar.guide import Guide, allow, first_line
from worker.sampling.masks import Judge, Masks
from worker.sequence import Sequence

Words = npt.NDArray[np.int32]


class MaskMaker:
    """Makes them, several at a time on threads of llguidance's. What it gave out last is overwritten by the next."""

    def __init__(self, is_pinned: bool) -> None:
        """``is_pinned``: the masks go to a device."""
        self._executor = LLExecutor()
        self._is_pinned = is_pinned
        self._buffer = self._room(0, 0)

    def make(self, sequences: Run[Sequence]) -> tuple[Masks | None, dict[Sequence, Exception]]:
        """Of the rows of a batch, as ``Sequence.rows`` has them: those of sequences that have a guide and have not
        ended. And those that cannot go on."""
        rows: list[int] = []
        asked: list[tuple[Sequence, Guide, int]] = []
        at = 0
        for sequence in sequences:
            num = 1 + len(sequence.draft_token_ids)
            if sequence.guide is not None and not sequence.has_ended:
                asked.append((sequence, sequence.guide, len(rows)))
                rows += range(at, at + num)
            at += num
        if not asked:
            return None, {}
        if len(rows) > len(self._buffer):
            num_words = -(-asked[0][1].vocabulary.vocab_size // 32)  # one model has one vocabulary
            self._buffer = self._room(2 * len(rows), num_words)
        bits = self._buffer[: len(rows)]
        words: Words = bits.numpy()
        words.fill(-1)
        self._fill(asked, words)
        judges: list[Judge | None] = [None] * len(rows)
        ending: set[int] = set()
        faults: dict[Sequence, Exception] = {}
        for sequence, guide, place in asked:
            if guide.matcher.is_error():
                reason = first_line(guide.matcher.get_error())
                faults[sequence] = GuideLost(f"its grammar cannot be followed any further: {reason}")
                continue
            for nth in range(1 + len(sequence.draft_token_ids)):
                if self._finish(sequence, guide, words[place + nth], nth):
                    ending.add(rows[place + nth])
            num_left = sequence.num_left
            if guide.is_careful(num_left):
                judges[place] = Judge(guide, num_left)
        return Masks(rows, bits, judges, frozenset(ending)), faults

    def _fill(self, asked: list[tuple[Sequence, Guide, int]], words: Words) -> None:
        plain = [(guide.matcher, place) for sequence, guide, place in asked if not sequence.draft_token_ids]
        drafted = [
            (guide.matcher, place, list(sequence.draft_token_ids))
            for sequence, guide, place in asked
            if sequence.draft_token_ids
        ]
        row_bytes = 4 * words.shape[1]
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, words.ctypes.data, row_bytes, len(words))
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, words.ctypes.data, row_bytes, len(words))

    def _finish(self, sequence: Sequence, guide: Guide, row: Words, num_drafted: int) -> bool:
        """Where the answer may end, any of its ends will do. Whether it must, though it is shorter than it should
        be."""
        eos_token_id = guide.vocabulary.eos_token
        if not row[eos_token_id >> 5] >> (eos_token_id & 31) & 1:
            return False
        for token_id in guide.stop_token_ids:
            allow(row, token_id)
        if len(sequence.output_token_ids) + num_drafted >= sequence.sampling.min_tokens:
            return False
        ends = np.zeros_like(row)
        for token_id in guide.stop_token_ids:
            allow(ends, token_id)
        return not (row & ~ends).any()

    def _room(self, num_rows: int, num_words: int) -> torch.Tensor:
        return torch.empty((num_rows, num_words), dtype=torch.int32, pin_memory=self._is_pinned)
