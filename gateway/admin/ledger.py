"""The ledger, for looking at it and for putting it right: rows, corrections, closed days."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
import sqlalchemy as sa
from msgspec import Meta

from gateway import store
from gateway.admin.change import Change
from gateway.admin.endpoint import OPERATORS, READERS, Ask, Endpoint, Nothing
from gateway.admin.pages import BAD_CURSOR, Page, PageQuery, listed
from gateway.admin.problems import Invalid, NotThere
from gateway.admin.words import Id, Instant, Written
from gateway.ledger import Entry, closing, corrections
from gateway.ledger.corrections import Absent, Refused
from gateway.telemetry import TimesView
from policies.policy import Name

Difference = Annotated[int, Meta(ge=-(2**53), le=2**53)]
Reason = Annotated[str, Meta(min_length=1, max_length=1024, pattern=r"^[^\x00]*$(?!\n\x00)")]
Place = Annotated[int, Meta(ge=0, le=2**53)]
Word = Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f]+$(?!\n)")]

_OF_ANSWER = re.compile(r"^(?:chatcmpl-|cmpl-|resp_|msg_|embd-)(?=[0-9a-f]{32}$)")
"""Before an answer's id, which is else that of its request: what clients write into their logs."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What a request owes, or what a correction adds to it; times in Unix seconds, costs in millionths of
    ``currency``."""

    request_id: str
    tenant_id: str
    key_id: str
    model: str
    endpoint: str
    status: int
    """HTTP's; 499 when the client went away."""
    finish_reason: str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    num_sequences: int
    created_at: int
    queue_ms: float
    ttft_ms: float | None
    duration_ms: float
    sla_class: str
    service_tier: str
    cache: str
    policy_name: str
    policy_version: int
    cost_micros: int
    num_reasoning_tokens: int
    num_drafted_tokens: int
    num_accepted_tokens: int
    engine_us: int
    kv_block_ms: int
    price_version: str
    end_user: str | None
    safety_identifier: str | None
    metadata: dict[str, str] | None
    trace_id: str | None
    corrects: str | None
    """The request that this row corrects."""
    reason: str | None
    settled_at: int
    chain: int
    position: int
    link: str | None
    """Hexadecimal; the hash over the row and the link before it."""
    upstream: str | None
    """The one that answered; null where a worker or a cache did."""
    counted_by: Literal["upstream", "gateway"] | None
    """Whose count the tokens are, where an upstream answered."""
    currency: str


class RowQuery(PageQuery, frozen=True, kw_only=True):
    """``order`` is by the time of settling."""

    after: Annotated[str, Meta(max_length=4096)] | None = None
    """``next_cursor`` of the page before. No row is on two pages; in "asc" those settled meanwhile are on a later one.
    One that comes late, from a spool or from a gateway whose clock is behind, may be on none: whoever bills goes by
    closed days (``exports/usage``) or a sink."""

    tenant_id: Id | None = None
    key_id: Id | None = None
    model: Word | None = None
    request_id: Id | None = None
    """Its row, and the corrections of it. The id of its answer (chatcmpl-, cmpl-, resp_, msg_) does as well."""
    since: Instant | None = None
    """Unix seconds; rows that were settled from then on."""
    until: Instant | None = None
    """Rows that were settled before then."""
    status: Annotated[int, Meta(ge=100, le=599)] | None = None
    failed: bool | None = None
    """True: those whose status is not 200; false: those whose is."""
    sla_class: Name | None = None
    end_user: Word | None = None
    trace_id: Id | None = None
    min_duration_ms: Annotated[float, Meta(ge=0, le=1e12)] | None = None


class NewCorrection(Written, frozen=True, kw_only=True):
    """What is to be added to a row, or taken from it by a negative number; costs in millionths of the currency."""

    request_id: Id
    reason: Reason
    num_prompt_tokens: Difference = 0
    num_cached_tokens: Difference = 0
    """Of the prompt's."""
    num_completion_tokens: Difference = 0
    num_reasoning_tokens: Difference = 0
    """Of the completion's."""
    engine_us: Difference = 0
    cost_micros: Difference = 0
    """Not counted from the tokens: it is what is said here."""


class State(msgspec.Struct, frozen=True, kw_only=True):
    """Of the gateway that answers."""

    num_pending: int
    """Rows that are not durable yet; their answers wait for them."""
    is_failing: bool
    """The last try to write failed: it is tried again, and new requests are refused meanwhile."""
    added: TimesView
    """How long answers waited for their rows to be durable, which is all that the ledger adds to them."""
    last_closed_day: str | None
    """As 2026-11-21; null: none is closed."""


class ClosedDay(msgspec.Struct, frozen=True, kw_only=True):
    """A day (UTC) whose rows are settled for good."""

    day: str
    num_rows: int
    digest: str
    """Hexadecimal; over the digest of the day before and the last link of each chain."""
    closed_at: int


class Given(msgspec.Struct, frozen=True, array_like=True, tag="ledger"):
    """Up to where rows were given. Within a second each gateway still adds rows to a chain of its own, so it is said
    for each of them."""

    order: Literal["asc", "desc"]
    settled_at: Instant
    positions: dict[Place, Place]
    """By chain, of those that have given rows of this second."""


async def rows(ask: Ask[RowQuery, Nothing]) -> Page[Row]:
    """List rows of the ledger."""
    query, columns, statement = ask.query, store.ledger.c, sa.select(store.ledger)
    for name in ("tenant_id", "key_id", "model", "status", "sla_class", "end_user", "trace_id"):
        if (value := getattr(query, name)) is not None:
            statement = statement.where(columns[name] == value)
    if query.request_id is not None:
        meant = _OF_ANSWER.sub("req_", query.request_id)
        statement = statement.where((columns.request_id == meant) | (columns.corrects == meant))
    if query.failed is not None:
        statement = statement.where((columns.status != 200) if query.failed else (columns.status == 200))
    if query.min_duration_ms is not None:
        statement = statement.where(columns.duration_ms >= query.min_duration_ms)
    if query.since is not None:
        statement = statement.where(columns.settled_at >= query.since)
    if query.until is not None:
        statement = statement.where(columns.settled_at < query.until)
    given = None if query.after is None else _unpacked(query)
    if given is not None:
        statement = statement.where(_behind(given))
    places = (columns.settled_at, columns.chain, columns.position)
    ordered = statement.order_by(*(place if query.order == "asc" else place.desc() for place in places))
    async with ask.reading() as connection:
        found = (await connection.execute(ordered.limit(query.limit + 1))).all()
    page, has_more, currency = found[: query.limit], len(found) > query.limit, ask.gw.settings.billing.currency
    return Page(
        [shaped(row, currency) for row in page], has_more, _packed(query.order, page, given) if has_more else None
    )


async def state(ask: Ask[Nothing, Nothing]) -> State:
    """Show how this gateway's rows get into the ledger."""
    ledger = ask.gw.ledger
    query = sa.select(sa.func.max(store.ledger_days.c.day))
    async with ask.reading() as connection:
        last = (await connection.execute(query)).scalar()
    return State(
        num_pending=ledger.num_pending,
        is_failing=ledger.is_failing,
        added=ledger.added.view(),
        last_closed_day=None if last is None else closing.name_of(last),
    )


async def correct(ask: Ask[Nothing, NewCorrection], change: Change) -> Row:
    """Correct a row by a new one that is added to it."""
    body = ask.body
    differences = {name: value for name in corrections.DIFFERENCES if (value := getattr(body, name))}
    if not differences:
        raise Invalid.of(
            (name, "nothing is corrected: give at least one difference") for name in corrections.DIFFERENCES
        )
    try:
        entry = await corrections.correct(change.connection, body.request_id, body.reason, differences)
    except Absent:
        raise NotThere(f"The ledger has no row of {body.request_id}.") from None
    except Refused as refused:
        raise Invalid.of([(refused.field, str(refused))]) from None
    row = shaped(entry, ask.gw.settings.billing.currency)
    await change.record("ledger.corrected", "ledger_row", row.request_id, None, row)
    return row


async def days(ask: Ask[PageQuery, Nothing]) -> Page[ClosedDay]:
    """List closed days with their digests."""
    async with ask.reading() as connection:
        return await listed(connection, ask.query, sa.select(store.ledger_days), store.ledger_days.c.day, _of_day)


def _packed(order: Literal["asc", "desc"], page: Sequence[Any], before: Given | None) -> str:
    at = page[-1].settled_at
    known = before.positions if before is not None and before.settled_at == at else {}
    of_page = {row.chain: row.position for row in page if row.settled_at == at}
    return base64.urlsafe_b64encode(msgspec.json.encode(Given(order, at, known | of_page))).decode()


def _unpacked(query: RowQuery) -> Given:
    """Raises Invalid."""
    try:
        raw = base64.b64decode((query.after or "").encode("ascii"), altchars=b"-_", validate=True)
        given = msgspec.json.decode(raw, type=Given)
        if given.order == query.order:
            return given
    except (UnicodeError, binascii.Error, msgspec.DecodeError):
        pass
    raise Invalid.of([("after", BAD_CURSOR)])


def _behind(given: Given) -> sa.ColumnElement[bool]:
    columns, is_up = store.ledger.c, given.order == "asc"
    at, position = columns.settled_at, columns.position
    was_given = [
        sa.and_(columns.chain == chain, position <= last if is_up else position >= last)
        for chain, last in given.positions.items()
    ]
    of_its_second = sa.and_(at == given.settled_at, sa.not_(sa.or_(sa.false(), *was_given)))
    from_it_on = at >= given.settled_at if is_up else at <= given.settled_at  # which the index finds
    return sa.and_(from_it_on, sa.or_(at != given.settled_at, of_its_second))


def shaped(row: Any, currency: str) -> Row:
    """``row``: of the ledger, or an Entry."""
    values = {name: getattr(row, name) for name in Entry.__struct_fields__}
    values["metadata"] = None if row.metadata is None else msgspec.json.decode(row.metadata)
    values["link"] = None if row.link is None else row.link.hex()
    return Row(**values, currency=currency)


def _of_day(row: sa.Row[Any]) -> ClosedDay:
    return ClosedDay(
        day=closing.name_of(row.day), num_rows=row.num_rows, digest=row.digest.hex(), closed_at=row.closed_at
    )


ENDPOINTS = [
    Endpoint("GET", "/admin/v1/ledger", state, State, READERS),
    Endpoint("GET", "/admin/v1/ledger/rows", rows, Page[Row], READERS, query=RowQuery),
    Endpoint("GET", "/admin/v1/ledger/days", days, Page[ClosedDay], READERS, query=PageQuery),
    Endpoint(
        "POST", "/admin/v1/ledger/corrections", correct, Row, OPERATORS, body=NewCorrection, status=201, changes=True
    ),
]
