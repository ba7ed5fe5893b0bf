"""Every substring of a text that grows, and where it occurred last: a suffix automaton, built token by token.

The construction is that of Blumer et al. 1985 ("The smallest automaton recognizing the subwords of a text"): at most
two states and three transitions for each token, O(1) amortised for one more. The link of the newest state is the
longest end of the text that has occurred before, so what followed it then is a guess at what follows now (as in
SuffixDecoding, Oliaro et al. 2024, arXiv 2411.04975, and in prompt lookup, Saxena 2023, which knows one length only).
"""

from __future__ import annotations

from collections.abc import Iterable

ROOT = 0
NOTHING = -1
"""Where no state and no place is meant."""


class SuffixAutomaton:
    """``text`` so far. States are numbers; each stands for the substrings that end at the same places."""

    __slots__ = ("_ends", "_last", "_lengths", "_links", "_next", "text")

    def __init__(self) -> None:
        self.text: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._links = [NOTHING]
        self._lengths = [0]
        """Of the longest substring of each state."""
        self._ends = [0]
        """The length of the text when a substring of the state was last seen to end there."""
        self._last = ROOT

    def extend(self, token_ids: Iterable[int]) -> None:
        """The text goes on."""
        text, nexts, links, lengths, ends = self.text, self._next, self._links, self._lengths, self._ends
        last = self._last
        for token_id in token_ids:
            # What was the longest repeated end a token ago has occurred again there; whoever asks now has been told.
            ends[links[last]] = len(text)
            text.append(token_id)
            new = len(nexts)
            nexts.append({})
            lengths.append(len(text))
            ends.append(len(text))
            links.append(ROOT)
            state = last
            while state != NOTHING and token_id not in nexts[state]:
                nexts[state][token_id] = new
                state = links[state]
            last = new
            if state == NOTHING:
                continue
            found = nexts[state][token_id]
            length = lengths[state] + 1
            if lengths[found] == length:
                links[new] = found
                continue
            clone = len(nexts)
            nexts.append(nexts[found].copy())
            lengths.append(length)
            ends.append(ends[found])
            links.append(links[found])
            while state != NOTHING and nexts[state].get(token_id) == found:
                nexts[state][token_id] = clone
                state = links[state]
            links[found] = links[new] = clone
        self._last = last

    def repeated(self) -> tuple[int, int]:
        """Of the longest end of the text that has occurred before: its length, and the length of the text when it
        did so last. (0, 0) if there is none."""
        link = self._links[self._last]
        return (0, 0) if link == NOTHING else (self._lengths[link], self._ends[link])

    def step(self, state: int, length: int, token_id: int) -> tuple[int, int]:
        """For another text, of which the last ``length`` tokens lead to ``state``: the same when it goes on by
        ``token_id``. Begins with (ROOT, 0)."""
        nexts, links, lengths = self._next, self._links, self._lengths
        # The state may have been split since: what is short enough belongs to the part split off.
        while links[state] != NOTHING and lengths[links[state]] >= length:
            state = links[state]
        while state != ROOT and token_id not in nexts[state]:
            state = links[state]
            length = lengths[state]
        found = nexts[state].get(token_id)
        return (ROOT, 0) if found is None else (found, length + 1)

    def end_of(self, state: int) -> int:
        """The length of the text when this state's substrings were last seen."""
        return self._ends[state]
