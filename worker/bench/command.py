"""`penstock bench engine`: its command line, its rounds and its report."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from policies import settings
from policies.terms import Sampling
from worker.bench import checkpoint, plot
from worker.bench.measures import Round
from worker.bench.ours import EngineFailed, Ours, Prompter, Prompts
from worker.bench.peer import PeerError, Transformers
from worker.bench.report import OURS, Report, print_report, results_of
from worker.models import SHAPES, ModelError, path_of
from worker.runner import Runner

NUM_STREAMS = 8
"""That a long prompt arrives amid."""
NUM_SHARING, NUM_OWN_TOKENS = 32, 32
"""Prompts that begin alike, and what each of them adds."""

Contender = Callable[[Prompts, int], Round]


def _several(_: click.Context, parameter: click.Parameter, text: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"{text!r} is no list of numbers like 1,8,32", param=parameter) from None
    if min(values) < 1:
        raise click.BadParameter("every number must be at least 1", param=parameter)
    return values


@click.command(name="engine", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--model", help='A directory in Hugging Face layout, a hub id, or "demo" [demo].')
@click.option("--shape", type=click.Choice(sorted(SHAPES)), help="Random weights of this shape instead of a model.")
@click.option("--input-tokens", type=click.IntRange(1), default=512, show_default=True)
@click.option("--output-tokens", type=click.IntRange(2), default=128, show_default=True)
@click.option("--concurrency", default="1,8,32", callback=_several, show_default=True, help="Prompts at a time.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Of each; the median counts.")
@click.option("--dtype", type=click.Choice(["auto", "bfloat16", "float16", "float32"]), default="auto")
@click.option("--quantize", type=click.Choice(["none", "int8", "int4", "fp8"]), default="none", show_default=True)
@click.option("--threads", type=click.IntRange(0), default=0, help="CPU threads [one a physical core].")
@click.option("--temperature", type=click.FloatRange(0), default=0.0, show_default=True, help="Of ours; peers: greedy.")
@click.option("--top-p", type=click.FloatRange(0, 1), default=1.0, show_default=True)
@click.option("--attention", type=click.Choice(["auto", "reference"]), default="auto")
@click.option("--max-step-tokens", type=click.IntRange(1), default=settings.Engine().max_step_tokens, show_default=True)
@click.option(
    "--max-prefill-tokens-beside-decodes",
    type=click.IntRange(1),
    default=settings.Engine().max_prefill_tokens_beside_decodes,
    show_default=True,
)
@click.option("--max-slowdown", type=click.FloatRange(0), default=settings.Engine().max_slowdown, show_default=True)
@click.option("--peer", type=click.Choice(["transformers"]), help="Measure it in the same run, round by round.")
@click.option("--no-generate-batch", is_flag=True, help="Of the peer, only the static batch.")
@click.option("--stall", is_flag=True, help="Instead: 8 streams, and a prompt of 4,000 tokens that arrives amid them.")
@click.option("--stall-tokens", type=click.IntRange(1), default=4000, show_default=True)
@click.option(
    "--shared-prefix",
    is_flag=True,
    help="Instead: 32 prompts that begin with the same 2,000 tokens; the first is cold.",
)
@click.option("--shared-tokens", type=click.IntRange(1), default=2000, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="Of prompts and random weights.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--plot", "plot_path", type=click.Path(dir_okay=False, path_type=Path), help="Write a PNG.")
def main(**options: Any) -> None:
    """Measure the engine alone, no HTTP: batches of random prompts, submitted at once, run to the end.

    Exit code 2 where the model or the peer cannot be used.
    """
    try:
        if options["plot_path"]:
            if options["shared_prefix"]:
                raise click.UsageError("--shared-prefix has no picture.")
            plot.check(options["plot_path"])
        with _directory(options) as (name, directory):
            run = _stalls if options["stall"] else _shared_prefix if options["shared_prefix"] else _race
            report = run(name, directory, options)
        if options["plot_path"]:
            plot.draw(report, options["plot_path"])
    except (ModelError, PeerError, EngineFailed, plot.PlotError) as error:
        click.echo(f"penstock bench: {error}", err=True)
        sys.exit(2)
    if options["as_json"]:
        click.echo(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        print_report(report)


@contextlib.contextmanager
def _directory(options: dict[str, Any]) -> Iterator[tuple[str, Path]]:
    """The model's name and files; those of a shape are written for the run. Raises ModelError."""
    if options["shape"] is None:
        source = options["model"] or "demo"
        yield source, path_of(source)
        return
    if options["model"] is not None:
        raise click.UsageError("--model and --shape are two ways to say what to run; give one.")
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as path:
        checkpoint.write(options["shape"], Path(path), options["seed"])
        yield f"shape {options['shape']}, random weights", Path(path)


def _engine_settings(options: dict[str, Any], max_total_tokens: int, **changes: Any) -> settings.Engine:
    engine = settings.Engine(
        dtype=options["dtype"],
        quantize=options["quantize"],
        num_threads=options["threads"],
        attention=options["attention"],
        max_step_tokens=options["max_step_tokens"],
        max_prefill_tokens_beside_decodes=options["max_prefill_tokens_beside_decodes"],
        max_slowdown=options["max_slowdown"],
        max_model_tokens=max_total_tokens,
        max_sequences=max(*options["concurrency"], NUM_STREAMS + 1),
    )
    return msgspec.structs.replace(engine, **changes)


def _report(name: str, runner: Runner, options: dict[str, Any]) -> Report:
    return Report(
        model=name,
        dtype=runner.dtype if options["quantize"] == "none" else f"{runner.dtype}, weights {options['quantize']}",
        device=torch.cuda.get_device_name(runner.device) if runner.device.startswith("cuda") else runner.device,
        num_threads=torch.get_num_threads(),
        torch=str(torch.__version__),
        peer=None,
        input_tokens=options["input_tokens"],
        output_tokens=options["output_tokens"],
        temperature=options["temperature"],
        results=[],
    )


def _sampling(options: dict[str, Any]) -> Sampling:
    return Sampling(max_tokens=1, temperature=options["temperature"], top_p=options["top_p"], ignore_eos=True)


def _race(name: str, directory: Path, options: dict[str, Any]) -> Report:
    """Rounds of all contenders in turn, so that what disturbs the machine disturbs all alike."""
    num_tokens = options["input_tokens"] + options["output_tokens"]
    engine = _engine_settings(options, num_tokens)
    runner = Runner.load(str(directory), engine)
    report = _report(name, runner, options)
    contenders: dict[str, Contender] = {OURS: Ours(runner, engine, _sampling(options)).batch}
    with contextlib.ExitStack() as stack, warnings.catch_warnings(action="ignore"):
        if options["peer"]:
            peer = Transformers(directory, runner.dtype, runner.device, max(options["concurrency"]) * num_tokens)
            stack.callback(peer.close)
            report.peer = f"transformers {peer.version}"
            contenders["transformers generate"] = peer.generate
            if not options["no_generate_batch"]:
                contenders["transformers generate_batch"] = peer.generate_batch
        prompter = Prompter(runner.vocab_size, options["seed"])
        with _progress(options) as progress:
            task = progress.add_task("", total=len(contenders) * len(options["concurrency"]) * options["rounds"])
            for contender in contenders.values():
                contender(prompter.take(1, options["input_tokens"]), 2)  # kernels chosen, buffers made
            for concurrency in options["concurrency"]:
                rounds: dict[str, list[Round]] = {each: [] for each in contenders}
                for _ in range(options["rounds"]):
                    prompts = prompter.take(concurrency, options["input_tokens"])
                    for each, contender in contenders.items():
                        progress.update(task, description=f"{each}, {concurrency} at a time")
                        rounds[each].append(contender(prompts, options["output_tokens"]))
                        progress.advance(task)
                report.results += results_of(concurrency, rounds)
    return report


def _stalls(name: str, directory: Path, options: dict[str, Any]) -> Report:
    """The same with chunks and, for contrast, with the whole prompt in one step."""
    num_quiet, num_long = 40, options["stall_tokens"]
    num_tokens = max(num_long, options["input_tokens"]) + 2 * num_quiet + num_long
    whole: dict[str, Any] = {
        "max_prefill_tokens_beside_decodes": 2 * num_long,
        "max_step_tokens": 2 * num_long,
        "max_slowdown": 0.0,
    }
    report: Report | None = None
    stalls = []
    with _progress(options) as progress:
        task = progress.add_task("", total=2)
        for label, changes in (("prompt in chunks", {}), ("prompt in one step", whole)):
            progress.update(task, description=label)
            engine = _engine_settings(options, num_tokens, **changes)
            runner = Runner.load(str(directory), engine)
            report = report or _report(name, runner, options)
            ours = Ours(runner, engine, _sampling(options))
            prompter = Prompter(runner.vocab_size, options["seed"])
            ours.batch(prompter.take(1, num_long), 2)
            ran = [
                ours.stall(
                    prompter.take(NUM_STREAMS, options["input_tokens"]), prompter.take(1, num_long)[0], num_quiet
                )
                for _ in range(options["rounds"])
            ]
            stalls.append(sorted(ran, key=lambda each: each.worst_to_median)[(len(ran) - 1) // 2])
            progress.advance(task)
    assert report is not None
    report.stall_chunked, report.stall_whole = stalls
    return report


def _shared_prefix(name: str, directory: Path, options: dict[str, Any]) -> Report:
    """A cold prompt, then others that begin like it, one after another and all at once; the round in the middle."""
    num_tokens = options["shared_tokens"] + NUM_OWN_TOKENS + 1
    # Nobody's answer is being written, and nothing else may decide how much of a prompt fits into a step.
    options = options | {"concurrency": [NUM_SHARING]}
    engine = _engine_settings(options, num_tokens)
    runner = Runner.load(str(directory), engine)
    report = _report(name, runner, options)
    ours = Ours(runner, engine, _sampling(options))
    prompter = Prompter(runner.vocab_size, options["seed"])
    with _progress(options) as progress:
        task = progress.add_task("prompts that begin alike", total=options["rounds"])
        ours.batch(prompter.take(2, options["shared_tokens"]), 1)
        ran = []
        for _ in range(options["rounds"]):
            shared = prompter.take(1, options["shared_tokens"])[0]
            own = prompter.take(2 * NUM_SHARING - 1, NUM_OWN_TOKENS)
            ran.append(ours.shared_prefix(shared, own[:NUM_SHARING], own[NUM_SHARING:]))
            progress.advance(task)
    report.shared_prefix = sorted(ran, key=lambda each: each.warm_to_cold)[(len(ran) - 1) // 2]
    return report


def _progress(options: dict[str, Any]) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=options["as_json"] and not sys.stderr.isatty(),
    )
