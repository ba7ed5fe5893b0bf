"""Tables and sessions: what outlives the process. Migrations are applied when it is opened.

SQLite in the data directory unless the settings name a PostgreSQL. The data directory belongs to one gateway at a time;
gateways that share a PostgreSQL need one each.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

import migrations
from gateway.background import within
from gateway.store import sqlite
from gateway.store.bulk import batches, files, upload_parts, uploads
from gateway.store.chats import chat_labels, chats
from gateway.store.conversations import conversation_items, conversations
from gateway.store.edition import Edition, InPostgres, InSqlite
from gateway.store.responses import response_events, responses
from gateway.store.sessions import sessions
from gateway.store.tables import (
    adapters,
    audit_log,
    changes,
    idempotency,
    install,
    keys,
    ledger,
    ledger_chains,
    ledger_closings,
    ledger_cursors,
    ledger_days,
    ledger_repeats,
    metadata,
    organizations,
    policies,
    policy_heads,
    posted_events,
    prices,
    service_accounts,
    sink_failures,
    sink_skips,
    sink_states,
    tenants,
    upstreams,
    usage,
)
from policies import settings

__all__ = [
    "PRAGMAS",
    "Edition",
    "Store",
    "StoreError",
    "adapters",
    "audit_log",
    "batches",
    "begun",
    "beside",
    "bump",
    "cause_of",
    "changes",
    "chat_labels",
    "chats",
    "conversation_items",
    "conversations",
    "driven",
    "files",
    "idempotency",
    "install",
    "is_away",
    "keys",
    "ledger",
    "ledger_chains",
    "ledger_closings",
    "ledger_cursors",
    "ledger_days",
    "ledger_repeats",
    "metadata",
    "named",
    "new_id",
    "opened",
    "organizations",
    "policies",
    "policy_heads",
    "posted_events",
    "prices",
    "response_events",
    "responses",
    "service_accounts",
    "sessions",
    "shown",
    "sink_failures",
    "sink_skips",
    "sink_states",
    "tenants",
    "upload_parts",
    "uploads",
    "upstreams",
    "url_of",
    "usage",
]

PRAGMAS = ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON", "busy_timeout = 10000")
"""FULL: a commit is on the disk when it returns, which a ledger promises and WAL's own default does not."""


SETTING = "store.url (PENSTOCK_STORE__URL)"
"""By both its names, as it may come from either."""


AWAY_STATES = ("08", "25006", "28", "3D", "53", "57")
"""How PostgreSQL's codes begin (appendix A of its manual) for what is wrong with it rather than with a statement: no
connection, read-only, not let in, no such database, too much asked of it, going down or coming up."""


CLOSING_S = 2.0
"""How long all connections together may take to be closed."""


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
        self._kept: InPostgres | InSqlite | None = None

    async def edition(self) -> Edition:
        """As of now. Raises what the database raises."""
        if self._kept is None:
            self._kept = InPostgres(self.engine) if self.database is None else InSqlite(self.database)
        return await self._kept.edition()

    async def aclose(self) -> None:
        """What ``edition`` has kept open."""
        if self._kept is not None:
            await self._kept.close()

    @contextlib.asynccontextmanager
    async def changing(self) -> AsyncIterator[tuple[AsyncConnection, int]]:
        """A transaction that changes tenants, keys or policies, and the revision that its rows carry. It commits on
        leaving, or changes nothing when an exception leaves it."""
        async with self.engine.begin() as connection:
            yield connection, await bump(connection)


@contextlib.contextmanager
def begun(rooms: Store) -> Iterator[None]:
    """For what is read and written at a start: raises StoreError where the database cannot do that, as on a full disk,
    or where it is a standby."""
    try:
        yield
    except SQLAlchemyError as error:
        if not is_away(error):
            raise
        raise StoreError(f"the {named(rooms.engine.url)} cannot be used: {cause_of(error)}") from None


def is_away(error: SQLAlchemyError | OSError) -> bool:
    """The database cannot be reached, or not now; otherwise something is wrong with what it was asked."""
    if isinstance(error, DBAPIError) and not isinstance(error, OperationalError | InterfaceError):
        state = getattr(error.orig, "sqlstate", None) or ""
        return error.connection_invalidated or state.startswith(AWAY_STATES)
    return isinstance(error, OSError | OperationalError | InterfaceError | PoolTimeoutError)


def cause_of(error: BaseException) -> str:
    """What went wrong with the database, in one line: the driver's words, or the error's name where it has none."""
    cause = getattr(error, "orig", None) or error
    return " ".join(str(cause).split()) or type(cause).__name__


async def bump(connection: AsyncConnection) -> int:
    """A new revision, for the rows that this transaction changes.

    It comes first in the transaction: whoever else changes something waits here until this one has committed, so
    revisions become visible in their order, and SQLite never finds that what was read before has changed meanwhile.
    """
    counted = sa.update(changes).values(revision=changes.c.revision + 1).returning(changes.c.revision)
    revision: int = (await connection.execute(counted)).scalar_one()
    return revision


_last_ns = 0


def new_id(kind: str) -> str:
    """Unique, and in the order of making: milliseconds, the nanoseconds in them, and chance."""
    global _last_ns
    _last_ns = max(time.time_ns(), _last_ns + 1)
    ms, ns = divmod(_last_ns, 1_000_000)
    return f"{kind}_{ms:011x}{ns:05x}{secrets.token_hex(4)}"


def url_of(config: settings.Store) -> sa.URL:
    """Where the database is. Raises StoreError when it is none that we serve."""
    if not config.url:
        return sa.URL.create("sqlite+aiosqlite", database=str(Path(config.data_dir) / "penstock.db"))
    try:
        url = sa.make_url(config.url)
        is_served = url.drivername in ("postgresql", "postgres", "postgresql+asyncpg")
        if is_served:
            url = url.set(drivername="postgresql+asyncpg")
            url.get_dialect()().create_connect_args(url)
    except (ArgumentError, ValueError):  # the second: of a port that is none
        raise _no_url() from None
    if not is_served:
        raise StoreError(f"{SETTING} names {url.drivername}, but only postgresql is served")
    if "@" in (url.host or ""):  # the end of a password
        raise _no_url()
    return url


def _no_url() -> StoreError:
    return StoreError(
        f"{SETTING} is no database URL, such as postgresql+asyncpg://user@host/database; a password with letters such"
        " as @, : or / can be in PGPASSWORD instead"
    )


def shown(url: sa.URL) -> str:
    """As it may be told to anybody."""
    secret = {name: "***" for name in url.query if "password" in name}
    return url.update_query_dict(secret).render_as_string(hide_password=True).replace("%2A", "*")


def named(url: sa.URL) -> str:
    """The database as it may be told to anybody, with the setting that names it."""
    return f"database {shown(url)}" if _is_sqlite(url) else f"database {shown(url)} of {SETTING}"


@contextlib.asynccontextmanager
async def opened(config: settings.Store) -> AsyncIterator[Store]:
    """The store with its schema up to date. Raises StoreError."""
    url, data_dir = url_of(config), Path(config.data_dir)
    with _held(data_dir, _database(url)):
        async with _engine_of(url) as engine:
            applied = await _of_schema(engine, url, migrations.upgrade)
            async with contextlib.aclosing(Store(engine, data_dir, _database(url), applied)) as rooms:
                yield rooms


@contextlib.asynccontextmanager
async def beside(config: settings.Store) -> AsyncIterator[Store]:
    """The store, which a gateway may have open at the same time: nothing is migrated, and nobody kept out. Raises
    StoreError."""
    url, data_dir = url_of(config), Path(config.data_dir)
    if (database := _database(url)) is not None and not database.exists():
        raise StoreError(f"there is no store in {data_dir}")
    async with _engine_of(url) as engine:
        if await _of_schema(engine, url, migrations.missing_of):
            raise StoreError("the store is an older Penstock's; `penstock migrate` brings it up to date")
        async with contextlib.aclosing(Store(engine, data_dir, database, [])) as rooms:
            yield rooms


def _is_sqlite(url: sa.URL) -> bool:
    return url.drivername.startswith("sqlite")


def _database(url: sa.URL) -> Path | None:
    return Path(url.database or "") if _is_sqlite(url) else None


def driven(url: sa.URL) -> dict[str, Any]:
    """What an engine is made of: connections that are closed in time. What libpq knows of TLS (sslmode, sslrootcert and
    their like), as URLs of PostgreSQL often have it, is for the driver, which reads it in a URL of its own."""
    if _is_sqlite(url):
        return {"url": url, "connect_args": {"async_creator_fn": sqlite.connect}}
    from gateway.store import postgres  # with its driver

    of_tls = {name: value for name, value in url.query.items() if name.startswith("ssl") and name != "ssl"}
    told = {"dsn": f"postgresql://?{urlencode(of_tls, doseq=True)}"} if of_tls else {}
    return {
        "url": url.difference_update_query(of_tls),
        "connect_args": {"connection_class": postgres.Connection, **told},
    }


@contextlib.asynccontextmanager
async def _engine_of(url: sa.URL) -> AsyncIterator[AsyncEngine]:
    is_sqlite = _is_sqlite(url)
    # What a statement that failed was given, an answer to be kept for one, is nothing for the log.
    engine = create_async_engine(**driven(url), pool_pre_ping=not is_sqlite, hide_parameters=True)
    if is_sqlite:
        sa.event.listen(engine.sync_engine, "connect", _set_up_sqlite)
        sa.event.listen(engine.sync_engine, "begin", _begin_sqlite)
    try:
        yield engine
    finally:
        await within(CLOSING_S, engine.dispose(), "the store")


async def _of_schema(engine: AsyncEngine, url: sa.URL, work: Callable[[sa.Connection], list[str]]) -> list[str]:
    try:
        async with contextlib.AsyncExitStack() as stack:
            try:
                connection = await stack.enter_async_context(engine.begin())
            except (TypeError, ValueError) as error:  # the driver's, of an option in the URL
                raise StoreError(f"the {named(url)} cannot be opened: {cause_of(error)}") from None
            return await connection.run_sync(work)
    except migrations.Unknown as revision:
        raise StoreError(f"the store was written by a newer Penstock (revision {revision})") from None
    except (SQLAlchemyError, OSError) as error:
        why = "it does not answer" if isinstance(error, TimeoutError) else cause_of(error)
        raise StoreError(f"the {named(url)} cannot be opened: {why}") from None


@contextlib.contextmanager
def _held(data_dir: Path, database: Path | None) -> Any:
    """The data directory, there and writable; with a ``database`` in it nobody else's while this lasts."""
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(data_dir / "penstock.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise StoreError(f"store.data_dir (--data-dir) {data_dir} is no directory, but a file") from None
    except OSError as error:
        raise StoreError(f"the data directory {data_dir} cannot be written: {error.strerror}") from None
    try:
        if database is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise StoreError(
                    f"the data directory {data_dir} is in use by another Penstock; each needs its own (--data-dir)"
                ) from None
            try:
                sqlite.private(database)
            except OSError as error:
                raise StoreError(f"the database {database} cannot be opened: {error.strerror}") from None
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
