"""What all of /v1/organization has in common: OpenAI's lists, its way of writing queries, and how what is asked in its
words is asked in ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, TypeVar

import msgspec
import sqlalchemy as sa
from aiohttp import web
from msgspec import Meta
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.admin.endpoint import Ask, Endpoint
from gateway.admin.problems import NotThere, of_validation
from gateway.admin.words import Id, Written

T = TypeVar("T")

ROOT = "/v1/organization"
Lifetime = Annotated[int, Meta(ge=1, le=100 * 365 * 86_400)]
"""Seconds from now."""


class ListQuery(Written, frozen=True, kw_only=True):
    """What every list takes. ``after`` and ``before`` are ids."""

    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    after: Id | None = None
    before: Id | None = None


class Listing(msgspec.Struct, Generic[T], frozen=True):
    """One page of a list."""

    data: list[T]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class Deleted(msgspec.Struct, frozen=True):
    """What is no more."""

    id: str
    object: str
    deleted: bool = True


async def listed(
    connection: AsyncConnection,
    query: ListQuery,
    statement: sa.Select[Any],
    column: sa.Column[str],
    shaped: Callable[[sa.Row[Any]], T],
    newest_first: bool = False,
) -> Listing[T]:
    """The page of what ``statement`` finds, in the order of ``column``, an id; ids are in the order of time."""
    forwards = query.before is None
    if query.after is not None:
        statement = statement.where(column < query.after if newest_first else column > query.after)
    if query.before is not None:  # the last ones of those that stand before it
        statement = statement.where(column > query.before if newest_first else column < query.before)
    descends = newest_first == forwards
    ordered = statement.order_by(column.desc() if descends else column).limit(query.limit + 1)
    rows = (await connection.execute(ordered)).all()
    has_more = len(rows) > query.limit
    rows = rows[: query.limit] if forwards else rows[: query.limit][::-1]
    first_id, last_id = (getattr(rows[0], column.key), getattr(rows[-1], column.key)) if rows else (None, None)
    return Listing([shaped(row) for row in rows], first_id, last_id, has_more)


@dataclass(frozen=True, slots=True)
class OpenAIEndpoint(Endpoint):
    """Reads lists that are written ``name[]=one&name[]=two``. Its refusals are OpenAI's error object, since it is not
    under the root of those that answer with problems."""

    def _query_of(self, request: web.Request) -> Any:
        values: dict[str, Any] = {}
        for name in request.query:
            given = request.query.getall(name)
            values[name] = given if name.endswith("[]") or len(given) > 1 else given[0]
        try:
            return msgspec.convert(values, self.query, strict=False)
        except msgspec.ValidationError as error:
            raise of_validation(error, self.query) from None


@dataclass(frozen=True, slots=True)
class Ours(Ask[Any, Any]):
    """The same asked in our own words, where a handler of /admin/v1 does what is asked."""

    names: Mapping[str, str] = field(default_factory=dict)

    def named(self, part: str) -> str:
        return self.names[part]


def ours(ask: Ask[Any, Any], body: Any = None, **names: str) -> Ours:
    """``names``: the parts of the path."""
    return Ours(ask.gw, ask.request, ask.caller, ask.query, body, ask.look_again, names)


def check_belongs(is_there: bool, what: str) -> None:
    """Raises NotThere: a thing of another project is one that nobody has."""
    if not is_there:
        raise NotThere(f"There is no such {what}.")


def redacted(prefix: str, last_four: str) -> str:
    """A key as it may be shown again."""
    return f"{prefix}...{last_four}"


def ends_at(now: int, expires_in_seconds: int | None) -> int | None:
    return None if expires_in_seconds is None else now + expires_in_seconds
