"""The whole gateway on a free port, on a thread and a loop of its own, and the worker processes it started."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import openai
import sqlalchemy as sa
import uvloop
from sqlalchemy.ext.asyncio import create_async_engine

from gateway import app, doors, store
from gateway.bootstrap import ADMIN_KEY, API_KEY
from gateway.doors import Doors
from gateway.house import Gateway
from gateway.launcher import COMMAND, Launcher
from policies import settings
from tests import official
from tests.builders import PATIENCE_S, quiet, until

T = TypeVar("T")

KEYS = {API_KEY: "sk-penstock-test-key", ADMIN_KEY: "sk-penstock-test-admin-key"}


class House:
    """What a test sees of it: a URL and a key, what it holds at the moment, and its ledger."""

    def __init__(self, config: settings.Settings, gw: Gateway, house_doors: Doors, url: str) -> None:
        self.config = config
        self.gw = gw
        self.url = url
        self.key = KEYS[API_KEY]
        self.admin_key = KEYS[ADMIN_KEY]
        self.model = next(iter(config.models))
        self._doors = house_doors
        self._loop = asyncio.get_running_loop()

    @contextlib.asynccontextmanager
    async def client(self, key: str | None = None, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
        """OpenAI's own; it does not try again unless told to."""
        client = official.Client(
            base_url=f"{self.url}/v1", api_key=key or self.key, **{"max_retries": 0, "timeout": PATIENCE_S, **options}
        )
        async with client:
            yield client

    @contextlib.asynccontextmanager
    async def http(self, key: str | None = None) -> AsyncIterator[aiohttp.ClientSession]:
        """Paths are relative to the server's root: ``session.post("/v1/completions", json=...)``."""
        headers = {"authorization": f"Bearer {key or self.key}"}
        timeout = aiohttp.ClientTimeout(PATIENCE_S)
        async with aiohttp.ClientSession(self.url, headers=headers, timeout=timeout) as session:
            yield session

    @contextlib.asynccontextmanager
    async def stream(self, prompt: str, **parameters: Any) -> AsyncIterator[Stream]:
        """A streamed chat completion; leaving hangs up."""
        body = {"model": self.model, "messages": [{"role": "user", "content": prompt}], "stream": True, **parameters}
        async with self.http() as session, session.post("/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
            yield Stream(response)

    async def quiet(self) -> None:
        """Until no request is inside and the workers report, after that, that nothing is left with them."""
        await until(lambda: not self._doors.num_inside)
        await quiet(self.gw.dispatch)

    async def num_used_blocks(self) -> int:
        """KV blocks that sequences hold, by the workers' last report."""
        return sum(worker.stats.num_used_blocks for worker in self.gw.dispatch.workers() if worker.stats)

    async def num_open_requests(self) -> int:
        return self._doors.num_inside

    async def ledger_rows(self, **values: Any) -> list[sa.Row[Any]]:
        """What is durable, oldest first; ``status=200`` and the like choose some."""
        query = sa.select(store.ledger).filter_by(**values).order_by(store.ledger.c.created_at)
        engine = create_async_engine(store.url_of(self.config.store))
        try:
            async with engine.connect() as connection:
                return list((await connection.execute(query)).all())
        finally:
            await engine.dispose()

    async def inside(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs it on the house's own loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


class Stream:
    """Events of one answer as they come."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response

    async def events(self) -> AsyncIterator[Any]:
        """Each event's JSON, up to [DONE]."""
        async for line in self.response.content:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                yield json.loads(line[6:])

    async def take(self, num_events: int) -> list[Any]:
        taken: list[Any] = []
        async for event in self.events():
            taken.append(event)
            if len(taken) == num_events:
                break
        return taken

    async def text(self) -> str:
        """What is left of the first choice's answer."""
        return "".join(
            [
                choice["delta"].get("content") or ""
                async for event in self.events()
                for choice in event["choices"]
                if choice["index"] == 0
            ]
        )


@contextlib.contextmanager
def running(data_dir: Path, command: Sequence[str] = COMMAND, **sections: Any) -> Iterator[House]:
    """A house whose first model can answer: the demo, unless told otherwise.

    ``command`` starts a worker. ``sections`` are the settings', such as ``server=settings.Server(stall_s=1)``.
    """
    sections = {"store": settings.Store(data_dir=str(data_dir)), "models": {"demo": settings.Model()}, **sections}
    config = settings.Settings(**sections)
    opened: list[House | BaseException] = []
    leaving: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
    told = threading.Event()

    async def live() -> None:
        house_doors = Doors()
        gone = asyncio.Event()
        leaving.append((asyncio.get_running_loop(), gone))
        sockets = doors.listen(settings.Server(host="127.0.0.1", port=0))
        with contextlib.ExitStack() as stack:
            for bound in sockets:
                stack.enter_context(bound)
            async with app.opened(config, KEYS, lambda line: None, house_doors, sockets, Launcher(command)) as gw:
                await asyncio.wait_for(gw.dispatch.until_ready(), PATIENCE_S)
                house = House(config, gw, house_doors, doors.url_of(settings.Server(), sockets[0]))
                opened.append(house)
                told.set()
                await gone.wait()

    def run() -> None:
        try:
            uvloop.run(live())
        except BaseException as error:
            opened.append(error)
        told.set()

    level = logging.root.level  # which the administration may change
    thread = threading.Thread(target=run, name="house")
    thread.start()
    told.wait()
    try:
        if isinstance(opened[0], BaseException):
            raise opened[0]
        yield opened[0]
    finally:
        ((loop, gone),) = leaving
        with contextlib.suppress(RuntimeError):  # it has ended by itself
            loop.call_soon_threadsafe(gone.set)
        thread.join()
        logging.root.setLevel(level)
        for failure in opened[1:]:
            raise failure
