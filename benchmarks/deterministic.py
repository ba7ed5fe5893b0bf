"""What ``engine.deterministic`` costs: the same engine with it and without, in turn, on the same prompts.

    python -m benchmarks.deterministic --shape M

Notes and figures are in benchmarks/deterministic.md.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median

import click
import msgspec
import torch

from policies.settings import Engine, Speculation
from policies.terms import Sampling
from worker.bench import checkpoint
from worker.bench.measures import Round
from worker.bench.ours import Ours, Prompter
from worker.runner import Runner


@click.command()
@click.option("--shape", default="M", show_default=True)
@click.option("--quantize", default="none", show_default=True)
@click.option("--dtype", default="auto", show_default=True)
@click.option("--attention", default="auto", show_default=True)
@click.option("--input-tokens", type=click.IntRange(1), default=512, show_default=True)
@click.option("--output-tokens", type=click.IntRange(2), default=32, show_default=True)
@click.option("--concurrency", multiple=True, type=click.IntRange(1), default=(1, 8, 32), show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--threads", type=click.IntRange(0), default=0)
def main(
    shape: str,
    quantize: str,
    dtype: str,
    attention: str,
    input_tokens: int,
    output_tokens: int,
    concurrency: tuple[int, ...],
    rounds: int,
    threads: int,
) -> None:
    """Time to the first token and from token to token, without and with."""
    free = Engine(
        dtype=dtype,  # type: ignore[arg-type]
        quantize=quantize,  # type: ignore[arg-type]
        attention=attention,  # type: ignore[arg-type]
        num_threads=threads,
        max_model_tokens=input_tokens + output_tokens,
        max_sequences=max(concurrency),
        prefix_cache=False,
        # Random weights repeat themselves, and not at the same places in both.
        speculation=Speculation(enabled=False),
    )
    asked = Sampling(1, temperature=0.0, ignore_eos=True)
    with tempfile.TemporaryDirectory() as directory:
        checkpoint.write(shape, Path(directory), 0)
        ways = {}
        for name, engine in (("free", free), ("deterministic", msgspec.structs.replace(free, deterministic=True))):
            runner = Runner.load(directory, engine)
            ways[name] = Ours(runner, engine, asked)
    click.echo(f"{shape}, {runner.dtype}, {quantize}, attention {attention}, {torch.get_num_threads()} threads")
    prompter = Prompter(runner.vocab_size, 0)
    for number in concurrency:
        ran: dict[str, list[Round]] = {name: [] for name in ways}
        for _ in range(rounds):
            prompts = prompter.take(number, input_tokens)
            for name, ours in ways.items():
                ran[name].append(ours.batch(prompts, output_tokens))
        first, gap = [_ratio(ran, kind) for kind in ("ttft_ms", "itl_ms")]
        click.echo(f"{number:3} at a time: first token {first}; from token to token {gap}")


def _ratio(ran: dict[str, list[Round]], kind: str) -> str:
    """Medians of the rounds' medians."""
    free, kept = (median(getattr(each, kind).p50 for each in ran[name]) for name in ("free", "deterministic"))
    return f"{free:,.1f} and {kept:,.1f} ms ({kept / free:.2f})"


if __name__ == "__main__":
    main()
