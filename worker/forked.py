"""The tokens of one of many answers to one long prompt, which they have in one list between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import overload

MIN_SHARED = 2048
"""Tokens of a prompt that are worth it: who has a list of its own is looked at faster in each step."""


class Forked(Sequence[int]):
    """Prompt and completion; of the first nothing is changed."""

    __slots__ = ("_num_shared", "_own", "_shared")

    def __init__(self, shared: list[int], own: Iterable[int]) -> None:
        self._shared, self._own = shared, list(own)
        self._num_shared = len(shared)

    def __len__(self) -> int:
        return self._num_shared + len(self._own)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        """Of a slice, whose step is 1, a list."""
        num_shared = self._num_shared
        if isinstance(at, int):
            place = at + len(self) if at < 0 else at
            return self._own[place - num_shared] if place >= num_shared else self._shared[place]
        begin, end, step = at.indices(len(self))
        assert step == 1
        if begin >= num_shared:
            return self._own[begin - num_shared : end - num_shared]
        return self._shared[begin:end] + self._own[: max(0, end - num_shared)]

    def __setitem__(self, at: int, token_id: int) -> None:
        """Of its completion."""
        assert at >= self._num_shared
        self._own[at - self._num_shared] = token_id

    def append(self, token_id: int) -> None:
        self._own.append(token_id)


def tokens_of(prompt_token_ids: list[int], emitted_token_ids: list[int], num_sequences: int) -> list[int] | Forked:
    """Of one of so many answers, which it may add to."""
    if num_sequences > 1 and len(prompt_token_ids) >= MIN_SHARED:
        return Forked(prompt_token_ids, emitted_token_ids)
    return [*prompt_token_ids, *emitted_token_ids]
