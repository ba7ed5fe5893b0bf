"""The price list: entries with a version and an instant from which they count, none of which is ever changed or taken
back, so that a row of the ledger can be counted again for ever."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import sqlalchemy as sa
from msgspec import Meta

from gateway import store
from gateway.admin.change import Change
from gateway.admin.endpoint import OPERATORS, READERS, Ask, Endpoint, Nothing
from gateway.admin.pages import Page, PageQuery, listed
from gateway.admin.problems import Conflict, Invalid, NotThere
from gateway.admin.words import Instant, Note
from policies import faults
from policies.policy import Price
from policies.pricelist import Proposed, Terms

PATH = "/admin/v1/prices"
MAX_IN_USE = 10_000
"""Entries in force or to come, which every gateway has in memory."""
Word = Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[^\x00]+$(?!\n\x00)")]


class PriceVersion(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of the list; instants in Unix seconds, ``created_by`` a key's id."""

    version: int
    model: str
    sla_class: str
    currency: str
    price: Price | None
    effective_from: int
    created_at: int
    created_by: str
    note: str


class NewPrice(Proposed, frozen=True, kw_only=True):
    """An entry; ``*`` is every model, or every class, that has none of its own."""

    effective_from: Instant | None = None
    """Null: from now on."""
    note: Note = ""


class PriceQuery(PageQuery, frozen=True, kw_only=True):
    """Which of them."""

    model: Word | None = None
    sla_class: Word | None = None
    at: Instant | None = None
    """Only what is in force at this instant: of each model and class the last entry."""


async def every(ask: Ask[PriceQuery, Nothing]) -> Page[PriceVersion]:
    """List the entries of the price list, or what is in force at an instant."""
    columns, query = store.prices.c, ask.query
    statement = sa.select(store.prices)
    if query.model is not None:
        statement = statement.where(columns.model == query.model)
    if query.sla_class is not None:
        statement = statement.where(columns.sla_class == query.sla_class)
    if query.at is not None:
        later = store.prices.alias().c
        statement = statement.where(
            columns.effective_from <= query.at,
            ~sa.exists().where(
                later.model == columns.model,
                later.sla_class == columns.sla_class,
                later.effective_from <= query.at,
                sa.tuple_(later.effective_from, later.version) > sa.tuple_(columns.effective_from, columns.version),
            ),
        )
    async with ask.reading() as connection:
        return await listed(connection, query, statement, columns.version, shaped)


async def one(ask: Ask[Nothing, Nothing]) -> PriceVersion:
    """Read an entry of the price list."""
    number = ask.named("version")
    if not number.isdecimal() or len(number) > 15:
        raise NotThere("The version of a price is a whole number.")
    async with ask.reading() as connection:
        query = sa.select(store.prices).where(store.prices.c.version == int(number))
        row = (await connection.execute(query)).first()
    if row is None:
        raise NotThere(f"There is no version {number} of the price list.")
    return shaped(row)


async def create(ask: Ask[Nothing, NewPrice], change: Change) -> PriceVersion:
    """Put a price on the list, from now on or from a later instant."""
    body, billing = ask.body, ask.gw.settings.billing
    found = faults.of_proposed(body, ask.gw.settings.classes, billing.currency)
    if body.effective_from is not None and body.effective_from < change.at:
        what = f"is over; it is {change.at} now, and what was admitted until now has its price"
        found.append(("effective_from", what))
    if found:
        raise Invalid.of(found)
    if len(ask.gw.directory.prices) >= MAX_IN_USE:
        raise Conflict(
            f"The price list has {MAX_IN_USE} entries in force or to come, which is as many as there can be."
        )
    newest = (await change.connection.execute(sa.select(sa.func.max(store.prices.c.version)))).scalar()
    after = PriceVersion(
        version=(newest or 0) + 1,
        model=body.model,
        sla_class=body.sla_class,
        currency=billing.currency,
        price=body.price,
        effective_from=change.at if body.effective_from is None else body.effective_from,
        created_at=change.at,
        created_by=ask.caller.key_id,
        note=body.note,
    )
    row = msgspec.structs.asdict(after) | {"revision": change.revision}
    row["document"] = msgspec.json.encode(Terms(currency=row.pop("currency"), price=row.pop("price"))).decode()
    await change.connection.execute(sa.insert(store.prices), row)
    await change.record("price.created", "price", str(after.version), None, after)
    return after


def shaped(row: sa.Row[Any]) -> PriceVersion:
    values = dict(row._mapping)
    terms = msgspec.json.decode(values.pop("document"), type=Terms)
    del values["revision"]
    return PriceVersion(**values, currency=terms.currency, price=terms.price)


ENDPOINTS = [
    Endpoint("GET", PATH, every, Page[PriceVersion], READERS, query=PriceQuery),
    Endpoint("POST", PATH, create, PriceVersion, OPERATORS, body=NewPrice, status=201, changes=True),
    Endpoint("GET", PATH + "/{version}", one, PriceVersion, READERS),
]
