"""Twice the load that a worker can carry: ``python -m benchmarks.overload --trace azure_conv_2023.csv [--plot PATH]``.

The demo model in a real worker process behind the real dispatch, on the real wire. First its capacity is measured with
requests of the trace, all in one line, as many as it takes to keep it full. Then four tenants ask for twice as much:

- ``chat`` in the class "interactive", 0.3 of the capacity, arriving as in the trace;
- ``left`` and ``right`` in the class "standard", 0.35 and 0.55, arriving as in the trace, from other parts of it;
- ``flood`` in the class "batch", 0.8, made up: everything for the next five seconds at once.

Lengths are the trace's, scaled. The same arrivals then go into one line for all, as an order of arrival would have
them, for comparison. Exit status 1 when a mark is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec
import uvloop

from benchmarks.traces import Recorded, read, scaled
from gateway.clock import Clock
from gateway.dispatch import Dispatch
from gateway.errors import GatewayError
from gateway.flight import Flight
from gateway.text import Text
from policies import settings, terms, wire
from policies.priority import Order
from sources import place_of

MODEL = "demo"
NUM_TO_FILL = 6000
"""Requests of the trace with which the capacity is measured: more than can be answered in that time."""
BURST_S = 5.0
WARM_S = 5.0
"""Of each run, before anything is counted: the line has to fill."""
MARKS = {"attainment": 0.99, "jain": 0.98}


class Tenant(NamedTuple):
    name: str
    sla_class: str
    load: float
    """Of the capacity."""


TENANTS = (
    Tenant("chat", "interactive", 0.3),
    Tenant("left", "standard", 0.35),
    Tenant("right", "standard", 0.55),
    Tenant("flood", "batch", 0.8),
)


class Asked(msgspec.Struct):
    """One request of the run and what became of it."""

    at_s: float
    tenant: str
    sla_class: str
    num_prompt_tokens: int
    num_completion_tokens: int
    flight: Flight | None = None
    refused: str = ""
    tokens_at: list[tuple[float, int]] = []
    """(seconds of the run, tokens)."""


class Run:
    """One load on one worker."""

    def __init__(self, dispatch: Dispatch, asked: list[Asked], in_one_line: bool, seed: int) -> None:
        self.asked = asked
        self.began_at = 0.0
        self._dispatch = dispatch
        self._in_one_line = in_one_line
        self._chance = random.Random(seed)
        facts = dispatch.ready(MODEL)
        assert facts is not None
        self._vocab_size = facts.vocab_size
        self._clock = Clock()

    async def go(self, lasts_s: float) -> None:
        """Asks as planned and stops after ``lasts_s``, whatever still waits."""
        self.began_at = self._clock.now()
        tasks = []
        for number, each in enumerate(self.asked):
            delay_s = self.began_at + each.at_s - self._clock.now()
            if delay_s > 0:
                await asyncio.sleep(delay_s)
            tasks.append(asyncio.create_task(self._ask(each, number)))
        await asyncio.sleep(max(0.0, self.began_at + lasts_s - self._clock.now()))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        workers = self._dispatch.workers()
        while any(worker.stats is None or worker.stats.num_running for worker in workers):  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    async def _ask(self, each: Asked, number: int) -> None:
        # Every prompt is new to the worker: nothing of it is found in its memory.
        prompt = [self._chance.randrange(5, self._vocab_size) for _ in range(each.num_prompt_tokens)]
        sampling = terms.Sampling(each.num_completion_tokens, temperature=0.0, ignore_eos=True)
        submit = wire.Submit(f"req_{id(self):x}_{number}", prompt, sampling)
        tenant, sla_class = ("all", "standard") if self._in_one_line else (each.tenant, each.sla_class)
        order = Order(tenant, sla_class, 1.0, each.num_prompt_tokens, each.num_completion_tokens, self._clock.now())
        try:
            each.flight = self._dispatch.submit(MODEL, submit, order)
        except GatewayError as error:
            each.refused = type(error).__name__
            return
        async with each.flight as flight:
            is_first, num_open = True, 1
            while num_open:
                deltas = await flight.deltas()
                num_open -= sum(delta.finish is not None for delta in deltas)
                num_tokens = sum(len(delta.token_ids) for delta in deltas) + is_first * each.num_prompt_tokens
                is_first = False
                each.tokens_at.append((self._clock.now() - self.began_at, num_tokens))


def planned(trace: list[Recorded], capacity: float, lasts_s: float, chance: random.Random) -> list[Asked]:
    """Arrivals at the rates that TENANTS say, in order."""
    asked = []
    for number, tenant in enumerate(TENANTS):
        num = round(tenant.load * capacity * lasts_s)
        start = chance.randrange(len(trace) - num) if num < len(trace) else 0
        part = trace[start : start + num]
        pace = (part[-1].at_s - part[0].at_s) / lasts_s
        for index, request in enumerate(part):
            at_s = (request.at_s - part[0].at_s) / pace
            if tenant.name == "flood":
                at_s = index * lasts_s / num // BURST_S * BURST_S
            asked.append(
                Asked(at_s, tenant.name, tenant.sla_class, request.num_prompt_tokens, request.num_completion_tokens)
            )
        print(f"  {tenant.name}: {num} requests from {start} on, {pace:.2f} times the pace of the trace ({number})")
    return sorted(asked, key=lambda each: each.at_s)


def jain(amounts: Iterable[float]) -> float:
    """Index of fairness (Jain, Chiu and Hawe 1984): 1 when all have the same."""
    values = list(amounts)
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


def served(run: Run, lasts_s: float, **which: str) -> int:
    """Tokens after the warm-up of those whose fields are as ``which`` says."""
    return sum(
        num
        for each in run.asked
        if all(getattr(each, name) == value for name, value in which.items())
        for at_s, num in each.tokens_at
        if WARM_S <= at_s < lasts_s
    )


def sent(run: Run, lasts_s: float, sla_class: str = "") -> int:
    """Tokens, prompt and announced completion, of the requests sent after the warm-up: what a guaranteed share is
    about. Of a class, or of all."""
    return sum(
        each.flight.order.num_tokens
        for each in run.asked
        if sla_class in ("", each.sla_class)
        and each.flight is not None
        and each.flight.sent_at is not None
        and WARM_S <= each.flight.sent_at - run.began_at < lasts_s
    )


def share_kept(run: Run, lasts_s: float, sla_class: str) -> tuple[float, float]:
    """A class's share of what was sent, and the least that it may be in a window of this length.

    The guarantee is kept in whole requests: by policies/priority.py ``K / s + n * L`` tokens may go by before a turn of
    the class, so at either end of a window it may be behind, or have been ahead, by K and s times n * L.
    """
    orders = [each.flight.order for each in run.asked if each.flight is not None]
    largest = max(order.num_tokens for order in orders)
    own = max(order.num_tokens for order in orders if order.sla_class == sla_class)
    share, total = settings.CLASSES[sla_class].share, sent(run, lasts_s)
    slack = own + share * len(settings.CLASSES) * largest
    return sent(run, lasts_s, sla_class) / total, share - slack / total


def ttfts_s(run: Run, lasts_s: float, sla_class: str) -> list[float]:
    """Of a class's requests; infinite where it was refused, or waited until the end longer than its target."""
    found = []
    target_s = settings.CLASSES[sla_class].ttft_ms / 1e3
    for each in run.asked:
        if each.sla_class != sla_class:
            continue
        if each.tokens_at and each.flight is not None and each.flight.first_token_at is not None:
            found.append(each.flight.first_token_at - each.flight.submitted_at)
        elif each.refused or lasts_s - each.at_s > target_s:
            found.append(float("inf"))
    return found


def longest_gap(run: Run, sla_class: str) -> tuple[int, float]:
    """Tokens sent from one turn of a class to its next while it had somebody waiting, at most; and the stated bound."""
    sent = [each.flight for each in run.asked if each.flight is not None and each.flight.sent_at is not None]
    turns = sorted((flight for flight in sent if flight.turn is not None), key=lambda flight: flight.turn.number)  # type: ignore[union-attr]
    if not turns:
        return 0, float("inf")
    largest = max(flight.order.num_tokens for flight in turns)
    gap = longest = 0
    last_at = 0.0
    for flight in turns:
        sent_at = flight.sent_at or 0.0
        if flight.order.sla_class == sla_class:
            if flight.submitted_at <= last_at:
                longest = max(longest, gap)
            gap, last_at = 0, sent_at
        else:
            gap += flight.order.num_tokens
    terms_of = settings.CLASSES[sla_class]
    own = max((flight.order.num_tokens for flight in turns if flight.order.sla_class == sla_class), default=0)
    return longest, own / terms_of.share + len(settings.CLASSES) * largest


async def capacity_of(dispatch: Dispatch, trace: list[Recorded], lasts_s: float) -> float:
    """Requests a second when one line is always full."""
    asked = [Asked(0.0, "all", "standard", r.num_prompt_tokens, r.num_completion_tokens) for r in trace[:NUM_TO_FILL]]
    run = Run(dispatch, asked, in_one_line=True, seed=1)
    await run.go(lasts_s)
    mean = statistics.fmean(r.num_prompt_tokens + r.num_completion_tokens for r in trace)
    return served(run, lasts_s) / (lasts_s - WARM_S) / mean


def tell(name: str, run: Run, lasts_s: float) -> dict[str, float]:
    """Prints the run; returns what MARKS are about."""
    total = served(run, lasts_s)
    print(f"{name}: {total / (lasts_s - WARM_S):,.0f} tokens/s")
    for sla_class, terms_of in settings.CLASSES.items():
        times = sorted(ttfts_s(run, lasts_s, sla_class))
        met = sum(time_s <= terms_of.ttft_ms / 1e3 for time_s in times) / max(1, len(times))
        waits = [
            (each.flight.sent_at or run.began_at + lasts_s) - each.flight.submitted_at
            for each in run.asked
            if each.flight is not None and each.sla_class == sla_class
        ]
        refused = sum(bool(each.refused) for each in run.asked if each.sla_class == sla_class)
        share = served(run, lasts_s, sla_class=sla_class) / total
        print(
            f"  {sla_class:11} {share:6.1%} of the tokens, TTFT p50 {1e3 * times[len(times) // 2]:7.0f} ms, "
            f"p99 {1e3 * times[int(0.99 * len(times))]:7.0f} ms, {met:6.1%} within {terms_of.ttft_ms / 1e3:g} s; "
            f"longest wait in line {max(waits, default=0.0):5.1f} s; {refused} refused"
        )
    interactive = ttfts_s(run, lasts_s, "interactive")
    target_s = settings.CLASSES["interactive"].ttft_ms / 1e3
    return {
        "attainment": sum(time_s <= target_s for time_s in interactive) / len(interactive),
        "jain": jain(served(run, lasts_s, tenant=name) for name in ("left", "right")),
    }


def plot(runs: dict[str, Run], lasts_s: float, path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 6), sharex=True, sharey="row", layout="constrained")
    for column, (name, run) in enumerate(runs.items()):
        bins = [float(second) for second in range(int(lasts_s) + 1)]
        at_s = [[at for each in run.asked if each.tenant == t.name for at, _ in each.tokens_at] for t in TENANTS]
        weights = [[num for each in run.asked if each.tenant == t.name for _, num in each.tokens_at] for t in TENANTS]
        top, bottom = axes[0][column], axes[1][column]
        top.hist(at_s, bins, weights=weights, stacked=True, label=[f"{t.name} ({t.sla_class})" for t in TENANTS])
        top.set(title=name)
        for tenant in TENANTS:
            answered = [
                (each.at_s, each.flight.first_token_at - each.flight.submitted_at)
                for each in run.asked
                if each.tenant == tenant.name and each.flight is not None and each.flight.first_token_at is not None
            ]
            if answered:
                bottom.scatter(*zip(*answered, strict=True), s=5)
        bottom.axhline(settings.CLASSES["interactive"].ttft_ms / 1e3, color="grey", linewidth=0.8, linestyle="--")
        bottom.set(yscale="log", xlabel="arrival, s")
    axes[0][0].set_ylabel("tokens/s served")
    axes[1][0].set_ylabel("TTFT, s (dashed: the interactive target)")
    figure.suptitle("Twice the capacity")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    pyplot.savefig(path, dpi=150)


async def measured(chosen: argparse.Namespace) -> int:
    trace = scaled(read(chosen.trace), lengths=chosen.lengths, longest=256)
    engine = settings.Engine(device="cpu", num_threads=1, max_kv_bytes=64 << 20, max_sequences=32)
    model = settings.Model(engine=engine)
    # Nobody is to be refused for the length of the line: what is measured is its order.
    classes = {name: msgspec.structs.replace(each, max_waiting=100_000) for name, each in settings.CLASSES.items()}
    config = settings.Settings(models={MODEL: model}, classes=classes)
    dispatch = Dispatch(config, Clock())
    dispatch.serve(MODEL, Text.load(place_of(model.source), config.text))
    try:
        await dispatch.until_ready()
        started_at = time.monotonic()
        capacity = await capacity_of(dispatch, trace, chosen.calibrate_s)
        print(f"capacity: {capacity:.1f} requests/s of the trace with its lengths x {chosen.lengths:g}, at most 256")
        asked = planned(trace, capacity, chosen.seconds, random.Random(chosen.seed))
        lanes = Run(dispatch, asked, in_one_line=False, seed=2)
        await lanes.go(chosen.seconds)
        marks = tell("lanes", lanes, chosen.seconds)
        for view in dispatch.queues():
            off = "-" if view.median_error_ms is None else f"{view.median_error_ms:,.0f} ms"
            print(f"  {view.sla_class:11} {view.num_predicted} predictions, half of them off by less than {off}")
        is_met = True
        for name, wanted in MARKS.items():
            is_met &= marks[name] >= wanted
            print(f"  {name}: {marks[name]:.4f} (at least {wanted:g})")
        share, least = share_kept(lanes, chosen.seconds, "batch")
        is_met &= share >= least
        print(f"  batch: {share:.4f} of what was sent (at least {least:.4f})")
        for sla_class in settings.CLASSES:
            longest, bound = longest_gap(lanes, sla_class)
            is_met &= longest <= bound
            print(f"  {sla_class:11} longest gap between turns {longest:,} tokens (bound {bound:,.0f})")
        bare = [Asked(a.at_s, a.tenant, a.sla_class, a.num_prompt_tokens, a.num_completion_tokens) for a in lanes.asked]
        one_line = Run(dispatch, bare, in_one_line=True, seed=2)
        await one_line.go(chosen.seconds)
        tell("one line, in order of arrival", one_line, chosen.seconds)
        print(f"took {time.monotonic() - started_at:.0f} s")
    finally:
        await dispatch.close(drain_s=0)
    if chosen.plot:
        plot({"lanes": lanes, "one line, in order of arrival": one_line}, chosen.seconds, chosen.plot)
    return 0 if is_met else 1


def main() -> None:
    options = argparse.ArgumentParser(prog="python -m benchmarks.overload", description=__doc__)
    options.add_argument("--trace", type=Path, required=True, help="azure_conv_2023.csv, or Mooncake's .jsonl")
    options.add_argument("--lengths", type=float, default=0.125, help="of prompts and completions, of the trace's")
    options.add_argument("--seconds", type=float, default=60.0, help="of each of the two runs")
    options.add_argument("--calibrate-s", type=float, default=20.0)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--plot", type=Path, help="where the picture goes")
    sys.exit(uvloop.run(measured(options.parse_args())))


if __name__ == "__main__":
    main()
