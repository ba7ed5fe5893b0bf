"""How much of a client's prediction came true: the tokens of it that are in the answer, in order."""

from __future__ import annotations

from collections.abc import Sequence

_RUN = 4
"""Tokens that have to agree for the two to be put side by side again."""


def num_true(prediction: Sequence[int], token_ids: Sequence[int]) -> int:
    """Never more than a longest common subsequence has, and in time that grows with the two texts alone: both are gone
    through once, and where they part they meet again at the next run of tokens that is in the prediction further on."""
    places: dict[tuple[int, ...], list[int]] = {}
    for place in range(len(prediction) - _RUN, -1, -1):
        places.setdefault(tuple(prediction[place : place + _RUN]), []).append(place)
    num = at = place = 0
    while at < len(token_ids):
        if place < len(prediction) and prediction[place] == token_ids[at]:
            num, place, at = num + 1, place + 1, at + 1
            continue
        found = places.get(tuple(token_ids[at : at + _RUN]), [])
        while found and found[-1] < place:
            found.pop()
        if found:
            place = found[-1]
        else:
            at += 1
    return num
