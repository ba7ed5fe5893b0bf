"""What a run of the engine showed: when each sequence's tokens came, condensed into figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec

from policies.distribution import Distribution, distribution


@dataclass(slots=True)
class Timeline:
    """One sequence: when it was submitted, and when each of its tokens came. Seconds on one monotonic clock."""

    submitted_at: float
    token_ats: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    @property
    def itls_s(self) -> Iterable[float]:
        return (after - before for before, after in pairwise(self.token_ats))


class Round(msgspec.Struct):
    """One batch, submitted at once and run to its end."""

    output_tokens_per_s: float
    """All output tokens over the whole time, prefill included."""
    ttft_ms: Distribution | None
    """None where a peer does not say when its tokens came."""
    tpot_ms: Distribution | None
    itl_ms: Distribution | None


def round_of(timelines: Sequence[Timeline], duration_s: float, num_tokens: int) -> Round:
    """``num_tokens``: output tokens of all sequences together."""
    token_ats = [timeline.token_ats for timeline in timelines if timeline.token_ats]
    return Round(
        output_tokens_per_s=num_tokens / duration_s,
        ttft_ms=distribution(line.token_ats[0] - line.submitted_at for line in timelines if line.token_ats),
        tpot_ms=distribution((ats[-1] - ats[0]) / (len(ats) - 1) for ats in token_ats if len(ats) > 1),
        itl_ms=distribution(gap for line in timelines for gap in line.itls_s),
    )


def median(rounds: Sequence[Round]) -> Round:
    """The round in the middle by throughput: figures that belong together. Of two in the middle, the slower."""
    return sorted(rounds, key=lambda each: each.output_tokens_per_s)[(len(rounds) - 1) // 2]


class Stall(msgspec.Struct):
    """What a long prompt does to streams that are being written."""

    quiet_itl_ms: Distribution | None
    """Gaps that ended before it arrived."""
    itl_ms: Distribution | None
    """Gaps from its arrival until its first token."""
    ttft_ms: float
    """Its own."""
    gaps: list[tuple[float, float]]
    """(seconds since it arrived, milliseconds) of every gap of one stream, for the picture."""

    @property
    def worst_to_median(self) -> float:
        """The worst gap while the prompt was computed, to the median gap before it."""
        return self.itl_ms.max / self.quiet_itl_ms.p50 if self.itl_ms and self.quiet_itl_ms else 0.0


def stall_of(streams: Sequence[Timeline], arrived: Timeline) -> Stall:
    """The streams' gaps around the arrival of a long prompt, which has had its first token."""
    began_at, first_at = arrived.submitted_at, arrived.token_ats[0]
    gaps = [pair for stream in streams for pair in zip(stream.token_ats[1:], stream.itls_s, strict=True)]
    return Stall(
        quiet_itl_ms=distribution(gap for at, gap in gaps if at <= began_at),
        # The step that gives the prompt its first token still computes its last chunk.
        itl_ms=distribution(gap for at, gap in gaps if began_at < at <= first_at),
        ttft_ms=1e3 * (first_at - began_at),
        gaps=[(at - began_at, 1e3 * gap) for at, gap in zip(streams[0].token_ats[1:], streams[0].itls_s, strict=True)],
    )


class SharedPrefix(msgspec.Struct):
    """What a cached beginning saves of the time to a prompt's first token."""

    shared_tokens: int
    cold_ttft_ms: float
    """Of the first prompt, which finds nothing."""
    alone_ttft_ms: Distribution
    """Of those that come after it, one by one."""
    together_ttft_ms: Distribution
    """Of those that come after it, all at once."""

    @property
    def warm_to_cold(self) -> float:
        """The median of those that come one by one, to the first."""
        return self.alone_ttft_ms.p50 / self.cold_ttft_ms


def shared_prefix_of(shared_tokens: int, ttfts_s: Sequence[float], together: Sequence[Timeline]) -> SharedPrefix:
    """``ttfts_s``: of the first prompt and those that came one by one, at least one."""
    alone = distribution(ttfts_s[1:])
    at_once = distribution(line.token_ats[0] - line.submitted_at for line in together)
    assert alone is not None
    assert at_once is not None
    return SharedPrefix(shared_tokens, 1e3 * ttfts_s[0], alone, at_once)
