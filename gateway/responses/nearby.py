"""What a WebSocket remembers of the responses that were written over it, so that one which is not stored can be gone on
from all the same, for as long as the connection lasts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from aiohttp import web

from gateway.responses.items import MAX_ITEMS, AnyItem


class Context(NamedTuple):
    """All that one which goes on from it has before it."""

    response_id: str
    items: list[AnyItem]
    num_bytes: int
    """Of the items as JSON."""


class Nearby:
    """Of each lane the latest, as far as all of them have room."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._latest: dict[str | None, Context] = {}
        """By lane, the one that was written last at the end."""

    def find(self, response_id: str | None) -> Context | None:
        return next((each for each in self._latest.values() if each.response_id == response_id), None)

    def put(self, lane: str | None, context: Context) -> None:
        self._latest.pop(lane, None)
        if len(context.items) <= MAX_ITEMS:
            self._latest[lane] = context
        while sum([each.num_bytes for each in self._latest.values()]) > self._max_bytes:
            del self._latest[next(iter(self._latest))]


@dataclass(frozen=True, slots=True)
class Near:
    """Of one request: where it finds what is remembered, and where it is remembered itself."""

    nearby: Nearby
    lane: str | None
    generates: bool = True
    """False: nothing is to be written; it is there to be gone on from."""

    def put(self, response_id: str, before: Context | None, more: list[AnyItem]) -> None:
        """``before``: what it went on from, if that was remembered; ``more``: its input and its output."""
        items, num_bytes = ([], 0) if before is None else (before.items, before.num_bytes)
        context = Context(response_id, [*items, *more], num_bytes + len(msgspec.json.encode(more)))
        self.nearby.put(self.lane, context)


NEAR = web.RequestKey("near", Near)
"""Key of a request that comes over a WebSocket."""
