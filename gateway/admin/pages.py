"""Lists in pages: a cursor says where the next one begins, and belongs to the list that gave it."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
import sqlalchemy as sa
from msgspec import Meta
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.admin.problems import Invalid

T = TypeVar("T")

MAX_LIMIT = 500
BAD_CURSOR = "is no cursor of this list in this order; give the next_cursor of a page of it"
Key = Annotated[str, Meta(max_length=256, pattern=r"^[^\x00]+$")] | Annotated[int, Meta(ge=0, le=2**53)]
"""What a list is ordered by."""


class PageQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What every list takes."""

    limit: Annotated[int, Meta(ge=1, le=MAX_LIMIT)] = 50
    after: Annotated[str, Meta(max_length=512)] | None = None
    """``next_cursor`` of the page before."""
    order: Literal["asc", "desc"] = "asc"
    """By the time of making."""


class Page(msgspec.Struct, Generic[T], frozen=True):
    """One page of a list."""

    data: list[T]
    has_more: bool
    next_cursor: str | None
    """``after`` of the next page; null on the last one."""


async def listed(
    connection: AsyncConnection,
    query: PageQuery,
    statement: sa.Select[Any],
    column: sa.Column[Any] | tuple[sa.Column[Any], ...],
    shaped: Callable[[sa.Row[Any]], T],
) -> Page[T]:
    """The page of what ``statement`` finds, in the order of ``column``, or of several, by which no two rows are alike.
    Raises Invalid."""
    columns = column if isinstance(column, tuple) else (column,)
    kind = ",".join(map(str, columns))
    if (last := _place(query, kind, columns)) is not None:
        place, behind = sa.tuple_(*columns), sa.tuple_(*last, types=[column.type for column in columns])
        statement = statement.where(place > behind if query.order == "asc" else place < behind)
    ordered = statement.order_by(*(column if query.order == "asc" else column.desc() for column in columns))
    rows = (await connection.execute(ordered.limit(query.limit + 1))).all()
    has_more = len(rows) > query.limit
    rows = rows[: query.limit]
    cursor = _cursor(query, kind, [getattr(rows[-1], column.key) for column in columns]) if has_more else None
    return Page([shaped(row) for row in rows], has_more, cursor)


def _cursor(query: PageQuery, kind: str, last: list[str | int]) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode((kind, query.order, last))).decode()


def _place(query: PageQuery, kind: str, columns: tuple[sa.Column[Any], ...]) -> list[str | int] | None:
    """What the last item of the page before is ordered by; None on the first page."""
    if query.after is None:
        return None
    try:
        raw = base64.b64decode(query.after.encode("ascii"), altchars=b"-_", validate=True)
        cursor_kind, order, last = msgspec.json.decode(raw, type=tuple[str, str, list[Key]])
        types = [column.type.python_type for column in columns]
        if (cursor_kind, order) == (kind, query.order) and list(map(type, last)) == types:
            return list(last)
    except (UnicodeError, binascii.Error, msgspec.DecodeError):
        pass
    raise Invalid.of([("after", BAD_CURSOR)])
