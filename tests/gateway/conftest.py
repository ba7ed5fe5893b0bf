"""The real gateway on a free port, with a worker that the test plays itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sqlite3
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import openai
import pytest

from gateway import app, doors, log_level, shelving, store, telemetry
from gateway.house import Gateway
from gateway.text import Text
from policies import settings
from tests import collectors, official
from tests.builders import PATIENCE_S, until, when
from tests.gateway.peer import Peer
from tests.gateway.texts import model_directory

KEY = "sk-of-the-tests"
ADMIN_KEY = "sk-of-the-tests-admin"
NO_AUTHORITIES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For clients of addresses without TLS: to read a bundle of certificates takes longer than most requests."""
HELLO = [{"role": "user", "content": "Hello"}]


@dataclass
class Front:
    """What a client sees of the gateway, and what the test may look at behind it."""

    url: str
    gw: Gateway
    peer: Peer
    http: aiohttp.ClientSession
    client: openai.AsyncOpenAI
    data_dir: Path
    doors: doors.Doors

    @property
    def text(self) -> Text:
        return self.gw.dispatch.text("demo")

    def ids(self, text: str) -> list[int]:
        """The tokens of an answer."""
        return self.text._tokenizer.encode(text, add_special_tokens=False).ids

    async def post(self, path: str, body: object, **headers: str) -> tuple[int, Any, Mapping[str, str]]:
        """Status, body and headers. ``body`` is sent as JSON unless it is bytes."""
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        headers = {"content-type": "application/json", **headers}
        async with self.http.post(self.url + path, data=data, headers=headers) as answer:
            return answer.status, msgspec.json.decode(await answer.read()), answer.headers

    def chat(self, **others: object) -> asyncio.Task[Any]:
        """A chat completion under way, through OpenAI's own client."""
        call: dict[str, Any] = {"model": "demo", "messages": HELLO, **others}
        return asyncio.create_task(self.client.chat.completions.create(**call))

    async def answered(self) -> None:
        """A chat, computed and settled."""
        asked = self.chat()
        submit = await self.peer.submitted()
        self.peer.say(submit, [5, 6])
        self.peer.say(submit, [7, 3], "stop")
        await asked

    def rows(self) -> list[dict[str, Any]]:
        """The ledger."""
        with contextlib.closing(sqlite3.connect(self.data_dir / self._database)) as connection:
            connection.row_factory = sqlite3.Row
            return [dict(row) for row in connection.execute("SELECT * FROM ledger ORDER BY rowid")]

    async def settled(self, num_rows: int) -> list[dict[str, Any]]:
        """The ledger, once it has so many rows."""
        rows = await when(lambda: asyncio.to_thread(self.rows), lambda rows: len(rows) >= num_rows)
        assert len(rows) == num_rows
        return rows

    async def lost(self) -> None:
        """Until the gateway has noticed that its worker is gone."""
        await until(lambda: not any(model.ready for model in self.gw.dispatch.models()))

    @property
    def _database(self) -> str:
        (path,) = self.data_dir.glob("*.db")
        return path.name


OpenFront = Callable[..., AbstractAsyncContextManager[Front]]


@pytest.fixture
def open_front(tmp_path: Path, data_dir: Path) -> OpenFront:
    """``async with open_front(server=..., peer=...)``: a gateway with settings of its own."""

    @contextlib.asynccontextmanager
    async def open_it(
        *,
        peer: Peer | None = None,
        model: dict[str, Any] | None = None,
        send_buffer_bytes: int | None = None,
        environ: Mapping[str, str] | None = None,
        adapters: Mapping[str, str] | None = None,
        **sections: Any,
    ) -> AsyncIterator[Front]:
        peer = peer or Peer()
        source = model_directory(tmp_path / "model", **(model or {}))
        server = msgspec.structs.replace(sections.pop("server", settings.Server()), port=0)
        config = settings.Settings(
            server=server,
            store=sections.pop("store", settings.Store(data_dir=str(data_dir))),
            models={
                "demo": settings.Model(
                    source=str(source),
                    replicas=0,
                    addresses=(await peer.listen(tmp_path / "peer.socket"),),
                    adapters=dict(adapters or {}),
                )
            },
            **sections,
        )
        environ = {"PENSTOCK_API_KEY": KEY, "PENSTOCK_ADMIN_KEY": ADMIN_KEY, **(environ or {})}
        (bound, *_), house_doors = doors.listen(server), doors.Doors()
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(bound)
            if send_buffer_bytes is not None:  # accepted connections inherit it
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
            gw = await stack.enter_async_context(app.opened(config, environ, lambda line: None, house_doors, [bound]))
            async with asyncio.timeout(PATIENCE_S):
                await gw.dispatch.until_ready()
            url = doors.url_of(server, bound)
            http = await stack.enter_async_context(aiohttp.ClientSession(headers={"authorization": f"Bearer {KEY}"}))
            client = official.Client(
                base_url=f"{url}/v1",
                api_key=KEY,
                max_retries=0,
                timeout=PATIENCE_S,
                http_client=openai.DefaultAsyncHttpxClient(verify=NO_AUTHORITIES),
            )
            stack.push_async_callback(client.close)
            stack.push_async_callback(peer.close)
            yield Front(url, gw, peer, http, client, data_dir, house_doors)

    return open_it


@pytest.fixture
async def front(open_front: OpenFront) -> AsyncIterator[Front]:
    async with open_front() as opened:
        yield opened


@pytest.fixture
async def rooms(store_settings: settings.Store) -> AsyncIterator[store.Store]:
    """An empty store of each kind, open."""
    async with store.opened(store_settings) as opened:
        yield opened


@pytest.fixture
def collector() -> Iterator[collectors.Collector]:
    with collectors.by_http() as opened:
        yield opened


@pytest.fixture
def patient_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept is waited for as long as a test waits: where a disk is busy, longer than clients would."""
    monkeypatch.setattr(shelving, "PATIENCE_S", PATIENCE_S)


@pytest.fixture
def level_afterwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The log is told from the level that it was, afterwards; before, nothing was asked of it, whatever ran here."""
    level, events = logging.root.level, telemetry._events
    monkeypatch.setattr(telemetry, "_usual", "info")
    log_level.ask(None)
    yield
    log_level.ask(None)
    logging.root.setLevel(level)
    telemetry._events = events
