"""What the waiting line costs as it grows: ``python -m benchmarks.queue [--plot PATH]``.

For each length of the line, spread over up to 10,000 tenants and three classes: one request enters and another is sent
(the line keeps its length), one enters and leaves without a turn, a tenant is charged for tokens, and the line is asked
who is next. Each figure is the median of rounds, with the collector off. In every round a bare ``heapq`` of the same
length does a push and a pop, the least that any order of requests could cost. At the end: what a request costs that
finds nobody waiting, past the whole line and back (``Line`` with a worker that takes everything), and a token of it.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import math
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from gateway.clock import Clock
from gateway.line import Line
from gateway.seat import Seat
from gateway.workers import Worker
from policies import settings, terms, wire
from policies.priority import Lanes, Order

LENGTHS = (1, 10, 100, 1_000, 10_000, 100_000)
MAX_TENANTS = 10_000
NUM_OPS, NUM_ROUNDS = 2_000, 15
CLASSES = tuple(settings.CLASSES)


class Figures(msgspec.Struct):
    """Microseconds for one."""

    num_waiting: int
    num_tenants: int
    enter_and_send_us: float
    enter_and_leave_us: float
    charge_us: float
    next_us: float
    heap_us: float


def an_order(chance: random.Random, num_tenants: int) -> Order:
    return Order(
        f"ten_{chance.randrange(num_tenants)}",
        chance.choice(CLASSES),
        chance.choice((1.0, 2.0)),
        chance.randint(10, 2000),
        chance.randint(1, 500),
        chance.random(),
    )


def per_op_us(work: Callable[[], object]) -> float:
    started_at = time.perf_counter()
    work()
    return 1e6 * (time.perf_counter() - started_at) / NUM_OPS


def at_length(length: int, chance: random.Random) -> Figures:
    num_tenants = min(length, MAX_TENANTS)
    lanes = Lanes(settings.CLASSES)
    for _ in range(length):
        lanes.add(an_order(chance, num_tenants), None)
    heap = [(chance.random(), number) for number in range(length)]
    heapq.heapify(heap)

    rounds: list[tuple[float, ...]] = []
    for _ in range(NUM_ROUNDS):
        orders = [an_order(chance, num_tenants) for _ in range(NUM_OPS)]
        keys = [(chance.random(), number) for number in range(NUM_OPS)]

        def enter_and_send(orders: list[Order] = orders) -> None:
            for order in orders:
                lanes.add(order, None)
                turn, is_claim = lanes.next()  # type: ignore[misc]
                lanes.take(turn, is_claim)
                lanes.done(turn, order.num_expected_tokens)

        def enter_and_leave(orders: list[Order] = orders) -> None:
            for order in orders:
                lanes.remove(lanes.add(order, None))

        def charge(orders: list[Order] = orders) -> None:
            for order in orders:
                lanes[order.sla_class].serve(order.tenant_id, order.weight, 1)

        def ask() -> None:
            for _ in range(NUM_OPS):
                lanes.next()

        def push_and_pop(keys: list[tuple[float, int]] = keys) -> None:
            for key in keys:
                heapq.heappushpop(heap, key)

        works = (enter_and_send, enter_and_leave, charge, ask, push_and_pop)
        rounds.append(tuple(map(per_op_us, works)))
    medians = [statistics.median(figures) for figures in zip(*rounds, strict=True)]
    return Figures(length, num_tenants, *medians)


class Everything(Worker):
    """A place at the table where every frame is taken and nothing is computed."""

    def send(self, message: wire.Submit | wire.Cancel | wire.LoadAdapter | wire.UnloadAdapter) -> None:
        pass


def past_the_line(num_tokens: int) -> tuple[float, float]:
    """Microseconds for a request that finds nobody waiting and has one token, and for each further token."""
    model = settings.Model()
    line = Line("demo", model, settings.CLASSES, Clock(), lambda: None, settings.Workers())
    worker = Everything("demo-0", "unix:/nowhere", line, settings.Workers(), Clock())
    worker.facts = wire.Ready("demo", 8192, 32_000, [0], 32, 4096, 256, "cpu", "float32", 1)
    line.seats[worker] = Seat(worker, line.priorities, line.shares)
    line.joined(worker)
    submits = [wire.Submit(f"req_{number}", [1] * 64, terms.Sampling(num_tokens)) for number in range(NUM_OPS)]
    finish = wire.Finish("length", 0, 0, 0.0, 0.0, 0.0)
    order = Order("ten_1", "standard", 1.0, 64, num_tokens, 0.0)

    def whole() -> None:
        for submit in submits:
            line.submit(submit, order)
            line.moved(worker, [wire.Delta(submit.request_id, 0, [1], None, finish)])

    def with_tokens() -> None:
        for submit in submits:
            line.submit(submit, order)
            for _ in range(num_tokens - 1):
                line.moved(worker, [wire.Delta(submit.request_id, 0, [1])])
            line.moved(worker, [wire.Delta(submit.request_id, 0, [1], None, finish)])

    request_us = statistics.median(per_op_us(whole) for _ in range(NUM_ROUNDS))
    more_us = statistics.median(per_op_us(with_tokens) for _ in range(NUM_ROUNDS))
    return request_us, (more_us - request_us) / (num_tokens - 1)


def plot(figures: list[Figures], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    _, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    lengths = [each.num_waiting for each in figures]
    for name, label in (
        ("enter_and_send_us", "enters, and another is sent"),
        ("enter_and_leave_us", "enters and leaves"),
        ("charge_us", "charged for tokens"),
        ("next_us", "who is next"),
        ("heap_us", "a bare heap: push and pop"),
    ):
        axes.plot(lengths, [getattr(each, name) for each in figures], marker="o", label=label)
    axes.set(xscale="log", xlabel="requests waiting (up to 10,000 tenants)", ylabel="µs", ylim=(0, None))
    axes.set_title("What the waiting line costs")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    pyplot.savefig(path, dpi=150)


def main() -> None:
    options = argparse.ArgumentParser(prog="python -m benchmarks.queue", description=__doc__)
    options.add_argument("--plot", type=Path, help="where the picture goes")
    options.add_argument("--seed", type=int, default=1)
    chosen = options.parse_args()
    gc.collect()
    gc.disable()
    figures = [at_length(length, random.Random(chosen.seed)) for length in LENGTHS]
    print("µs:  waiting  tenants  enter+send  enter+leave  charge   next   heap")
    for each in figures:
        print(
            f"    {each.num_waiting:8,} {each.num_tenants:8,} {each.enter_and_send_us:11.2f} "
            f"{each.enter_and_leave_us:12.2f} {each.charge_us:7.2f} {each.next_us:6.2f} {each.heap_us:6.2f}"
        )
    first, last = figures[2], figures[-1]
    growth = last.enter_and_send_us / first.enter_and_send_us
    allowed = math.log2(last.num_waiting) / math.log2(first.num_waiting)
    print(f"from {first.num_waiting:,} to {last.num_waiting:,}: {growth:.2f} times; log n grows {allowed:.2f} times")
    request_us, token_us = past_the_line(32)
    print(f"nobody waits: {request_us:.2f} µs a request of one token, {token_us:.2f} µs each further token")
    if chosen.plot:
        plot(figures, chosen.plot)


if __name__ == "__main__":
    main()
