"""Tenants, keys and policies written straight into a store, as another gateway's administration would write them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from gateway import keys, store
from gateway.store import Store
from policies import settings
from policies.policy import Policy


@contextlib.asynccontextmanager
async def visiting(config: settings.Store) -> AsyncIterator[Store]:
    """The store of a gateway that is running, as somebody else sees it."""
    engine = create_async_engine(store.url_of(config))
    data_dir = Path(config.data_dir)
    try:
        async with contextlib.aclosing(
            Store(engine, data_dir, None if config.url else data_dir / "penstock.db", [])
        ) as rooms:
            yield rooms
    finally:
        await engine.dispose()


async def add_tenant(rooms: Store, name: str, policy: str = "default", **others: Any) -> str:
    """Its id."""
    async with rooms.changing() as (connection, revision):
        organization_id = (await connection.execute(sa.select(store.organizations.c.id))).scalars().first()
        row = {
            "id": store.new_id("ten"),
            "organization_id": organization_id,
            "name": name,
            "policy": policy,
            "metadata": "{}",
            **_born(revision),
            **others,
        }
        await connection.execute(sa.insert(store.tenants), row)
    return str(row["id"])


async def add_key(rooms: Store, tenant_id: str | None, **others: Any) -> str:
    """The key itself; of the administration when there is no tenant. Restrictions are given as what they are."""
    key = keys.new_key() if tenant_id else keys.new_admin_key()
    for name in ("scopes", "networks", "narrowing"):
        if name in others and not isinstance(others[name], str):
            others[name] = msgspec.json.encode(others[name]).decode()
    async with rooms.changing() as (connection, revision):
        secret = (await connection.execute(sa.select(store.install.c.key_secret))).scalar_one()
        row = {
            "id": store.new_id("key"),
            "tenant_id": tenant_id,
            "kind": "api" if tenant_id else "admin",
            "role": None if tenant_id else "owner",
            "name": "test",
            **msgspec.structs.asdict(keys.kept(secret, key)),
            **_born(revision),
            **others,
        }
        await connection.execute(sa.insert(store.keys), row)
    return key


async def add_version(rooms: Store, name: str, document: Policy | Mapping[str, Any], version: int = 1) -> None:
    """It is the one that counts from now on."""
    async with rooms.changing() as (connection, revision):
        head = {"current_version": version, "revision": revision}
        if version == 1:
            await connection.execute(sa.insert(store.policy_heads), {"name": name, **head})
        else:
            changed = sa.update(store.policy_heads).where(store.policy_heads.c.name == name)
            await connection.execute(changed.values(head))
        row = {
            "name": name,
            "version": version,
            "document": msgspec.json.encode(document).decode(),
            "created_at": int(time.time()),
            "created_by": "test",
            "note": "",
        }
        await connection.execute(sa.insert(store.policies), row)


async def change(rooms: Store, table: sa.Table, id: str, **values: Any) -> None:
    """Of one row."""
    async with rooms.changing() as (connection, revision):
        changed = sa.update(table).where(table.c.id == id)
        await connection.execute(changed.values(revision=revision, version=table.c.version + 1, **values))


def _born(revision: int) -> dict[str, int]:
    return {"created_at": int(time.time()), "version": 1, "revision": revision}
