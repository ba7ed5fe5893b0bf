"""Weights in twelve bits beside the same in sixteen: `python -P benchmarks/engine_coded.py --shape M`.

One process has the model twice, once with its matrices coded (worker/native/coded.h) and once as they are, and both do
the same work, step by step in turn: prompts, and sequences that decode together. Nothing is lost, so both must give the
same tokens, or this fails; but where there are tiles (AMX) one row of what is coded is added up in another
order, and it is said how many answers are alike.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import random
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import click

from policies import wire
from policies.costs import StepCosts
from policies.settings import Engine as EngineSettings
from policies.settings import Speculation
from policies.terms import Sampling
from worker.bench import checkpoint
from worker.engine import Engine
from worker.native import Library, library
from worker.runner import Runner
from worker.sampler import Sampler

CODED, PLAIN = "12 bits", "16 bits"


class Side:
    """One of the two."""

    def __init__(self, directory: str, settings: EngineSettings, is_coded: bool) -> None:
        self.num_coded, code = 0, Library.code

        def note(kernels: Library, weight: Any, matrix: Any) -> Any:
            coded = code(kernels, weight, matrix) if is_coded else None
            self.num_coded += coded is not None
            return coded

        began_at = time.perf_counter()
        with patch.object(Library, "code", note), patch("worker.loading.coding_pays", return_value=True):
            self._runner = Runner.load(directory, settings, may_part=True)
        self.load_s = time.perf_counter() - began_at
        self._settings = settings
        self.steps: dict[int, list[float]] = {}
        """Seconds, by how many sequences each gave a token to."""
        self.answers: dict[str, list[int]] = {}

    def begin(self) -> None:
        runner = self._runner
        sampler = Sampler(runner.vocab_size, runner.eos_token_ids)
        self.engine = Engine(runner, sampler, self._settings, time.monotonic, StepCosts())
        self.steps, self.answers = {}, {}

    def ask(self, name: str, prompt: list[int], num_output: int) -> None:
        sampling = Sampling(num_output, temperature=0.0, ignore_eos=True)
        assert self.engine.add(wire.Submit(name, prompt, sampling, cache_salt=name.encode())) is None

    def step(self) -> None:
        began_at = time.perf_counter()
        deltas, failed = self.engine.step()
        taken_s = time.perf_counter() - began_at
        assert not failed, failed
        self.steps.setdefault(len(deltas), []).append(taken_s)
        for delta in deltas:
            self.answers.setdefault(delta.request_id, []).extend(delta.token_ids)


def beside(sides: dict[str, Side], num_sequences: int, num_input: int, num_output: int, seed: int) -> dict[str, float]:
    """Seconds of the median step in which all sequences got a token, of each."""
    chance = random.Random(seed)
    prompts = [[chance.randrange(1000) for _ in range(num_input)] for _ in range(num_sequences)]
    for side in sides.values():
        side.begin()
        for index, prompt in enumerate(prompts):
            side.ask(str(index), prompt, num_output)
    while any(side.engine.has_work for side in sides.values()):
        for side in sides.values():
            if side.engine.has_work:
                side.step()
    coded, plain = sides[CODED].answers, sides[PLAIN].answers
    num_other = sum(coded[name] != tokens for name, tokens in plain.items())
    kernels = library()
    if num_other and not (kernels and kernels.has_tiles):
        raise click.ClickException(f"{num_other} of {num_sequences} answers are not the same")
    if num_other:
        click.echo(f"{num_other} of {num_sequences} answers are not the same")
    return {name: median(side.steps[num_sequences]) for name, side in sides.items()}


@click.command()
@click.option("--shape", default="M", show_default=True, help="Of the random model: S (25 M) or M (0.5 B); or demo.")
@click.option("--sequences", default="1,2,4,8,16,32", show_default=True, help="That decode together, with commas.")
@click.option("--input-tokens", type=click.IntRange(1), default=512, show_default=True)
@click.option("--output-tokens", type=click.IntRange(5), default=48, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
def main(shape: str, sequences: str, input_tokens: int, output_tokens: int, rounds: int) -> None:
    """What a quarter less to read is worth."""
    with tempfile.TemporaryDirectory() as directory:
        if shape != "demo":
            checkpoint.write(shape, Path(directory))
        settings = EngineSettings(
            dtype="bfloat16", device="cpu", prefix_cache=False, speculation=Speculation(enabled=False)
        )
        library()  # whoever loads first is not to wait for the compiler
        source = "demo" if shape == "demo" else directory
        sides = {name: Side(source, settings, name == CODED) for name in (PLAIN, CODED)}
        for name, side in sides.items():
            click.echo(f"{shape}, {name}: loaded in {side.load_s:.2f} s, {side.num_coded} matrices coded")
        if not sides[CODED].num_coded:
            raise click.ClickException("no matrix of this model is coded on this machine")
        # A prompt alone is a step that gives one sequence its token.
        decoding = ((f"{number} decoding", int(number), output_tokens) for number in sequences.split(","))
        kinds = [("prompt", 1, 1), *decoding]
        for kind, num, num_output in kinds:
            taken: dict[str, list[float]] = {name: [] for name in sides}
            for seed in range(rounds if num_output > 1 else 3 * rounds):
                for name, seconds in beside(sides, num, input_tokens, num_output, seed).items():
                    taken[name].append(1e3 * seconds)
            ratios = [plain / coded for plain, coded in zip(taken[PLAIN], taken[CODED], strict=True)]
            of_each = ", ".join(f"{name} {median(all_):.2f} ms" for name, all_ in taken.items())
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            click.echo(f"{kind}: {of_each}, {median(ratios):.2f} ({spread}) times as fast coded")


if __name__ == "__main__":
    main()
