"""Bearer key to tenant: one keyed hash and one look-up in memory; no database on the way of a request."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import sqlalchemy as sa
from aiohttp import web

from gateway import keys, store
from gateway.errors import InvalidApiKey
from gateway.store import Store


class Caller(msgspec.Struct, frozen=True):
    """Who asks, and with which key."""

    tenant_id: str
    key_id: str


class Auth:
    """Every API key that is valid. Admin keys belong to no tenant and open nothing here."""

    def __init__(self, secret: bytes, callers: Mapping[bytes, Caller]) -> None:
        """``callers`` by the hash of their key under ``secret``."""
        self._secret = secret
        self._callers = callers

    @classmethod
    async def load(cls, rooms: Store) -> Auth:
        """The keys that are neither revoked nor of a disabled tenant."""
        query = (
            sa.select(store.keys.c.hash, store.keys.c.tenant_id, store.keys.c.id)
            .join(store.tenants)
            .where(store.keys.c.kind == "api", store.keys.c.revoked_at.is_(None), store.tenants.c.disabled_at.is_(None))
        )
        async with rooms.engine.connect() as connection:
            secret = (await connection.execute(sa.select(store.install.c.key_secret))).scalar_one()
            rows = await connection.execute(query)
            return cls(secret, {row.hash: Caller(row.tenant_id, row.id) for row in rows})

    async def tenant_of(self, request: web.Request) -> Caller:
        """Raises InvalidApiKey."""
        header = request.headers.get("authorization", "")
        scheme, _, key = header.partition(" ")
        if scheme.lower() != "bearer" or not (key := key.strip()):
            raise InvalidApiKey(
                "You didn't provide an API key. Send it in the Authorization header: 'Authorization: Bearer YOUR_KEY'."
            )
        caller = self.caller(key)
        if caller is None:
            raise InvalidApiKey("Incorrect API key provided.")
        return caller

    def caller(self, key: str) -> Caller | None:
        return self._callers.get(keys.hash_of(self._secret, key))
