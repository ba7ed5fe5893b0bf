"""INSERT with a word on what becomes of a row that is there already, which each database has in its own way."""

from __future__ import annotations

from typing import Any


def insert_for(dialect: str) -> Any:
    """SQLAlchemy's ``insert`` of this dialect. No dialect is loaded but the store's own."""
    if dialect == "sqlite":
        from sqlalchemy.dialects import sqlite

        return sqlite.insert
    from sqlalchemy.dialects import postgresql

    return postgresql.insert
