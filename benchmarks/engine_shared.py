"""A decode step of requests that begin with the same prompt: `python -P benchmarks/engine_shared.py`.

32 sequences of the M shape in bfloat16, a token each, behind 2,000 tokens that all of them share and 60 of their own:
with the shared blocks read once for all, read by each, and where each has blocks of its own. In turn; medians in ms.
`--attention torch` computes without the compiled kernels.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import statistics
import tempfile
import time
from pathlib import Path
from typing import Literal

import click
import torch

from policies.settings import Engine
from worker.attention import shared as common
from worker.bench import checkpoint
from worker.inputs import Span
from worker.runner import Runner

NUM_SEQUENCES, NUM_SHARED, NUM_OWN = 32, 2000, 60
NUM_ROUNDS = 15


@click.command()
@click.option("--attention", type=click.Choice(["auto", "torch"]), default="auto", show_default=True)
def main(attention: Literal["auto", "torch"]) -> None:
    """A decode step of requests that begin with the same prompt."""
    with tempfile.TemporaryDirectory() as directory:
        checkpoint.write("M", Path(directory))
        runner = Runner.load(
            directory, Engine(device="cpu", dtype="bfloat16", max_model_tokens=4096, attention=attention)
        )
    size = runner.block_size
    for tensor in (*runner.cache.keys, *runner.cache.values):
        # Pages that were never written are one page, which stays in cache.
        tensor[:, : NUM_SEQUENCES * 70 * size].normal_(0.0, 0.1)
    num_blocks = -(-(NUM_SHARED + NUM_OWN + 1) // size)
    own = [list(range(index * num_blocks, (index + 1) * num_blocks)) for index in range(NUM_SEQUENCES)]
    shared = [own[0][: NUM_SHARED // size] + table[NUM_SHARED // size :] for table in own]
    enough = common.MIN_SHARERS
    ways = {"blocks of their own": (own, enough), "shared": (shared, 1 << 30), "shared, read once": (shared, enough)}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(NUM_ROUNDS):
        for name, (tables, common.MIN_SHARERS) in ways.items():
            spans = [Span([5], NUM_SHARED + NUM_OWN, table, 1) for table in tables]
            began_at = time.perf_counter()
            runner.forward(spans)
            taken[name].append(1e3 * (time.perf_counter() - began_at))
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for name, times in taken.items():
        print(f"{name:20} {statistics.median(times[2:]):7.1f} ms a step")


if __name__ == "__main__":
    main()
