"""What was used and what it cost: by minute, hour or day, by whatever words the rows of the ledger have.

Times are Unix seconds. What is asked begins and ends at whole minutes; a span that lies at its edge is cut there.
"""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
import sqlalchemy as sa
from msgspec import Meta

from gateway import store
from gateway.admin.endpoint import READERS, Ask, Endpoint, Nothing
from gateway.admin.problems import Invalid
from gateway.admin.words import Instant, Written
from gateway.ledger.sums import WIDTHS, WORDS
from gateway.ledger.usage import Line, Place, Question

WIDTH_OF = dict(zip(("minute", "hour", "day"), WIDTHS, strict=True))
MAX_SPANS = {"minute": 31 * 1440, "hour": 366 * 24, "day": 100 * 366}
"""That one question may be about."""
MAX_VALUES = 100
MAX_LINES = 1000
REPEATED = ("group_by", *WORDS)
"""Parameters that may be given several times."""
UNITS = {"request": "requests", "engine_second": "microseconds"}
"""Of quantities; the others are tokens."""
Value = Annotated[str, Meta(min_length=1, max_length=16_384, pattern=r"^[^\x00-\x1f\x7f]+$(?!\n)")]
Values = Annotated[tuple[Value, ...], Meta(max_length=MAX_VALUES)]
"""One, or several: the parameter is given again for each. Those that can have no comma in them, which is all but
models, may also stand in one with commas between them."""


class UsageQuery(Written, frozen=True, kw_only=True):
    """What is to be added up, and how."""

    since: Instant
    """Unix seconds; the minute that it lies in counts."""
    until: Instant | None = None
    """Likewise; null: now."""
    bucket: Literal["minute", "hour", "day"] = "day"
    """How long the spans are, which begin at whole ones in UTC."""
    group_by: Values | None = None
    """Words: tenant_id, key_id, model, endpoint, sla_class, service_tier, cache, price_version."""
    tenant_id: Values | None = None
    key_id: Values | None = None
    model: Values | None = None
    endpoint: Values | None = None
    sla_class: Values | None = None
    service_tier: Values | None = None
    cache: Values | None = None
    price_version: Values | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_LINES)] = 100
    after: Annotated[str, Meta(max_length=4096)] | None = None
    """``next_cursor`` of the page before."""


class UsageLine(msgspec.Struct, frozen=True, kw_only=True):
    """What was used in one span by those who have these words in common; failed requests count, and corrections do
    but for the number of requests."""

    starts_at: int
    ends_at: int
    group: dict[str, str]
    num_requests: int
    num_prompt_tokens: int
    num_cached_tokens: int
    """Of the prompts'."""
    num_completion_tokens: int
    num_reasoning_tokens: int
    """Of the completions'."""
    engine_us: int
    kv_block_ms: int


class UsagePage(msgspec.Struct, frozen=True):
    """Lines in the order of their spans and words. Spans in which there was nothing have none."""

    data: list[UsageLine]
    has_more: bool
    next_cursor: str | None
    """``after`` of the next page; null on the last one."""


class CostPart(msgspec.Struct, frozen=True, kw_only=True):
    """What one kind of thing cost; the parts of a line add up to its cost. "other": by which price it was counted is
    not known any more. Requests that owe nothing, such as those that failed, are in no quantity."""

    kind: str
    quantity: int
    unit: str
    cost_micros: int


class CostLine(msgspec.Struct, frozen=True, kw_only=True):
    """What was charged in one span."""

    starts_at: int
    ends_at: int
    group: dict[str, str]
    cost_micros: int
    parts: list[CostPart]


class CostPage(msgspec.Struct, frozen=True):
    """As of usage; money in millionths of ``currency``."""

    currency: str
    data: list[CostLine]
    has_more: bool
    next_cursor: str | None
    """``after`` of the next page; null on the last one."""


class Cursor(msgspec.Struct, frozen=True, array_like=True):
    """Where a question goes on, and which question it was."""

    since: int
    until: int
    width_s: int
    group_by: tuple[str, ...]
    place: Place | None
    """The last line that was given; None: its time begins anew at ``since``."""


async def usage(ask: Ask[UsageQuery, Nothing]) -> UsagePage:
    """Add up what was used."""
    question, lines, cursor = await _answered(ask)
    data = [
        UsageLine(
            starts_at=line.starts_at,
            ends_at=line.ends_at,
            group=dict(zip(question.group_by, line.words, strict=True)),
            num_requests=line.totals.num_requests,
            num_prompt_tokens=line.totals.num_prompt_tokens,
            num_cached_tokens=line.totals.num_cached_tokens,
            num_completion_tokens=line.totals.num_completion_tokens,
            num_reasoning_tokens=line.totals.num_reasoning_tokens,
            engine_us=line.totals.engine_us,
            kv_block_ms=line.totals.kv_block_ms,
        )
        for line in lines
    ]
    return UsagePage(data, cursor is not None, cursor)


async def costs(ask: Ask[UsageQuery, Nothing]) -> CostPage:
    """Add up what it cost, and what for."""
    question, lines, cursor = await _answered(ask, with_charges=True)
    data = [
        CostLine(
            starts_at=line.starts_at,
            ends_at=line.ends_at,
            group=dict(zip(question.group_by, line.words, strict=True)),
            cost_micros=line.totals.cost_micros,
            parts=[
                CostPart(kind=kind, quantity=quantity, unit=UNITS.get(kind, "tokens"), cost_micros=cost_micros)
                for kind, quantity, cost_micros in line.totals.charges()
            ],
        )
        for line in lines
    ]
    return CostPage(ask.gw.settings.billing.currency, data, cursor is not None, cursor)


def period(since: int, until: int | None, names: tuple[str, str]) -> tuple[int, int]:
    """The minutes in which a time begins and ends; where no end is said it is now. ``names``: of the two, as they were
    asked for. Raises Invalid."""
    now = int(time.time())
    if until is None and since > now:
        raise Invalid.of([(names[0], f"has not come yet; it is {now} now")])
    if until is not None and until <= since:
        raise Invalid.of([(names[1], f"must be later than {names[0]}")])
    last = now if until is None else until - 1
    return since - since % WIDTHS[0], last - last % WIDTHS[0] + WIDTHS[0]


def packed(cursor: Cursor) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(cursor)).decode()


def unpacked(text: str, name: str, question: Question, has_end: bool) -> Cursor:
    """``name``: of the parameter. ``has_end``: the request says when the question ends. Raises Invalid for a cursor of
    another one."""
    try:
        raw = base64.b64decode(text.encode("ascii"), altchars=b"-_", validate=True)
        cursor = msgspec.json.decode(raw, type=Cursor)
    except (UnicodeError, binascii.Error, msgspec.DecodeError):
        cursor = None
    if (
        cursor is None
        or (cursor.width_s, cursor.group_by) != (question.width_s, question.group_by)
        or not question.since <= cursor.since < cursor.until <= question.until
        or (has_end and cursor.until != question.until)
        or cursor.since % WIDTHS[0]
        or cursor.until % WIDTHS[0]
        or (cursor.place is not None and not _is_within(cursor.place, cursor))
    ):
        raise Invalid.of([(name, "is no cursor of this question; give the one that its page before ended with")])
    return cursor


def _is_within(place: Place, cursor: Cursor) -> bool:
    starts_at, words = place
    if not cursor.since <= starts_at < cursor.until or (starts_at != cursor.since and starts_at % cursor.width_s):
        return False
    return len(words) == len(cursor.group_by) and "\0" not in "".join(words)


async def _answered(
    ask: Ask[UsageQuery, Nothing], with_charges: bool = False
) -> tuple[Question, list[Line], str | None]:
    """The question, the page's lines, and the cursor of the next one."""
    query = ask.query
    question = msgspec.structs.replace(await _question(ask), with_charges=with_charges)
    place = None
    if query.after is not None:
        cursor = unpacked(query.after, "after", question, query.until is not None)
        if cursor.since != question.since or cursor.place is None:
            raise Invalid.of([("after", "is the cursor of a question about another time")])
        question, place = msgspec.structs.replace(question, until=cursor.until), cursor.place
    lines, has_more = await ask.gw.usage.lines(question, query.limit, place)
    if not has_more:
        return question, lines, None
    last = (lines[-1].starts_at, lines[-1].words)
    return question, lines, packed(Cursor(question.since, question.until, question.width_s, question.group_by, last))


async def _question(ask: Ask[UsageQuery, Nothing]) -> Question:
    """Raises Invalid."""
    query = ask.query
    since, until = period(query.since, query.until, ("since", "until"))
    num_spans = (until - since) // WIDTH_OF[query.bucket]
    if num_spans > (most := MAX_SPANS[query.bucket]):
        what = f"ask for a shorter time, or for a longer one than the {query.bucket}"
        raise Invalid.of([("bucket", f"there are {num_spans} of them, more than {most}: {what}")])
    group_by = () if query.group_by is None else tuple(_values("group_by", query.group_by))
    for word in group_by:
        if word not in WORDS:
            raise Invalid.of([("group_by", f"there is no {word!r}; it knows {', '.join(WORDS)}")])
        if group_by.count(word) > 1:
            raise Invalid.of([("group_by", f"names {word} twice")])
    only = {word: _values(word, given) for word in WORDS if (given := getattr(query, word)) is not None}
    await _check_known(ask, "tenant_id", store.tenants, only.get("tenant_id", ()))
    await _check_known(ask, "key_id", store.keys, only.get("key_id", ()))
    return Question(since=since, until=until, width_s=WIDTH_OF[query.bucket], group_by=group_by, only=only)


def _values(name: str, given: tuple[str, ...]) -> list[str]:
    values = list(given) if name == "model" else ",".join(given).split(",")
    if "" in values:
        raise Invalid.of([(name, "has a comma too many")])
    if len(values) > MAX_VALUES:
        raise Invalid.of([(name, f"has {len(values)} values, more than {MAX_VALUES}")])
    return values


async def _check_known(ask: Ask[Any, Any], name: str, table: sa.Table, ids: Sequence[str]) -> None:
    """Raises Invalid: an answer without lines would say that they used nothing."""
    if not ids:
        return
    async with ask.reading() as connection:
        known = set((await connection.execute(sa.select(table.c.id).where(table.c.id.in_(ids)))).scalars())
    if unknown := [id for id in ids if id not in known]:
        raise Invalid.of([(name, f"there is no {unknown[0]}")])


ENDPOINTS = [
    Endpoint("GET", "/admin/v1/usage", usage, UsagePage, READERS, query=UsageQuery, repeated=REPEATED),
    Endpoint("GET", "/admin/v1/costs", costs, CostPage, READERS, query=UsageQuery, repeated=REPEATED),
]
