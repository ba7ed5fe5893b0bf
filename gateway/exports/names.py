"""What tenants are called, for those who read an export: as at the end of its period, whatever became of them later."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway import store
from gateway.exports import BadOrder

_KIND = "tenant"


class _Named(msgspec.Struct):
    name: str = ""


class Names:
    """By id; of those that ever were."""

    def __init__(self, now: dict[str, str], then: dict[str, str]) -> None:
        self._now = now
        self._then = {**now, **then}

    @classmethod
    async def read(cls, connection: AsyncConnection, until: int) -> Names:
        """``until``: Unix seconds. Raises what the database raises."""
        now = {
            row.id: row.name for row in await connection.execute(sa.select(store.tenants.c.id, store.tenants.c.name))
        }
        columns = store.audit_log.c
        later = (
            sa.select(columns.object_id, columns.before)
            .where(columns.object_kind == _KIND, columns.at >= until, columns.before.is_not(None))
            .order_by(columns.id.desc())  # the first change after the period has the last word
        )
        then = {
            id: msgspec.json.decode(before, type=_Named).name
            for id, before in await connection.execute(later)
            if before
        }
        return cls(now, then)

    def of(self, tenant_id: str) -> str:
        """Empty: nobody knows."""
        return self._then.get(tenant_id, "")

    def ids_of(self, tenants: Sequence[str]) -> tuple[str, ...]:
        """Of tenants that are named by their ids or by their names of now. Raises BadOrder for one that is not
        there."""
        by_name = {name: id for id, name in self._now.items()}
        ids = set()
        for tenant in tenants:
            id = tenant if tenant in self._now else by_name.get(tenant)
            if id is None:
                raise BadOrder("tenant", f"is {tenant!r}, and there is no such tenant")
            ids.add(id)
        return tuple(sorted(ids))
