"""The engines as processes: each under its own interpreter, told what to do in lines, stopped while others run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

ROOT = Path(__file__).parents[2]
DRIVERS = Path(__file__).with_name("drivers")
OURS = "penstock"
FORMS = {
    OURS: ("bf16", "int8", "int4"),
    "vllm": ("bf16", "int8"),
    "openvino": ("bf16", "int8", "int4"),
    "llama": ("bf16", "q8_0", "q4_0", "bf16-fa", "q8_0-fa", "q4_0-fa"),
    "transformers": ("bf16",),
}
"""Who can be measured, and in which stored forms of the same weights; the first is the default."""
NAMES = {OURS: "Penstock", "vllm": "vLLM", "openvino": "openvino-genai", "llama": "llama.cpp"}
"""As they are printed, where that is another name; llama.cpp comes with llama-cpp-python, whose version is given."""
KEPT_TO_AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
"""What torch and its libraries are told where they are to use no more."""
MAX_LINE_BYTES = 1 << 24
RESERVED_BYTES = 2 << 30
"""Memory that loading another engine must leave free, or one that waits is ended first."""


class ContenderError(Exception):
    """This engine cannot be measured; one sentence."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """An engine in one form, and the interpreter that has it."""

    engine: str
    form: str
    python: str
    concurrencies: tuple[int, ...] = ()
    """Only at these numbers of prompts at a time; empty: at all."""

    @property
    def key(self) -> str:
        return f"{self.engine}:{self.form}"


@dataclass(frozen=True, slots=True)
class Written:
    """What one run gave."""

    duration_s: float
    first_token_ids: list[int]
    others: float
    """CPUs that everything else on the machine, and whoever owns the machine, had meanwhile."""


class Contender:
    """One contestant's process, while it has one."""

    def __init__(self, contestant: Contestant, checkpoint: Path, made: Path, facts: dict[str, Any], log: Path) -> None:
        self.contestant = contestant
        self.loaded: dict[str, Any] = {}
        """What it said of itself when it was loaded: version, and what else it knows."""
        self.load_s = 0.0
        self.used_at = 0.0
        self._checkpoint, self._made, self._facts, self._log = checkpoint, made, facts, log
        self._process: asyncio.subprocess.Process | None = None

    @property
    def is_loaded(self) -> bool:
        return self._process is not None

    async def prepare(self, within_s: float) -> None:
        """Its own files beside the checkpoint, where it wants some. Raises ContenderError."""
        self._made.mkdir(parents=True, exist_ok=True)
        await self._start()
        try:
            await self._ask(within_s, do="prepare", **self._paths())
        finally:
            await self.close()

    async def load(self, within_s: float) -> None:
        """Leaves it loaded and stopped. Raises ContenderError."""
        began_at = perf_counter()
        await self._start()
        try:
            self.loaded = await self._ask(within_s, do="load", **self._paths(), facts=self._facts)
        except ContenderError:
            await self.close()
            raise
        self.load_s = perf_counter() - began_at
        self._signal(signal.SIGSTOP)

    async def run(self, prompts: list[list[int]], num_output_tokens: int, within_s: float) -> Written:
        """The only engine that runs meanwhile. Raises ContenderError, and is closed then."""
        self._signal(signal.SIGCONT)
        began_at, busy_s, own_s = perf_counter(), _busy_s(), self._cpu_s()
        try:
            answer = await self._ask(within_s, do="run", prompts=prompts, num_output_tokens=num_output_tokens)
        except ContenderError:
            await self.close()
            raise
        self._signal(signal.SIGSTOP)
        self.used_at = perf_counter()
        others_s = _busy_s() - busy_s - (self._cpu_s() - own_s)
        others = max(0.0, others_s / (self.used_at - began_at))
        return Written(answer["duration_s"], answer["first_token_ids"], others)

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        # The whole group: some engines have children of their own.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()

    async def _start(self) -> None:
        # Each is told its number of threads by its driver; some warn of a number from outside, and keep to it.
        environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        if self._facts.get("keeps_to_avx2"):
            environ |= KEPT_TO_AVX2
        if self.contestant.engine == OURS:
            environ["PYTHONPATH"] = str(ROOT)
        with self._log.open("ab") as errors:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *(self.contestant.python, str(DRIVERS / f"run_{self.contestant.engine}.py")),
                    env=environ,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    limit=MAX_LINE_BYTES,
                    start_new_session=True,
                )
            except OSError as error:
                raise ContenderError(f"{self.contestant.python} does not start: {error.strerror}") from None

    async def _ask(self, within_s: float, **order: Any) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(within_s):
                self._process.stdin.write(json.dumps(order).encode() + b"\n")
                await self._process.stdin.drain()
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise ContenderError(f"{order['do']}: no answer within {within_s:g} s") from None
        except ConnectionError:
            line = b""
        if not line:
            raise ContenderError(f"{order['do']}: it ended: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ContenderError(f"{order['do']}: {answer['error']}")
        return answer

    def _paths(self) -> dict[str, str]:
        return {"checkpoint": str(self._checkpoint), "made": str(self._made), "form": self.contestant.form}

    def _signal(self, number: int) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _cpu_s(self) -> float:
        """Of all processes of its session."""
        assert self._process is not None
        ticks = 0
        for process in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = process.read_text().rpartition(")")[2].split()
                if int(fields[3]) == self._process.pid:
                    ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "it said nothing"


def parse(text: str) -> Contestant:
    """NAME[:FORM][@N,N]=PYTHON. Raises ValueError."""
    name, _, python = text.partition("=")
    name, _, places = name.partition("@")
    engine, _, form = name.partition(":")
    if engine not in FORMS:
        raise ValueError(f"there is no engine {engine}; there are {', '.join(FORMS)}")
    form = form or FORMS[engine][0]
    if form not in FORMS[engine]:
        raise ValueError(f"{engine} has no form {form}; it has {', '.join(FORMS[engine])}")
    if not python and engine not in (OURS, "transformers"):
        raise ValueError(f"say with which interpreter: {name}=PYTHON")
    return Contestant(engine, form, python or sys.executable, numbers(places) if places else ())


def numbers(text: str) -> tuple[int, ...]:
    """Of a list like 1,8,32. Raises ValueError."""
    if not all(part.isdigit() and int(part) for part in text.split(",")):
        raise ValueError(f"{text!r} is no list of numbers like 1,8,32")
    return tuple(int(part) for part in text.split(","))


def _busy_s() -> float:
    """CPU seconds of the whole machine that were not idle: our own, others', and those that its owner kept; from any
    instant on."""
    # What was idle is measured to the microsecond where no clock ticks meanwhile; what was not is guessed by ticks,
    # which miss a tenth of work that comes in short pieces.
    lines = Path("/proc/stat").read_text().splitlines()
    idle, waiting = map(int, lines[0].split()[4:6])
    num_cpus = sum(line.startswith("cpu") for line in lines) - 1
    return num_cpus * perf_counter() - (idle + waiting) / os.sysconf("SC_CLK_TCK")


def free_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise ContenderError("the system does not say how much memory is free")
