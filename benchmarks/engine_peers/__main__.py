"""Its command line, and the table."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.engine_peers import environments, figures, picture
from benchmarks.engine_peers.contenders import FORMS, NAMES, OURS, ROOT, ContenderError, Contestant, numbers, parse
from benchmarks.engine_peers.figures import Point, Report
from benchmarks.engine_peers.race import Plan, Race

notes = Console(stderr=True, highlight=False, soft_wrap=True)


def _contestants(_: click.Context, __: click.Parameter, texts: tuple[str, ...]) -> list[Contestant] | None:
    """None: whoever is found."""
    if texts in ((), ("none",)):
        return [] if texts else None
    try:
        return [parse(text) for text in texts]
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _numbers(_: click.Context, __: click.Parameter, text: str) -> list[int]:
    try:
        return list(numbers(text))
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command()
@click.option("--shape", default="M", show_default=True, help="Whose random weights all engines get: S (25 M) or M.")
@click.option(
    "--ours",
    help=f"Our forms: {', '.join(FORMS[OURS])}; none: leave out [bf16, and where peers are looked for as many bits as "
    "theirs].",
)
@click.option(
    "--peer",
    "peers",
    multiple=True,
    callback=_contestants,
    help="NAME[:FORM][@N,N]=PYTHON; none: Penstock alone [all that are installed here, and in --environments].",
)
@click.option(
    "--environments",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Look for peers in each DIRECTORY/*/bin/python, too.",
)
@click.option("--concurrency", default="1,8,32", callback=_numbers, show_default=True, help="Prompts at a time.")
@click.option("--rounds", type=click.IntRange(1, 50), default=3, show_default=True)
@click.option("--input-tokens", type=click.IntRange(1), default=512, show_default=True)
@click.option("--output-tokens", type=click.IntRange(2), default=128, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True, help="The same for everyone.")
@click.option(
    "--limit-s", type=click.FloatRange(1), default=150.0, show_default=True, help="For one run of one engine."
)
@click.option("--start-limit-s", type=click.FloatRange(1), default=600.0, show_default=True, help="To load one.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the prompts.")
@click.option("--limits/--no-limits", default=True, show_default=True, help="Measure what the machine can do, too.")
@click.option(
    "--max-others",
    type=click.FloatRange(0),
    default=100.0,
    help="CPUs that anything else may have beside a run, or it is run again, twice at most [no limit].",
)
@click.option(
    "--avx2",
    is_flag=True,
    help="As a processor with no more does it: torch, oneDNN and our kernels keep to AVX2; llama.cpp is as built.",
)
@click.option("--keep", type=click.Path(file_okay=False, path_type=Path), help="Keep checkpoints and logs here.")
@click.option("--prepare-only", is_flag=True, help="Make what the peers want of the checkpoint, into --keep.")
@click.option("--wait", is_flag=True, help="Before each round, when all is loaded and warm, wait for a line on stdin.")
@click.option("--merge", multiple=True, type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Reports.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the report.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Write a PNG.")
def main(**options: Any) -> None:
    """Penstock and the peers that are installed on the same weights: 512 tokens in, 128 out, greedy, end ignored.

    With --merge nothing is measured: the reports are put together, printed and drawn.
    """
    # As Ctrl-C is: who waits its turn is stopped, and would be left behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if options["plot"]:
        picture.check()
    if options["environments"] and options["peers"] is not None:
        raise click.UsageError("--environments is where to look for peers, and --peer says which there are")
    try:
        if options["merge"]:
            report = figures.merged([msgspec.json.decode(path.read_bytes(), type=Report) for path in options["merge"]])
        else:
            report = asyncio.run(_race(options))
    except (ContenderError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    if options["json_path"]:
        options["json_path"].write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    show(report)
    if options["plot"] and report.points:
        picture.draw(report, options["plot"])


async def _race(options: dict[str, Any]) -> Report:
    plan = Plan(
        shape=options["shape"],
        concurrencies=options["concurrency"],
        input_tokens=options["input_tokens"],
        output_tokens=options["output_tokens"],
        num_rounds=options["rounds"],
        num_threads=options["threads"],
        seed=options["seed"],
        limit_s=options["limit_s"],
        start_limit_s=options["start_limit_s"],
        with_limits=options["limits"],
        max_others=options["max_others"],
        keeps_to_avx2=options["avx2"],
    )
    peers, forms = options["peers"], ["bf16"]
    if peers is None:
        peers, said = environments.find(options["environments"])
        for sentence in said:
            notes.print(sentence)
        forms = environments.forms_beside(peers)
    if options["ours"]:
        forms = [] if options["ours"] == "none" else options["ours"].split(",")
    contestants = [parse(f"{OURS}:{form}={sys.executable}") for form in forms] + peers
    with contextlib.ExitStack() as stack:
        folder = options["keep"] or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="peers-")))
        folder.mkdir(parents=True, exist_ok=True)
        race = Race(plan, contestants, folder.resolve(), lambda text: notes.print(text, style="dim"), _commit())
        await race.prepare()
        if options["prepare_only"]:
            return race.report
        async with race.loaded():
            for concurrency in plan.concurrencies:
                await race.measure(concurrency, _a_line if options["wait"] else _nothing)
                if options["json_path"]:
                    # What is measured stays, whatever comes.
                    options["json_path"].write_bytes(msgspec.json.encode(race.report))
        return race.report


async def _a_line() -> None:
    notes.print("ready for a round: waiting for a line")
    await asyncio.to_thread(sys.stdin.readline)


async def _nothing() -> None:
    pass


def _commit() -> str:
    """Of this tree, with a plus where files differ from it."""
    try:
        said = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--exclude", "*"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
        return said.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def show(report: Report) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200
    facts = ", ".join(f"{name} {value}" for name, value in report.machine.items())
    console.print(f"{report.began} UTC, commit {report.commit}, {report.num_threads} threads; {facts}", soft_wrap=True)
    for shape in report.limits:
        said = [
            f"{name} {value:.1f}" for name in ("read_gb_per_s", "weights_gb_per_s", "bf16_tflop_per_s",
            "int8_tflop_per_s") if (value := report.limit(shape, name)) is not None
        ]  # fmt: skip
        console.print(f"{shape}: limits, best of {len(report.limits[shape])}: {', '.join(said)}")
    for shape in report.models:
        _table(console, report, shape)
    for name, reason in report.failures.items():
        console.print(f"not measured: {name}: {reason}", soft_wrap=True)


def _table(console: Console, report: Report, shape: str) -> None:
    points = [point for point in report.points if point.shape == shape]
    if not points:
        return
    first = points[0]
    table = Table(title=f"{shape}: {first.input_tokens} tokens in, {first.output_tokens} out", title_justify="left")
    columns = (
        "at a time",
        "",
        "TTFT ms",
        "of GEMM",
        "decode tok/s",
        "of reads",
        "tok/s",
        "spread",
        "others",
        "ours is",
        "alike",
    )
    for column in columns:
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for concurrency in sorted({point.concurrency for point in points}):
        here = [point for point in points if point.concurrency == concurrency]
        for point in here:
            table.add_row(*_row(report, point, here), end_section=point is here[-1])
    console.print(table)


def _row(report: Report, point: Point, here: list[Point]) -> list[str]:
    def text(value: float | None, form: str, times: float = 1.0) -> str:
        return "" if value is None else format(times * value, form)

    rates = [point.concurrency * point.output_tokens / each for each in point.durations_s]
    ratios = []
    if point.engine != OURS:
        for own in (each for each in here if each.engine == OURS):
            fast = (own.decode_tokens_per_s, point.decode_tokens_per_s)
            ratio = fast[0] / fast[1] if fast[0] and fast[1] else own.tokens_per_s / point.tokens_per_s
            ratios.append(f"{own.form} {ratio:.2f}")
    return [
        str(point.concurrency),
        f"{NAMES.get(point.engine, point.engine)}{'' if point.engine == OURS else f' {point.version}'} {point.form}",
        text(point.ttft_s, ".1f", 1e3),
        text(report.prefill_share(point), ".2f"),
        text(point.decode_tokens_per_s, ",.1f"),
        text(report.decode_share(point), ".2f"),
        f"{point.tokens_per_s:,.1f}",
        f"{min(rates):,.0f}-{max(rates):,.0f}",
        text(max(point.others, default=None), ".2f"),
        ", ".join(ratios),
        text(point.first_tokens_alike, ".0%"),
    ]


if __name__ == "__main__":
    main()
