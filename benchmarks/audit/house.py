"""What is killed: a gateway, or several on one port, and workers that write down what they emit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path

import msgspec

from policies.policy import Price
from tests.builders import ROOT, scripted, worker_settings
from tests.family import ENVIRON, children, command_of
from tests.house import KEYS

KEY = KEYS["PENSTOCK_API_KEY"]
PRICE = Price(prompt=Decimal("1.5"), cached_prompt=Decimal("0.5"), completion=Decimal(2), cache_hit=Decimal("0.1"))
POLICY = "{prices = {demo = {prompt = 1.5, cached_prompt = 0.5, completion = 2.0, cache_hit = 0.1}}}"


class House:
    """An async context manager. Whatever dies is started again."""

    def __init__(self, folder: Path, num_workers: int, step_s: float, environ: Mapping[str, str]) -> None:
        """``environ``: settings of the gateways, such as where a PostgreSQL is."""
        self.folder = folder
        self.num_kills = {"gateway": 0, "worker": 0}
        self.ready = asyncio.Event()
        """A gateway listens, as far as is known."""
        self.emitted = [folder / f"emitted-{number}" for number in range(num_workers)]
        self._sockets = [f"unix:{folder / f'worker-{number}'}" for number in range(num_workers)]
        self._step_s = step_s
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self._environ = {
            **ENVIRON,
            **KEYS,
            "PENSTOCK_MODELS__DEMO__REPLICAS": "0",
            "PENSTOCK_MODELS__DEMO__ADDRESSES": msgspec.json.encode(self._sockets).decode(),
            "PENSTOCK_WORKERS__MAX_RESTART_BACKOFF_S": "0.5",
            "PENSTOCK_POLICIES__DEFAULT": POLICY,
            "PENSTOCK_STORE__DATA_DIR": str(folder / "data"),
            "PENSTOCK_LOG__LEVEL": "warning",
            **environ,
        }
        self.is_family = "PENSTOCK_SERVER__PROCESSES" in environ
        self._gateway: Process | None = None
        self._workers: list[Process | None] = [None] * num_workers
        self._living: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> House:
        self._living = [asyncio.create_task(self._worker(number)) for number in range(len(self._workers))]
        self._living.append(asyncio.create_task(self._serve()))
        await self.ready.wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._living:
            task.cancel()
        await asyncio.gather(*self._living, return_exceptions=True)
        if self._gateway is not None:
            with contextlib.suppress(ProcessLookupError):
                self._gateway.terminate()
            await self._gateway.wait()
        for worker in self._workers:
            if worker is not None:
                with contextlib.suppress(ProcessLookupError):
                    worker.kill()
                await worker.wait()

    def kill(self, what: str, chance: random.Random) -> None:
        """One gateway or one worker, if there is one at the moment."""
        if what == "worker":
            pids = [worker.pid for worker in self._workers if worker is not None and worker.returncode is None]
        else:
            pids = self.gateways() if self.ready.is_set() else []
        if pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(chance.choice(pids), signal.SIGKILL)
                self.num_kills[what] += 1

    def gateways(self) -> list[int]:
        if self._gateway is None or self._gateway.returncode is not None:
            return []
        if not self.is_family:
            return [self._gateway.pid]
        return [pid for pid in children(self._gateway.pid) if b"gateway.processes" in command_of(pid)]

    async def restart(self) -> None:
        """Ends in order what runs, and begins once more: whatever was left behind is settled then."""
        gateway = self._gateway
        assert gateway is not None
        self.ready.clear()
        gateway.terminate()
        await self.ready.wait()

    async def _serve(self) -> None:
        with (self.folder / "gateway.log").open("ab") as log:
            while True:
                command = (sys.executable, "-m", "gateway", "serve", "--port", str(self.port))
                self._gateway = await asyncio.create_subprocess_exec(
                    *command, cwd=self.folder, env=self._environ, stdout=PIPE, stderr=log
                )
                assert self._gateway.stdout is not None
                async for line in self._gateway.stdout:
                    if line.startswith(b"Penstock ready on"):
                        self.ready.set()
                self.ready.clear()
                await self._gateway.wait()

    async def _worker(self, number: int) -> None:
        told = msgspec.json.encode(worker_settings(self._sockets[number])).decode()
        command = scripted("--step-s", self._step_s, "--emitted", self.emitted[number])
        while True:
            self._workers[number] = process = await asyncio.create_subprocess_exec(
                *command, told, cwd=ROOT, stderr=DEVNULL
            )
            await process.wait()
