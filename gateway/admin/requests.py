"""One request that is in the ledger: where its time went, as far as the gateway that answers knows."""

from __future__ import annotations

from typing import Literal

import msgspec
import sqlalchemy as sa

from gateway import store
from gateway.admin.endpoint import READERS, Ask, Endpoint, Nothing
from gateway.admin.problems import NotThere
from gateway.ledger.recent import Part, way_of


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """``source``: "trace" with all that its trace tells, "gateway" as it was noted on its way, or "ledger" with the
    little that its row says, where it is none of the last ones or another gateway process has it."""

    request_id: str
    source: Literal["trace", "gateway", "ledger"]
    gateway: str
    """The process that answers."""
    num_gateways: int
    """One of which may know more."""
    parts: list[Part]
    """In order; those of level 0 lie end to end."""


async def parts(ask: Ask[Nothing, Nothing]) -> Parts:
    """Read where a request's time went, part by part."""
    request_id, gw = ask.named("request"), ask.gw
    if gw.tracing is not None:
        gw.tracing.flush()  # it may be among those that are not put into words yet
    way = gw.ledger.recent.way(request_id)
    if way is None:
        columns = store.ledger.c
        query = sa.select(columns.queue_ms, columns.ttft_ms, columns.duration_ms)
        query = query.where(columns.request_id == request_id, columns.corrects.is_(None))
        async with ask.reading() as connection:
            row = (await connection.execute(query)).first()
        if row is None:
            raise NotThere(f"The ledger has no row of {request_id}.")
        way = way_of(*row)
    return Parts(
        request_id=request_id,
        source=way.source,
        gateway=gw.gateways.name,
        num_gateways=gw.gateways.num_gateways,
        parts=way.parts,
    )


ENDPOINTS = [Endpoint("GET", "/admin/v1/requests/{request}/parts", parts, Parts, READERS)]
