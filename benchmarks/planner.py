"""Promises kept: the engine's planner against class priorities alone and against order of arrival, on recorded traffic.

    python -m benchmarks.planner --trace azure_conv_2023.csv --plot benchmarks/planner.png

Simulated (policies/simulation): the real line, the real plan of each step, and a formula for a step's time. In each
round the same arrivals go three ways: workers that are told what was promised; workers that know only the classes'
priorities, as is usual; and workers that know nothing, whose requests are all of one priority. A promise is kept when
a request was let in, its first token came within its class's ``ttft_ms`` and the others, in the mean, within
``tpot_ms``. What had not ended when the time was up and was not due yet does not count.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.overload_simulated import LONGEST, capacity
from benchmarks.traces import Recorded, read
from policies.policy import Policy
from policies.settings import CLASSES, SlaClass
from policies.simulation import Arrival, Outcome, Trial, WorkerModel, run

MIX = {"interactive": 0.35, "standard": 0.35, "batch": 0.3}
"""Of the tokens asked for."""
TIERS = {"interactive": "priority", "standard": "default", "batch": "flex"}
NUM_TENANTS = 3
"""Of each class; the first asks for half of what the class does."""


class Machine(NamedTuple):
    """What computes, what is promised on it, and how long requests are."""

    model: WorkerModel
    promises_ms: dict[str, tuple[float, float]]
    """Of each class, first token and further ones."""
    lengths: float
    """To the trace's."""


_GPU = WorkerModel(max_sequences=64, num_blocks=6_000)
_CPU = WorkerModel(weights=(3e-2, 3.3e-4, 2.5e-4, 2.2e-7, 2e-9, 1e-3, 1e-7), max_sequences=32, num_blocks=1_500)
_ON_GPU = {"interactive": (500.0, 15.0), "standard": (2_000.0, 30.0), "batch": (60_000.0, 200.0)}
_ON_CPU = {"interactive": (1_000.0, 60.0), "standard": (5_000.0, 120.0), "batch": (600_000.0, 1_000.0)}
MACHINES = {
    # About an 8 B model on one large GPU, a 0.5 B model on two CPU cores, and the same with memory for few sequences.
    "gpu": Machine(_GPU, _ON_GPU, 1.0),
    "cpu": Machine(_CPU, _ON_CPU, 0.25),
    "small": Machine(msgspec.structs.replace(_CPU, num_blocks=200), _ON_CPU, 0.25),
}
WAYS = ("promises", "priorities", "arrival")


class Kept(msgspec.Struct, frozen=True):
    """One way, one load."""

    machine: str
    load: float
    way: str
    kept: dict[str, float]
    """Share of promises, by class and of "all"."""
    tokens_per_s: float
    num_preemptions: int
    num_tail_frees: int
    num_displacements: int
    ttft_p99_ms: dict[str, float]
    tpot_p99_ms: dict[str, float]


def arrivals(
    trace: list[Recorded], tokens_per_s: float, duration_s: float, lengths: float, seed: int
) -> tuple[Arrival, ...]:
    """So many tokens a second are asked for; each class's are another stretch of the trace, at its own pace."""
    rng = random.Random(seed)
    found = []
    for sla_class, part in MIX.items():
        begin = rng.uniform(0.0, trace[-1].at_s)
        # The trace as a ring, from another instant on for each class.
        rows = [row._replace(at_s=(row.at_s - begin) % trace[-1].at_s) for row in trace]
        rows.sort()
        speed = part * tokens_per_s / (sum(_length(row, lengths) for row in rows) / trace[-1].at_s)
        for row in rows:
            at_s = row.at_s / speed
            if at_s >= duration_s:
                break
            tenant = f"{sla_class}-{0 if rng.random() < 0.5 else rng.randrange(1, NUM_TENANTS)}"
            found.append(
                Arrival(
                    at_s=at_s,
                    tenant=tenant,
                    model="m",
                    num_prompt_tokens=_scaled(row.num_prompt_tokens, lengths),
                    num_completion_tokens=_scaled(row.num_completion_tokens, lengths),
                    max_completion_tokens=1024,
                    service_tier=TIERS[sla_class],  # type: ignore[arg-type]
                )
            )
    return tuple(found)


def measure(machine: str, asked: tuple[Arrival, ...], load: float, way: str, duration_s: float) -> Kept:
    model, promises_ms, _ = MACHINES[machine]
    classes = {
        name: msgspec.structs.replace(CLASSES[name], max_waiting=100_000, ttft_ms=ttft_ms, tpot_ms=tpot_ms)
        for name, (ttft_ms, tpot_ms) in promises_ms.items()
    }
    if way == "arrival":
        classes = {name: msgspec.structs.replace(terms, priority=1) for name, terms in classes.items()}
    policies = {arrival.tenant: Policy() for arrival in asked}
    outcome = run(
        Trial(
            arrivals=asked,
            policies=policies,
            workers={"m": msgspec.structs.replace(model, promises=way == "promises")},
            classes=classes,
            stops_at_s=duration_s,
        )
    )
    return Kept(
        machine=machine,
        load=load,
        way=way,
        kept=_kept(outcome, asked, classes, duration_s),
        tokens_per_s=outcome.total.num_served_tokens / duration_s,
        num_preemptions=outcome.num_preemptions,
        num_tail_frees=outcome.num_tail_frees,
        num_displacements=outcome.num_displacements,
        ttft_p99_ms={name: part.ttft_ms.p99 for name, part in outcome.classes.items()},
        tpot_p99_ms={name: part.tpot_ms.p99 for name, part in outcome.classes.items()},
    )


def _kept(
    outcome: Outcome, asked: tuple[Arrival, ...], classes: dict[str, SlaClass], duration_s: float
) -> dict[str, float]:
    kept: dict[str, float] = {}
    num_kept = num_all = 0
    for name, part in outcome.classes.items():
        # Those that came too late to have ended by then, if all goes well, are nobody's failure.
        terms = classes[name]
        num_due = sum(
            arrival.service_tier == TIERS[name]
            and arrival.at_s + (terms.ttft_ms + terms.tpot_ms * arrival.num_completion_tokens) / 1e3 <= duration_s
            for arrival in asked
        )
        num = max(num_due, part.num_admitted + sum(part.refused.values()), 1)
        kept[name] = part.num_kept / num
        num_kept, num_all = num_kept + part.num_kept, num_all + num
    return {**kept, "all": num_kept / num_all}


def _scaled(num_tokens: int, lengths: float) -> int:
    return max(1, min(LONGEST, round(num_tokens * lengths)))


def _shortened(row: Recorded, lengths: float) -> Recorded:
    num_prompt_tokens, num_completion_tokens = row.num_prompt_tokens, row.num_completion_tokens
    return row._replace(
        num_prompt_tokens=_scaled(num_prompt_tokens, lengths),
        num_completion_tokens=_scaled(num_completion_tokens, lengths),
    )


def _length(row: Recorded, lengths: float) -> int:
    return _scaled(row.num_prompt_tokens, lengths) + _scaled(row.num_completion_tokens, lengths)


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trace", type=Path, required=True, help="azure_conv_2023.csv or conversation_trace.jsonl")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.6, 0.75, 0.9, 1.2], help="of what can be served")
    parser.add_argument("--seconds", type=float, default=300.0, help="of traffic, each round")
    parser.add_argument("--seeds", type=int, default=2, help="rounds of each load, each from other instants on")
    parser.add_argument("--machines", nargs="+", choices=list(MACHINES), default=list(MACHINES))
    parser.add_argument("--plot", type=Path, help="where to draw it, as PNG")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    options = parser.parse_args(list(arguments) if arguments is not None else None)
    trace = read(options.trace)
    results: list[Kept] = []
    for machine in options.machines:
        model, _, lengths = MACHINES[machine]
        most = capacity([_shortened(row, lengths) for row in trace], model)
        for load in options.loads:
            rounds: dict[str, list[Kept]] = {way: [] for way in WAYS}
            for seed in range(options.seeds):
                asked = arrivals(trace, load * most, options.seconds, lengths, seed)
                for way in WAYS:
                    rounds[way].append(measure(machine, asked, load, way, options.seconds))
            means = [_mean(rounds[way]) for way in WAYS]
            results += means
            if not options.json:
                report(most, means)
    if options.json:
        print(msgspec.json.encode(results).decode())
    if options.plot:
        from benchmarks.planner_picture import draw  # needs matplotlib

        draw(results, options.plot)


def _mean(rounds: list[Kept]) -> Kept:
    def mean(parts: list[dict[str, float]]) -> dict[str, float]:
        return {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]}

    return msgspec.structs.replace(
        rounds[0],
        kept=mean([each.kept for each in rounds]),
        tokens_per_s=sum(each.tokens_per_s for each in rounds) / len(rounds),
        num_preemptions=sum(each.num_preemptions for each in rounds),
        num_tail_frees=sum(each.num_tail_frees for each in rounds),
        num_displacements=sum(each.num_displacements for each in rounds),
        ttft_p99_ms=mean([each.ttft_p99_ms for each in rounds]),
        tpot_p99_ms=mean([each.tpot_p99_ms for each in rounds]),
    )


def report(most: float, ways: list[Kept]) -> None:
    base = {each.way: each.kept["all"] for each in ways}
    for each in ways:
        classes = ", ".join(
            f"{name} {100 * each.kept[name]:.1f} % (TTFT p99 {each.ttft_p99_ms[name]:,.0f},"
            f" TPOT p99 {each.tpot_p99_ms[name]:.0f} ms)"
            for name in MIX
        )
        print(
            f"{each.machine} at {each.load:.2f} of {most:,.0f} tokens/s, {each.way:<10}"
            f" kept {100 * each.kept['all']:.1f} %: {classes};"
            f" {each.tokens_per_s:,.0f} tokens/s, put back {each.num_preemptions},"
            f" ends lost {each.num_tail_frees}, put aside for {each.num_displacements}",
            flush=True,
        )
    print(
        f"  promises to priorities {base['promises'] / max(1e-9, base['priorities']):.3f},"
        f" to arrival {base['promises'] / max(1e-9, base['arrival']):.3f}"
    )


if __name__ == "__main__":
    main()
