"""Where the time of those requests went that were settled last, for whoever looks into one of them.

What is held on to of each are the instants of its journey and a few figures of its row and of what its worker has told,
in places that are used again and again: several hundred whole rows drive what the next request needs out of the
processor's cache. Of a request that was worth a trace it is what was sent of it. It is put in order only when somebody
asks. Other gateways have their own.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from operator import attrgetter
from typing import Literal, NamedTuple

import msgspec

from gateway.journey import Journey
from gateway.ledger.entry import Entry
from gateway.spent import Spent
from gateway.tracing import names
from policies.answers import Outcome

Fact = str | bool | int | float | list[str]


class Times(NamedTuple):
    """Of one request, what its parts are made of. Instants are monotonic seconds."""

    queue_ms: float
    ttft_ms: float
    """NaN: there was no first token."""
    duration_ms: float
    """These are its row's."""
    prefill_s: float
    decode_s: float
    durable_at: float
    """Its row was."""
    received_at: float
    """These are its journey's, as there."""
    started_at: float
    parse_at: float
    load_at: float
    render_at: float
    cache_at: float
    admit_at: float
    queue_at: float


BEFORE = (
    ("received_at", names.RECEIVE),
    ("started_at", names.AUTH),
    ("parse_at", names.PARSE),
    ("load_at", names.LOAD),
    ("render_at", names.RENDER),
    ("cache_at", names.CACHE_LOOK),
    ("admit_at", names.ADMIT),
)
"""Instants of a journey until it is handed to the line, and what begins then."""
_instants = attrgetter(*Times._fields[Times._fields.index("received_at") :])
ID_BYTES = 36
PLACE = struct.Struct(f"{ID_BYTES}s{len(Times._fields)}d")
"""A request's id and its ``Times``."""
NOBODY = b"\xff"
"""An empty place has bytes that are in no id."""


class Moment(msgspec.Struct, frozen=True):
    """Something that happened at one instant."""

    name: str
    at_ms: float
    facts: dict[str, Fact]


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Of a request's time, by the name that its span has in a trace. ``at_ms`` is from the request's beginning."""

    name: str
    at_ms: float
    duration_ms: float
    level: int = 0
    """1: it lies within the last one of level 0, beside others."""
    facts: dict[str, Fact] = {}
    moments: list[Moment] = []


class Way(NamedTuple):
    """The parts of one request, and who knows them so: its trace, this gateway, or only the ledger."""

    source: Literal["trace", "gateway", "ledger"]
    parts: list[Part]


class Recent:
    """Of one gateway."""

    def __init__(self, num_requests: int) -> None:
        """``num_requests``: that it holds on to, and as many of those with a trace."""
        self._num_places = num_requests
        self._next = 0
        """The place that is used next."""
        self._times = bytearray(NOBODY * num_requests * PLACE.size)
        self._outcomes: list[Outcome] = ["bypass"] * num_requests
        self._upstreams: list[str | None] = [None] * num_requests
        self._kept: deque[tuple[str, bytes]] = deque(maxlen=num_requests)

    def note(self, row: Entry, spent: Spent, journey: Journey, durable_at: float) -> None:
        """Of every request that has a row, when it is durable."""
        place = self._next
        if place == self._num_places:
            if not place:
                return
            place = 0
        self._next = place + 1
        PLACE.pack_into(
            self._times,
            place * PLACE.size,
            row.request_id.encode(),
            row.queue_ms,
            math.nan if row.ttft_ms is None else row.ttft_ms,
            row.duration_ms,
            spent.prefill_s,
            spent.decode_s,
            durable_at,
            *_instants(journey),
        )
        self._outcomes[place], self._upstreams[place] = row.cache, row.upstream

    def keep(self, request_id: str, kept: bytes) -> None:
        """It goes into a trace: as the process that makes spans gets it, but without what was asked and answered."""
        self._kept.append((request_id, kept))

    def way(self, request_id: str) -> Way | None:
        """None: it is not among them, or another gateway's."""
        for own_id, kept in reversed(self._kept):
            if own_id == request_id:
                return Way("trace", list(_traced(kept)))
        place, rest = divmod(self._times.find(request_id.encode().ljust(ID_BYTES, b"\0")), PLACE.size)
        if place < 0 or rest:
            return None
        times = Times(*PLACE.unpack_from(self._times, place * PLACE.size)[1:])
        return Way("gateway", list(_parts(times, self._outcomes[place], self._upstreams[place])))


def way_of(queue_ms: float, ttft_ms: float | None, duration_ms: float) -> Way:
    """All that the ledger says of it."""
    first_ms = duration_ms if ttft_ms is None else ttft_ms
    bounds = [0.0, min(queue_ms, first_ms), first_ms, duration_ms]
    parts = [
        Part(name=name, at_ms=at, duration_ms=until - at)
        for name, (at, until) in zip((names.QUEUE, names.FIRST_TOKEN, names.STREAM), pairwise(bounds), strict=True)
    ]
    return Way("ledger", [part for part in parts if part.duration_ms > 0 or part.name == names.FIRST_TOKEN])


def _traced(kept: bytes) -> Iterator[Part]:
    from gateway.tracing.kept import Kept
    from gateway.tracing.spans import spans_of

    root, *spans = spans_of(msgspec.msgpack.decode(kept, type=Kept), {})
    for span in spans:
        yield Part(
            name=span.name,
            at_ms=(span.start_ns - root.start_ns) / 1e6,
            duration_ms=(span.end_ns - span.start_ns) / 1e6,
            level=int(span.parent_id != root.span_id),
            facts=dict(span.attributes),
            moments=[
                Moment(each.name, (each.at_ns - root.start_ns) / 1e6, dict(each.attributes)) for each in span.events
            ],
        )


def _parts(own: Times, cache: Outcome, upstream: str | None) -> Iterator[Part]:
    """End to end. What the worker told are durations, which are laid out around its first token."""
    came_at, queue_at = own.started_at, own.queue_at
    settle_at = came_at + own.duration_ms / 1e3
    first_at = None if math.isnan(own.ttft_ms) else came_at + own.ttft_ms / 1e3
    begins = [(at, name) for instant, name in BEFORE if (at := getattr(own, instant))]
    facts: dict[str, Fact] = {}
    moments: list[tuple[str, float]] = []
    if cache in ("hit", "shared"):
        begins.append((queue_at, names.SHARED if cache == "shared" else names.STREAM))
    else:
        begins.append((queue_at, names.QUEUE))
        if own.queue_ms or upstream is not None:  # else nobody got it
            name = names.WORKER_SPAN if upstream is None else names.UPSTREAM_SPAN
            begins.append((queue_at + own.queue_ms / 1e3, name))
        if upstream is not None:
            facts[names.UPSTREAM] = upstream
        if first_at is not None:
            began_at, last_at = first_at - own.prefill_s, first_at + own.decode_s
            begins.append((last_at, names.STREAM))
            moments = [(names.SCHEDULED, began_at), (names.FIRST_TOKEN, first_at), (names.LAST_TOKEN, last_at)]
    begins += [(settle_at, names.SETTLE), (own.durable_at, "")]
    from_at = at = begins[0][0]
    for (_, name), (until, _) in pairwise(begins):
        until = max(at, until if name == names.SETTLE else min(until, settle_at))
        is_worker = name in (names.WORKER_SPAN, names.UPSTREAM_SPAN)
        yield Part(
            name=name,
            at_ms=1e3 * (at - from_at),
            duration_ms=1e3 * (until - at),
            facts=facts if is_worker else {},
            moments=[
                Moment(what, 1e3 * (min(max(then, at), until) - from_at), {}) for what, then in moments if is_worker
            ],
        )
        at = until
