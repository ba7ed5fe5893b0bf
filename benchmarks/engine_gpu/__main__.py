"""Its command line, its parts and its report."""

from __future__ import annotations

import gc
import platform
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import msgspec
import torch
from msgspec.structs import replace
from rich.console import Console

from benchmarks.engine_gpu import attention
from benchmarks.engine_gpu.device import Busy, copy_bytes_per_s, finish
from benchmarks.engine_gpu.loop import CompiledLoop
from benchmarks.engine_gpu.peer import ContinuousBatching
from benchmarks.engine_gpu.weights import ARCHITECTURES, decoder, num_matrix_weights
from policies import settings
from policies.terms import Sampling
from worker.bench.ours import Ours, Prompter
from worker.inputs import Span
from worker.models import ModelError
from worker.runner import Runner

TENSORRT_LLM_TOKENS_PER_S = {(128, 128): 27_911, (1000, 1000): 17_744}
"""Published by its authors for one H200 and Llama-3.1-8B in FP8 (its performance overview), in tokens in and out."""
PARTS = ("correct", "single", "loop", "batches", "attention", "busy", "forms")
"""The first one first: figures of what computes something else are worth nothing."""
FORMS = ("int8", "int4", "fp8")

ROOT = Path(__file__).parents[2]
notes = Console(stderr=True, highlight=False, soft_wrap=True)


class Sizes(msgspec.Struct, frozen=True):
    """How much of everything; the second set only shows that the code runs."""

    copy_bytes: int
    single: tuple[int, int]
    """Tokens in and out, of one sequence."""
    num_sequences: int
    batches: tuple[tuple[int, int], ...]
    """Tokens in and out, of each of them."""
    attention_sequences: int
    attention_tokens: int
    prefill_tokens: int
    busy_tokens: int


LARGE = Sizes(4 << 30, (512, 128), 256, ((128, 128), (1000, 1000)), 16, 8192, 8192, 64)
SMALL = Sizes(1 << 20, (24, 8), 3, ((16, 4),), 2, 70, 40, 4)


class Report(msgspec.Struct):
    """What was measured; None: not measured."""

    date: str
    commit: str
    device: str
    torch: str
    shape: str
    quantize: str
    weight_bytes: int
    copy_gb_per_s: float
    single_decode_tokens_per_s: float | None = None
    loop_decode_tokens_per_s: float | None = None
    ours_tokens_per_s: dict[str, float] = {}
    """By "tokens in/tokens out"."""
    transformers_tokens_per_s: dict[str, float] = {}
    transformers: str = ""
    attention_kernel: str = ""
    attention_decode_gb_per_s: float | None = None
    attention_prefill_ms: float | None = None
    flash_prefill_ms: float | None = None
    busy_share: float | None = None
    forms_decode_tokens_per_s: dict[str, float] = {}
    """One sequence, by the form of the weights."""
    failures: dict[str, str] = {}

    def lines(self) -> list[str]:
        """What the figures mean, a sentence each."""
        said = [f"copy: {self.copy_gb_per_s:,.0f} GB/s read and written"]
        if rate := self.single_decode_tokens_per_s:
            share = rate * self.weight_bytes / (self.copy_gb_per_s * 1e9)
            said.append(f"decode alone: {rate:,.1f} tokens/s, {share:.2f} of copying the weights' bytes")
            if self.loop_decode_tokens_per_s:
                ratio = rate / self.loop_decode_tokens_per_s
                said.append(f"compiled loop: {self.loop_decode_tokens_per_s:,.1f} tokens/s; ours is {ratio:.2f} of it")
        for name, rate in self.ours_tokens_per_s.items():
            said.append(f"{name}: {rate:,.0f} tokens/s")
            if theirs := self.transformers_tokens_per_s.get(name):
                said.append(
                    f"{name}: transformers {self.transformers} {theirs:,.0f}; ours is {rate / theirs:.2f} of it"
                )
            sizes = tuple(int(part) for part in name.split("/"))
            if "H200" in self.device and (anchor := TENSORRT_LLM_TOKENS_PER_S.get((sizes[0], sizes[1]))):
                said.append(f"{name}: {rate / anchor:.2f} of TensorRT-LLM's published {anchor:,} in FP8")
        if self.attention_decode_gb_per_s:
            share = self.attention_decode_gb_per_s / self.copy_gb_per_s
            said.append(f"attention of decode, {self.attention_kernel}: {share:.2f} of the copy's bandwidth")
        if self.attention_prefill_ms and self.flash_prefill_ms:
            ratio = self.flash_prefill_ms / self.attention_prefill_ms
            said.append(
                f"attention of a prompt: {self.attention_prefill_ms:.2f} ms, {ratio:.2f} of torch's flash speed"
            )
        if self.busy_share is not None:
            said.append(f"GPU busy in steady decode: {self.busy_share:.1%}")
        for form, rate in self.forms_decode_tokens_per_s.items():
            said.append(f"decode alone, weights in {form}: {rate:,.1f} tokens/s")
        return said + [f"not measured: {part}: {reason}" for part, reason in self.failures.items()]


@click.command()
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--shape", type=click.Choice(sorted(ARCHITECTURES)), default="8b", show_default=True)
@click.option("--quantize", type=click.Choice(["none", "int8", "int4", "fp8"]), default="none", show_default=True)
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), help="Only these [all].")
@click.option("--compile/--no-compile", "compiles", default=True, show_default=True, help="The loop beside ours.")
@click.option("--minutes", default=25.0, show_default=True, help="No part is begun after so many.")
@click.option("--notes", "notes_path", type=click.Path(dir_okay=False, path_type=Path), help="Add the figures to it.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the report.")
def main(
    device: str,
    shape: str,
    quantize: Any,
    parts: tuple[str, ...],
    compiles: bool,
    minutes: float,
    notes_path: Path | None,
    json_path: Path | None,
) -> None:
    """Random weights made on the device; ours against its bandwidth, a compiled loop and transformers."""
    if device == "cuda" and not torch.cuda.is_available():
        raise click.ClickException("there is no CUDA device here; --device cpu --shape tiny shows that the code runs")
    began_at = perf_counter()
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    sizes = LARGE if shape == "8b" else SMALL
    each = ARCHITECTURES[shape]
    bytes_a_weight = {"none": 2.0, "int8": 1.0, "fp8": 1.0, "int4": 0.5 + 4 / 64}[quantize]
    report = Report(
        date=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        commit=_commit(),
        device=torch.cuda.get_device_name(place) if device == "cuda" else platform.processor() or "cpu",
        torch=str(torch.__version__),
        shape=shape,
        quantize=quantize,
        weight_bytes=int(bytes_a_weight * num_matrix_weights(each)),
        copy_gb_per_s=copy_bytes_per_s(place, sizes.copy_bytes) / 1e9,
    )
    bench = Bench(place, shape, quantize, sizes, compiles, report)
    for part in parts or PARTS:
        if perf_counter() - began_at > 60 * minutes:
            report.failures[part] = f"{minutes:g} minutes were over"
            continue
        notes.print(f"{part} …", style="dim")
        measure: Callable[[], None] = getattr(bench, part)
        try:
            measure()
        except (ModelError, ImportError, RuntimeError, AssertionError) as error:
            report.failures[part] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:300]
        bench.forget()
        if part == "correct" and part in report.failures:
            raise click.ClickException(f"nothing is measured: {report.failures[part]}")
    if json_path:
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    head = f"{report.date}, {report.commit}, {report.device}, torch {report.torch}, {shape}, quantize {quantize}"
    click.echo(head)
    for line in report.lines():
        click.echo(line)
    if notes_path:
        with notes_path.open("a") as file:
            file.write("\n".join(["", f"## {head}", "", *(f"- {line}" for line in report.lines()), ""]))


def _commit() -> str:
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or "no commit"


class Bench:
    """The parts, each with only what it needs on the device."""

    def __init__(
        self, device: torch.device, shape: str, quantize: Any, sizes: Sizes, compiles: bool, report: Report
    ) -> None:
        self._device, self._quantize, self._sizes, self._compiles = device, quantize, sizes, compiles
        self._architecture = ARCHITECTURES[shape]
        self._report = report
        self._prompter = Prompter(self._architecture.vocab_size, 0)

    def correct(self) -> None:
        """Every kernel says what torch says, matrices of codes among them, and a small model by them what it says by
        plain attention. Raises AssertionError."""
        if self._device.type == "cuda":
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"]
            tried = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            assert tried.returncode == 0, (
                f"tests/gpu: {(tried.stdout.strip() or tried.stderr.strip()).splitlines()[-1]}"
            )
        ids, said = Prompter(ARCHITECTURES["tiny"].vocab_size, 0).take(1, 40)[0], []
        for kind in ("reference", "auto"):
            engine = replace(self._engine(1, 64), attention=kind)
            runner = Runner.of(decoder(ARCHITECTURES["tiny"], self._device, "none"), engine, num_blocks=8)
            said.append(runner.forward([Span(ids, 0, list(range(8)), 1)]).float().cpu())
        worst = float((said[0] - said[1]).abs().max() / said[0].abs().max())
        assert worst < 0.03, f"logits are off by {worst:.3f} of the largest"

    def forms(self) -> None:
        for form in FORMS:
            self._report.forms_decode_tokens_per_s[form] = self._decode_rate(form)
            self.forget()

    def single(self) -> None:
        self._report.single_decode_tokens_per_s = self._decode_rate(self._quantize)

    def _decode_rate(self, quantize: Any) -> float:
        """Of one sequence, tokens/s."""
        num_in, num_out = self._sizes.single
        ours = self._ours(1, num_in + num_out, quantize)
        ours.batch(self._prompter.take(1, num_in), num_out)
        rates = []
        for _ in range(3):
            first_s = self._batch_s(ours, 1, num_in, 1)
            rates.append((num_out - 1) / (self._batch_s(ours, 1, num_in, num_out) - first_s))
        return sorted(rates)[1]

    def loop(self) -> None:
        num_in, num_out = self._sizes.single
        loop = CompiledLoop(self._architecture, self._device, num_in + num_out, self._compiles)
        took_s = sorted(loop.decode_s(num_in, num_out) for _ in range(3))[1]
        self._report.loop_decode_tokens_per_s = num_out / took_s

    def batches(self) -> None:
        num = self._sizes.num_sequences
        for num_in, num_out in self._sizes.batches:
            ours = self._ours(num, num_in + num_out)
            self._batch_s(ours, num, num_in, 4)
            name = f"{num_in}/{num_out}"
            self._report.ours_tokens_per_s[name] = num * num_out / self._batch_s(ours, num, num_in, num_out)
            del ours
            self.forget()
        peer = ContinuousBatching(self._architecture, self._device)
        try:
            self._report.transformers = peer.version
            for num_in, num_out in self._sizes.batches:
                # A whole run to warm up: its manager is sized for the first requests that it sees.
                peer.tokens_per_s(self._prompter.take(num, num_in), num_out)
                rate = peer.tokens_per_s(self._prompter.take(num, num_in), num_out)
                self._report.transformers_tokens_per_s[f"{num_in}/{num_out}"] = rate
                peer.end_manager()
        finally:
            peer.close()

    def attention(self) -> None:
        num, num_tokens, num_prompt = (
            self._sizes.attention_sequences,
            self._sizes.attention_tokens,
            self._sizes.prefill_tokens,
        )
        runner = self._runner(num, max(num_tokens, num_prompt))
        found = attention.decode(runner, num, num_tokens, self._architecture.num_heads)
        self._report.attention_kernel = found.kernel
        self._report.attention_decode_gb_per_s = found.num_bytes / found.call_s / 1e9
        prompt = attention.prefill(runner, num_prompt, self._architecture.num_heads)
        self._report.attention_prefill_ms, self._report.flash_prefill_ms = 1e3 * prompt.call_s, 1e3 * prompt.flash_s

    def busy(self) -> None:
        num, (num_in, _) = self._sizes.num_sequences, self._sizes.batches[0]
        ours = self._ours(num, num_in + 2 * self._sizes.busy_tokens + 64)
        busy = Busy()
        ours.steady(self._prompter.take(num, num_in), self._sizes.busy_tokens, busy)
        self._report.busy_share = busy.share

    def forget(self) -> None:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _batch_s(self, ours: Ours, num: int, num_in: int, num_out: int) -> float:
        prompts = self._prompter.take(num, num_in)
        finish(self._device)
        began_at = perf_counter()
        ours.batch(prompts, num_out)
        return perf_counter() - began_at

    def _runner(self, num_sequences: int, num_tokens: int) -> Runner:
        engine = self._engine(num_sequences, num_tokens)
        return Runner.of(decoder(self._architecture, self._device, self._quantize), engine)

    def _ours(self, num_sequences: int, num_tokens: int, quantize: Any = None) -> Ours:
        engine = self._engine(num_sequences, num_tokens)
        runner = Runner.of(decoder(self._architecture, self._device, quantize or self._quantize), engine)
        return Ours(runner, engine, Sampling(max_tokens=1, temperature=0.0, ignore_eos=True))

    def _engine(self, num_sequences: int, num_tokens: int) -> settings.Engine:
        return settings.Engine(
            device="cuda" if self._device.type == "cuda" else "cpu",
            max_model_tokens=num_tokens,
            max_sequences=num_sequences,
            kv_memory_share=0.9,
            quantize=self._quantize,
        )


if __name__ == "__main__":
    main()
