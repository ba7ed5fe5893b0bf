"""Which of several servers: drawn by weight, and of two drawn the one that should answer sooner.

What one costs is its latency as a moving average that follows peaks at once and forgets them slowly, times what it has
to do already (peak EWMA, as in Twitter's Finagle); comparing two drawn at random comes close to knowing the best of all
and never sends everybody to the same one (M. Mitzenmacher, "The Power of Two Choices", 2001).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from typing import NamedTuple

import msgspec

DECAY_S = 10.0
"""After so long without a peak, what is left of it is 1/e."""
NUM_LATEST = 128
"""Latencies that percentiles are of."""
MIN_LATEST = 20
"""With fewer, nothing is said of percentiles."""


class Latency(msgspec.Struct, frozen=True):
    """Of one server; seconds."""

    average_s: float = 0.0
    at: float | None = None
    """When it was last observed; None: never."""

    def observed(self, seconds: float, now: float) -> Latency:
        if self.at is None or seconds >= self.average_s:
            return Latency(seconds, now)
        kept = exp(-max(0.0, now - self.at) / DECAY_S)
        return Latency(self.average_s * kept + seconds * (1.0 - kept), now)


class Candidate(NamedTuple):
    """What speaks for one that can be asked."""

    weight: float
    """> 0."""
    latency: Latency
    num_open: int
    """Requests that it has."""


def drawn(weights: Sequence[float], draw: float) -> int:
    """The place of one, each as likely as its weight says; ``draw`` in [0, 1)."""
    rest = draw * sum(weights)
    for place, weight in enumerate(weights):
        rest -= weight
        if rest < 0:
            return place
    return len(weights) - 1


def cost(candidate: Candidate, default_s: float) -> float:
    """Smaller is better. ``default_s`` stands for a latency that nobody knows."""
    known_s = default_s if candidate.latency.at is None else candidate.latency.average_s
    return max(known_s, 1e-6) * (candidate.num_open + 1) / candidate.weight


def choose(candidates: Sequence[Candidate], draws: tuple[float, float], by_latency: bool = True) -> int:
    """The place of the one to ask; ``draws`` are two numbers in [0, 1). One that was never asked counts as fast as the
    fastest, so that it is tried."""
    weights = [candidate.weight for candidate in candidates]
    first = drawn(weights, draws[0])
    if not by_latency or len(candidates) < 2:
        return first
    others = [place for place in range(len(candidates)) if place != first]
    second = others[drawn([weights[place] for place in others], draws[1])]
    known = [each.latency.average_s for each in candidates if each.latency.at is not None]
    fastest_s = min(known, default=1e-6)
    return min((first, second), key=lambda place: (cost(candidates[place], fastest_s), place != first))


def percentile(latest_s: Sequence[float], share: float) -> float | None:
    """Of the latest latencies; None where there are too few to tell."""
    if len(latest_s) < MIN_LATEST:
        return None
    in_order = sorted(latest_s)
    return in_order[min(len(in_order) - 1, int(share * len(in_order)))]
