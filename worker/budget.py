"""How much a step may hold once memory has run out in one: half, until it has gone well for a while."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from policies.batching import Limits

NUM_STEPS_TO_RECOVER = 64
"""Steps that must go well before twice as much is tried again."""


log = logging.getLogger("penstock.worker")


class OutOfMemory(Exception):
    """The device has no memory left for a forward pass; what was computed of it counts for nothing."""


class Budget:
    """``limits``: those of the next step, never above those of the settings."""

    def __init__(self, limits: Limits) -> None:
        self._full = limits.max_step_tokens
        self._num_good_steps = 0
        self.limits = limits

    def shrink(self, nums_tokens: Sequence[int], error: Exception) -> bool:
        """A step of so many tokens of each sequence did not fit, as ``error`` says. Whether less can be tried; what one
        token alone cannot have, or one prompt that is computed whole, nobody can give it.
        """
        if sum(nums_tokens) <= 1 or (self.limits.whole_prompts and len(nums_tokens) == 1):
            return False
        self._num_good_steps = 0
        self._set(max(1, min(self.limits.max_step_tokens, sum(nums_tokens)) // 2))
        log.warning("%s; steps hold at most %d tokens now", error, self.limits.max_step_tokens)
        return True

    def passed(self) -> None:
        """A step went well."""
        if self.limits.max_step_tokens == self._full:
            return
        self._num_good_steps += 1
        if self._num_good_steps == NUM_STEPS_TO_RECOVER:
            self._num_good_steps = 0
            self._set(min(self._full, 2 * self.limits.max_step_tokens))

    def _set(self, max_step_tokens: int) -> None:
        self.limits = msgspec.structs.replace(self.limits, max_step_tokens=max_step_tokens)
