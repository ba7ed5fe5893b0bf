"""The first start: an empty store gets its secret, a tenant, an API key and an admin key, which a file keeps."""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway import keys, store
from gateway.store import Store, StoreError

log = logging.getLogger(__name__)

FILE = "bootstrap.env"
API_KEY, ADMIN_KEY = "PENSTOCK_API_KEY", "PENSTOCK_ADMIN_KEY"
TENANT = "default"


class Born(msgspec.Struct, frozen=True):
    """What the first start made."""

    path: Path
    made: dict[str, str]
    """The keys that were drawn here, by name; not those that the environment gave."""


async def bootstrap(rooms: Store, environ: Mapping[str, str]) -> Born | None:
    """Fills an empty store; None when it is not empty. Raises StoreError.

    Keys named in the environment are used as they are. The file is written before the store is, so that no start is the
    first one whose keys nobody has seen.
    """
    async with rooms.engine.begin() as connection:
        installed = (await connection.execute(sa.select(store.install.c.key_secret))).scalar()
        if installed is not None:
            await _mention_strangers(connection, installed, environ)
            return None
        now, secret = int(time.time()), keys.new_secret()
        values = {name: environ.get(name) or keys.new_key() for name in (API_KEY, ADMIN_KEY)}
        if values[API_KEY] == values[ADMIN_KEY]:
            raise StoreError(f"{API_KEY} and {ADMIN_KEY} are the same key, but one opens what the other must not")
        path = _write(rooms.data_dir / FILE, values)
        tenant_id = new_id("ten")
        await connection.execute(sa.insert(store.install), {"id": 1, "key_secret": secret, "created_at": now})
        await connection.execute(sa.insert(store.tenants), {"id": tenant_id, "name": TENANT, "created_at": now})
        for name, kind in ((API_KEY, "api"), (ADMIN_KEY, "admin")):
            row = {
                "id": new_id("key"),
                "tenant_id": tenant_id if kind == "api" else None,
                "kind": kind,
                "name": "bootstrap",
                "created_at": now,
                **msgspec.structs.asdict(keys.kept(secret, values[name])),
            }
            await connection.execute(sa.insert(store.keys), row)
    return Born(path, {name: value for name, value in values.items() if not environ.get(name)})


async def _mention_strangers(connection: AsyncConnection, secret: bytes, environ: Mapping[str, str]) -> None:
    """A key in the environment that opens nothing here is most likely a mistake."""
    for name in (API_KEY, ADMIN_KEY):
        if key := environ.get(name):
            known = sa.select(store.keys.c.id).where(store.keys.c.hash == keys.hash_of(secret, key))
            if (await connection.execute(known)).first() is None:
                log.warning("%s is set but is no key of this store: it is looked at on the first start alone", name)


def new_id(kind: str) -> str:
    """Unique, and in the order of making."""
    return f"{kind}_{time.time_ns() // 1_000_000:011x}{uuid.uuid4().hex[:13]}"


def _write(path: Path, values: Mapping[str, str]) -> Path:
    """For its owner alone, and whole or not at all."""
    draft = path.with_suffix(".new")
    try:
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.writelines(f"{name}={value}\n" for name, value in values.items())
        draft.replace(path)
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}") from None
    return path
