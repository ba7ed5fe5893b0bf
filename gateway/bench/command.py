"""`penstock bench`: ``serve`` puts load on a server, ``engine`` measures the engine alone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click
import msgspec

from gateway.bench import arrivals, measures, plot
from gateway.bench.arrivals import Due, TraceError
from gateway.bench.measures import Report
from gateway.bench.prompts import Prompts
from gateway.client import CallFailed, Finite, api_root, find_key, list_models, open_session, server_option
from gateway.settings_file import fail
from policies.distribution import Distribution, distribution

if TYPE_CHECKING:
    import aiohttp
    from rich.console import Console

    from gateway.bench import load

MOST_REQUESTS = 1_000_000
LONGEST_S = 3600.0


@dataclass(frozen=True, slots=True)
class Options:
    """The command line of ``bench serve``."""

    url: str
    key: str | None
    model: str | None
    concurrency: int
    rate: float | None
    trace: Path | None
    time_scale: float
    length_scale: float
    requests: int | None
    duration: float | None
    input_tokens: int
    output_tokens: int
    shared_prefix: int
    stream: bool
    ignore_eos: bool
    endpoint: str
    temperature: float
    timeout: float
    warmup: int
    seed: int
    as_json: bool
    plot_path: Path | None

    @property
    def max_requests(self) -> int:
        return self.requests or (MOST_REQUESTS if self.duration or self.trace else 200)

    @property
    def max_s(self) -> float:
        return self.duration or (LONGEST_S if self.requests or self.trace else 120.0)

    def schedule(self) -> list[Due]:
        """Raises TraceError."""
        if self.trace:
            dues = arrivals.trace(self.trace.read_text("utf-8-sig"), self.time_scale, self.length_scale)
        elif self.rate:
            num = min(self.max_requests, round(2 * self.rate * self.max_s) + 10)
            dues = arrivals.poisson(num, self.rate, self.input_tokens, self.output_tokens, self.seed)
        else:
            dues = arrivals.at_once(self.max_requests, self.input_tokens, self.output_tokens)
        return arrivals.bounded(dues, self.max_requests, self.max_s)

    @property
    def load(self) -> str:
        """The kind of load in words, for the heading."""
        if self.trace:
            return f"open loop, {self.trace.name}, time x {self.time_scale:g}, lengths x {self.length_scale:g}"
        lengths = f"about {self.input_tokens} tokens in, at most {self.output_tokens} out"
        if self.rate:
            return f"open loop, Poisson {self.rate:g} requests/s, {lengths}"
        return f"closed loop, {self.concurrency} concurrent, {lengths}"


@click.group()
def bench() -> None:
    """Measure a server under load, or the engine alone."""


@bench.command(
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    short_help="Measure the engine alone, no HTTP.",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def engine(arguments: tuple[str, ...]) -> None:
    """Measure the engine alone, no HTTP (`penstock bench engine --help`)."""
    # Another program, because the gateway's side never imports what computes.
    os.execv(sys.executable, [sys.executable, "-m", "worker.bench", *arguments])


@bench.command(short_help="Put load on an OpenAI-compatible server.")
@server_option
@click.option("--key", help="API key [PENSTOCK_API_KEY, the local server's bootstrap.env, OPENAI_API_KEY].")
@click.option("--model", help="Model name [the first that the server lists].")
@click.option(
    "--concurrency",
    type=click.IntRange(1, 10_000),
    default=8,
    show_default=True,
    help="Closed loop: requests at a time.",
)
@click.option("--rate", type=Finite(0, min_open=True), help="Open loop: requests/s on average, Poisson arrivals.")
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Open loop: arrivals and lengths of a CSV like Azure's 2023 LLM trace or JSON lines like Mooncake's.",
)
@click.option("--time-scale", type=Finite(0), default=1.0, show_default=True, help="Times a trace's instants.")
@click.option("--length-scale", type=Finite(0), default=1.0, show_default=True, help="Times a trace's lengths.")
@click.option("--requests", type=click.IntRange(1, MOST_REQUESTS), help="At most so many [200, unless --duration].")
@click.option("--duration", type=Finite(0, LONGEST_S, min_open=True), help="Begin none after so many s [120].")
@click.option(
    "--input-tokens", type=click.IntRange(1, 1_000_000), default=256, show_default=True, help="About so many."
)
@click.option(
    "--output-tokens", type=click.IntRange(1, 1_000_000), default=64, show_default=True, help="At most so many."
)
@click.option(
    "--shared-prefix", type=click.IntRange(0), default=0, show_default=True, help="Tokens that all prompts begin with."
)
@click.option("--stream/--no-stream", default=True, show_default=True)
@click.option("--ignore-eos", is_flag=True, help="Ask for exactly --output-tokens (vLLM's and our own extension).")
@click.option("--endpoint", type=click.Choice(["chat", "completions"]), default="chat", show_default=True)
@click.option("--temperature", type=Finite(0, 2), default=0.0, show_default=True)
@click.option("--timeout", type=Finite(0, min_open=True), default=120.0, show_default=True, help="s a request.")
@click.option(
    "--warmup", type=click.IntRange(0, 10_000), default=1, show_default=True, help="Requests before measuring."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of arrivals and prompts.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--plot", "plot_path", type=click.Path(dir_okay=False, path_type=Path), help="Write a PNG.")
def serve(**options: Any) -> None:
    """Put load on an OpenAI-compatible server and report what its clients felt.

    Stops by itself; Ctrl-C stops it earlier and prints what was measured. Exit code 1 if every request failed.
    """
    chosen = Options(**options)
    if chosen.rate and chosen.trace:
        raise click.UsageError("--rate and --trace are two ways to say when requests are due; give one.")
    try:
        if chosen.plot_path:
            plot.check(chosen.plot_path)
        dues = chosen.schedule()
    except (plot.PlotError, TraceError, OSError, UnicodeDecodeError) as error:
        fail(str(error))
    if not dues:
        fail("no request is due within the time given")
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(_serve(chosen, dues)))


async def _serve(options: Options, dues: list[Due]) -> int:
    """Runs it all; the exit code."""
    from rich.console import Console

    from gateway.bench import load

    notes = Console(stderr=True)
    run = load.Run()
    async with open_session(options.url, find_key(options.key, options.url), options.timeout) as session:
        try:
            model = options.model or await _first_model(session)
            target = load.Target(
                model, options.endpoint == "chat", options.stream, options.ignore_eos, options.temperature
            )
            fit = await load.learn_fit(session, target, options.seed)
            prompts = Prompts(options.seed, fit, options.shared_prefix, options.length_scale if options.trace else 1.0)
            for number in range(options.warmup):
                # Numbers past the run's own: the measured prompts must be new to the server.
                due = dues[number % len(dues)]
                await load.warm_up(
                    session, target, prompts.make(MOST_REQUESTS + number, due), due.num_completion_tokens
                )
        except CallFailed as error:
            notes.print(
                f"penstock bench: {api_root(options.url)}: {error}", markup=False, highlight=False, soft_wrap=True
            )
            return 1
        if options.rate or options.trace:
            work = load.open_loop(session, target, dues, prompts, run)
        else:
            work = load.closed_loop(session, target, dues, prompts, options.concurrency, options.max_s, run)
        interrupted = await _watched(work, run, min(len(dues), options.max_requests), notes)
    report = measures.report(run.outcomes)
    subtitle = f"{model} at {api_root(options.url)}: {options.load}"
    if options.as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(_as_json(options, model, report, interrupted)), indent=2))
    else:
        _print(report, subtitle, interrupted)
    if options.plot_path:
        title = f"{report.completion_tokens_per_s:,.0f} tokens/s, {report.requests_per_s:,.1f} requests/s"
        try:
            plot.draw(
                run.outcomes,
                title,
                f"{subtitle}; {report.num_ok:,} answers, {report.num_errors:,} errors",
                options.plot_path,
            )
        except plot.PlotError as error:
            notes.print(f"penstock bench: {error}", markup=False, highlight=False, soft_wrap=True)
            return 1
        notes.print(f"picture: {options.plot_path}", style="dim", highlight=False)
    return 0 if report.num_ok or interrupted else 1


async def _first_model(session: aiohttp.ClientSession) -> str:
    models = await list_models(session)
    if not models:
        raise CallFailed("the server lists no model; name one with --model")
    return models[0]


async def _watched(work: Coroutine[Any, Any, None], run: load.Run, num_requests: int, notes: Console) -> bool:
    """Runs ``work`` under a progress bar; True when Ctrl-C ended it."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    columns = (TextColumn("{task.completed:,.0f}/{task.total:,.0f}"), BarColumn(), TextColumn("{task.fields[note]}"))
    began_at = perf_counter()
    try:
        with Progress(*columns, TimeElapsedColumn(), console=notes, transient=True, auto_refresh=False) as progress:
            bar = progress.add_task("", total=num_requests, note="")
            while not (await asyncio.wait([task], timeout=0.25))[0]:
                progress.update(bar, completed=len(run.outcomes), note=_progress_note(run, perf_counter() - began_at))
                progress.refresh()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return task.cancelled()
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        task.cancel()


def _progress_note(run: load.Run, elapsed_s: float) -> str:
    recent = run.outcomes[-200:]
    failed = sum(outcome.error is not None for outcome in recent)
    ttft = distribution(outcome.ttft_s for outcome in recent if outcome.error is None)
    parts = [f"{run.num_started - len(run.outcomes)} running", f"{len(run.outcomes) / elapsed_s:,.1f} requests/s"]
    if run.num_pieces:
        parts.append(f"{run.num_pieces / elapsed_s:,.0f} chunks/s")
    if ttft:
        parts.append(f"TTFT p50 {ttft.p50:,.0f} ms")
    if failed:
        parts.append(f"[red]{failed} of the last {len(recent)} failed[/red]")
    return "  ".join(parts)


def _as_json(options: Options, model: str, report: Report, interrupted: bool) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "url": api_root(options.url),
        "model": model,
        "load": options.load,
        "endpoint": options.endpoint,
        "stream": options.stream,
        "ignore_eos": options.ignore_eos,
        "temperature": options.temperature,
        "shared_prefix": options.shared_prefix,
        "timeout_s": options.timeout,
        "seed": options.seed,
        "interrupted": interrupted,
    }
    settings.update(msgspec.to_builtins(report))
    return settings


def _print(report: Report, subtitle: str, interrupted: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    out = Console(highlight=False)
    out.print(
        f"[bold]{report.num_ok:,} answers[/bold] in {report.duration_s:,.1f} s, {report.num_errors:,} errors", end=""
    )
    out.print(" (interrupted)" if interrupted else "")
    out.print(subtitle, style="dim", markup=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    for name in ("mean", "p50", "p90", "p95", "p99", "max"):
        table.add_column(name, justify="right")
    rows: list[tuple[str, Distribution | None]] = [
        ("TTFT ms", report.ttft_ms),
        ("TPOT ms", report.tpot_ms),
        ("ITL ms", report.itl_ms),
        ("end to end ms", report.e2e_ms),
    ]
    for name, values in rows:
        if values:
            cells = (values.mean, values.p50, values.p90, values.p95, values.p99, values.max)
            table.add_row(name, *(f"{cell:,.2f}" for cell in cells))
    out.print(table)
    cached = f" ({report.num_cached_tokens:,} cached)" if report.num_cached_tokens else ""
    counted = "" if report.counted_by_server else ", counted by pieces: the server sent no usage"
    out.print(
        f"{report.requests_per_s:,.2f} requests/s   {report.completion_tokens_per_s:,.1f} completion tokens/s   "
        f"{report.prompt_tokens_per_s:,.1f} prompt tokens/s"
    )
    out.print(
        f"{report.num_prompt_tokens:,} prompt tokens{cached}, "
        f"{report.num_completion_tokens:,} completion tokens{counted}",
        style="dim",
    )
    if report.tokens_per_chunk and report.tokens_per_chunk > 1.05:
        out.print(
            f"The server put {report.tokens_per_chunk:.2f} tokens into a chunk, so ITL is the gap between chunks.",
            style="dim",
        )
    if report.send_lag_ms and report.send_lag_ms.p99 > 50:
        out.print(
            f"The load generator itself was up to {report.send_lag_ms.max:,.0f} ms late: use a lower rate.",
            style="yellow",
        )
    for message, count in report.errors.items():
        out.print(f"{count:,} x {message}", style="red", markup=False)
