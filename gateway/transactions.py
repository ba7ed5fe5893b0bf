"""Transactions of the store, for those whose clients are told where it cannot be reached."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway import errors, store
from gateway.store import Edition, Store, is_away

_TO_WRITE = sa.update(store.files).where(sa.false()).values(filename=store.files.c.filename)
"""Changes nothing, and waits for its turn to."""


async def edition_of(rooms: Store) -> Edition:
    """Raises StoreUnavailable."""
    try:
        return await rooms.edition()
    except (SQLAlchemyError, OSError) as error:
        raise _unavailable(error, is_change=False) from error


@contextlib.asynccontextmanager
async def reading(rooms: Store) -> AsyncIterator[AsyncConnection]:
    """Raises StoreUnavailable."""
    try:
        async with rooms.engine.connect() as connection:
            yield connection
    except (SQLAlchemyError, OSError) as error:
        raise _unavailable(error, is_change=False) from error


@contextlib.asynccontextmanager
async def changing(rooms: Store) -> AsyncIterator[AsyncConnection]:
    """A transaction. Raises StoreUnavailable."""
    try:
        async with rooms.engine.begin() as connection:
            if rooms.database is not None:  # SQLite refuses to write where others have written since it has read
                await connection.execute(_TO_WRITE)
            yield connection
    except (SQLAlchemyError, OSError) as error:
        raise _unavailable(error, is_change=True) from error


def _unavailable(error: SQLAlchemyError | OSError, is_change: bool) -> Exception:
    return errors.StoreUnavailable.for_clients(is_change) if is_away(error) else error
