"""The first start: an empty store gets its secret, an organization, a tenant, an API key and an admin key, which a file
keeps; and every start: policies, prices and adapters of the settings that the store has never had are made in it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway import keys, store
from gateway.adapters import new_adapter_id
from gateway.store import Store, StoreError, new_id
from policies import settings
from policies.policy import Policy
from policies.pricelist import Proposed, Terms

log = logging.getLogger(__name__)

FILE = "bootstrap.env"
API_KEY, ADMIN_KEY = "PENSTOCK_API_KEY", "PENSTOCK_ADMIN_KEY"
ORGANIZATION = TENANT = POLICY = "default"
BY_SETTINGS = "config.toml"
"""Who made what the settings say."""


class Born(msgspec.Struct, frozen=True):
    """What the first start made."""

    path: Path
    made: dict[str, str]
    """The keys that were drawn here, by name; not those that the environment gave."""


async def bootstrap(
    rooms: Store,
    environ: Mapping[str, str],
    seeds: Mapping[str, Policy] | None = None,
    prices: Sequence[Proposed] = (),
    currency: str = settings.Billing().currency,
    models: Mapping[str, settings.Model] | None = None,
) -> Born | None:
    """Fills an empty store; None when it is not empty. Raises StoreError.

    Keys named in the environment are used as they are. The file is written before the store is, so that no start is the
    first one whose keys nobody has seen. ``seeds``: the settings' policies; ``currency``: of all prices; ``models``:
    the settings', for their adapters.
    """
    async with rooms.changing() as (connection, revision):
        await _seed(connection, {POLICY: Policy(), **(seeds or {})}, revision)
        await _list_prices(connection, prices, currency, revision)
        await _seed_adapters(connection, models or {}, revision)
        installed = (await connection.execute(sa.select(store.install.c.key_secret))).scalar()
        if installed is not None:
            await _mention_strangers(connection, installed, environ)
            return None
        now, secret = int(time.time()), keys.new_secret()
        values = {
            API_KEY: environ.get(API_KEY) or keys.new_key(),
            ADMIN_KEY: environ.get(ADMIN_KEY) or keys.new_admin_key(),
        }
        for name, value in values.items():
            if " " in value or not (value.isascii() and value.isprintable()):
                raise StoreError(f"{name} has characters that no client can send, such as a blank or the end of a line")
        if values[API_KEY] == values[ADMIN_KEY]:
            raise StoreError(f"{API_KEY} and {ADMIN_KEY} are the same key, but one opens what the other must not")
        path = _write(rooms.data_dir / FILE, values)
        born = {"created_at": now, "version": 1, "revision": revision}
        organization = {"id": new_id("org"), "name": ORGANIZATION, **born}
        tenant = {
            "id": new_id("ten"),
            "organization_id": organization["id"],
            "name": TENANT,
            "policy": POLICY,
            "metadata": "{}",
            **born,
        }
        await connection.execute(sa.insert(store.install), {"id": 1, "key_secret": secret, "created_at": now})
        await connection.execute(sa.insert(store.organizations), organization)
        await connection.execute(sa.insert(store.tenants), tenant)
        for name, kind in ((API_KEY, "api"), (ADMIN_KEY, "admin")):
            row = {
                "id": new_id("key"),
                "tenant_id": tenant["id"] if kind == "api" else None,
                "kind": kind,
                "role": "owner" if kind == "admin" else None,
                "name": "bootstrap",
                **msgspec.structs.asdict(keys.kept(secret, values[name])),
                **born,
            }
            await connection.execute(sa.insert(store.keys), row)
    return Born(path, {name: value for name, value in values.items() if not environ.get(name)})


async def _seed(connection: AsyncConnection, seeds: Mapping[str, Policy], revision: int) -> None:
    """Those of which no version was ever written."""
    heads = {row.name: row for row in await connection.execute(sa.select(store.policy_heads))}
    for name, policy in seeds.items():
        if name in heads and heads[name].current_version:
            continue
        head = {"current_version": 1, "revision": revision}
        if name in heads:
            renewed = sa.update(store.policy_heads).where(store.policy_heads.c.name == name)
            await connection.execute(renewed.values(head))
        else:
            await connection.execute(sa.insert(store.policy_heads), {"name": name, **head})
        version = {
            "name": name,
            "version": 1,
            "document": msgspec.json.encode(policy).decode(),
            "created_at": int(time.time()),
            "created_by": BY_SETTINGS,
            "note": "",
        }
        await connection.execute(sa.insert(store.policies), version)


class _Kept(msgspec.Struct):
    """Of a price's document, whatever else it says."""

    currency: str


async def _list_prices(connection: AsyncConnection, prices: Sequence[Proposed], currency: str, revision: int) -> None:
    """Those whose model and class the list has never had. Raises StoreError when the list is in another currency."""
    columns = store.prices.c
    newest = (await connection.execute(sa.select(store.prices).order_by(columns.version.desc()).limit(1))).first()
    if newest is not None and (kept := msgspec.json.decode(newest.document, type=_Kept).currency) != currency:
        raise StoreError(f"billing.currency is {currency}, but the store's price list is in {kept}")
    places = await connection.execute(sa.select(columns.model, columns.sla_class).distinct())
    known = {(model, sla_class) for model, sla_class in places}
    version = 0 if newest is None else newest.version
    for proposed in prices:
        if (proposed.model, proposed.sla_class) in known:
            continue
        version += 1
        now = int(time.time())
        row = {
            "version": version,
            "model": proposed.model,
            "sla_class": proposed.sla_class,
            "effective_from": now,
            "document": msgspec.json.encode(Terms(currency=currency, price=proposed.price)).decode(),
            "created_at": now,
            "created_by": BY_SETTINGS,
            "note": "",
            "revision": revision,
        }
        await connection.execute(sa.insert(store.prices), row)


async def _seed_adapters(connection: AsyncConnection, models: Mapping[str, settings.Model], revision: int) -> None:
    """Those whose names the store has never had."""
    known = set((await connection.execute(sa.select(store.adapters.c.name))).scalars())
    for model, served in models.items():
        for name, source in served.adapters.items():
            if name in known:
                continue
            row = {
                "name": name,
                "model": model,
                "adapter_id": new_adapter_id(name),
                "source": source,
                "digest": "",
                "rank": 0,
                "num_bytes": 0,
                "loaded_at": int(time.time()),
                "loaded_by": BY_SETTINGS,
                "version": 1,
                "revision": revision,
            }
            await connection.execute(sa.insert(store.adapters), row)


async def _mention_strangers(connection: AsyncConnection, secret: bytes, environ: Mapping[str, str]) -> None:
    """A key in the environment that opens nothing here is most likely a mistake."""
    for name in (API_KEY, ADMIN_KEY):
        if key := environ.get(name):
            known = sa.select(store.keys.c.id).where(store.keys.c.hash == keys.hash_of(secret, key))
            if (await connection.execute(known)).first() is None:
                log.warning("%s is set but is no key of this store: it is looked at on the first start alone", name)


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
