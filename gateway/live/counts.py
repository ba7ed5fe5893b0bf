"""What ended in a second or in a minute, in numbers that add up: over seconds, and over gateways.

Times are counted in buckets whose bounds grow by a factor of 2^(1/8), so a percentile is off by 4.5 % at most, and the
counts of many seconds are the sum of theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil, floor, log2

import msgspec

from gateway.ledger.tally import Columns

PER_DOUBLING = 8
LEAST_MS = 0.01
"""What is shorter counts as this."""


class Percentiles(msgspec.Struct, frozen=True):
    """Of times in milliseconds; null where there were none."""

    num: int
    p50: float | None
    p90: float | None
    p99: float | None


class Counts(msgspec.Struct):
    """What ended."""

    num_requests: int = 0
    num_failed: int = 0
    """Of those, through a fault that was not the client's."""
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    ttft: dict[int, int] = {}
    """Requests by the bucket of their time to the first token."""
    tpot: dict[int, int] = {}
    classes: dict[str, tuple[int, int]] = {}
    """Requests that count for their class's promise, and those for which it was kept."""
    tenants: dict[str, tuple[int, int]] = {}
    """Requests and completion tokens, by the tenant's id."""

    def take(self, ended: Columns) -> None:
        """These have ended."""
        for alike in ended.alike:
            self.num_requests += alike.num
            self.num_prompt_tokens += sum(alike.num_prompt_tokens)
            self.num_completion_tokens += sum(alike.num_completion_tokens)
            _count(self.ttft, alike.ttft_ms)
            _count(self.tpot, alike.tpot_ms)
            _, _, sla_class, status, _ = alike.kind
            if alike.count_for_promise:
                self.num_failed += alike.num if status != 200 else 0
                _pair(self.classes, sla_class, alike.num, alike.num_kept)
        for tenant_id, (num, _, num_tokens, _) in ended.tenants.items():
            _pair(self.tenants, tenant_id, num, num_tokens)

    def add(self, other: Counts, sign: int = 1) -> None:
        """``sign`` -1 takes away what was added before."""
        self.num_requests += sign * other.num_requests
        self.num_failed += sign * other.num_failed
        self.num_prompt_tokens += sign * other.num_prompt_tokens
        self.num_completion_tokens += sign * other.num_completion_tokens
        for own, others in ((self.ttft, other.ttft), (self.tpot, other.tpot)):
            for bucket, num in others.items():
                if left := own.get(bucket, 0) + sign * num:
                    own[bucket] = left
                else:
                    del own[bucket]
        for mine, theirs in ((self.classes, other.classes), (self.tenants, other.tenants)):
            for name, (first, second) in theirs.items():
                _pair(mine, name, sign * first, sign * second)
                if not mine[name][0]:
                    del mine[name]


def percentiles(counts: Mapping[int, int]) -> Percentiles:
    """Of what ``counts`` has by bucket."""
    num = sum(counts.values())
    found: list[float | None] = []
    for share in (0.5, 0.9, 0.99):
        rank, seen, value = ceil(share * num), 0, None
        for bucket in sorted(counts):
            seen += counts[bucket]
            if seen >= rank:
                value = round(2 ** ((bucket + 0.5) / PER_DOUBLING), 3)
                break
        found.append(value)
    return Percentiles(num, *found)


def _count(counts: dict[int, int], times_ms: Iterable[float]) -> None:
    for ms in times_ms:
        bucket = floor(PER_DOUBLING * log2(ms if ms > LEAST_MS else LEAST_MS))
        counts[bucket] = counts.get(bucket, 0) + 1


def _pair(pairs: dict[str, tuple[int, int]], name: str, first: int, second: int) -> None:
    before = pairs.get(name, (0, 0))
    pairs[name] = (before[0] + first, before[1] + second)
