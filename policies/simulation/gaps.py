"""The longest gaps between a class's turns, in tokens, held against the bound that policies/priority.py states."""

from __future__ import annotations

from policies.priority import Lane, Lanes, Turn


class Gap:
    """One class: what was sent since it had its last turn, or began to wait."""

    __slots__ = ("bound", "is_open", "longest", "num_sent", "num_short", "owed")

    def __init__(self) -> None:
        self.is_open = False
        self.num_sent = 0.0
        self.num_short = 0.0
        """What others fell short of their expected tokens by, and its own claims went beyond theirs."""
        self.owed = 0.0
        """Of its guarantee, when the gap began."""
        self.longest = 0.0
        self.bound = 1.0
        """Of that gap which came closest to its own bound, as is ``longest``."""

    def begin(self, lane: Lane) -> None:
        self.is_open = len(lane) > 0
        self.num_sent = self.num_short = 0.0
        self.owed = max(0.0, -lane.credit)


class Gaps:
    """All classes of one model."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self.of_class = {lane.name: Gap() for lane in lanes}
        self._largest = 0
        """Cost of any request so far."""

    def added(self, turn: Turn) -> None:
        """It waits."""
        gap = self.of_class[turn.lane.name]
        if not gap.is_open:
            gap.begin(turn.lane)

    def taken(self, turn: Turn) -> None:
        """It was sent."""
        num_tokens = turn.order.num_tokens
        self._largest = max(self._largest, num_tokens)
        for lane in self._lanes:
            gap = self.of_class[lane.name]
            if lane is not turn.lane:
                gap.num_sent += num_tokens
            elif gap.is_open:
                self._end(gap, turn)
                gap.begin(lane)

    def done(self, turn: Turn, num_completion_tokens: int) -> None:
        """A turn that was taken has ended."""
        num_more = num_completion_tokens - turn.order.num_expected_tokens
        for name, gap in self.of_class.items():
            if name == turn.lane.name and turn.was_claimed:
                gap.num_short += max(0, num_more)
            else:
                gap.num_short += max(0, -num_more)

    def left(self, lane: Lane) -> None:
        """Somebody left without a turn."""
        if not len(lane):
            self.of_class[lane.name].is_open = False

    def stop(self) -> None:
        """Whoever waits now has waited long enough to count."""
        for lane in self._lanes:
            if len(lane):
                self._end(self.of_class[lane.name], lane.first())

    def _end(self, gap: Gap, turn: Turn) -> None:
        owed = turn.order.num_tokens + gap.owed + gap.num_short
        bound = owed / turn.lane.terms.share + len(self.of_class) * self._largest
        if gap.num_sent * gap.bound > gap.longest * bound:
            gap.longest, gap.bound = gap.num_sent, bound
