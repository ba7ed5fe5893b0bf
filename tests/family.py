"""`penstock serve` with several gateway processes, as an operator starts it: one port, one Redis, one PostgreSQL."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from policies import settings
from tests.builders import PATIENCE_S, ROOT
from tests.house import KEYS

ENVIRON = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")} | {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "PENSTOCK_ENGINE__MAX_KV_BYTES": "67108864",
    "PENSTOCK_WORKERS__RESTART_BACKOFF_S": "0.1",
}


def sharing(redis: settings.Redis, store_url: str, num_processes: int) -> dict[str, str]:
    """The environment of gateways that share these."""
    return {
        "PENSTOCK_SERVER__PROCESSES": str(num_processes),
        "PENSTOCK_STORE__URL": store_url,
        "PENSTOCK_REDIS__URL": redis.url,
        "PENSTOCK_REDIS__PREFIX": redis.prefix,
        "PENSTOCK_REDIS__TIMEOUT_MS": str(redis.timeout_ms),
    }


def answered_by(address: str) -> dict[str, str]:
    """The environment in which a worker that runs elsewhere computes what the model "demo" says."""
    return {"PENSTOCK_MODELS__DEMO__REPLICAS": "0", "PENSTOCK_MODELS__DEMO__ADDRESSES": f'["{address}"]'}


class Family:
    """A running one."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process = process
        self.url = url
        self.key = KEYS["PENSTOCK_API_KEY"]
        self.admin_key = KEYS["PENSTOCK_ADMIN_KEY"]
        self.told: list[str] = []
        """Lines on standard error so far."""

    @contextlib.asynccontextmanager
    async def http(self, key: str | None = None, timeout_s: float = PATIENCE_S) -> AsyncIterator[aiohttp.ClientSession]:
        """A new connection for each request, so that the kernel deals them out among the gateways."""
        async with aiohttp.ClientSession(
            self.url,
            headers={"authorization": f"Bearer {key or self.key}"},
            connector=aiohttp.TCPConnector(force_close=True, limit=0),
            timeout=aiohttp.ClientTimeout(timeout_s),
        ) as session:
            yield session

    def gateways(self) -> list[int]:
        """Process ids of its gateways."""
        return [pid for pid in children(self.process.pid) if b"gateway.member" in command_of(pid)]

    def workers(self) -> list[int]:
        commands = [(pid, command_of(pid)) for pid in children(self.process.pid)]
        return [pid for pid, command in commands if command and b"gateway.member" not in command]

    async def end(self, number: signal.Signals = signal.SIGTERM) -> int | None:
        self.process.send_signal(number)
        async with asyncio.timeout(2 * PATIENCE_S):
            return await self.process.wait()


@contextlib.asynccontextmanager
async def family(directory: Path, **environ: str) -> AsyncIterator[Family]:
    """One that is ready. ``environ`` overrides settings, such as ``PENSTOCK_SERVER__PROCESSES="3"``."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", "serve", "--port", "0"),
        cwd=directory,
        env={**ENVIRON, **KEYS, **environ},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    told: list[str] = []
    reading = asyncio.create_task(_read(process.stderr, told))
    try:
        async with asyncio.timeout(2 * PATIENCE_S):
            while not (line := (await process.stdout.readline()).decode()).startswith("Penstock ready on "):
                assert line, "\n".join(told)
        running = Family(process, line.split()[-1])
        running.told = told
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        await reading


async def _read(stream: Any, lines: list[str]) -> None:
    async for line in stream:
        lines.append(line.decode().rstrip())  # noqa: PERF401 (others read it meanwhile)


def children(pid: int) -> list[int]:
    """None where it is gone."""
    return [int(child) for child in _said(pid, f"task/{pid}/children").split()]


def command_of(pid: int) -> bytes:
    """Empty where it has ended, were it a moment ago."""
    return _said(pid, "cmdline")


def _said(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
