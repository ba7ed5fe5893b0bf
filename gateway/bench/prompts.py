"""Prompts of about a wanted length in tokens, from plain words: distinct from each other, the same for the same seed.

How many tokens a word takes depends on the server's tokenizer; ``Fit`` learns it from two answers' usage.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from gateway.bench.arrivals import TRACE_BLOCK_TOKENS, Due

_TEXT = """
the and then when where house river green blue small large bird tree stone water light little old new day night run walk
see say make take come go find give tell work call try ask need feel become leave put mean keep let begin help show hear
play turn move live hold bring write sit stand lose pay meet read learn change lead open follow stop time year people
way man woman child world life hand part place week case point group number home room mother area money story month lot
right study book eye job word side kind head friend father power hour game line end member
"""
WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class Fit:
    """Prompt tokens as a line in the number of words: ``overhead + words * per_word``."""

    per_word: float = 1.2
    overhead: float = 8.0

    @classmethod
    def through(cls, small: tuple[int, int], large: tuple[int, int]) -> Fit:
        """Through two measured (words, tokens); the default where they make no sense."""
        if small[1] <= 0 or large[1] <= small[1]:
            return cls()
        per_word = (large[1] - small[1]) / (large[0] - small[0])
        return cls(per_word, small[1] - small[0] * per_word)

    def num_words(self, num_tokens: float) -> int:
        return max(1, round((num_tokens - self.overhead) / self.per_word))


class Prompts:
    """The text of each request of a schedule."""

    def __init__(self, seed: int, fit: Fit, num_shared_tokens: int = 0, length_scale: float = 1.0) -> None:
        """``num_shared_tokens``: every prompt begins with the same text of about so many tokens.
        ``length_scale``: what a trace's lengths, and so its blocks, were multiplied by."""
        self._seed = seed
        self._fit = fit
        self._shared = _words(f"{seed} shared", fit.num_words(num_shared_tokens)) if num_shared_tokens else []
        self._block_words = max(1, round(TRACE_BLOCK_TOKENS * length_scale / fit.per_word))
        self._block = lru_cache(maxsize=4096)(self._make_block)

    def make(self, number: int, due: Due) -> str:
        """The text of request ``number``."""
        num_words = self._fit.num_words(due.num_prompt_tokens)
        if due.block_ids:
            words = [word for block_id in due.block_ids for word in self._block(block_id)]
            return " ".join(words[:num_words])
        # A number of its own in front, so that not even the first KV block is shared by chance.
        own = [f"{self._seed}.{number}:", *_words(f"{self._seed} {number}", max(1, num_words - len(self._shared) - 3))]
        return " ".join([*self._shared[: num_words - 1], *own])

    def _make_block(self, block_id: int) -> Sequence[str]:
        return _words(f"{self._seed} block {block_id}", self._block_words)


def _words(seed: str, num_words: int) -> list[str]:
    return random.Random(seed).choices(WORDS, k=num_words)
