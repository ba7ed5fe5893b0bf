"""Decoding beside a gateway that is busy on the same cores: what it loses, and what the gateway took.

Run ``python -m benchmarks.engine_beside``. The gateway is the production one, on all cores, under wrk; the worker that
answers it is scripted and lives here. The engine is another process, as in benchmarks/engine_peers, and writes for a
batch of sequences alone, then beside the gateway, in turn. Notes and figures are in benchmarks/engine_peers.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import random
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import aiohttp
import click
import msgspec
import uvloop

from benchmarks.engine_peers.contenders import OURS, Contender, ContenderError, Written, parse
from benchmarks.engine_peers.race import written
from benchmarks.gateway import processes
from benchmarks.gateway.processes import BenchmarkError, Server
from benchmarks.gateway.rounds import KEY, MESSAGES, MODEL_NAME, NUM_COMPLETION_TOKENS
from benchmarks.gateway.served import served


class Round(msgspec.Struct):
    """The same batch twice."""

    alone_s: float
    beside_s: float
    taken: float
    """Share of the machine's CPU time that everything but the engine had beside it: gateway, load and scripted worker.
    """
    gateway: float
    """Of that, the gateway's own."""
    requests_per_s: float

    @property
    def lost(self) -> float:
        """Share of the engine's tokens a second."""
        return 1 - self.alone_s / self.beside_s


@click.command()
@click.option("--shape", default="M", show_default=True)
@click.option("--form", default="bf16", show_default=True)
@click.option("--sequences", type=click.IntRange(1), default=8, show_default=True)
@click.option("--input-tokens", type=click.IntRange(1), default=32, show_default=True)
@click.option("--output-tokens", type=click.IntRange(2), default=128, show_default=True)
@click.option("--connections", type=click.IntRange(1), default=8, show_default=True, help="Of the gateway's load.")
@click.option("--delay-ms", type=click.IntRange(1), default=10, show_default=True, help="Before each of its requests.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--patience", type=click.FloatRange(1.0), default=2.0, show_default=True, help="Times as long as alone.")
@click.option("--keep", type=click.Path(file_okay=False, path_type=Path), help="Keep the checkpoint here.")
@click.option("--json", "as_json", is_flag=True)
def main(
    shape: str,
    form: str,
    sequences: int,
    input_tokens: int,
    output_tokens: int,
    connections: int,
    delay_ms: int,
    rounds: int,
    threads: int,
    patience: float,
    keep: Path | None,
    as_json: bool,
) -> None:
    """What decoding loses beside a busy gateway on the same cores, against the CPU time that the gateway takes."""
    with contextlib.ExitStack() as stack:
        kept = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="beside-")))
        kept.mkdir(parents=True, exist_ok=True)
        checkpoint = kept.resolve() / shape
        model = written(shape, checkpoint)
        facts = {
            "num_threads": threads,
            "max_sequences": sequences,
            "input_tokens": input_tokens,
            "output_tokens": output_tokens,
            "commit": "",
        }
        engine = Contender(parse(f"{OURS}:{form}={sys.executable}"), checkpoint, checkpoint, facts, kept / "beside.log")
        source = random.Random(0)

        def prompts() -> list[list[int]]:
            return [[source.randrange(3, model.vocab_size) for _ in range(input_tokens)] for _ in range(sequences)]

        async def batch() -> Written:
            return await engine.run(prompts(), output_tokens, 120.0)

        async def all_rounds() -> list[Round]:
            try:
                await engine.load(120.0)
                await batch()
                async with contextlib.AsyncExitStack() as servers:
                    folder = Path(servers.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
                    gateway = await _gateway(servers, folder)
                    return [
                        await _round(batch, gateway, folder, connections, delay_ms, patience) for _ in range(rounds)
                    ]
            finally:
                await engine.close()

        try:
            done = uvloop.run(all_rounds())
        except (ContenderError, BenchmarkError) as error:
            raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(done)).decode())
        return
    for each in done:
        click.echo(
            f"{sequences} sequences: {sequences * output_tokens / each.alone_s:,.1f} tokens/s alone, "
            f"{sequences * output_tokens / each.beside_s:,.1f} beside {each.requests_per_s:,.0f} requests/s: "
            f"lost {each.lost:.1%}, taken {each.taken:.1%} of all CPUs, the gateway {each.gateway:.1%}"
        )
    lost, taken = median(each.lost for each in done), median(each.taken for each in done)
    click.echo(f"median: lost {lost:.1%}, taken {taken:.1%}: {lost / taken:.2f} of it (wanted: at most 1)")


async def _gateway(servers: contextlib.AsyncExitStack, folder: Path) -> Server:
    """Serving, its scripted worker connected. Raises BenchmarkError."""
    gateway, _ = await servers.enter_async_context(served(folder, folder / "data", None))
    body = {"model": MODEL_NAME, "messages": MESSAGES, "max_tokens": NUM_COMPLETION_TOKENS}
    (folder / "request.json").write_text(json.dumps(body))
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as session,
        session.post(f"{gateway.url}/v1/chat/completions", json=body) as response,
    ):
        if response.status != 200:
            raise BenchmarkError(f"the gateway answers {response.status}")
    return gateway


async def _round(
    batch: Callable[[], Awaitable[Written]],
    gateway: Server,
    folder: Path,
    connections: int,
    delay_ms: int,
    patience: float,
) -> Round:
    """``patience``: beside the gateway the batch may take so many times as long as alone."""
    alone = await batch()
    # And a second for the load to begin.
    duration_s = math.ceil(patience * alone.duration_s) + 2
    load = asyncio.create_task(
        processes.wrk(
            f"{gateway.url}/v1/chat/completions",
            connections,
            duration_s,
            None,
            folder / "request.json",
            KEY,
            int(perf_counter() * 1000) % 900_000,
            delay_ms,
        )
    )
    await asyncio.sleep(1.0)
    began_at, before_s = perf_counter(), gateway.cpu_s()
    beside = await batch()
    gateway_s, took_s = gateway.cpu_s() - before_s, perf_counter() - began_at
    if load.done():
        raise BenchmarkError(f"beside the gateway the engine took more than {patience:g} times what it takes alone")
    answered = await load
    num_cpus = len(os.sched_getaffinity(0))
    return Round(
        alone_s=alone.duration_s,
        beside_s=beside.duration_s,
        taken=beside.others / num_cpus,
        gateway=gateway_s / took_s / num_cpus,
        requests_per_s=answered.requests_per_s,
    )


if __name__ == "__main__":
    main()
