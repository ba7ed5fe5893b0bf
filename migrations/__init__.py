"""The store's schema, one step forward each, applied by Alembic when the gateway starts. A step's file is called by its
revision.

A step is never edited once released; the next one corrects it. There is no way back: a store that a newer Penstock has
migrated is refused by an older one.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, inspect, text

if TYPE_CHECKING:
    from alembic.config import Config

DIRECTORY = Path(__file__).parent
_LOCK = 0x70656E73
"""The advisory lock ("pens") under which gateways that share a PostgreSQL take turns."""


class Unknown(Exception):
    """The store's revision is none of ours: a newer Penstock has been here."""


def upgrade(connection: Connection) -> list[str]:
    """Brings the schema to the newest revision within the connection's transaction; the revisions that were applied.

    Raises Unknown.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
    if missing := missing_of(connection):
        # Imported here: it takes a tenth of a start, and hardly any start finds something to do.
        from alembic import command

        command.upgrade(config_of(connection), "head")
    return missing


def missing_of(connection: Connection) -> list[str]:
    """The revisions by which the schema is behind. Raises Unknown."""
    revisions = sorted(path.name.partition("_")[0] for path in DIRECTORY.glob("[0-9]*_*.py"))
    current = _current(connection)
    if current is not None and current not in revisions:
        raise Unknown(current)
    return revisions[revisions.index(current) + 1 :] if current is not None else revisions


def _current(connection: Connection) -> str | None:
    """Where Alembic left the schema; None: it has never been here."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    revision: str | None = connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one_or_none()
    return revision


def config_of(connection: Connection) -> Config:
    """What Alembic needs to know."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(DIRECTORY / "environment").replace("%", "%%"))
    config.set_main_option("version_locations", str(DIRECTORY).replace("%", "%%"))
    config.set_main_option("path_separator", "newline")
    config.attributes["connection"] = connection
    return config
