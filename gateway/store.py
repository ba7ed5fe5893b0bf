"""Tables and sessions: what outlives the process. Migrations are applied when it is opened.

SQLite in the data directory unless the settings name a PostgreSQL. The data directory belongs to one gateway at a time;
gateways that share a PostgreSQL need one each.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

import migrations
from policies import settings

PRAGMAS = ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON", "busy_timeout = 10000")
"""FULL: a commit is on the disk when it returns, which a ledger promises and WAL's own default does not."""

metadata = sa.MetaData()

install = sa.Table(
    "install",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("key_secret", sa.LargeBinary, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.CheckConstraint("id = 1", name="install_is_one_row"),
)
tenants = sa.Table(
    "tenants",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, nullable=False, unique=True),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("disabled_at", sa.BigInteger),
)
keys = sa.Table(
    "keys",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("tenant_id", sa.Text, sa.ForeignKey("tenants.id"), index=True),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("hash", sa.LargeBinary, nullable=False, unique=True),
    sa.Column("prefix", sa.Text, nullable=False),
    sa.Column("last_four", sa.Text, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("revoked_at", sa.BigInteger),
    sa.CheckConstraint(
        "kind = 'admin' AND tenant_id IS NULL OR kind = 'api' AND tenant_id IS NOT NULL", name="keys_have_their_kind"
    ),
)
ledger = sa.Table(
    "ledger",
    metadata,
    sa.Column("request_id", sa.Text, primary_key=True),
    sa.Column("tenant_id", sa.Text, nullable=False),
    sa.Column("key_id", sa.Text, nullable=False),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("endpoint", sa.Text, nullable=False),
    sa.Column("status", sa.Integer, nullable=False),
    sa.Column("finish_reason", sa.Text),
    sa.Column("num_prompt_tokens", sa.BigInteger, nullable=False),
    sa.Column("num_cached_tokens", sa.BigInteger, nullable=False),
    sa.Column("num_completion_tokens", sa.BigInteger, nullable=False),
    sa.Column("num_sequences", sa.Integer, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("queue_ms", sa.Double, nullable=False),
    sa.Column("ttft_ms", sa.Double),
    sa.Column("duration_ms", sa.Double, nullable=False),
)


class StoreError(Exception):
    """The store cannot be opened; the message is one sentence for the operator."""


class Store:
    """An open store, as ``opened`` yields it."""

    def __init__(self, engine: AsyncEngine, data_dir: Path, database: Path | None, applied: list[str]) -> None:
        self.engine = engine
        self.data_dir = data_dir
        self.database = database
        """SQLite's file; None on PostgreSQL."""
        self.applied = applied
        """The revisions by which opening it brought it up to date."""


def url_of(config: settings.Store) -> sa.URL:
    """Where the database is. Raises StoreError when it is none that we serve."""
    if not config.url:
        return sa.URL.create("sqlite+aiosqlite", database=str(Path(config.data_dir) / "penstock.db"))
    try:
        url = sa.make_url(config.url)
    except ArgumentError:
        raise StoreError("store.url is no database URL, such as postgresql+asyncpg://user@host/database") from None
    if url.drivername not in ("postgresql", "postgres", "postgresql+asyncpg"):
        raise StoreError(f"store.url names {url.drivername}, but only postgresql+asyncpg is served") from None
    return url.set(drivername="postgresql+asyncpg")


@contextlib.asynccontextmanager
async def opened(config: settings.Store) -> AsyncIterator[Store]:
    """The store with its schema up to date. Raises StoreError."""
    url = url_of(config)
    is_sqlite = url.drivername.startswith("sqlite")
    data_dir = Path(config.data_dir)
    with _held(data_dir, exclusively=is_sqlite):
        engine = create_async_engine(url, pool_pre_ping=not is_sqlite)
        if is_sqlite:
            sa.event.listen(engine.sync_engine, "connect", _set_up_sqlite)
            sa.event.listen(engine.sync_engine, "begin", _begin_sqlite)
        try:
            applied = await _migrate(engine, url)
            yield Store(engine, data_dir, Path(url.database or "") if is_sqlite else None, applied)
        finally:
            await engine.dispose()


async def _migrate(engine: AsyncEngine, url: sa.URL) -> list[str]:
    try:
        async with engine.begin() as connection:
            return await connection.run_sync(migrations.upgrade)
    except migrations.Unknown as revision:
        raise StoreError(f"the store was written by a newer Penstock (revision {revision})") from None
    except (SQLAlchemyError, OSError) as error:
        cause = getattr(error, "orig", None) or error
        where = url.render_as_string(hide_password=True)
        raise StoreError(f"the database {where} cannot be opened: {_one_line(cause)}") from None


@contextlib.contextmanager
def _held(data_dir: Path, exclusively: bool) -> Any:
    """The data directory, there and writable; exclusively: nobody else's while this lasts."""
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(data_dir / "penstock.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreError(f"the data directory {data_dir} cannot be written: {error.strerror}") from None
    try:
        if exclusively:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise StoreError(f"the data directory {data_dir} is in use by another Penstock") from None
        yield
    finally:
        os.close(lock)


def _set_up_sqlite(connection: Any, _: object) -> None:
    """No transactions of the driver's own making: it would commit before each change of the schema."""
    connection.isolation_level = None
    for pragma in PRAGMAS:
        connection.execute(f"PRAGMA {pragma}").close()


def _begin_sqlite(connection: sa.Connection) -> None:
    connection.exec_driver_sql("BEGIN")


def _one_line(error: object) -> str:
    return " ".join(str(error).split()) or type(error).__name__
