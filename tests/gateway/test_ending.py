"""A stop while everything hangs ends all the same, and in time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest

from gateway import background, doors, ending, ledger, processes, store
from policies.settings import Server
from tests.builders import PATIENCE_S
from tests.gateway.test_cli import ENVIRON


@contextlib.asynccontextmanager
async def hanging() -> AsyncIterator[str]:
    yield "open"
    await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def failing() -> AsyncIterator[None]:
    yield
    raise ZeroDivisionError


async def test_parts_that_hang_do_so_together_and_only_for_so_long(monkeypatch, caplog):
    waited: list[float] = []
    within = background.within

    async def noted(limit_s: float, work: Coroutine[Any, Any, object], what: object) -> None:
        waited.append(limit_s)
        await within(0.01, work, what)

    monkeypatch.setattr(ending, "within", noted)
    parts = ending.Parts()
    assert await parts.enter(hanging()) == "open"
    await parts.enter(failing())
    await parts.enter(background.alongside(asyncio.sleep(PATIENCE_S)))
    assert await parts.enter(hanging()) == "open"
    await parts.close()
    assert waited == [ending.PARTS_S] * 4
    said = sorted(record.getMessage() for record in caplog.records if record.levelno == logging.ERROR)
    assert [each.split()[:4] for each in said] == [
        ["failing", "has", "ended", "by"],
        *[["hanging", "has", "not", "ended"]] * 2,
    ]


def test_nobody_waits_longer_for_the_gateways_of_a_house_than_for_one_alone():
    alone_s = Server().drain_s + ending.CLOSING_S
    assert Server().drain_s + processes.CLOSING_S + ending.WORKERS_S + ending.KILLED_S + ending.LAST_S == alone_s
    of_a_gateway_s = ending.CUT_S + ending.PARTS_S + ending.LEDGER_S + ledger.CLOSING_S + store.CLOSING_S
    assert of_a_gateway_s + ending.REDIS_S == processes.CLOSING_S


def test_a_stop_waits_for_no_download(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as hub:  # which takes what is asked, and says nothing
        hub.settimeout(PATIENCE_S)
        process = subprocess.Popen(
            [sys.executable, "-m", "gateway", "serve", "--port", "0", "--model", "nobody/nothing"],
            cwd=tmp_path,
            env={
                **{name: value for name, value in ENVIRON.items() if name != "HF_HUB_OFFLINE"},
                "HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}",
                "HF_HOME": str(tmp_path),
            },
            stdout=subprocess.DEVNULL,
        )
        try:
            asked, _ = hub.accept()
            with asked:
                os.kill(process.pid, signal.SIGTERM)
                assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
            process.wait()


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_stop_waits_for_no_database(tmp_path: Path, num_processes: int):
    with socket.create_server(("127.0.0.1", 0)) as database:  # which takes what is asked, and says nothing
        database.settimeout(PATIENCE_S)
        process = subprocess.Popen(
            [sys.executable, "-m", "gateway", "serve", "--port", "0"],
            cwd=tmp_path,
            env={
                **ENVIRON,
                "PENSTOCK_SERVER__PROCESSES": str(num_processes),
                "PENSTOCK_STORE__URL": f"postgresql://penstock@127.0.0.1:{database.getsockname()[1]}/penstock",
                "PENSTOCK_REDIS__URL": "redis://127.0.0.1:9/0",
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        try:
            asked, _ = database.accept()
            with asked:
                os.kill(process.pid, signal.SIGTERM)
                _, said = process.communicate(timeout=PATIENCE_S)
            assert (process.returncode, said) == (0, b"")
        finally:
            process.kill()
            process.wait()


async def test_a_block_is_broken_off_by_an_event_and_fails_by_itself():
    event = asyncio.Event()
    with pytest.raises(TimeoutError, match="its own"):
        async with doors.until(event):
            raise TimeoutError("its own")
    async with doors.until(event):
        event.set()
        await asyncio.Event().wait()
    async with doors.until(event):
        pass
