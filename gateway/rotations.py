"""Which keys were rotated into which: they spend one budget."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway import store

CHUNK = 1000
"""Rows that are read at once."""
AT_ONCE = 500
"""Tenants named in one query."""


async def predecessors(connection: AsyncConnection, tenant_ids: Collection[str]) -> dict[str, str]:
    """Of each key of these tenants that was made by rotating another one, revoked or not: that one's id."""
    found: dict[str, str] = {}
    columns, ids = store.keys.c, sorted(tenant_ids)
    for start in range(0, len(ids), AT_ONCE):
        query = sa.select(columns.id, columns.rotated_from).where(
            columns.tenant_id.in_(ids[start : start + AT_ONCE]), columns.rotated_from.is_not(None)
        )
        async for chunk in (await connection.stream(query)).partitions(CHUNK):
            found.update((id, rotated_from) for id, rotated_from in chunk)
    return found


def line(key_id: str, predecessors: Mapping[str, str]) -> Iterator[str]:
    """The key, the one that it was made by rotating, and so on to the first."""
    found: str | None = key_id
    while found is not None:
        yield found
        found = predecessors.get(found)


def first(key_id: str, predecessors: Mapping[str, str]) -> str:
    """Where that line begins."""
    *_, found = line(key_id, predecessors)
    return found
