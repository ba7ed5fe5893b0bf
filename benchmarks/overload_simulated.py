"""Twice as much as the workers can do, three classes, one tenant flooding: a recorded hour in a simulation.

    python -m benchmarks.overload_simulated --trace azure_conv_2023.csv --plot benchmarks/overload_simulated.png

The policies are the real ones (policies/simulation). The arrivals of the interactive and of the standard class are the
trace's, in turn between two equal tenants each, at a pace that makes them the parts of ``LOADS`` of what the workers
can do. In the batch class one tenant floods and an equal one asks for less, yet for more than its part; both draw from
the trace's lengths, at seeded random instants. What the workers can do is measured first, in the same simulation:
served tokens of the trace's mixture while the line is never empty.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.traces import Recorded, read
from policies.policy import Policy
from policies.settings import CLASSES
from policies.simulation import Arrival, Outcome, Trial, WorkerModel, run

DURATION_S = 600.0
LOADS = {"interactive": 0.3, "standard": 0.5, "batch": 1.2}
"""Of the capacity; together twice of it."""
TIERS = {"interactive": "priority", "standard": "default", "batch": "flex"}
TENANTS = {
    "interactive": {"chat-1": 0.5, "chat-2": 0.5},
    "standard": {"tools-1": 0.5, "tools-2": 0.5},
    "batch": {"flood": 0.8, "night": 0.2},
}
"""Equal tenants of each class, and what each of them asks for of the class's load."""
MODEL = WorkerModel(max_sequences=64, num_blocks=10_000)
LONGEST = 4096
"""Tokens of a prompt or an answer; the trace has few that are longer."""


def capacity(trace: list[Recorded], model: WorkerModel, duration_s: float = 120.0) -> float:
    """Tokens a second that the workers serve while there is always somebody waiting."""
    num_enough = int(200 * duration_s * model.replicas)
    rows = (trace * (num_enough // len(trace) + 1))[:num_enough]
    classes = {"all": msgspec.structs.replace(CLASSES["batch"], share=1.0, max_waiting=num_enough)}
    arrivals = tuple(_arrival(0.0, row, "flood", "auto") for row in rows)
    policy = Policy(sla_class="all", sla_classes=("all",))
    outcome = run(
        Trial(
            arrivals=arrivals,
            policies={"flood": policy},
            workers={"m": model},
            classes=classes,
            stops_at_s=duration_s,
        )
    )
    assert outcome.total.num_unfinished, "the workers were done before the time was up"
    return outcome.total.num_served_tokens / duration_s


def overload(
    trace: list[Recorded], model: WorkerModel, tokens_per_s: float, seed: int, loads: dict[str, float]
) -> tuple[Trial, float]:
    """Each class's arrivals for ``DURATION_S``; and by how much the trace was sped up for the interactive class."""
    rng = random.Random(seed)
    arrivals: list[Arrival] = []
    per_second = sum(map(_num_tokens, trace)) / trace[-1].at_s
    pace = loads["interactive"] * tokens_per_s / per_second
    for sla_class in ("interactive", "standard"):
        speed = loads[sla_class] * tokens_per_s / per_second
        rows = [row for row in trace if row.at_s < DURATION_S * speed]
        if sla_class == "standard":  # not the same minutes as the other class
            middle = trace[-1].at_s / 2
            rows = [
                row._replace(at_s=row.at_s - middle) for row in trace if 0 <= row.at_s - middle < DURATION_S * speed
            ]
        tenants = list(TENANTS[sla_class])
        arrivals += [
            _arrival(row.at_s / speed, row, tenants[index % len(tenants)], TIERS[sla_class])
            for index, row in enumerate(rows)
        ]
    for tenant, part in TENANTS["batch"].items():
        num_left = part * loads["batch"] * tokens_per_s * DURATION_S
        while num_left > 0:
            row = rng.choice(trace)
            arrivals.append(_arrival(rng.uniform(0.0, DURATION_S), row, tenant, TIERS["batch"]))
            num_left -= _num_tokens(row)
    policies = {tenant: Policy() for tenants in TENANTS.values() for tenant in tenants}
    classes = {name: msgspec.structs.replace(terms, max_waiting=100_000) for name, terms in CLASSES.items()}
    asked = Trial(
        arrivals=tuple(arrivals),
        policies=policies,
        workers={"m": model},
        classes=classes,
        stops_at_s=DURATION_S,
    )
    return asked, pace


def jain(values: Iterable[float]) -> float:
    """Jain, Chiu and Hawe's index (1984): 1 when all are equal, 1 / n when one has everything."""
    amounts = list(values)
    return sum(amounts) ** 2 / (len(amounts) * sum(amount * amount for amount in amounts))


def _num_tokens(row: Recorded) -> int:
    return min(LONGEST, row.num_prompt_tokens) + min(LONGEST, row.num_completion_tokens)


def _arrival(at_s: float, row: Recorded, tenant: str, tier: Any) -> Arrival:
    return Arrival(
        at_s=at_s,
        tenant=tenant,
        model="m",
        num_prompt_tokens=min(LONGEST, row.num_prompt_tokens),
        num_completion_tokens=max(1, min(LONGEST, row.num_completion_tokens)),
        max_completion_tokens=1024,
        service_tier=tier,
    )


class Result(msgspec.Struct):
    """What is to be shown, of one run."""

    tokens_per_s: float
    pace: float
    offered: float
    """Tokens asked for, to those that could be served."""
    attainment: float
    """Of all interactive requests, refused ones too: those whose first token came within the class's target."""
    batch_share: float
    jain: dict[str, float]
    longest_wait_s: dict[str, float]
    max_wait_s: dict[str, float]
    gap: dict[str, float]
    """Longest gap between a class's turns, to its bound."""
    outcome: Outcome


def measure(
    trace: list[Recorded], model: WorkerModel, seed: int, tokens_per_s: float, loads: dict[str, float]
) -> Result:
    asked, pace = overload(trace, model, tokens_per_s, seed, loads)
    outcome = run(asked)
    interactive = outcome.classes["interactive"]
    num_ended = interactive.num_requests - interactive.num_unfinished
    num_asked = sum(arrival.num_prompt_tokens + arrival.num_completion_tokens for arrival in asked.arrivals)
    return Result(
        tokens_per_s=tokens_per_s,
        pace=pace,
        offered=num_asked / DURATION_S / tokens_per_s,
        attainment=interactive.ttft_attainment * interactive.num_admitted / num_ended,
        batch_share=outcome.classes["batch"].share_while_waiting,
        jain={
            name: jain(outcome.tenants[tenant].num_served_tokens for tenant in tenants)
            for name, tenants in TENANTS.items()
        },
        longest_wait_s={name: part.longest_wait_ms / 1e3 for name, part in outcome.classes.items()},
        max_wait_s={name: terms.max_wait_s for name, terms in asked.classes.items()},
        gap={name: part.longest_gap_tokens / part.gap_bound_tokens for name, part in outcome.classes.items()},
        outcome=outcome,
    )


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trace", type=Path, required=True, help="azure_conv_2023.csv")
    parser.add_argument("--seeds", type=int, default=3, help="runs, each with another flood")
    parser.add_argument(
        "--loads", type=float, nargs=3, default=list(LOADS.values()), help="of the capacity: " + ", ".join(LOADS)
    )
    parser.add_argument("--plot", type=Path, help="where to draw the first run, as PNG")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    options = parser.parse_args(list(arguments) if arguments is not None else None)
    trace, loads = read(options.trace), dict(zip(LOADS, options.loads, strict=True))
    tokens_per_s = capacity(trace, MODEL)
    results = []
    for seed in range(options.seeds):
        result = measure(trace, MODEL, seed, tokens_per_s, loads)
        results.append(result)
        if not options.json:
            report(seed, result)
    if options.json:
        print(msgspec.json.encode(results).decode())
    if options.plot:
        from benchmarks.overload_picture import draw  # needs matplotlib

        draw(results[0], LOADS, TENANTS, options.plot)


def report(seed: int, result: Result) -> None:
    print(
        f"seed {seed}: capacity {result.tokens_per_s:,.0f} tokens/s, asked for {result.offered:.2f} times as much;"
        f" trace at {result.pace:.2f} times its pace for the interactive class"
    )
    for name, part in result.outcome.classes.items():
        print(
            f"  {name:<12} {part.num_requests:>6} requests, {part.num_admitted} answered, {part.num_unfinished} open,"
            f" refused {part.refused}; TTFT p50 {part.ttft_ms.p50:,.0f} p99 {part.ttft_ms.p99:,.0f} ms,"
            f" TPOT p50 {part.tpot_ms.p50:.0f} p99 {part.tpot_ms.p99:.0f} ms;"
            f" predicted TTFT off by p50 {part.ttft_error_ms.p50:,.0f} p90 {part.ttft_error_ms.p90:,.0f} ms,"
            f" bias {part.ttft_bias_ms:,.0f} ms;"
            f" share while waiting {part.share_while_waiting:.3f};"
            f" longest wait {result.longest_wait_s[name]:.2f} of {result.max_wait_s[name]:g} s,"
            f" gap {result.gap[name]:.2f} of its bound; Jain {result.jain[name]:.4f}"
        )
    print(
        f"  interactive attainment {result.attainment:.4f}, batch share {result.batch_share:.3f},"
        f" preempted {result.outcome.num_preemptions}, busy {result.outcome.utilisation:.3f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
