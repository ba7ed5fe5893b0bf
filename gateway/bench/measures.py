"""What the clients of a load run felt: one record for each request, condensed into a report.

Words as everywhere: TTFT is request to first token, TPOT (last - first) / (n - 1) of one request, ITL one gap between
two tokens. A request counts from the instant it was due, not from when the load generator got round to it, so a server
that stalls cannot hide the requests it kept from being sent (Gil Tene's "coordinated omission"). In a closed loop the
two are the same instant.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec

from policies.distribution import Distribution, distribution


@dataclass(slots=True)
class Outcome:
    """One request as its client saw it; instants in seconds on one monotonic clock."""

    due_at: float
    sent_at: float = 0.0
    finished_at: float = 0.0
    chunk_ats: array[float] = field(default_factory=lambda: array("d"))
    """When each piece of text arrived. A server may put several tokens into one piece."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    """As the server counted; without its usage, the number of pieces."""
    counted_by_server: bool = False
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        return self.chunk_ats[0] - self.due_at if self.chunk_ats else None

    @property
    def tpot_s(self) -> float | None:
        """None below two tokens, or when all arrived in one piece: one instant shows no pace."""
        if len(self.chunk_ats) < 2 or self.num_completion_tokens < 2:
            return None
        return (self.chunk_ats[-1] - self.chunk_ats[0]) / (self.num_completion_tokens - 1)

    @property
    def itls_s(self) -> Iterable[float]:
        """Gaps between pieces; between tokens, where the server sends one a piece."""
        return (after - before for before, after in pairwise(self.chunk_ats))

    @property
    def e2e_s(self) -> float:
        return self.finished_at - self.due_at


class Report(msgspec.Struct):
    """A whole run. Throughput is over the time from the first request due to the last answer finished, and of answers
    that arrived whole; failed requests count as errors alone."""

    duration_s: float
    num_requests: int
    num_ok: int
    num_errors: int
    errors: dict[str, int]
    """Message to count, the commonest first."""
    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    counted_by_server: bool
    """False: some answer came without usage, and its pieces were counted instead."""
    tokens_per_chunk: float | None
    """Above 1 the server merges tokens, and an ITL is the gap between pieces."""
    requests_per_s: float
    prompt_tokens_per_s: float
    completion_tokens_per_s: float
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    e2e_ms: Distribution | None
    send_lag_ms: Distribution | None
    """Sent minus due: what the load generator itself was late by. Part of the latencies above."""


def report(outcomes: Sequence[Outcome]) -> Report:
    """The whole run in figures."""
    ok = [outcome for outcome in outcomes if outcome.error is None]
    errors = Counter(outcome.error for outcome in outcomes if outcome.error is not None)
    began_at = min((outcome.due_at for outcome in outcomes), default=0.0)
    duration_s = max((outcome.finished_at for outcome in outcomes), default=began_at) - began_at
    num_prompt_tokens = sum(outcome.num_prompt_tokens for outcome in ok)
    num_completion_tokens = sum(outcome.num_completion_tokens for outcome in ok)
    num_chunks = sum(len(outcome.chunk_ats) for outcome in ok)

    def per_s(count: int) -> float:
        return count / duration_s if duration_s else 0.0

    return Report(
        duration_s=duration_s,
        num_requests=len(outcomes),
        num_ok=len(ok),
        num_errors=len(outcomes) - len(ok),
        errors=dict(errors.most_common()),
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=sum(outcome.num_cached_tokens for outcome in ok),
        num_completion_tokens=num_completion_tokens,
        counted_by_server=all(outcome.counted_by_server for outcome in ok),
        tokens_per_chunk=num_completion_tokens / num_chunks if num_chunks else None,
        requests_per_s=per_s(len(ok)),
        prompt_tokens_per_s=per_s(num_prompt_tokens),
        completion_tokens_per_s=per_s(num_completion_tokens),
        ttft_ms=distribution(outcome.ttft_s for outcome in ok),
        tpot_ms=distribution(outcome.tpot_s for outcome in ok),
        itl_ms=distribution(gap for outcome in ok for gap in outcome.itls_s),
        e2e_ms=distribution(outcome.e2e_s for outcome in ok),
        send_lag_ms=distribution(outcome.sent_at - outcome.due_at for outcome in ok),
    )


def tokens_over_time(outcomes: Sequence[Outcome], num_bins: int = 60) -> tuple[list[float], list[float]]:
    """Middle of each bin in seconds since the start, and tokens/s in it: an answer spread evenly over its pieces."""
    ok = [outcome for outcome in outcomes if outcome.error is None]
    began_at = min((outcome.due_at for outcome in ok), default=0.0)
    duration_s = max((outcome.finished_at for outcome in ok), default=began_at) - began_at
    if duration_s <= 0.0:
        return [], []
    bin_s = duration_s / num_bins
    counts = [0.0] * num_bins
    for outcome in ok:
        ats = outcome.chunk_ats or (outcome.finished_at,)
        for at in ats:
            counts[min(int((at - began_at) / bin_s), num_bins - 1)] += outcome.num_completion_tokens / len(ats)
    return [bin_s * (i + 0.5) for i in range(num_bins)], [count / bin_s for count in counts]
