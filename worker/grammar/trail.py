"""The tokens of an answer, and llguidance's matcher of it, which hears of them when it is asked."""

from __future__ import annotations

from llguidance import LLMatcher

MAX_BEHIND = 256
"""Tokens that it has not heard of: to take one in takes a microsecond."""


class Trail:
    """Of one answer."""

    __slots__ = ("_matcher", "_num_followed", "token_ids")

    def __init__(self, matcher: LLMatcher) -> None:
        """``matcher``: at its beginning, and of nobody else."""
        self._matcher = matcher
        self._num_followed = 0
        self.token_ids: list[int] = []
        """Only ever added to."""

    @property
    def matcher(self) -> LLMatcher:
        """It has all of them now."""
        if self._num_followed < len(self.token_ids):
            self.catch_up()
        return self._matcher

    def catch_up(self) -> None:
        """What cannot be followed any further (a bound of llguidance's) shows in the next mask."""
        self._matcher.consume_tokens(self.token_ids[self._num_followed :])
        self._num_followed = len(self.token_ids)
