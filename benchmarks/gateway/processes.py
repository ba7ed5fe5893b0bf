"""The servers under measurement as pinned processes, and wrk."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

LUA = Path(__file__).with_name("post.lua")


class BenchmarkError(Exception):
    """The benchmark cannot run here or did not run well; one sentence."""


class Wrk(msgspec.Struct, frozen=True):
    """One run of wrk, latencies in microseconds."""

    num_requests: int
    duration_us: int
    p50_us: int
    p99_us: int
    num_errors: int

    @property
    def requests_per_s(self) -> float:
        return self.num_requests * 1e6 / self.duration_us


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    pid: int

    def cpu_s(self) -> float:
        """CPU seconds of all its threads so far."""
        # Nanoseconds a thread, where /proc/PID/stat has hundredths of a second; threads that ended are missed.
        tasks = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9

    def pss_mib(self) -> float:
        """Proportional set size: shared pages counted by share."""
        rollup = Path(f"/proc/{self.pid}/smaps_rollup").read_text()
        found = re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)
        assert found
        return int(found[1]) / 1024


def check() -> tuple[int, int]:
    """The core to measure and the core for everything else. Raises BenchmarkError where this machine cannot do it."""
    if not shutil.which("wrk"):
        raise BenchmarkError("wrk is not installed; it is in Debian's package wrk (apt-get install wrk)")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise BenchmarkError(
            "two cores are needed, one for the server and one for the load, and this process may use only one"
        )
    return cores[0], cores[1]


@asynccontextmanager
async def server(
    arguments: Sequence[str],
    core: int | None,
    log: Path,
    environ: Mapping[str, str] | None = None,
    ready_within_s: float = 60.0,
) -> AsyncIterator[Server]:
    """A process on one core (None: on all), from its line "... ready on URL" until it has exited on SIGTERM. Raises
    BenchmarkError.
    """
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *arguments,
            env=os.environ | (environ or {}),
            stdout=subprocess.PIPE,
            stderr=errors,
            preexec_fn=_pinned(core),
        )
        assert process.stdout
        try:
            try:
                async with asyncio.timeout(ready_within_s):
                    url = await _ready_line(process.stdout)
            except (TimeoutError, EOFError):
                name, said = " ".join(arguments[1:4]), _last_words(log)
                raise BenchmarkError(f"{name} was not ready within {ready_within_s:g} s: {said}") from None
            drained = asyncio.create_task(process.stdout.read())
            yield Server(url, process.pid)
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
                try:
                    async with asyncio.timeout(20.0):
                        await process.wait()
                except TimeoutError:
                    process.kill()
                    await process.wait()
        await drained


async def _ready_line(out: asyncio.StreamReader) -> str:
    """The address in the line that says so. Raises EOFError."""
    while line := await out.readline():
        if found := re.search(rb"ready on (http://\S+)", line):
            return found[1].decode()
    raise EOFError


def _pinned(core: int | None) -> Callable[[], None] | None:
    return None if core is None else lambda: os.sched_setaffinity(0, {core})


def _last_words(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]


async def wrk(
    url: str,
    connections: int,
    duration_s: int,
    core: int | None,
    body: Path,
    key: str,
    first: int,
    delay_ms: int = 0,
) -> Wrk:
    """One run of wrk on its core (None: on all), its requests numbered from ``first``; each connection waits so long
    before a request. Raises BenchmarkError when a request failed.
    """
    process = await asyncio.create_subprocess_exec(
        *("wrk", "-t1", f"-c{connections}", f"-d{duration_s}s", "--timeout", "10s", "-s", str(LUA), url),
        env=os.environ
        | {"BENCH_BODY": str(body), "BENCH_KEY": key, "BENCH_FIRST": str(first)}
        | ({"BENCH_DELAY_MS": str(delay_ms)} if delay_ms else {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=_pinned(core),
    )
    out, _ = await process.communicate()
    found = re.search(rb"FIGURES (\{.*\})", out)
    if not found:
        raise BenchmarkError(f"wrk failed: {out.decode(errors='replace')[-500:]}")
    figures = msgspec.json.decode(found[1], type=Wrk)
    if figures.num_errors or not figures.num_requests:
        raise BenchmarkError(f"{url}: {figures.num_errors} of {figures.num_requests} requests failed")
    return figures
