"""What was measured, as figures, as JSON and as a table."""

from __future__ import annotations

import statistics

import msgspec
from rich.console import Console
from rich.table import Table

from policies.distribution import Distribution
from worker.bench import measures
from worker.bench.measures import Round, SharedPrefix, Stall

OURS = "penstock"


class Result(msgspec.Struct):
    """One contender at one concurrency."""

    contender: str
    concurrency: int
    median: Round
    """The middle round by throughput."""
    rounds_output_tokens_per_s: list[float]
    ratio: float | None
    """Our median output tokens/s to its own; None for ourselves."""


class Report(msgspec.Struct):
    """Everything that was measured, and on what."""

    model: str
    dtype: str
    device: str
    num_threads: int
    torch: str
    peer: str | None
    input_tokens: int
    output_tokens: int
    temperature: float
    results: list[Result]
    stall_chunked: Stall | None = None
    stall_whole: Stall | None = None
    shared_prefix: SharedPrefix | None = None


def results_of(concurrency: int, rounds: dict[str, list[Round]]) -> list[Result]:
    rates = {each: [one.output_tokens_per_s for one in ran] for each, ran in rounds.items()}
    own = statistics.median(rates[OURS])
    return [
        Result(
            contender=each,
            concurrency=concurrency,
            median=measures.median(ran),
            rounds_output_tokens_per_s=rates[each],
            ratio=None if each == OURS else own / statistics.median(rates[each]),
        )
        for each, ran in rounds.items()
    ]


def print_report(report: Report) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = 110
    threads = f"{report.num_threads} thread{'s' if report.num_threads > 1 else ''}"
    console.print(
        f"{report.model}, {report.dtype} on {report.device}, {threads}, torch {report.torch}", highlight=False
    )
    if report.stall_chunked and report.stall_whole:
        _print_stalls(console, report.stall_chunked, report.stall_whole)
        return
    if report.shared_prefix:
        _print_shared_prefix(console, report.shared_prefix)
        return
    table = Table(
        title=f"{report.input_tokens} tokens in, {report.output_tokens} out; times in ms", title_justify="left"
    )
    for column in ("at a time", "", "tokens/s", "ours is", "TTFT p50 / p99", "TPOT p50", "ITL p50 / p99"):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for result in report.results:
        middle = result.median
        table.add_row(
            str(result.concurrency),
            result.contender,
            f"{statistics.median(result.rounds_output_tokens_per_s):,.0f}",
            "" if result.ratio is None else f"{result.ratio:.2f} x",
            _ms(middle.ttft_ms, "p50", "p99"),
            _ms(middle.tpot_ms, "p50"),
            _ms(middle.itl_ms, "p50", "p99"),
            end_section=result is report.results[-1] or result.ratio is not None,
        )
    console.print(table)


def _print_stalls(console: Console, chunked: Stall, whole: Stall) -> None:
    table = Table(title="8 streams while a long prompt arrives", title_justify="left")
    for column in ("", "ITL ms before, p50", "ITL ms beside it, p50 / max", "worst to median", "its TTFT ms"):
        table.add_column(column, justify="left" if not column else "right")
    for name, stall in (("in chunks", chunked), ("in one step", whole)):
        table.add_row(
            name,
            _ms(stall.quiet_itl_ms, "p50"),
            _ms(stall.itl_ms, "p50", "max"),
            f"{stall.worst_to_median:.2f} x",
            f"{stall.ttft_ms:.0f}",
        )
    console.print(table)


def _print_shared_prefix(console: Console, found: SharedPrefix) -> None:
    table = Table(title=f"prompts that begin with the same {found.shared_tokens} tokens", title_justify="left")
    for column in ("", "TTFT ms p50 / max", "of the cold one"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("the first", f"{found.cold_ttft_ms:.1f}", "")
    for name, ttft_ms in (("then, one by one", found.alone_ttft_ms), ("then, all at once", found.together_ttft_ms)):
        table.add_row(name, _ms(ttft_ms, "p50", "max"), f"{ttft_ms.p50 / found.cold_ttft_ms:.1%}")
    console.print(table)


def _ms(distribution: Distribution | None, *names: str) -> str:
    return " / ".join(f"{getattr(distribution, name):.1f}" for name in names) if distribution else "–"
