"""How worker processes are started.

A worker imports torch, which takes as long as the gateway's own modules and its store do. So a first process is begun
before these: what it computes it is told when that is known, and until then it imports what any worker needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import sysconfig
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec

from policies import settings

COMMAND = (sys.executable, "-P", "-m", "worker")
"""Starts a worker; its settings follow as JSON. -P: a folder called "worker" where the user stands is not meant."""
TOLD_LATER = "-"
"""In place of them: they come as a line on standard input, within a minute."""


class Launcher:
    """Starts workers by a command."""

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        """``command``: the settings follow as JSON."""
        self._command = command
        self._begun: asyncio.subprocess.Process | None = None

    @contextlib.asynccontextmanager
    async def ahead(self, models: Sequence[settings.Model]) -> AsyncIterator[None]:
        """Meanwhile one process is begun already, if any of ``models`` is loaded from the start. If it is nobody's in
        the end it is killed; it leaves by itself if it hears nothing for long."""
        if any(model.load_at_start and model.replicas for model in models):
            with contextlib.suppress(OSError):  # whoever wants one finds out, and says so
                self._begun = await self._spawned(TOLD_LATER)
        try:
            yield
        finally:
            process, self._begun = self._begun, None
            if process is not None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    async def start(self, child: settings.WorkerSettings) -> asyncio.subprocess.Process:
        """A process that computes this. Its standard input is open: the end of that tells it that we are gone. Raises
        OSError."""
        told = msgspec.json.encode(child)
        process, self._begun = self._begun, None
        if process is None or process.returncode is not None:
            return await self._spawned(told.decode())
        assert process.stdin is not None
        process.stdin.write(told + b"\n")
        return process

    async def _spawned(self, told: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *self._command,
            told,
            stdin=asyncio.subprocess.PIPE,
            stdout=2,  # our own standard output belongs to the ready line
            env=environment(),
            start_new_session=True,  # Ctrl-C, and the terminal's end, are for us, who then tell it
        )


def environment() -> dict[str, str]:
    """A worker's: ours, and where these packages lie if not installed, since -P keeps the current directory out."""
    root = str(Path(__file__).parents[1])
    if root == sysconfig.get_paths()["purelib"]:
        return dict(os.environ)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
