"""One model on one rank and on two, in the same run: `python -m benchmarks.ranks --shape M`.

Prints medians in ms: a whole prompt in one step, and a step of decodes. Each of two ranks has one thread, so together
they have the cores that one rank has with two threads.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

from worker.process import prepare

prepare()

from policies.settings import Engine, WorkerSettings  # noqa: E402
from worker.bench.checkpoint import write  # noqa: E402
from worker.inputs import Span  # noqa: E402
from worker.models import SHAPES  # noqa: E402
from worker.parallel.runner import ParallelRunner  # noqa: E402
from worker.runner import Runner  # noqa: E402

PROMPTS = (256, 512, 1024, 2048)
BATCHES = (1, 8)
LAYOUTS = ((2, 1), (1, 2))
CONTEXT = 100
BLOCKS = CONTEXT // Engine().block_size + 1


def lost(fault: Exception) -> NoReturn:
    """A rank ended, of which another thread is told while this one may wait for it without end."""
    print(f"the measurement ends: {fault}", file=sys.stderr, flush=True)
    os._exit(1)


def median_ms(work: Callable[[], object], num_rounds: int) -> float:
    """After one that nobody counts."""
    work()
    seconds = []
    for _ in range(num_rounds):
        started_at = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started_at)
    return 1e3 * statistics.median(seconds)


def line(name: str, runner: Runner | ParallelRunner) -> str:
    chance = random.Random(0)
    figures = []
    for length in PROMPTS:
        token_ids = [chance.randrange(runner.vocab_size) for _ in range(length)]
        prompt = [Span(token_ids, 0, list(range(-(-length // runner.block_size))), 1)]
        figures.append(median_ms(partial(runner.forward, prompt), 3))
    for count in BATCHES:
        blocks = [list(range(BLOCKS * place, BLOCKS * (place + 1))) for place in range(count)]
        decodes = [Span([5], CONTEXT, block_ids, 1) for block_ids in blocks]
        figures.append(median_ms(partial(runner.forward, decodes), 12))
    return f"{name:24}" + "".join(f"{figure:9.1f}" for figure in figures)


def main() -> None:
    parser = argparse.ArgumentParser(description="One model on one rank and on two, in the same run.")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="M")
    shape = parser.parse_args().shape
    heads = [f"{length} in" for length in PROMPTS] + [f"{count} out" for count in BATCHES]
    with tempfile.TemporaryDirectory() as directory:
        write(shape, Path(directory))
        print(f"{shape + ', ms':24}" + "".join(f"{head:>9}" for head in heads))

        def engine(tensor: int, pipeline: int, num_threads: int) -> Engine:
            return Engine(
                device="cpu",
                num_threads=num_threads,
                max_kv_bytes=256 << 20,
                max_model_tokens=max(PROMPTS),
                tensor_parallel=tensor,
                pipeline_parallel=pipeline,
            )

        for num_threads in (1, 2):
            print(line(f"one rank, threads: {num_threads}", Runner.load(directory, engine(1, 1, num_threads))))
        for tensor, pipeline in LAYOUTS:
            one_thread = engine(tensor, pipeline, 1)
            runner = ParallelRunner.load(WorkerSettings("bench", shape, directory, "", engine=one_thread), lost)
            print(line(f"tensor {tensor}, pipeline {pipeline}", runner))
            runner.close()


if __name__ == "__main__":
    main()
