"""An owner's key for whoever has the store itself, where none is at hand: all that there were are lost."""

from __future__ import annotations

import time

import msgspec
import sqlalchemy as sa

from gateway import keys, store
from gateway.admin.admin_keys import AdminKey, MadeAdminKey
from gateway.store import Store, StoreError, new_id

NAME, ACTOR = "recovery", "penstock admin-key"


async def owner_key(rooms: Store) -> MadeAdminKey:
    """A new one, with a line in the audit log; those that there are stay as they are. Raises StoreError, and what the
    database raises."""
    async with rooms.changing() as (connection, revision):
        secret = (await connection.execute(sa.select(store.install.c.key_secret))).scalar()
        if secret is None:
            raise StoreError("the store is empty: the first start of `penstock serve` makes its keys")
        now, key = int(time.time()), keys.new_admin_key()
        trace = keys.kept(secret, key)
        kept = AdminKey(
            id=new_id("key"),
            name=NAME,
            role="owner",
            prefix=trace.prefix,
            last_four=trace.last_four,
            networks=(),
            rotated_from=None,
            created_at=now,
            expires_at=None,
            revoked_at=None,
            version=1,
        )
        row = msgspec.structs.asdict(kept) | {"networks": None, "kind": "admin", "hash": trace.hash}
        await connection.execute(sa.insert(store.keys), row | {"revision": revision})
        line = {
            "id": new_id("aud"),
            "at": now,
            "actor_key_id": "",
            "actor_name": ACTOR,
            "action": "admin_key.created",
            "object_kind": "admin_key",
            "object_id": kept.id,
            "before": None,
            "after": msgspec.json.encode(kept).decode(),
            "request_id": "",
            "address": "",
        }
        await connection.execute(sa.insert(store.audit_log), line)
    return MadeAdminKey(**msgspec.structs.asdict(kept), key=key)
