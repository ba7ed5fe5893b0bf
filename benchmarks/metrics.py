"""What /metrics costs the gateway: its throughput with it and without, in interleaved rounds.

    python -m benchmarks.metrics [--rounds 8] [--seconds 2] [--every 15]

Two gateways share one core and take turns: one as it is, read every so many seconds (15 is what Prometheus does unless
it is told otherwise; 0: never), and one with ``metrics.enabled = false``. A scripted worker on the real wire and the
load have the other core. Behind the rounds it is told what one reading takes of a gateway's CPU that has nothing else
to do. Needs wrk and two cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import median

import aiohttp
import click
import uvloop
from tokenizers import Tokenizer

from benchmarks.gateway import peer, processes
from benchmarks.gateway.__main__ import CONFIG, MODEL, TEXT, _memory
from benchmarks.gateway.processes import BenchmarkError, Server
from benchmarks.gateway.rounds import CONNECTIONS, KEY, MESSAGES, MODEL_NAME, NUM_COMPLETION_TOKENS
from policies.wire import Ready

REQUIRED = 0.98
"""Of the throughput without."""
NUM_READINGS = 100


@click.command()
@click.option("--rounds", "num_rounds", type=click.IntRange(1, 100), default=8, show_default=True)
@click.option("--seconds", type=click.IntRange(1, 60), default=2, show_default=True, help="Of each run of wrk.")
@click.option(
    "--every",
    "every_s",
    type=click.FloatRange(0),
    default=0.0,
    show_default=True,
    help="Seconds between two readings of /metrics; 0: none.",
)
@click.option("--check/--no-check", default=True, show_default=True, help="Exit code 1 when the mark is missed.")
def main(num_rounds: int, seconds: int, every_s: float, check: bool) -> None:
    try:
        ratios, reading_ms = uvloop.run(measure(num_rounds, seconds, every_s))
    except BenchmarkError as error:
        raise click.ClickException(str(error)) from error
    click.echo(
        f"requests/s with metrics are {median(each for each, _ in ratios):.3f} of those without, "
        f"CPU for one {median(each for _, each in ratios):.3f} (medians of {num_rounds} rounds; required {REQUIRED}); "
        f"one reading takes {reading_ms:.2f} ms"
    )
    sys.exit(1 if check and median(each for each, _ in ratios) < REQUIRED else 0)


async def measure(num_rounds: int, seconds: int, every_s: float) -> tuple[list[tuple[float, float]], float]:
    """With metrics, of without: requests/s and the CPU for one, of each round; and that of a reading, in ms."""
    core, load_core = processes.check()
    os.sched_setaffinity(0, {load_core})
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        body = folder / "request.json"
        fields = {"model": MODEL_NAME, "messages": MESSAGES, "max_tokens": NUM_COMPLETION_TOKENS}
        body.write_bytes(json.dumps(fields).encode())
        without = await stack.enter_async_context(gateway(folder, core, is_on=False))
        measured = await stack.enter_async_context(gateway(folder, core, is_on=True))
        first, ratios = 0, []
        for number in range(-1, num_rounds):  # the first one warms up
            seen: dict[str, tuple[float, float]] = {}
            for server in (without, measured) if number % 2 else (measured, without):
                before = server.cpu_s()
                url = f"{server.url}/v1/chat/completions"
                async with scraped(server if server is measured and every_s else None, every_s):
                    ran = await processes.wrk(url, CONNECTIONS, seconds, load_core, body, KEY, first)
                first += ran.num_requests
                seen[server.url] = ran.requests_per_s, 1e6 * (server.cpu_s() - before) / ran.num_requests
            (per_s, cpu_us), (per_s_without, cpu_us_without) = seen[measured.url], seen[without.url]
            click.echo(
                f"round {number + 1}: {per_s:,.0f}/s with metrics and {per_s_without:,.0f} without, "
                f"{cpu_us:.1f} and {cpu_us_without:.1f} µs",
                err=True,
            )
            if number >= 0:
                ratios.append((per_s / per_s_without, cpu_us / cpu_us_without))
        before = measured.cpu_s()
        async with aiohttp.ClientSession(raise_for_status=True) as session:
            for _ in range(NUM_READINGS):
                async with session.get(f"{measured.url}/metrics") as answer:
                    await answer.read()
        return ratios, 1e3 * (measured.cpu_s() - before) / NUM_READINGS


@contextlib.asynccontextmanager
async def gateway(folder: Path, core: int, is_on: bool) -> AsyncIterator[Server]:
    """A gateway with a ledger and a worker of its own."""
    name = f"metrics-{is_on}"
    with contextlib.ExitStack() as stack:
        data = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-", dir=_memory()))
        tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
        ready = Ready(MODEL_NAME, 8192, tokenizer.get_vocab_size(), [0, 2], 32, 4096, 256, "none", "none", os.getpid())
        token_ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
        listening, connected = await peer.listen_as_worker(folder / f"{name}.socket", ready, token_ids)
        stack.callback(listening.close)
        config = folder / f"{name}.toml"
        config.write_text(CONFIG.format(data_dir=json.dumps(data), socket=folder / f"{name}.socket"))
        environ = {
            "PENSTOCK_API_KEY": KEY,
            "PENSTOCK_ADMIN_KEY": f"{KEY}-admin",
            "PENSTOCK_METRICS__ENABLED": str(is_on).lower(),
        }
        arguments = [sys.executable, "-m", "gateway", "serve", "--config", str(config)]
        async with processes.server(arguments, core, folder / f"{name}.log", environ) as server:
            async with asyncio.timeout(10.0):
                await connected
            yield server


@contextlib.asynccontextmanager
async def scraped(server: Server | None, every_s: float) -> AsyncIterator[None]:
    """At once and every so often, for as long as this lasts; None: nobody is."""

    async def scrape(url: str) -> None:
        async with aiohttp.ClientSession(raise_for_status=True) as session:
            while True:
                async with session.get(f"{url}/metrics") as answer:
                    await answer.read()
                await asyncio.sleep(every_s)

    if server is None:
        yield
        return
    task = asyncio.create_task(scrape(server.url))
    try:
        yield
    finally:
        if task.done():
            task.result()
        task.cancel()


if __name__ == "__main__":
    main()
