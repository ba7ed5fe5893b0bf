"""What a worker knows of its steps before it has served anybody: `python -P benchmarks/engine_probe.py --shape M`.

The model is loaded and probed as a worker does it. Then work that the probe has not seen is computed, and each step is
held against what was predicted for it, nothing being learned meanwhile: a prompt alone, sequences that decode together
with so much behind them, and chunks of a prompt beside these.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import random
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import click

from policies import wire
from policies.costs import StepCosts, Work
from policies.settings import Engine as EngineSettings
from policies.settings import Speculation
from policies.terms import Sampling
from worker.bench import checkpoint
from worker.engine import Engine
from worker.probe import probe
from worker.runner import Runner
from worker.sampler import Sampler

NUM_STREAMS, NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 8, 512, 64
NUM_QUIET = 8
"""Steps of the streams before a prompt comes."""


class Known(StepCosts):
    """What was learned before; steps are noted, and teach nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Work, float]] = []

    def observe(self, work: Work, seconds: float) -> None:
        """See StepCosts."""
        self.seen.append((work, seconds))


@dataclass
class Found:
    """Predicted over measured, by kind of step."""

    probe_s: float
    ratios: dict[str, list[float]] = field(default_factory=dict)

    def note(self, kind: str, predicted_s: float, seconds: float) -> None:
        self.ratios.setdefault(kind, []).append(predicted_s / seconds)

    def line(self) -> str:
        """Median, and the two ends, of each."""
        each = (f"{kind} {median(all_):.2f} ({min(all_):.2f} to {max(all_):.2f})" for kind, all_ in self.ratios.items())
        return f"probe {self.probe_s:.2f} s; predicted over measured: {', '.join(each)}"


def measure(source: str, quantize: Any) -> Found:
    settings = EngineSettings(quantize=quantize, device="cpu", speculation=Speculation(enabled=False))
    runner = Runner.load(source, settings, may_part=True)
    sampler = Sampler(runner.vocab_size, runner.eos_token_ids)

    def engine_of(costs: StepCosts) -> Engine:
        return Engine(runner, sampler, settings, time.monotonic, costs)

    began_at = time.monotonic()
    learned = probe(engine_of, runner.max_model_tokens)
    found = Found(time.monotonic() - began_at)
    known = Known.of(learned.weights)
    assert isinstance(known, Known)
    engine, chance = engine_of(known), random.Random(0)

    def ask(name: str, num_output: int) -> None:
        prompt = [chance.randrange(runner.vocab_size) for _ in range(NUM_PROMPT_TOKENS)]
        sampling = Sampling(num_output, temperature=0.0, ignore_eos=True)
        assert engine.add(wire.Submit(name, prompt, sampling, cache_salt=name.encode())) is None

    def run(kind: str) -> None:
        while engine.has_work:
            _, failed = engine.step()
            assert not failed, failed
        for work, seconds in known.seen:
            if kind == "alone" or work.num_decodes == NUM_STREAMS:
                own = kind if work.num_chunks else f"{work.num_decodes} decoding"
                found.note(own, known.predict(work), seconds)
        known.seen.clear()

    ask("alone", 1)
    run("alone")
    for index in range(NUM_STREAMS):
        ask(f"stream-{index}", NUM_OUTPUT_TOKENS)
    while any(engine.holds(f"stream-{index}") for index in range(NUM_STREAMS)):
        engine.step()
        if sum(work.num_decodes == NUM_STREAMS for work, _ in known.seen) == NUM_QUIET:
            ask("late", NUM_OUTPUT_TOKENS)
            break
    run("chunks beside them")
    return found


@click.command()
@click.option("--shape", default="M", show_default=True, help="Of the random model: S (25 M) or M (0.5 B); or demo.")
@click.option("--form", "forms", default="none", show_default=True, help="none, int8, int4, with commas.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Each with a probe of its own.")
def main(shape: str, forms: str, rounds: int) -> None:
    """How near a worker's first predictions are."""
    with tempfile.TemporaryDirectory() as directory:
        if shape != "demo":
            checkpoint.write(shape, Path(directory))
        for form in forms.split(","):
            for _ in range(rounds):
                found = measure("demo" if shape == "demo" else directory, form)
                click.echo(f"{shape} {form}: {found.line()}")


if __name__ == "__main__":
    main()
