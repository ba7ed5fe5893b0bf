"""What it costs each request that the console can tell where its time went: the calls of an account that settles, and
what is held on to.

    python -m benchmarks.recent
"""

from __future__ import annotations

import gc
import time
import timeit
import tracemalloc

from gateway.journey import Journey
from gateway.ledger import Entry
from gateway.ledger.recent import Recent
from gateway.spent import Spent
from policies.console import Console
from tests.builders import an_entry

NUM_CALLS = 100_000
NUM_ROUNDS = 15


class Settling:
    """What an ``Account`` does for it, and nothing else of what it does."""

    def __init__(self, recent: Recent) -> None:
        self._recent = recent
        self._journey = Journey()
        self._flights_spent, self._written = Spent(), an_entry()

    def nothing(self) -> None:
        pass

    def noted(self) -> None:
        journey = self._journey
        journey.parse_at = time.monotonic()
        journey.render_at = time.monotonic()
        journey.cache_at = time.monotonic()
        journey.admit_at = time.monotonic()
        journey.queue_at = time.monotonic()
        journey.settle_at = time.monotonic()
        self._spent = self._flights_spent
        self._recent.note(self._written, self._spent, journey, time.monotonic())


def per_call_us(settling: Settling) -> float:
    took_s = [
        min(timeit.repeat(call, number=NUM_CALLS, repeat=NUM_ROUNDS)) for call in (settling.nothing, settling.noted)
    ]
    return 1e6 * (took_s[1] - took_s[0]) / NUM_CALLS


def row(number: int) -> Entry:
    """One that shares no number and no id with another."""
    each = float(number)
    ids = {"request_id": f"req_{number:032x}", "tenant_id": f"ten_{number:020x}", "key_id": f"key_{number:020x}"}
    return an_entry(**ids, trace_id=f"{number:032x}", queue_ms=each, ttft_ms=each + 0.1, duration_ms=each + 0.2)


def bytes_each(num_requests: int) -> float:
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    recent = Recent(num_requests)
    for number in range(num_requests):
        at = float(number)
        spent = Spent(at + 0.1, at + 0.2, 0, 0, at + 0.3, at + 0.4, at + 0.5)
        recent.note(row(number), spent, Journey(), at)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (after - before) / num_requests


def main() -> None:
    num_requests = Console().recent_requests
    print(f"{per_call_us(Settling(Recent(num_requests))):.2f} us a request")
    print(f"{bytes_each(num_requests):.0f} bytes for each of the last {num_requests}")


if __name__ == "__main__":
    main()
