"""Pages of OpenAI's lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeVar

from gateway.errors import InvalidRequest


class Listed(Protocol):
    """What a list is of."""

    @property
    def id(self) -> str: ...


class Query(Protocol):
    """Which page is asked for."""

    @property
    def after(self) -> str | None: ...
    @property
    def limit(self) -> int: ...
    @property
    def order(self) -> Literal["asc", "desc"]: ...


L = TypeVar("L", bound=Listed)


def ends_of(page: Sequence[Listed]) -> tuple[str | None, str | None]:
    """``first_id`` and ``last_id``."""
    return (page[0].id, page[-1].id) if page else (None, None)


def page_of(listed: Sequence[L], query: Query, kind: str) -> tuple[list[L], bool]:
    """The page of a list that is here as a whole, the oldest first, and whether there is more behind it. ``kind``: what
    it is a list of. Raises InvalidRequest."""
    rest = list(listed if query.order == "asc" else reversed(listed))
    if query.after is not None:
        place = next((number for number, each in enumerate(rest, 1) if each.id == query.after), None)
        if place is None:
            raise InvalidRequest(f"{kind} with id '{query.after[:80]}' not found.", param="after")
        rest = rest[place:]
    return rest[: query.limit], len(rest) > query.limit
