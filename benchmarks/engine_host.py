"""What a step costs beside its forward pass: `python -m benchmarks.engine_host --shape M --form none,int8,int4`.

Sequences with random prompts decode together, end tokens ignored, in an engine without a gateway; of the steps in which
all of them decode, the median one is taken apart: the planner, the draw of tokens, all that is not the forward pass,
and of that one what is not the one call of the compiled kernels: making tensors of a plan and for what comes of it.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from policies import wire
from policies.settings import Engine as EngineSettings
from policies.settings import Speculation
from policies.terms import Sampling
from worker.bench import checkpoint
from worker.drawing import Drawing
from worker.engine import Engine
from worker.native import Library
from worker.probe import probe
from worker.runner import Runner
from worker.sampler import Sampler
from worker.scheduler import Scheduler

PARTS = ((Runner, "forward"), (Library, "whole"), (Scheduler, "schedule"), (Drawing, "draw"))
"""Whose calls are timed."""


class Stopwatch:
    """Seconds that the parts of a step took since it was last read; while it is open they are all timed."""

    def __init__(self) -> None:
        self._taken = dict.fromkeys((name for _, name in PARTS), 0.0)
        self._before: list[tuple[type, str, Any]] = []

    def __enter__(self) -> Stopwatch:
        for owner, name in PARTS:
            self._before.append((owner, name, getattr(owner, name)))
            setattr(owner, name, self._timed(name, getattr(owner, name)))
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, method in self._before:
            setattr(owner, name, method)

    def _timed(self, name: str, method: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            began_at = time.perf_counter()
            try:
                return method(*arguments, **options)
            finally:
                self._taken[name] += time.perf_counter() - began_at

        return call

    def read(self) -> dict[str, float]:
        taken, self._taken = self._taken, dict.fromkeys(self._taken, 0.0)
        return taken


def measure(directory: str, form: Any, num_sequences: int, num_input: int, num_output: int) -> dict[str, float | None]:
    """Of the median step, in ms or as shares of it. ``of_forward`` and ``beside_ms``, what is not the one call of the
    kernels: None where there is no such call."""
    settings = EngineSettings(
        dtype="bfloat16",
        device="cpu",
        quantize=form,
        max_sequences=num_sequences,
        max_model_tokens=num_input + num_output,
        speculation=Speculation(enabled=False),
    )
    runner = Runner.load(directory, settings)
    sampler = Sampler(runner.vocab_size, runner.eos_token_ids)

    def engine_of(costs: Any) -> Engine:
        return Engine(runner, sampler, settings, time.perf_counter, costs)

    engine = engine_of(probe(engine_of, runner.max_model_tokens))
    rng = random.Random(0)
    sampling = Sampling(max_tokens=num_output, temperature=0.0, ignore_eos=True)
    for index in range(num_sequences):
        prompt = [rng.randrange(runner.vocab_size) for _ in range(num_input)]
        assert engine.add(wire.Submit(str(index), prompt, sampling)) is None
    steps: list[tuple[float, dict[str, float]]] = []
    with Stopwatch() as watch:
        while engine.has_work:
            watch.read()
            began_at = time.perf_counter()
            deltas, failed = engine.step()
            taken_s = time.perf_counter() - began_at
            assert not failed, failed
            if len(deltas) == num_sequences and sum(len(delta.token_ids) for delta in deltas) == num_sequences:
                steps.append((taken_s, watch.read()))
    # The first of them ended prompts, the last one ends all answers.
    steps = sorted(steps[1:-1], key=lambda step: step[0])
    if not steps:
        raise click.ClickException("no step had all sequences decoding: ask for more output tokens")
    step_s, parts = steps[len(steps) // 2]
    in_kernels = parts["whole"]
    return {
        "step_ms": 1e3 * step_s,
        "forward_ms": 1e3 * parts["forward"],
        "host": 1 - parts["forward"] / step_s,
        "planner": parts["schedule"] / step_s,
        "draw_ms": 1e3 * parts["draw"],
        "of_forward": (parts["forward"] - in_kernels) / step_s if in_kernels else None,
        "beside_ms": 1e3 * (step_s - in_kernels) if in_kernels else None,
        "num_steps": len(steps),
    }


@click.command()
@click.option("--shape", default="M", show_default=True, help="Of the random model: S (25 M) or M (0.5 B).")
@click.option("--form", "forms", default="none", show_default=True, help="none, int8, int4, with commas.")
@click.option("--sequences", type=click.IntRange(1), default=32, show_default=True)
@click.option("--input-tokens", type=click.IntRange(1), default=512, show_default=True)
@click.option("--output-tokens", type=click.IntRange(5), default=160, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(shape: str, forms: str, sequences: int, input_tokens: int, output_tokens: int, as_json: bool) -> None:
    """A decode step's time beside its forward pass."""
    found: dict[str, dict[str, float | None]] = {}
    with tempfile.TemporaryDirectory() as directory:
        checkpoint.write(shape, Path(directory))
        for form in forms.split(","):
            found[form] = measure(directory, form, sequences, input_tokens, output_tokens)
    if as_json:
        return click.echo(json.dumps(found))
    for form, figures in found.items():
        said = ", ".join(f"{name} {value:.3g}" for name, value in figures.items() if value is not None)
        click.echo(f"{shape} {form}, {sequences} sequences: {said}")


if __name__ == "__main__":
    main()
