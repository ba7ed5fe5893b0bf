"""The store's schema, one step forward each, applied by Alembic when the gateway starts.

A step is never edited once released; the next one corrects it. There is no way back: a store that a newer Penstock has
migrated is refused by an older one.
"""

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

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
        command.upgrade(config_of(connection), "head")
    return missing


def missing_of(connection: Connection) -> list[str]:
    """The revisions by which the schema is behind. Raises Unknown."""
    scripts = ScriptDirectory.from_config(config_of(connection))
    revisions = [script.revision for script in scripts.walk_revisions()][::-1]
    current = MigrationContext.configure(connection).get_current_revision()
    if current is not None and current not in revisions:
        raise Unknown(current)
    return revisions[revisions.index(current) + 1 :] if current is not None else revisions


def config_of(connection: Connection) -> Config:
    """What Alembic needs to know."""
    config = Config()
    config.set_main_option("script_location", str(DIRECTORY / "environment").replace("%", "%%"))
    config.set_main_option("version_locations", str(DIRECTORY).replace("%", "%%"))
    config.set_main_option("path_separator", "newline")
    config.attributes["connection"] = connection
    return config
