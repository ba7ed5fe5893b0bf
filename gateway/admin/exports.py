"""Billing exports, as ``penstock export`` writes them."""

from __future__ import annotations

import datetime
import hashlib
import time
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta

from gateway.admin.endpoint import READERS, Ask, Endpoint, Nothing
from gateway.admin.problems import Conflict, Invalid
from gateway.admin.words import Id
from gateway.errors import StoreUnavailable
from gateway.exports import DAY_S, EPOCH, BadOrder, Format, Order, check
from gateway.exports.formats import CONTENT_TYPES
from gateway.exports.names import Names
from gateway.exports.process import Broken, Busy, Task
from gateway.exports.spans import Period, period_of
from gateway.house import GATEWAY

LIMIT_S = 6 * 3600.0


class Query(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A period in days of UTC, ``to`` left out."""

    from_: datetime.date = msgspec.field(name="from")
    to: datetime.date
    format: Format = "csv"
    tenant: Id | None = None
    """By its id; null: all."""
    offset: Annotated[int, Meta(ge=0, le=2**53)] = 0
    """Bytes that are there already of a download that broke off; only of periods whose days are closed."""


async def usage(ask: Ask[Query, Nothing]) -> web.StreamResponse:
    """Export a row for each request of a period"""
    return await _answer(ask, Order(what="usage", **_asked(ask)))


async def costs(ask: Ask[Query, Nothing]) -> web.StreamResponse:
    """Export what a period cost, by day, tenant, key, model, class and kind of token"""
    return await _answer(ask, Order(what="costs", **_asked(ask)))


def _asked(ask: Ask[Query, Nothing]) -> dict[str, Any]:
    query = ask.query
    currency = ask.gw.settings.billing.currency
    return {"format": query.format, "from_": query.from_, "to": query.to, "currency": currency}


async def _answer(ask: Ask[Query, Nothing], order: Order) -> web.StreamResponse:
    request, tenant = ask.request, ask.query.tenant
    try:
        check(order, EPOCH + datetime.timedelta(days=int(time.time()) // DAY_S))
        async with ask.reading() as connection:
            if tenant is not None:
                names = await Names.read(connection, order.days.stop * DAY_S)
                order = msgspec.structs.replace(order, tenant_ids=names.ids_of([tenant]))
            period = await period_of(connection, order.days)
    except BadOrder as error:
        raise Invalid.of([(error.field, error.what)]) from None
    etag = _etag_of(order, period)
    name = f"{order.what}-{order.from_}-{order.to}.{'csv' if order.format == 'focus' else order.format}"
    headers = {
        "content-type": CONTENT_TYPES[order.format],
        "content-disposition": f'attachment; filename="{name}"',
        **({"etag": etag} if etag else {}),
    }
    if etag and request.headers.get("if-none-match") == etag:
        return web.Response(status=304, headers=headers)
    if ask.query.offset and etag is None:
        raise Invalid.of([("offset", "is for periods whose days are all closed; what this one has may still change")])
    try:
        async with ask.gw.exports.running(Task(ask.gw.settings.store, order, ask.query.offset)) as data:
            return await _stream(request, data, headers)
    except Busy:
        raise Conflict("As many exports as may be are being written at the moment. Wait for one to end.") from None


async def _stream(request: web.Request, data: Any, headers: dict[str, str]) -> web.StreamResponse:
    response: web.StreamResponse | None = None
    try:
        async for chunk in data:
            if response is None:
                response = web.StreamResponse(headers=headers)
                await response.prepare(request)
            await response.write(chunk)
    except Broken as error:
        if response is None:
            is_file = request.app[GATEWAY].store.database is not None
            raise StoreUnavailable.for_operators(False, is_file) from error
        # What came is not all: a connection that breaks off says so, a proper end would not.
        assert request.transport is not None
        request.transport.abort()
        return response
    if response is None:
        return web.Response(headers=headers)
    await response.write_eof()
    return response


def _etag_of(order: Order, period: Period) -> str | None:
    """Of what never changes any more."""
    if period.digest is None:
        return None
    return f'"{hashlib.sha256(msgspec.msgpack.encode((order, period.digest))).hexdigest()[:32]}"'


FILES = tuple(sorted(set(CONTENT_TYPES.values())))
ENDPOINTS = [
    Endpoint("GET", "/admin/v1/exports/usage", usage, None, READERS, query=Query, limit_s=LIMIT_S, files=FILES),
    Endpoint("GET", "/admin/v1/exports/costs", costs, None, READERS, query=Query, limit_s=LIMIT_S, files=FILES),
]
