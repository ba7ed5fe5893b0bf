"""Starts everything, measures in interleaved rounds, and says whether the gateway is as light as it must be."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import sqlite3
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

import aiohttp
import click
import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.gateway import peer, picture, processes, rounds, streams
from benchmarks.gateway.processes import BenchmarkError
from benchmarks.gateway.rounds import (
    AIM_RATIO,
    CONNECTIONS,
    KEY,
    MESSAGES,
    MODEL_NAME,
    MOST_ADDED_MS,
    NUM_COMPLETION_TOKENS,
    REQUIRED_RATIO,
    REQUIRED_STREAM_RATIO,
    Bench,
    Result,
    Round,
)
from benchmarks.gateway.served import in_memory, served

notes = Console(stderr=True, highlight=False)


@click.command()
@click.option("--rounds", "num_rounds", type=click.IntRange(1, 100), default=5, show_default=True)
@click.option("--seconds", type=click.IntRange(1, 60), default=3, show_default=True, help="Of each run of wrk.")
@click.option("--streams", "num_streams", type=click.IntRange(2, streams.MAX_STREAMS), default=64, show_default=True)
@click.option("--tokens", "num_tokens", type=click.IntRange(2, 8000), default=1500, show_default=True, help="A stream.")
@click.option(
    "--data",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where the ledger's directory is made [in memory where there is /dev/shm: how long a disk takes to say that "
    "something is on it is no cost of the gateway's].",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Write a PNG.")
@click.option("--check/--no-check", default=True, show_default=True, help="Exit code 1 when a mark is missed.")
def main(
    num_rounds: int,
    seconds: int,
    num_streams: int,
    num_tokens: int,
    data: Path | None,
    as_json: bool,
    plot: Path | None,
    check: bool,
) -> None:
    """What the gateway itself costs on one core, against bare aiohttp on the same core."""
    try:
        result = uvloop.run(measure(num_rounds, seconds, num_streams, num_tokens, data or in_memory()))
    except (BenchmarkError, streams.StreamError) as error:
        raise click.ClickException(str(error)) from error
    except TimeoutError as error:
        raise click.ClickException("a round hung: some answer never came") from error
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(result), indent=2))
    else:
        show(result)
    if plot:
        picture.draw(result, plot)
    if failures := result.failures():
        notes.print(f"missed: {'; '.join(failures)}", style="red")
        sys.exit(1 if check else 0)


async def measure(num_rounds: int, seconds: int, num_streams: int, num_tokens: int, place: Path | None) -> Result:
    """All rounds, the ledger in a new directory in ``place``. Raises BenchmarkError, StreamError, TimeoutError."""
    core, load_core = processes.check()
    os.sched_setaffinity(0, {load_core})
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        data = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-", dir=place)))
        body = json.dumps({"model": MODEL_NAME, "messages": MESSAGES, "max_tokens": NUM_COMPLETION_TOKENS}).encode()
        (folder / "request.json").write_bytes(body)
        gateway, worker = await stack.enter_async_context(served(folder, data, core))
        idle_mib = gateway.pss_mib()
        answer, chunk = await samples(gateway.url)
        (folder / "answer").write_bytes(answer)
        (folder / "chunk").write_bytes(chunk)

        upstream = await asyncio.get_running_loop().create_server(lambda: peer.Upstream(answer), "127.0.0.1", 0)
        stack.callback(upstream.close)
        bare = await stack.enter_async_context(
            processes.server(
                [
                    *(sys.executable, "-m", "benchmarks.gateway.bare", str(folder / "answer"), str(folder / "chunk")),
                    f"http://127.0.0.1:{upstream.sockets[0].getsockname()[1]}/",
                ],
                core,
                folder / "bare.log",
            )
        )
        gc.freeze()
        bench = Bench(folder, gateway, bare, worker, load_core, seconds, num_streams, num_tokens)
        bench.num_answers = 2
        done: list[Round] = []
        for number in range(num_rounds):
            # Bounded, so that a stream that hangs ends as a failure.
            async with asyncio.timeout(120.0 + 6 * seconds):
                done.append(await bench.round())
            notes.print(f"round {number + 1} of {num_rounds}: {_line(done[-1])}", style="dim")
        facts = {
            "gateway_idle_mib": idle_mib,
            "commit_ms": _commit_ms(data),
            "num_answers": bench.num_answers,
            "request_bytes": len(body),
            "answer_bytes": len(answer),
            "chunk_bytes": len(chunk),
            "num_streams": num_streams,
            "tokens_a_stream": num_tokens,
        }
        # Streams and whole answers alike are in the ledger before their last byte leaves, so now is late enough.
        return rounds.summary(done, num_ledger_rows=_num_rows(data / "penstock.db"), **facts)


async def samples(url: str) -> tuple[bytes, bytes]:
    """The gateway's own answer to this benchmark's request, and a chunk of its stream: what the bare servers send."""
    fields = {"model": MODEL_NAME, "messages": MESSAGES, "max_tokens": NUM_COMPLETION_TOKENS}
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as session:
        async with session.post(f"{url}/v1/chat/completions", json=fields) as response:
            answer = await response.read()
            if response.status != 200:
                raise BenchmarkError(f"the gateway answers {response.status}: {answer[:500]!r}")
        async with session.post(f"{url}/v1/chat/completions", json={**fields, "stream": True}) as response:
            events = (await response.read()).split(b"\n\n")
    chunks = [event for event in events if b'"content":"' in event and b'"content":""' not in event]
    if not chunks:
        raise BenchmarkError(f"the gateway streams no text: {events[:3]!r}")
    # The scripted worker gives a whole answer at once, so the sample holds all its text; a chunk of a token holds one.
    fields_of_chunk = json.loads(chunks[0].removeprefix(b"data: "))
    fields_of_chunk["choices"][0]["delta"] = {"content": " river"}
    return answer, b"data: " + json.dumps(fields_of_chunk, separators=(",", ":")).encode() + b"\n\n"


def _commit_ms(folder: Path) -> float:
    """How long the ledger's place takes to say that a page is on it, in the middle of many."""
    times_s = []
    with (folder / "probe").open("wb", buffering=0) as probe:
        for _ in range(50):
            probe.write(bytes(4096))
            began_at = perf_counter()
            os.fdatasync(probe.fileno())
            times_s.append(perf_counter() - began_at)
    return 1e3 * median(times_s)


def _num_rows(path: Path) -> int:
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as ledger:
        return int(ledger.execute("SELECT count(*) FROM ledger").fetchone()[0])


def _line(r: Round) -> str:
    return (
        f"{r.gateway_per_s:,.0f}/s is {r.gateway_per_s / r.echo_per_s:.3f} of the echo "
        f"({r.gateway_cpu_us:.0f} and {r.echo_cpu_us:.0f} µs), "
        f"+{(r.gateway_c1_p50_us - r.echo_c1_p50_us) / 1e3:.2f} ms, "
        f"{r.in_step_tokens_per_s:,.0f} tokens/s is {r.in_step_tokens_per_s / r.loop_tokens_per_s:.2f} of the loop "
        f"({r.in_step_cpu_us:.1f} and {r.loop_cpu_us:.1f} µs), {r.flood_tokens_per_s:,.0f} merged"
    )


def show(result: Result) -> None:
    def middle(name: str) -> float:
        return float(median(getattr(r, name) for r in result.rounds))

    out = Console(highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("", "Penstock", "limit on the same core", "ratio", "required"):
        table.add_column(name, justify="left" if not name else "right")
    table.add_row(
        f"requests/s, {CONNECTIONS} connections, against a bare echo",
        f"{middle('gateway_per_s'):,.0f}",
        f"{middle('echo_per_s'):,.0f}",
        f"{result.requests_ratio:.3f}",
        f"{REQUIRED_RATIO:g} (aim {AIM_RATIO:g})",
    )
    table.add_row(
        "… CPU for one, µs",
        f"{middle('gateway_cpu_us'):,.0f}",
        f"{middle('echo_cpu_us'):,.0f}",
        f"{result.cpu_ratio:.3f}",
        "",
    )
    table.add_row(
        "… against a bare proxy", "", f"{middle('proxy_per_s'):,.0f}", f"{result.requests_ratio_to_proxy:.2f}", ""
    )
    table.add_row(
        "p50 at concurrency 1, µs",
        f"{middle('gateway_c1_p50_us'):,.0f}",
        f"{middle('echo_c1_p50_us'):,.0f}",
        f"+{result.added_ms:.2f} ms",
        f"+{MOST_ADDED_MS:g} ms",
    )
    table.add_row("… the proxy's", "", f"{middle('proxy_c1_p50_us'):,.0f}", f"(+{result.proxy_added_ms:.2f} ms)", "")
    table.add_row(
        f"tokens/s, {result.num_streams} streams, {middle('in_step_tokens_per_chunk'):.2f} tokens a chunk",
        f"{middle('in_step_tokens_per_s'):,.0f}",
        f"{middle('loop_tokens_per_s'):,.0f}",
        f"{result.stream_ratio:.2f}",
        f"{REQUIRED_STREAM_RATIO:g}",
    )
    table.add_row(
        "… CPU for one, µs",
        f"{middle('in_step_cpu_us'):.2f}",
        f"{middle('loop_cpu_us'):.2f}",
        f"{result.stream_cpu_ratio:.2f}",
        "",
    )
    table.add_row(
        "… against the loop, a write in each turn",
        "",
        f"{middle('turns_tokens_per_s'):,.0f}",
        f"{result.in_step_ratio:.2f}",
        "",
    )
    table.add_row(
        f"… merged, {middle('flood_tokens_per_chunk'):.1f} tokens a chunk",
        f"{middle('flood_tokens_per_s'):,.0f}",
        f"{middle('loop_tokens_per_s'):,.0f}",
        f"{result.merged_ratio:.2f}",
        "",
    )
    out.print(table)
    out.print(
        f"Medians of {len(result.rounds)} rounds. Request {result.request_bytes} bytes, answer {result.answer_bytes}, "
        f"chunk {result.chunk_bytes}. Gateway busy {middle('gateway_busy'):.0%} under load, "
        f"{middle('in_step_busy'):.0%} in step; idle {result.gateway_idle_mib:.0f} MiB. "
        f"A sync of the ledger's place takes {result.commit_ms:.2f} ms. "
        f"{result.num_ledger_rows:,} ledger rows for {result.num_answers:,} answers.",
        style="dim",
    )


if __name__ == "__main__":
    main()
