"""Stop strings: find the first one in a text that arrives in pieces, and never let out a part of one."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Holds back the longest end of the text with which a stop string begins; the rest is safe to send.

    The stop string that is complete first ends the text; of several complete with the same character, the longest. One
    automaton for each string (Knuth, Morris and Pratt 1977), so that a character costs the same however the text
    repeats.
    """

    __slots__ = ("_borders", "_firsts", "_held", "_keeps", "_matched", "_stops", "found")

    def __init__(self, stops: Sequence[str], keeps: bool = False) -> None:
        """``keeps``: the one that ends the text is a part of it."""
        assert stops
        assert all(stops)
        self._stops = tuple(stops)
        self._firsts = tuple({stop[0] for stop in stops})
        self._borders = tuple(_borders(stop) for stop in stops)
        self._matched = [0] * len(self._stops)
        self._held = ""
        self._keeps = keeps
        self.found: str | None = None
        """The one that has ended the text."""

    def feed(self, text: str) -> tuple[str, bool]:
        """What may be sent now, and whether a stop string was found: then the text up to it, and nothing may
        follow."""
        held = self._held
        if not held and not any(first in text for first in self._firsts):
            return text, False
        matched = self._matched
        held_and_text = held + text
        for i in range(len(held), len(held_and_text)):
            char = held_and_text[i]
            num_found = 0
            for s, stop in enumerate(self._stops):
                num = matched[s]
                while num and stop[num] != char:
                    num = self._borders[s][num]
                if stop[num] == char:
                    num += 1
                if num == len(stop):
                    num_found = max(num_found, num)
                matched[s] = num
            if num_found:
                self._held = ""
                self.found = held_and_text[i + 1 - num_found : i + 1]
                return held_and_text[: i + 1 if self._keeps else i + 1 - num_found], True
        num_safe = len(held_and_text) - max(matched)
        self._held = held_and_text[num_safe:]
        return held_and_text[:num_safe], False

    def finish(self) -> str:
        """The text has ended, or goes on behind something that is no text: what was held back became no stop string."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held


def _borders(stop: str) -> list[int]:
    """For each length k, the longest proper end of ``stop[:k]`` with which ``stop`` also begins."""
    borders = [0, 0]
    for k in range(1, len(stop)):
        num = borders[k]
        while num and stop[num] != stop[k]:
            num = borders[num]
        borders.append(num + 1 if stop[num] == stop[k] else 0)
    return borders
