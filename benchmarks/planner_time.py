"""What planning a step takes, on its own: claims, plan and blocks of worker/scheduler.py, nothing computed.

    python -m benchmarks.planner_time

Sequences of 600 tokens on a pool with room for all. "alike": one class; "classes": two, with promises that a step comes
near; "waiting": half as many wait in line, of eight tenants; "prompts": four long ones of four tenants are computed.
"""

from __future__ import annotations

import statistics
from time import perf_counter

from policies import wire
from policies.batching import limits_of
from policies.costs import StepCosts
from policies.prefix import Chain
from policies.settings import Engine
from policies.terms import Sampling
from worker.blocks import Pool
from worker.scheduler import Scheduler
from worker.sequence import Request, Sequence

BLOCK_SIZE = 32
NUM_STEPS = 200
STEP_S = 0.05
COSTS = (6e-3, 3e-5, 1e-4, 5e-8, 2e-10, 1e-4, 1e-8)


class Bench:
    """A scheduler, and sequences that get a token whenever they are computed."""

    def __init__(self, max_sequences: int) -> None:
        self._pool = Pool(40_000)
        limits = limits_of(Engine(max_sequences=max_sequences))
        self.scheduler = Scheduler(self._pool, BLOCK_SIZE, limits, lambda source, target: None)
        self._costs = StepCosts.of(COSTS)
        self._now = 0.0
        self._num = 0

    def add(self, num_tokens: int, priority: int = 0, tenant: bytes = b"") -> None:
        self._num += 1
        first = 1_000_000 * self._num
        submit = wire.Submit(
            str(self._num),
            list(range(first, first + num_tokens)),
            Sampling(max_tokens=100_000),
            priority=priority,
            ttft_s=1.0,
            tpot_s=0.05,
            tenant=tenant,
        )
        request, chain = Request(submit.request_id), Chain(BLOCK_SIZE, b"")
        chain.extend(submit.prompt_token_ids)
        sequence = Sequence(request, submit, 0, self._num, frozenset(), chain, self._now)
        request.live.append(sequence)
        self.scheduler.add(sequence)

    def step(self) -> float:
        """Seconds that planning it took."""
        began_at = perf_counter()
        batch = self.scheduler.schedule(self._now, self._costs)
        took_s = perf_counter() - began_at
        self._now += STEP_S
        for sequence, num_tokens in batch:
            self.scheduler.commit(sequence, num_tokens)
            if sequence.num_computed == len(sequence.token_ids):
                sequence.settle(sequence.expect(), 7, self._now)
        return took_s


def bench_of(num_running: int, case: str) -> Bench:
    bench = Bench(num_running if case == "waiting" else num_running + 8)
    for number in range(num_running):
        bench.add(600, priority=number % 2 if case == "classes" else 0)
    while bench.scheduler.waiting or not all(sequence.has_output for sequence in bench.scheduler.running):
        bench.step()
    for number in range(num_running // 2 if case == "waiting" else 0):
        bench.add(600, tenant=bytes([number % 8]))
    for number in range(4 if case == "prompts" else 0):
        bench.add(40_000, tenant=bytes([number]))
    return bench


def main() -> None:
    for num_running in (32, 256):
        for case in ("alike", "classes", "waiting", "prompts"):
            bench = bench_of(num_running, case)
            took_us = sorted(1e6 * bench.step() for _ in range(NUM_STEPS))
            print(
                f"{num_running:>4} running, {case:<8} p50 {statistics.median(took_us):,.0f} us,"
                f" p90 {took_us[NUM_STEPS * 9 // 10]:,.0f} us"
            )


if __name__ == "__main__":
    main()
