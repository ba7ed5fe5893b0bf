"""Its command line. Parts are measured in another process than this one: an error of CUDA ends a process for good, and
what takes too long can be ended. Figures are written as they come.
"""

from __future__ import annotations

import platform
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import click
import torch
from rich.console import Console

from benchmarks.engine_gpu.bench import PARTS, ROOT, Bench, reason_of
from benchmarks.engine_gpu.report import Report, read
from benchmarks.engine_gpu.weights import ARCHITECTURES, num_matrix_weights

notes = Console(stderr=True, highlight=False, soft_wrap=True)


@click.command()
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--shape", type=click.Choice(sorted(ARCHITECTURES)), default="8b", show_default=True)
@click.option("--quantize", type=click.Choice(["none", "int8", "int4", "fp8"]), default="none", show_default=True)
@click.option("--part", "parts", multiple=True, type=click.Choice(list(PARTS)), help="Only these [all].")
@click.option("--compile/--no-compile", "compiles", default=True, show_default=True, help="The loop beside ours.")
@click.option("--minutes", default=12.0, show_default=True, help="Nothing goes on after so many.")
@click.option("--notes", "notes_path", type=click.Path(dir_okay=False, path_type=Path), help="Add the figures to it.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the report.")
@click.option("--into", type=click.Path(path_type=Path), hidden=True, help="Measure here, into this report.")
def main(
    device: str,
    shape: str,
    quantize: str,
    parts: tuple[str, ...],
    compiles: bool,
    minutes: float,
    notes_path: Path | None,
    json_path: Path | None,
    into: Path | None,
) -> None:
    """Random weights made on the device; ours against its bandwidth, a compiled loop and transformers."""
    ends_at = perf_counter() + 60 * minutes
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    if into is not None:
        _measure(place, compiles, parts, into, notes_path, ends_at)
        return
    if device == "cuda" and not torch.cuda.is_available():
        raise click.ClickException("there is no CUDA device here; --device cpu --shape tiny shows that the code runs")
    bytes_a_weight = {"none": 2.0, "int8": 1.0, "fp8": 1.0, "int4": 0.5 + 4 / 64}[quantize]
    report = Report(
        date=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        commit=_commit(),
        device=torch.cuda.get_device_name(place) if device == "cuda" else platform.processor() or "cpu",
        torch=str(torch.__version__),
        shape=shape,
        quantize=quantize,
        weight_bytes=int(bytes_a_weight * num_matrix_weights(ARCHITECTURES[shape])),
    )
    with TemporaryDirectory() as directory:
        path = (json_path or Path(directory) / "report.json").absolute()
        report.save(path)
        left = list(parts or PARTS)
        while left:
            left_s = ends_at - perf_counter()
            if left_s <= 0:
                report.failures.update(dict.fromkeys(left, f"{minutes:g} minutes were over"))
                break
            num_done = len(report.done)
            told = ["--device", device, "--quantize", quantize, "--compile" if compiles else "--no-compile"]
            told += ["--minutes", str(left_s / 60), "--into", str(path)]
            told += ["--notes", str(notes_path.absolute())] if notes_path else []
            told += [word for part in left for word in ("--part", part)]
            ended = subprocess.run([sys.executable, "-m", "benchmarks.engine_gpu", *told], cwd=ROOT, check=False)
            report = read(path)
            if report.doing or len(report.done) == num_done:
                # In the middle of a part, or before it had begun with any.
                lost, report.doing = report.doing or left[0], ""
                is_late = ended.returncode == -signal.SIGALRM
                report.failures[lost] = "it took too long" if is_late else f"its process ended with {ended.returncode}"
                report.done.append(lost)
                report.save(path)
            left = [part for part in left if part not in report.done]
            if "correct" in report.failures:
                report.failures.update(dict.fromkeys(left, "the kernels are not right"))
                break
        report.save(path)
    click.echo(report.head)
    for line in report.lines():
        click.echo(line)
    if notes_path:
        report.note(notes_path)


def _measure(
    device: torch.device, compiles: bool, parts: tuple[str, ...], path: Path, notes_path: Path | None, ends_at: float
) -> None:
    report = read(path)

    def save() -> None:
        report.save(path)
        if notes_path:
            report.note(notes_path)

    bench = Bench(device, compiles, report, save)
    for part in parts:
        left_s = ends_at - perf_counter()
        if left_s <= 0 or "correct" in report.failures:
            return
        notes.print(f"{part} …", style="dim")
        report.doing = part
        save()
        # Unheard, it ends this process.
        signal.setitimer(signal.ITIMER_REAL, min(left_s, PARTS[part]))
        try:
            getattr(bench, part)()
        except Exception as error:
            report.failures[part] = reason_of(error)
        signal.setitimer(signal.ITIMER_REAL, 0)
        report.doing = ""
        report.done.append(part)
        save()
        # Where the device is lost this fails, too, and the others are measured in another process.
        bench.forget()


def _commit() -> str:
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or "no commit"


if __name__ == "__main__":
    main()
