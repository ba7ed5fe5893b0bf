"""What is measured, part by part."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import torch
from msgspec.structs import replace

from benchmarks.engine_gpu import attention, experts, mixed
from benchmarks.engine_gpu.device import Busy, copy_bytes_per_s, finish
from benchmarks.engine_gpu.loop import CompiledLoop
from benchmarks.engine_gpu.peer import ContinuousBatching
from benchmarks.engine_gpu.report import Report
from benchmarks.engine_gpu.weights import ARCHITECTURES, SHAPE_30B, TINY_MIXTURE, decoder
from policies import settings
from policies.terms import Sampling
from worker.bench.ours import Ours, Prompter
from worker.inputs import Span
from worker.runner import Runner

PARTS = {
    "correct": 400,
    "single": 90,
    "loop": 150,
    "few": 60,
    "batches": 120,
    "attention": 60,
    "busy": 60,
    "mixed": 60,
    "transformers": 200,
    "experts": 60,
    "forms": 120,
}
"""With the seconds that each may take. The first comes first: figures of what computes something else are worth
nothing."""
FORMS = ("int8", "int4", "fp8")
FEW = (1, 2, 4)
"""Sequences, of which each way to compute their steps is tried."""
LONG_S = 30.0
"""What would take transformers longer is reckoned from two shorter runs."""
ROOT = Path(__file__).parents[2]


class Sizes(msgspec.Struct, frozen=True):
    """How much of everything; the second set only shows that the code runs."""

    copy_bytes: int
    single: tuple[int, int]
    """Tokens in and out, of one sequence."""
    num_sequences: int
    batches: tuple[tuple[int, int], ...]
    """Tokens in and out, of each of them."""
    peer_tokens: tuple[int, int]
    """Out, of the two runs from which a long one of a peer is reckoned."""
    attention_sequences: int
    attention_tokens: int
    prefill_tokens: tuple[int, ...]
    """Of a prompt; the longest last."""
    warm_tokens: int
    """Of each, until steps of so many sequences have been recorded."""
    busy_tokens: int
    mixed: tuple[tuple[int, int, int], ...]
    """Decodes, tokens behind each, and tokens of the chunk beside them."""
    expert_tokens: tuple[int, ...]
    """At once, through the experts of one layer."""


LARGE = Sizes(
    4 << 30,
    (512, 128),
    256,
    ((128, 128), (1000, 1000)),
    (4, 24),
    16,
    8192,
    (256, 512, 1024, 2048, 8192),
    16,
    64,
    ((8, 1500, 32), (8, 1500, 128), (8, 1500, 400), (128, 1500, 128)),
    (1, 8, 64, 256, 2048),
)
SMALL = Sizes(1 << 20, (24, 8), 3, ((16, 4),), (1, 3), 2, 70, (40,), 2, 4, ((2, 10, 5),), (1, 20))


class Bench:
    """The parts, each with only what it needs on the device."""

    def __init__(self, device: torch.device, compiles: bool, report: Report, save: Callable[[], None]) -> None:
        """``save``: called after each figure."""
        self._device, self._compiles, self._save = device, compiles, save
        self._sizes = SMALL if report.shape.startswith("tiny") else LARGE
        self._quantize: Any = report.quantize
        self._architecture = ARCHITECTURES[report.shape]
        self._report = report
        self._prompter = Prompter(self._architecture.vocab_size, 0)
        if not report.copy_gb_per_s:
            report.copy_gb_per_s = copy_bytes_per_s(device, self._sizes.copy_bytes) / 1e9

    def correct(self) -> None:
        """Every kernel says what torch says, matrices of codes among them, and a small model by them what it says by
        plain attention. Raises AssertionError."""
        if self._device.type == "cuda":
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"]
            tried = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            last = (tried.stdout.strip() or tried.stderr.strip()).splitlines()[-1:]
            assert tried.returncode == 0, f"tests/gpu: {last}"
        ids, said = Prompter(ARCHITECTURES["tiny"].vocab_size, 0).take(1, 40)[0], []
        for kind in ("reference", "auto"):
            engine = replace(self._engine(1, 64), attention=kind)
            runner = Runner.of(decoder(ARCHITECTURES["tiny"], self._device, "none"), engine, num_blocks=8)
            said.append(runner.forward([Span(ids, 0, list(range(8)), 1)]).float().cpu())
        worst = float((said[0] - said[1]).abs().max() / said[0].abs().max())
        assert worst < 0.03, f"logits are off by {worst:.3f} of the largest"

    def forms(self) -> None:
        for form in FORMS:
            try:
                self._report.forms_decode_tokens_per_s[form] = self._decode_rate(form)
            except Exception as error:
                self._report.failures[f"forms, {form}"] = reason_of(error)
            self._save()
            self.forget()

    def single(self) -> None:
        self._report.single_decode_tokens_per_s = self._decode_rate(self._quantize)

    def _decode_rate(self, quantize: Any) -> float:
        """Of one sequence, tokens/s."""
        num_in, num_out = self._sizes.single
        ours = self._ours(1, num_in + num_out, quantize)
        ours.batch(self._prompter.take(1, num_in), num_out)
        if quantize == self._quantize:
            self._note_ways(ours)
        rates = []
        for _ in range(3):
            first_s = self._batch_s(ours, 1, num_in, 1)
            rates.append((num_out - 1) / (self._batch_s(ours, 1, num_in, num_out) - first_s))
        return sorted(rates)[1]

    def few(self) -> None:
        ours = self._ours(FEW[-1], 64)
        for num in FEW:
            ours.batch(self._prompter.take(num, 16), 16)
        self._note_ways(ours)

    def _note_ways(self, ours: Ours) -> None:
        if ours.runner.graphs is not None:
            tried = ours.runner.graphs.tried_s
            self._report.few_rows_s |= {f"{bucket.num_rows}": by_way for bucket, by_way in tried.items()}

    def loop(self) -> None:
        num_in, num_out = self._sizes.single
        loop = CompiledLoop(self._architecture, self._device, num_in + num_out, self._compiles)
        took_s = sorted(loop.decode_s(num_in, num_out) for _ in range(3))[1]
        self._report.loop_decode_tokens_per_s = num_out / took_s

    def batches(self) -> None:
        num = self._sizes.num_sequences
        for num_in, num_out in self._sizes.batches:
            ours = self._ours(num, num_in + num_out)
            self._batch_s(ours, num, num_in, self._sizes.warm_tokens)
            name = f"{num_in}/{num_out}"
            self._report.ours_tokens_per_s[name] = num * num_out / self._batch_s(ours, num, num_in, num_out)
            self._save()
            del ours
            self.forget()

    def transformers(self) -> None:
        num, peer = self._sizes.num_sequences, ContinuousBatching(self._architecture, self._device)
        try:
            self._report.transformers = peer.version
            for num_in, num_out in self._sizes.batches:
                name, prompts = f"{num_in}/{num_out}", self._prompter.take(num, num_in)
                few, more = self._sizes.peer_tokens
                # Once to warm up: its manager is sized for the first requests that it sees.
                peer.batch_s(prompts, more)
                few_s, more_s = peer.batch_s(prompts, few), peer.batch_s(prompts, more)
                # Steps take longer as contexts grow, so this is the least that a whole run takes.
                whole_s = more_s + (num_out - more) * (more_s - few_s) / (more - few)
                if whole_s < LONG_S:
                    whole_s = peer.batch_s(prompts, num_out)
                else:
                    self._report.reckoned.append(name)
                self._report.transformers_tokens_per_s[name] = num * num_out / whole_s
                self._save()
                peer.end_manager()
        finally:
            peer.close()

    def attention(self) -> None:
        sizes, num_heads = self._sizes, self._architecture.num_heads
        runner = self._runner(sizes.attention_sequences, max(sizes.attention_tokens, sizes.prefill_tokens[-1]))
        found = attention.decode(runner, sizes.attention_sequences, sizes.attention_tokens, num_heads)
        self._report.attention_kernel = found.kernel
        self._report.attention_decode_gb_per_s = found.num_bytes / found.call_s / 1e9
        self._save()
        for num_tokens in sizes.prefill_tokens:
            prompt = attention.prefill(runner, num_tokens, num_heads)
            self._report.attention_prefill_ms = 1e3 * prompt.call_s
            self._report.flash_prefill_ms[str(num_tokens)] = 1e3 * prompt.flash_s
            if prompt.kernel_s is not None:
                self._report.kernel_prefill_ms[str(num_tokens)] = 1e3 * prompt.kernel_s
            self._save()

    def experts(self) -> None:
        """Of one layer of a mixture, whatever the shape of the others."""
        architecture = TINY_MIXTURE if self._sizes is SMALL else SHAPE_30B
        layer = experts.Layer(architecture, self._device, self._quantize)
        for num_tokens in self._sizes.expert_tokens:
            self._report.experts[str(num_tokens)] = layer.measured(num_tokens)
            self._save()

    def busy(self) -> None:
        num, (num_in, _) = self._sizes.num_sequences, self._sizes.batches[0]
        ours = self._ours(num, num_in + 2 * self._sizes.busy_tokens + 64)
        ours.batch(self._prompter.take(num, num_in), self._sizes.warm_tokens)
        busy = Busy()
        ours.steady(self._prompter.take(num, num_in), self._sizes.busy_tokens, busy)
        self._report.busy_share = busy.share

    def mixed(self) -> None:
        num = max(num for num, _, _ in self._sizes.mixed)
        most = max(max(num_tokens, num_chunk) for _, num_tokens, num_chunk in self._sizes.mixed)
        runner = self._runner(num + 1, most + 64)
        for num_decodes, num_tokens, num_chunk in self._sizes.mixed:
            name = f"{num_decodes} decodes of {num_tokens} tokens and a chunk of {num_chunk}"
            self._report.mixed_steps[name] = mixed.measured(runner, num_decodes, num_tokens, num_chunk)
            self._save()

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


def reason_of(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:300]
