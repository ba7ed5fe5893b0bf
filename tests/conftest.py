"""Fixtures: a clock, scripted workers, databases, and ``house``, the whole thing running on a free port."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
import uvloop

from tests import builders

Start = Callable[..., Awaitable[str]]


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Tests run on the loop that serves."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def clock() -> builders.HandClock:
    return builders.HandClock()


@pytest.fixture
async def start_scripted_worker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Start]:
    """``address = await start_scripted_worker("--num-tokens", 3)``: it listens, as one that runs elsewhere would."""
    processes: list[asyncio.subprocess.Process] = []

    async def start(*options: object, name: str = "scripted-0") -> str:
        path = tmp_path_factory.mktemp("w") / "socket"
        settings = builders.worker_settings(f"unix:{path}", name=name)
        processes.append(
            await asyncio.create_subprocess_exec(
                *builders.scripted(*options), msgspec.json.encode(settings).decode(), cwd=builders.ROOT
            )
        )
        await listening(path)
        return f"unix:{path}"

    yield start
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def listening(path: Path) -> None:
    """Until somebody accepts connections there."""
    async with asyncio.timeout(builders.PATIENCE_S):
        while True:
            try:
                _, writer = await asyncio.open_unix_connection(path)
            except OSError:
                await asyncio.sleep(0.01)
            else:
                writer.close()
                return
