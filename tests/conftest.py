"""Fixtures: a clock, scripted workers, databases, and ``house``, the whole thing running on a free port."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import msgspec
import pytest
import sqlalchemy as sa
import uvloop
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from sqlalchemy.ext.asyncio import create_async_engine

from gateway import store
from gateway.clock import Clock
from gateway.redis import Redis
from policies import settings
from tests import builders
from tests import house as houses
from tests import postgres as postgresql
from tests import redis as redises

Start = Callable[..., Awaitable[str]]

PATIENT_MS = 5000.0

# As workers have it (worker/process.py). Before torch is imported, for that is when it is read. Threads that spin while
# they wait for one another keep these off the processor where files run side by side.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# How long an example takes is up to the machine.
hypothesis_settings.register_profile(
    "patient", hypothesis_settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
hypothesis_settings.load_profile("patient")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file that takes minutes comes first: last, it would keep a core busy while the others have nothing to do."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


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

    async def start(*options: object, listen: str = "") -> str:
        listen = listen or f"unix:{tmp_path_factory.mktemp('w') / 'socket'}"
        told = builders.worker_settings(listen)
        processes.append(
            await asyncio.create_subprocess_exec(
                *builders.scripted(*options), msgspec.json.encode(told).decode(), cwd=builders.ROOT
            )
        )
        await listening(listen)
        return listen

    yield start
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def listening(address: str) -> None:
    """Until somebody accepts connections there."""
    kind, _, where = address.partition(":")
    async with asyncio.timeout(builders.PATIENCE_S):
        while True:
            try:
                if kind == "unix":
                    _, writer = await asyncio.open_unix_connection(where)
                else:
                    _, writer = await asyncio.open_connection(*where.rsplit(":", 1))
            except OSError:
                await asyncio.sleep(0.01)
            else:
                writer.close()
                return


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """A real one; where there is none, its tests are skipped, except in CI."""
    with started(postgresql) as server:
        yield server.url


@pytest.fixture
def fragile_postgres() -> Iterator[postgresql.PostgresServer]:
    """A real one of the test's own, to be killed or stalled; its database "postgres" is empty."""
    with started(postgresql) as server:
        yield server


@contextlib.contextmanager
def started(kind: ModuleType) -> Iterator[Any]:
    """A server of ``postgresql``'s kind or of ``redises``'."""
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(kind.server())
        except kind.Missing as missing:
            skip(missing)
        yield server


def skip(missing: Exception) -> NoReturn:
    """In CI a test that cannot run is a failure."""
    if os.environ.get("CI") == "true":
        pytest.fail(str(missing))
    pytest.skip(str(missing))


async def command(server: str, text: str) -> None:
    """To a PostgreSQL, outside of any transaction."""
    engine = create_async_engine(f"{server}/postgres", isolation_level="AUTOCOMMIT")
    async with engine.connect() as connection:
        await connection.execute(sa.text(text))
    await engine.dispose()


@contextlib.asynccontextmanager
async def copied(server: str, template: str) -> AsyncIterator[str]:
    """The URL of a database that is like another, and gone afterwards."""
    name = f"test_{uuid.uuid4().hex}"
    await command(server, f"CREATE DATABASE {name} TEMPLATE {template}")
    yield f"{server}/{name}"
    await command(server, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
async def postgres(postgres_server: str) -> AsyncIterator[str]:
    """The URL of an empty database."""
    async with copied(postgres_server, "template1") as url:
        yield url


@pytest.fixture(params=["sqlite", "postgres"])
def new_store(request: pytest.FixtureRequest, tmp_path: Path) -> settings.Store:
    """A store of each kind that nobody has opened yet."""
    url = request.getfixturevalue("postgres") if request.param == "postgres" else ""
    return settings.Store(data_dir=str(tmp_path / "data"), url=url)


async def open_once(config: settings.Store) -> None:
    async with store.opened(config):
        pass


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty store in SQLite, to be copied: that takes a tenth of the time of its migrations."""
    directory = tmp_path_factory.mktemp("migrated")
    uvloop.run(open_once(settings.Store(data_dir=str(directory))))
    return directory / "penstock.db"


@pytest.fixture(scope="session")
def migrated_database(postgres_server: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The name of PostgreSQL's, likewise."""
    config = settings.Store(data_dir=str(tmp_path_factory.mktemp("migrated")), url=f"{postgres_server}/migrated")
    uvloop.run(command(postgres_server, "CREATE DATABASE migrated"))
    uvloop.run(open_once(config))
    return "migrated"


@pytest.fixture
def data_dir(tmp_path: Path, migrated_file: Path) -> Path:
    """A gateway's, with an empty store in SQLite."""
    directory = tmp_path / "data"
    directory.mkdir(mode=0o700)
    shutil.copy(migrated_file, directory)
    return directory


@pytest.fixture
async def migrated_postgres(postgres_server: str, migrated_database: str) -> AsyncIterator[str]:
    """The URL of a database with an empty store."""
    async with copied(postgres_server, migrated_database) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgres"])
def store_settings(request: pytest.FixtureRequest, tmp_path: Path) -> settings.Store:
    """An empty store of each kind."""
    if request.param == "postgres":
        return settings.Store(data_dir=str(tmp_path / "data"), url=request.getfixturevalue("migrated_postgres"))
    return settings.Store(data_dir=str(request.getfixturevalue("data_dir")))


@pytest.fixture(scope="session")
def redis_server() -> Iterator[redises.RedisServer]:
    """A real one; where there is none, its tests are skipped, except in CI. All tests share it, and none stops it."""
    with started(redises) as server:
        yield server


@pytest.fixture
def fragile_redis() -> Iterator[redises.RedisServer]:
    """A real one of the test's own, to be killed or stalled."""
    with started(redises) as server:
        yield server


@pytest.fixture
def redis_settings(redis_server: redises.RedisServer) -> settings.Redis:
    """An empty part of the shared server. (Patient: a busy machine that tests is no Redis that is away.)"""
    return settings.Redis(url=redis_server.url, prefix=f"test:{uuid.uuid4().hex}:", timeout_ms=PATIENT_MS)


@pytest.fixture
async def redis(redis_settings: settings.Redis) -> AsyncIterator[Redis]:
    """A connection to it."""
    opened = Redis(redis_settings, Clock())
    yield opened
    await opened.close()


@pytest.fixture(scope="session")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[houses.House]:
    """The whole thing with the demo model and a real worker; all tests share it, so each leaves it as it was.

    It is deterministic: the demo model's stories go on with one of several names that it finds equally likely, and
    elsewhere the last bits, which are the batch's and the processor's, say with which.
    """
    engine = settings.Engine(device="cpu", deterministic=True, num_threads=1, max_kv_bytes=64 << 20)
    with houses.running(tmp_path_factory.mktemp("house"), models={"demo": settings.Model(engine=engine)}) as house:
        yield house


@pytest.fixture
def start_house(tmp_path: Path) -> Iterator[Callable[..., houses.House]]:
    """``house = start_house("--num-tokens", 3, server=settings.Server(...))``: a scripted worker answers in it."""
    with contextlib.ExitStack() as stack:

        def start(*options: object, **sections: Any) -> houses.House:
            command = builders.scripted(*options)
            return stack.enter_context(houses.running(tmp_path / "data", command, **sections))

        yield start
