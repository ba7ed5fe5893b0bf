"""A gateway opens its doors when it has met the workers that run elsewhere, or has waited for them long enough."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from gateway import app, doors, meeting
from policies import settings
from policies.upstreams.terms import Upstream
from tests.builders import PATIENCE_S, until
from tests.gateway.conftest import ADMIN_KEY, KEY
from tests.gateway.peer import Peer
from tests.gateway.texts import model_directory

FAR = Upstream(name="far-1", model="far", url="http://127.0.0.1:9/v1")
"""Nobody asks it anything."""


@contextlib.asynccontextmanager
async def asking(tmp_path: Path, data_dir: Path) -> AsyncIterator[asyncio.Task[Any]]:
    """Whether a gateway is ready, from its beginning on, whose model "demo" has a worker at ``worker.socket``."""
    config = settings.Settings(
        server=settings.Server(port=0),
        store=settings.Store(data_dir=str(data_dir)),
        workers=settings.Workers(restart_backoff_s=0.01, max_restart_backoff_s=0.02),
        models={
            "demo": settings.Model(
                source=str(model_directory(tmp_path / "model")),
                replicas=0,
                addresses=(f"unix:{tmp_path / 'worker.socket'}",),
            )
        },
        upstreams=(FAR,),
    )
    environ = {"PENSTOCK_API_KEY": KEY, "PENSTOCK_ADMIN_KEY": ADMIN_KEY}
    (bound, *_), is_asked = doors.listen(config.server), asyncio.Event()

    async def ask() -> tuple[int, dict[str, Any]]:
        async with aiohttp.ClientSession() as session, session.get(f"{doors.url_of(config.server, bound)}/readyz") as a:
            return a.status, await a.json()

    async def serve() -> None:
        async with app.opened(config, environ, lambda line: None, doors.Doors(), [bound]):
            await is_asked.wait()

    with bound:
        serving, answered = asyncio.create_task(serve()), asyncio.create_task(ask())
        try:
            async with asyncio.timeout(PATIENCE_S):
                yield answered
        finally:
            is_asked.set()
            await serving


async def test_nobody_is_let_in_before_workers_elsewhere_are_met(tmp_path, data_dir, monkeypatch, caplog):
    monkeypatch.setattr(meeting, "MEET_S", PATIENCE_S)
    peer = Peer()
    async with asking(tmp_path, data_dir) as answered:
        await until(lambda: caplog.text.count("cannot be reached") >= 5)
        assert not answered.done()
        await peer.listen(tmp_path / "worker.socket")
        models = {"demo": "ready", "far": "ready"}
        assert await answered == (200, {"status": "ready", "models": models})
        await peer.close()


async def test_workers_that_are_away_are_not_waited_for_any_longer(tmp_path, data_dir, monkeypatch):
    monkeypatch.setattr(meeting, "MEET_S", 0.05)
    async with asking(tmp_path, data_dir) as answered:
        models = {"demo": "starting", "far": "ready"}
        assert await answered == (200, {"status": "ready", "models": models})
