"""The rounds: every contender in turn with the same prompts, and the machine's limits between them."""

from __future__ import annotations

import asyncio
import os
import platform
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.engine_peers.contenders import (
    OURS,
    RESERVED_BYTES,
    ROOT,
    Contender,
    ContenderError,
    Contestant,
    free_bytes,
)
from benchmarks.engine_peers.figures import Model, Point, Report
from benchmarks.engine_peers.limits import Limits, best_of

WARM_PROMPTS, WARM_TOKENS = 8, 4
"""Read and written by each engine before it is measured: kernels chosen, buffers made, graphs compiled."""


MAX_TRIES = 3
"""Of a run that was disturbed; the last one counts."""


class Plan(msgspec.Struct, frozen=True):
    """What to measure."""

    shape: str
    concurrencies: list[int]
    input_tokens: int
    output_tokens: int
    num_rounds: int
    num_threads: int
    seed: int
    limit_s: float
    """For one run of one engine; who takes longer is left out, and named."""
    start_limit_s: float
    """To prepare or to load one."""
    with_limits: bool
    max_others: float
    """CPUs that anything else may have had beside a run, or it is run again."""
    keeps_to_avx2: bool = False


class Race:
    """Contenders over one checkpoint, and what they have shown so far."""

    def __init__(
        self, plan: Plan, contestants: Sequence[Contestant], folder: Path, say: Callable[[str], None], commit: str
    ) -> None:
        self.plan = plan
        self.report = Report(f"{datetime.now(UTC):%Y-%m-%d %H:%M}", commit, machine(), plan.num_threads, {})
        self._checkpoint = folder / plan.shape
        self._say = say
        self._random = random.Random(plan.seed)
        facts = {
            "num_threads": plan.num_threads,
            "max_sequences": max(plan.concurrencies),
            "input_tokens": plan.input_tokens,
            "output_tokens": plan.output_tokens,
            "commit": commit,
            "keeps_to_avx2": plan.keeps_to_avx2,
        }
        if plan.keeps_to_avx2:
            self.report.machine["kept to"] = "avx2"
        self.contenders = [
            Contender(
                each,
                self._checkpoint,
                # llama.cpp's files of all forms lie together: they are made from one of them.
                folder / f"{plan.shape}-{each.engine if each.engine == 'llama' else each.key.replace(':', '-')}",
                facts,
                folder / f"{plan.shape}-{each.key.replace(':', '-')}.log",
            )
            for each in contestants
        ]

    async def prepare(self) -> None:
        """The checkpoint, and what the peers make of it; a contender that cannot is out. Raises ModelError."""
        self.report.models[self.plan.shape] = await asyncio.to_thread(written, self.plan.shape, self._checkpoint)
        for contender in list(self.contenders):
            self._say(f"{contender.contestant.key}: preparing")
            try:
                await contender.prepare(self.plan.start_limit_s)
            except ContenderError as error:
                self._out(contender, f"{self.plan.shape}", error)

    @asynccontextmanager
    async def loaded(self) -> AsyncIterator[None]:
        """Everyone who fits into memory, warm and stopped."""
        try:
            for contender in list(self.contenders):
                try:
                    await self._make_ready(contender)
                except ContenderError as error:
                    self._out(contender, self.plan.shape, error)
            yield
        finally:
            for contender in self.contenders:
                await contender.close()

    async def measure(self, concurrency: int, before_round: Callable[[], Awaitable[None]]) -> None:
        """All rounds at one number of prompts at a time."""
        here = f"{self.plan.shape} {concurrency}"
        points: dict[str, Point] = {}
        firsts: dict[str, dict[tuple[int, int, int], int]] = {}
        running = [each for each in self.contenders if concurrency in (each.contestant.concurrencies or [concurrency])]

        async def each(contender: Contender, use: Callable[[Contender], Awaitable[None]]) -> None:
            try:
                await self._make_ready(contender)
                await use(contender)
            except ContenderError as error:
                running.remove(contender)
                self._out(contender, here, error, for_good=False)

        async def warm(contender: Contender) -> None:
            # Many rows at once, and no more tokens than a few whole prompts: warming shall not take as long as a round.
            size = self.plan.input_tokens * min(concurrency, WARM_PROMPTS) // concurrency
            prompts = [prompt[: max(1, size)] for prompt in self._prompts(concurrency)]
            await self._run(contender, prompts, min(WARM_TOKENS, self.plan.output_tokens))

        async def run(contender: Contender) -> None:
            key = contender.contestant.key
            for number_of_try, (alone, prompts) in enumerate(given):
                # It was stopped: its threads and its pages come back before the clock runs.
                await self._run(contender, self._prompts(1), 1)
                first = await self._run(contender, alone, 1) if concurrency == 1 else None
                whole = await self._run(contender, prompts, self.plan.output_tokens)
                rate = concurrency * self.plan.output_tokens / whole.duration_s
                self._say(f"{here}, round {number + 1}: {key} {rate:,.1f} tokens/s, others {whole.others:.2f}")
                for place, token_id in enumerate(whole.first_token_ids):
                    firsts.setdefault(key, {})[number, number_of_try, place] = token_id
                if whole.others <= self.plan.max_others:
                    break
            point = points.setdefault(key, self._point(contender, concurrency))
            point.durations_s.append(whole.duration_s)
            point.others.append(whole.others)
            if first:
                point.ttfts_s.append(first.duration_s)

        for contender in list(running):
            await each(contender, warm)
        for number in range(self.plan.num_rounds):
            await before_round()
            limits = await self._measure_limits()
            # The same for all; where a run was disturbed, it has others that are the same for all who were.
            given = [(self._prompts(1), self._prompts(concurrency)) for _ in range(MAX_TRIES)]
            # Each round begins with another one, so that none always follows the same neighbour.
            turn = number % max(1, len(running))
            for contender in running[turn:] + running[:turn]:
                await each(contender, run)
            # A shared machine reads half as fast again from one minute to the next.
            limits += await self._measure_limits()
            for point in points.values():
                if limits and len(point.limits) < len(point.ttfts_s):
                    point.limits.append(best_of(limits))
            self._say(f"{here}, round {number + 1} of {self.plan.num_rounds} is done")
        own = firsts.get(f"{OURS}:bf16", {})
        for key, point in points.items():
            if common := own.keys() & firsts[key].keys():
                point.first_tokens_alike = sum(own[each] == firsts[key][each] for each in common) / len(common)
        self.report.points += points.values()

    async def _run(self, contender: Contender, prompts: list[list[int]], num_output_tokens: int) -> Any:
        return await contender.run(prompts, num_output_tokens, self.plan.limit_s)

    async def _make_ready(self, contender: Contender) -> None:
        """Loads it if it is not, ending others that wait where memory runs short. Raises ContenderError."""
        if contender.is_loaded:
            return
        waiting = sorted((each for each in self.contenders if each.is_loaded), key=lambda each: each.used_at)
        needed = RESERVED_BYTES + 4 * (self._checkpoint / "model.safetensors").stat().st_size
        while free_bytes() < needed and waiting:
            ended = waiting.pop(0)
            self._say(f"{ended.contestant.key}: ended, its memory is needed")
            await ended.close()
        await contender.load(self.plan.start_limit_s)
        self._say(f"{contender.contestant.key}: {contender.loaded}, loaded in {contender.load_s:.1f} s")

    async def _measure_limits(self) -> list[Limits]:
        """As they are now; none where nobody wants them or they cannot be measured."""
        if not self.plan.with_limits:
            return []
        model = self.report.models[self.plan.shape]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.engine_peers.limits"),
            *(str(self.plan.num_threads), str(2 * model.num_matrix_weights)),
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await process.communicate()
        if process.returncode != 0:
            return []
        limits = msgspec.json.decode(out, type=Limits)
        self._say(f"limits: {limits}")
        self.report.limits.setdefault(self.plan.shape, []).append(limits)
        return [limits]

    def _prompts(self, num: int) -> list[list[int]]:
        """Random, so that they share nothing and no prefix is ever found; the same for all contenders of a round."""
        size = self.report.models[self.plan.shape].vocab_size
        return [[self._random.randrange(3, size) for _ in range(self.plan.input_tokens)] for _ in range(num)]

    def _point(self, contender: Contender, concurrency: int) -> Point:
        each, said = contender.contestant, contender.loaded
        return Point(
            shape=self.plan.shape,
            concurrency=concurrency,
            engine=each.engine,
            form=each.form,
            version=str(said["version"]),
            input_tokens=self.plan.input_tokens,
            output_tokens=self.plan.output_tokens,
            durations_s=[],
            weight_bytes=said.get("weight_bytes"),
        )

    def _out(self, contender: Contender, where: str, error: ContenderError, for_good: bool = True) -> None:
        self._say(f"{where}: {contender.contestant.key} is out: {error}")
        self.report.failures[f"{where} {contender.contestant.key}"] = str(error)
        if for_good:
            self.contenders.remove(contender)


def written(shape: str, directory: Path) -> Model:
    """The shape's sizes; its checkpoint is written if it is not there. Raises ModelError."""
    from worker.bench import checkpoint
    from worker.models import SHAPES

    if not (directory / "config.json").exists():
        directory.mkdir(parents=True, exist_ok=True)
        checkpoint.write(shape, directory)
    each = SHAPES[shape]
    inner = (each.num_heads + 2 * each.num_kv_heads) * each.head_dim + each.num_heads * each.head_dim
    in_layers = each.num_layers * each.hidden_size * (inner + 3 * each.intermediate_size)
    return Model(
        shape=shape,
        vocab_size=each.vocab_size,
        num_matrix_weights=in_layers + each.vocab_size * each.hidden_size,
        num_layer_weights=in_layers,
        num_layers=each.num_layers,
        num_heads=each.num_heads,
        num_kv_heads=each.num_kv_heads,
        head_dim=each.head_dim,
    )


def machine() -> dict[str, str]:
    facts = {"cpus": str(len(os.sched_getaffinity(0))), "python": platform.python_version(), "torch": version("torch")}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            facts["processor"] = value.strip()
        if name.strip() == "flags":
            wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
            facts["vectors"] = " ".join(flag for flag in wanted if flag in value.split())
            break
    for line in Path("/proc/meminfo").read_text().splitlines()[:1]:
        facts["memory"] = f"{int(line.split()[1]) / (1 << 20):.0f} GiB"
    facts["kernel"] = platform.release()
    return facts
