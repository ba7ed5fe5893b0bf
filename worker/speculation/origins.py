"""Where in the prompt the words of an answer come from, and where the next ones will: records made of a text.

An answer that copies its own last record has other values in it, and those stand in the prompt: as far behind the last
record's values as these were behind each other. So a record is told by two copies at once, one of what lies between the
values and one of the values. A word may have a space before it in one place and none in the other, which are two tokens
(worker.speculation.twins).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from itertools import chain
from typing import NamedTuple

from worker.speculation.automaton import NOTHING
from worker.speculation.twins import Twins

MAX_AHEAD = 32
"""Tokens of the prompt that may lie between one value that is taken and the next one."""
MAX_VALUE = 12
"""Tokens of one value."""
MAX_LOST = 48
"""Tokens of an answer that come from nowhere, after which they are looked for in the whole prompt again; and tokens for
which one wrong guess is forgiven."""
MAX_WRONG = 3.0
"""Guessed values that are wrong and not made up for by right ones, before no more are guessed."""
MAX_ALIKE = 8
"""Times that a word stands in a prompt, and still says where it is from."""


class _Guesses(NamedTuple):
    """Of the next tokens."""

    token_ids: list[int]
    copied: list[int]
    """The tokens in their places in what is copied."""
    origins: list[int]
    """Of values: their places in the prompt."""


NO_GUESSES = _Guesses([], [], [])


class Origins:
    """Of one text, a prompt and the answer behind it; both are seen as one list of tokens that grows."""

    __slots__ = ("_at", "_from", "_guesses", "_num_lost", "_num_prompt_tokens", "_places", "_text", "_trust", "_twins")

    def __init__(self, text: list[int], num_prompt_tokens: int, twins: Twins) -> None:
        self._text, self._twins = text, twins
        self._num_prompt_tokens = num_prompt_tokens
        self._places: dict[int, list[int]] = {}
        """Of each of the prompt's tokens, spaces aside, ascending."""
        for place, token_id in enumerate(text[:num_prompt_tokens]):
            self._places.setdefault(twins.plain(token_id), []).append(place)
        self._from: list[int] = []
        """Of each token of the text the place that it was taken from; empty: it is not known that any was."""
        self._at = NOTHING
        """In the prompt, behind what was taken last; NOTHING: somewhere."""
        self._num_lost = 0
        self._guesses = NO_GUESSES
        """The last ones."""
        self._trust = MAX_WRONG

    def change(self, source: int, place: int) -> None:
        """In a copy there is something else at ``place`` than at ``source``; both, if they are words of the prompt that
        say where they are from, are the first values that are known."""
        if not self._from and self._is_telling(source) and self._is_telling(place):
            self._from = [NOTHING] * source
            self.follow()

    def follow(self) -> None:
        """The text has gone on."""
        if not self._from:
            return
        (guessed, copied, origins), self._guesses = self._guesses, NO_GUESSES
        num_guessed = len(guessed)
        new = self._text[len(self._from) :]
        self._trust = min(self._trust + len(new) / MAX_LOST, 2 * MAX_WRONG)
        for number, token_id in enumerate(new):
            is_guessed = number < num_guessed
            if is_guessed and origins[number] != NOTHING:
                self._trust += 1.0 if token_id == guessed[number] else -1.0
            if is_guessed and token_id == guessed[number]:
                origin = origins[number]
            else:
                # What would have been right as it was copied is no value.
                is_value = not is_guessed or token_id != copied[number]
                origin = self._origin_of(token_id) if is_value else NOTHING
                num_guessed = 0
            self._num_lost += 1
            if origin != NOTHING:
                self._at, self._num_lost = origin + 1, 0
            elif self._num_lost > MAX_LOST:
                self._at = NOTHING
            self._from.append(origin)

    def tells(self, source: int, num_tokens: int) -> bool:
        """Of so many tokens from there on, some are to be had from the prompt, in a copy that changes them."""
        return self._trust > 0.0 and any(origin != NOTHING for origin in self._from[source - 1 : source + num_tokens])

    def draft(self, source: int, num_tokens: int, changed: Mapping[int, int], ends: set[int]) -> list[int]:
        """What follows if the text is copied from ``source`` on, with other values: at most so many tokens.
        ``changed``: what else is changed, and to what; ``ends``: places where it is not known what comes."""
        # A copy that reaches the present goes on with what it has just foreseen.
        text, origins, copied = self._text.copy(), self._from.copy(), list[int]()
        begin_of_new = len(text)
        at, before = self._at, self._before(source)
        is_within = origins[source - 1] != NOTHING and origins[-1] != NOTHING
        """A value, which may go on."""
        while len(copied) < num_tokens and source < len(text):
            first, begin = before if is_within else origins[source], source
            if first == NOTHING:
                if source in ends:
                    break
                copied.append(text[source])
                text.append(changed.get(text[source], text[source]))
                origins.append(NOTHING)
                source += 1
                continue
            while source < len(text) and origins[source] == first + source - begin:
                source += 1
            start, end = at if is_within else self._behind(before, first, at), first + source - begin
            value = self._value(start, end)
            if value is not None:
                if value and not is_within:
                    value[0] = self._twins.alike(value[0], text[first], text[begin])
                at, before = start + len(value), end
                copied += (text[begin:source] + [NOTHING] * len(value))[: len(value)]
                text += value
                origins += range(start, at)
            elif begin not in ends:
                copied += text[begin:source]
                text += text[begin:source]
                origins += [NOTHING] * (source - begin)
            else:
                break
            is_within = False
        end = begin_of_new + num_tokens
        self._guesses = _Guesses(text[begin_of_new:end], copied[:num_tokens], origins[begin_of_new:end])
        return self._guesses.token_ids

    def _is_telling(self, place: int) -> bool:
        return 0 < len(self._places.get(self._twins.plain(self._text[place]), ())) <= MAX_ALIKE

    def _before(self, source: int) -> int:
        """In the prompt, behind what was taken last of what is copied."""
        for origin in reversed(self._from[max(0, source - MAX_AHEAD) : source]):
            if origin != NOTHING:
                return origin + 1
        return NOTHING

    def _origin_of(self, token_id: int) -> int:
        """The nearest, ahead if there is one; marks and spaces are from nowhere, since every text has them."""
        places = self._places.get(self._twins.plain(token_id))
        if places is None or not self._twins.is_word(token_id):
            return NOTHING
        if self._at == NOTHING:
            return places[0]
        number = bisect_left(places, self._at)
        if number < len(places) and places[number] <= self._at + MAX_AHEAD:
            return places[number]
        return places[number - 1] if number and places[number - 1] >= self._at - MAX_AHEAD else NOTHING

    def _behind(self, before: int, first: int, at: int) -> int:
        """Where a value begins behind ``at``, if another one begins at ``first`` behind ``before``, or NOTHING."""
        num = first - before
        if before == NOTHING or at == NOTHING or abs(num) > MAX_AHEAD:
            return NOTHING
        if not num:
            return at
        mark = self._twins.plain(self._text[first - 1])
        for start in chain((at + num,), range(at + 1, at + num + MAX_VALUE)):
            if 0 < start < self._num_prompt_tokens and self._twins.plain(self._text[start - 1]) == mark:
                return start
        return NOTHING

    def _value(self, start: int, end: int) -> list[int] | None:
        """From ``start`` up to what stands at ``end``, too; None: that does not come."""
        if start == NOTHING:
            return None
        text, stop = self._text, self._twins.plain(self._text[end])
        for place in range(start, min(start + MAX_VALUE, self._num_prompt_tokens)):
            if self._twins.plain(text[place]) == stop:
                return text[start:place]
        return None
