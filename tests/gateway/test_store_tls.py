"""A PostgreSQL that speaks TLS, asked for in libpq's words, as those who run one for others write its URL."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from gateway import store
from policies import settings
from tests.conftest import command
from tests.gateway.test_transport import certified
from tests.postgres import PostgresServer


@pytest.fixture
def certificate(fragile_postgres: PostgresServer) -> Iterator[Path]:
    """For localhost; the server can read its key."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        place = Path(directory)
        place.chmod(0o755)
        cert, key = certified(place, "localhost")
        key.chmod(0o600)
        if os.geteuid() == 0:
            os.chown(key, *fragile_postgres.owner)
        yield cert


async def is_encrypted(url: str, data_dir: Path) -> bool:
    async with store.opened(settings.Store(data_dir=str(data_dir), url=url)) as rooms, rooms.engine.connect() as asked:
        query = sa.text("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()")
        return bool((await asked.execute(query)).scalar())


async def test_a_url_says_how_sure_a_connection_is_to_be(fragile_postgres, certificate, tmp_path):
    plain = f"{fragile_postgres.url}/postgres"
    named = plain.replace("127.0.0.1", "localhost")
    with pytest.raises(store.StoreError, match=r"cannot be opened: PostgreSQL server .* rejected SSL upgrade"):
        await is_encrypted(f"{plain}?sslmode=require", tmp_path)
    for name, value in {
        "ssl_cert_file": certificate,
        "ssl_key_file": certificate.with_name("key.pem"),
        "ssl": "on",
    }.items():
        await command(fragile_postgres.url, f"ALTER SYSTEM SET {name} = '{value}'")
    await command(fragile_postgres.url, "SELECT pg_reload_conf()")
    trusting = f"sslmode=verify-full&sslrootcert={certificate}"
    assert await is_encrypted(f"{plain}?sslmode=require", tmp_path)
    assert await is_encrypted(f"{named}?{trusting}", tmp_path)
    assert not await is_encrypted(f"{plain}?sslmode=disable", tmp_path)
    with pytest.raises(store.StoreError, match=r"cannot be opened: .*certificate verify failed"):
        await is_encrypted(f"{plain}?{trusting}", tmp_path)


async def test_a_word_that_libpq_does_not_know_either_is_refused_in_a_sentence(fragile_postgres, tmp_path):
    with pytest.raises(store.StoreError, match=r"cannot be opened: .*sslmode"):
        await is_encrypted(f"{fragile_postgres.url}/postgres?sslmode=perhaps", tmp_path)
