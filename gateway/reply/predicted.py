"""How much of a client's prediction came true: the tokens of it that are in the answer, in order."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

_RUN = 4
"""Tokens that have to agree for the two to be put side by side again."""


class Predicted:
    """A prediction, read once for all answers to its prompt: of a long one that takes far longer than the rest."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self._places: dict[tuple[int, ...], list[int]] = {}
        """Of each run of tokens, where it begins, in order."""
        for place in range(len(token_ids) - _RUN + 1):
            self._places.setdefault(tuple(token_ids[place : place + _RUN]), []).append(place)

    def num_true(self, said: Sequence[int]) -> int:
        """Never more than a longest common subsequence has, and in time that grows with the answer alone: both are gone
        through once, and where they part they meet again at the next run of tokens that is in the prediction further
        on."""
        prediction, places = self._token_ids, self._places
        num = at = place = 0
        while at < len(said):
            if place < len(prediction) and prediction[place] == said[at]:
                num, place, at = num + 1, place + 1, at + 1
                continue
            found = places.get(tuple(said[at : at + _RUN]), ())
            number = bisect_left(found, place)
            if number < len(found):
                place = found[number]
            else:
                at += 1
        return num
