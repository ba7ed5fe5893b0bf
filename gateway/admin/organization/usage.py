"""Usage and costs in OpenAI's words, so that its own client reads them: of the organization that the header
OpenAI-Organization names, or of all. A tenant's own key reads those of its project.

What OpenAI counts and nobody here has (users, audio, images) is zero, null or an empty page. Requests for embeddings
are counted as such, all others (rankings and scores, too) as completions: together they are all, once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta, field

from gateway.admin.endpoint import READERS, Ask, Nothing
from gateway.admin.organization.projects import organization_of
from gateway.admin.organization.shapes import ROOT, OpenAIEndpoint
from gateway.admin.problems import Invalid
from gateway.admin.usage import Cursor, packed, period, unpacked
from gateway.admin.words import Instant, Written
from gateway.auth import USAGE
from gateway.ledger.usage import BATCH, DAY_S, HOUR_S, MINUTE_S, Charge, Line, Question, end_of

MAX_LINES = 5000
"""Results of one page; a span that has more goes on in the next one."""
PREFIX = "page_"
WIDTHS = {"1m": MINUTE_S, "1h": HOUR_S, "1d": DAY_S}
LIMITS = {"1m": (60, 1440), "1h": (24, 168), "1d": (7, 31)}
"""Spans of one page: unless asked otherwise, and at most."""
MAX_DAYS = 180
"""Of costs, in one page."""
WORD_OF = {
    "project_id": "tenant_id",
    "api_key_id": "key_id",
    "model": "model",
    "service_tier": "service_tier",
    "batch": BATCH,
    "line_item": "model",
}
"""Ours for OpenAI's; what is not here is the same for all that there is."""
ITEM_OF = {
    "prompt": "input_tokens",
    "cached_prompt": "input_cached_tokens",
    "completion": "output_tokens",
    "reasoning": "output_reasoning_tokens",
    "cache_hit": "cache_hit_tokens",
    "request": "requests",
    "engine_second": "engine_seconds",
    "other": "other",
}
"""A line item is a model and one of these."""
Chosen = dict[str, tuple[str, ...]]
"""Words and their values."""
EMBEDDINGS = ("/v1/embeddings", "/api/embed", "/api/embeddings")
"""Endpoints, as the ledger has them."""
UNUSED = (
    "moderations",
    "images",
    "audio_speeches",
    "audio_transcriptions",
    "vector_stores",
    "code_interpreter_sessions",
    "file_search_calls",
    "web_search_calls",
    "decisions",
)
"""Of which nothing is used: clients that add all of OpenAI's kinds up ask for each."""
Name = Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[^\x00]+$(?!\n)")]
Names = Annotated[tuple[Name, ...], Meta(max_length=100)]
Page = Annotated[str, Meta(max_length=4096)]
R = TypeVar("R")
UsageWord = Literal["project_id", "user_id", "api_key_id", "model", "batch", "service_tier", "api_source"]
EmbeddingsWord = Literal["project_id", "user_id", "api_key_id", "model"]
CostWord = Literal["project_id", "user_id", "line_item", "api_key_id", "api_source"]


class TimeQuery(Written, frozen=True, kw_only=True):
    """What both take; times in Unix seconds."""

    start_time: Instant
    end_time: Instant | None = None
    """Null: now."""
    page: Page | None = None
    """``next_page`` of the page before."""
    project_ids: Names | None = field(name="project_ids[]", default=None)
    api_key_ids: Names | None = field(name="api_key_ids[]", default=None)


class UsageQuery(TimeQuery, frozen=True, kw_only=True):
    """What is common to what of the usage is asked for."""

    bucket_width: Literal["1m", "1h", "1d"] = "1d"
    limit: Annotated[int, Meta(ge=1, le=1440)] | None = None
    models: Names | None = field(name="models[]", default=None)
    user_ids: Names | None = field(name="user_ids[]", default=None)
    """Nobody here is one, so nothing is found."""


class EmbeddingsQuery(UsageQuery, frozen=True, kw_only=True):
    """What of the usage of embeddings is asked for."""

    group_by: Annotated[tuple[EmbeddingsWord, ...], Meta(max_length=4)] = field(name="group_by[]", default=())


class CompletionsQuery(UsageQuery, frozen=True, kw_only=True):
    """What of the usage of everything else is asked for."""

    group_by: Annotated[tuple[UsageWord, ...], Meta(max_length=7)] = field(name="group_by[]", default=())
    batch: bool | None = None
    """True: lines of batches alone, false: all but those. Rows from before they were marked are none."""


class UnusedQuery(UsageQuery, frozen=True, kw_only=True):
    """What is asked for of one of UNUSED."""

    group_by: Annotated[tuple[Name, ...], Meta(max_length=7)] = field(name="group_by[]", default=())
    batch: bool | None = None
    sizes: Names | None = field(name="sizes[]", default=None)
    sources: Names | None = field(name="sources[]", default=None)
    context_levels: Names | None = field(name="context_levels[]", default=None)
    vector_store_ids: Names | None = field(name="vector_store_ids[]", default=None)


class CostsQuery(TimeQuery, frozen=True, kw_only=True):
    """What of the costs is asked for."""

    bucket_width: Literal["1d"] = "1d"
    limit: Annotated[int, Meta(ge=1, le=MAX_DAYS)] = 7
    group_by: Annotated[tuple[CostWord, ...], Meta(max_length=5)] = field(name="group_by[]", default=())
    line_items: Names | None = field(name="line_items[]", default=None)


class CompletionsResult(msgspec.Struct, frozen=True, kw_only=True):
    """What was used by those who have in common what is asked for; the rest of the words are null."""

    input_tokens: int
    input_cached_tokens: int
    input_uncached_tokens: int
    output_tokens: int
    num_model_requests: int
    input_text_tokens: int
    """Without the cached ones."""
    input_cached_text_tokens: int
    output_text_tokens: int
    project_id: str | None = None
    api_key_id: str | None = None
    model: str | None = None
    service_tier: str | None = None
    batch: bool | None = None
    api_source: str | None = None
    user_id: None = None
    input_cache_write_tokens: int = 0
    input_audio_tokens: int = 0
    input_cached_audio_tokens: int = 0
    output_audio_tokens: int = 0
    input_image_tokens: int = 0
    input_cached_image_tokens: int = 0
    output_image_tokens: int = 0
    object: str = "organization.usage.completions.result"


class EmbeddingsResult(msgspec.Struct, frozen=True, kw_only=True):
    """As CompletionsResult."""

    input_tokens: int
    num_model_requests: int
    project_id: str | None = None
    api_key_id: str | None = None
    model: str | None = None
    user_id: None = None
    object: str = "organization.usage.embeddings.result"


class UnusedResult(msgspec.Struct, frozen=True):
    """There are none."""


class Amount(msgspec.Struct, frozen=True):
    value: float
    currency: str
    """In lower case."""


class CostsResult(msgspec.Struct, frozen=True, kw_only=True):
    """What was charged."""

    amount: Amount
    line_item: str | None = None
    """Such as "demo, input_tokens"; quantities are given with it alone."""
    quantity: float | None = None
    quantity_unit: str | None = None
    project_id: str | None = None
    api_key_id: str | None = None
    api_source: str | None = None
    user_id: None = None
    object: str = "organization.costs.result"


class Bucket(msgspec.Struct, Generic[R], frozen=True, kw_only=True):
    start_time: int
    end_time: int
    results: list[R]
    object: str = "bucket"


class UsagePage(msgspec.Struct, Generic[R], frozen=True, kw_only=True):
    """Spans in the order of time, also those in which there was nothing; costs have days."""

    data: list[Bucket[R]]
    has_more: bool
    next_page: str | None
    object: str = "page"


async def completions(ask: Ask[CompletionsQuery, Nothing]) -> UsagePage[CompletionsResult]:
    """Read what was used by all but embeddings."""
    query = ask.query
    only: Chosen = {} if query.batch is None else {BATCH: ("true" if query.batch else "false",)}
    question = _question_of_usage(ask, only=only, without={"endpoint": EMBEDDINGS})
    shaped = partial(_written, query, question)
    return await _read(ask, question, query.limit or LIMITS[query.bucket_width][0], shaped, bool(query.user_ids))


async def embeddings(ask: Ask[EmbeddingsQuery, Nothing]) -> UsagePage[EmbeddingsResult]:
    """Read what was used by embeddings."""
    query = ask.query
    question = _question_of_usage(ask, only={"endpoint": EMBEDDINGS}, without={})
    shaped = partial(_embedded, question)
    return await _read(ask, question, query.limit or LIMITS[query.bucket_width][0], shaped, bool(query.user_ids))


async def unused(ask: Ask[UnusedQuery, Nothing]) -> UsagePage[UnusedResult]:
    """Read that nothing of another kind was used."""
    query = ask.query
    question = msgspec.structs.replace(_question_of_usage(ask, only={}, without={}), group_by=())
    return await _read(ask, question, query.limit or LIMITS[query.bucket_width][0], lambda _: [], is_empty=True)


async def costs(ask: Ask[CostsQuery, Nothing]) -> UsagePage[CostsResult]:
    """Read what it cost."""
    query = ask.query
    if query.line_items is not None and "line_item" not in query.group_by:
        raise Invalid.of([("line_items", "can be chosen when the costs are grouped by line_item")])
    question = _question(ask, DAY_S, query.group_by, {})
    question = msgspec.structs.replace(question, with_charges="line_item" in query.group_by)
    return await _read(ask, question, query.limit, partial(_charged, ask, question))


def _question_of_usage(ask: Ask[Any, Nothing], only: Chosen, without: Chosen) -> Question:
    """Raises Invalid."""
    query, most = ask.query, LIMITS[ask.query.bucket_width][1]
    if query.limit is not None and query.limit > most:
        raise Invalid.of([("limit", f"must be at most {most} with a bucket_width of {query.bucket_width}")])
    if query.models is not None:
        only["model"] = query.models
    question = _question(ask, WIDTHS[query.bucket_width], query.group_by, only)
    return msgspec.structs.replace(question, without=without)


def _question(ask: Ask[Any, Nothing], width_s: int, group_by: tuple[str, ...], only: Chosen) -> Question:
    """Raises Invalid."""
    query = ask.query
    since, until = period(query.start_time, query.end_time, ("start_time", "end_time"))
    if twice := [word for word in group_by if group_by.count(word) > 1]:
        raise Invalid.of([("group_by", f"names {twice[0]} twice")])
    words = tuple(WORD_OF[word] for word in group_by if word in WORD_OF)
    if query.project_ids is not None:
        only["tenant_id"] = query.project_ids
    if query.api_key_ids is not None:
        only["key_id"] = query.api_key_ids
    if (own := ask.caller.tenant_id) is not None:
        only["tenant_id"] = tuple({own} & set(only.get("tenant_id", (own,))))
    named = organization_of(ask) if own is None else None
    return Question(since=since, until=until, width_s=width_s, group_by=words, only=only, organization_id=named)


async def _read(
    ask: Ask[Any, Nothing],
    question: Question,
    max_spans: int,
    shaped: Callable[[Line], list[R]],
    is_empty: bool = False,
) -> UsagePage[R]:
    """One page. ``shaped``: the results of a line."""
    after = None
    if ask.query.page is not None:
        cursor = unpacked(ask.query.page.removeprefix(PREFIX), "page", question, ask.query.end_time is not None)
        question, after = msgspec.structs.replace(question, since=cursor.since, until=cursor.until), cursor.place
    first = question.since if after is None else after[0]
    starts = [first]
    while len(starts) < max_spans and (next_start := end_of(starts[-1], question)) < question.until:
        starts.append(next_start)
    ends_at = end_of(starts[-1], question)
    of_page = msgspec.structs.replace(question, until=ends_at)
    lines, has_more = ([], False) if is_empty else await ask.gw.usage.lines(of_page, MAX_LINES, after)
    cursor = Cursor(ends_at, question.until, question.width_s, question.group_by, None)
    if has_more:
        last = lines[-1]
        starts = [starts_at for starts_at in starts if starts_at <= last.starts_at]
        cursor = msgspec.structs.replace(cursor, since=question.since, place=(last.starts_at, last.words))
    next_page = PREFIX + packed(cursor) if has_more or ends_at < question.until else None
    of_span: dict[int, list[Line]] = {starts_at: [] for starts_at in starts}
    for line in lines:
        of_span[line.starts_at].append(line)
    data = [
        Bucket(
            start_time=starts_at,
            end_time=end_of(starts_at, question),
            results=[result for line in found for result in shaped(line)],
        )
        for starts_at, found in of_span.items()
    ]
    return UsagePage(data=data, has_more=next_page is not None, next_page=next_page)


def _written(query: CompletionsQuery, question: Question, line: Line) -> list[CompletionsResult]:
    known, totals = dict(zip(question.group_by, line.words, strict=True)), line.totals
    num_uncached = totals.num_prompt_tokens - totals.num_cached_tokens
    result = CompletionsResult(
        input_tokens=totals.num_prompt_tokens,
        input_cached_tokens=totals.num_cached_tokens,
        input_uncached_tokens=num_uncached,
        output_tokens=totals.num_completion_tokens,
        num_model_requests=totals.num_requests,
        input_text_tokens=num_uncached,
        input_cached_text_tokens=totals.num_cached_tokens,
        output_text_tokens=totals.num_completion_tokens,
        project_id=known.get("tenant_id"),
        api_key_id=known.get("key_id"),
        model=known.get("model"),
        service_tier=known.get("service_tier"),
        batch=known[BATCH] == "true" if BATCH in known else None,
        api_source="unlabeled" if "api_source" in query.group_by else None,
    )
    return [result]


def _embedded(question: Question, line: Line) -> list[EmbeddingsResult]:
    known = dict(zip(question.group_by, line.words, strict=True))
    result = EmbeddingsResult(
        input_tokens=line.totals.num_prompt_tokens,
        num_model_requests=line.totals.num_requests,
        project_id=known.get("tenant_id"),
        api_key_id=known.get("key_id"),
        model=known.get("model"),
    )
    return [result]


def _charged(ask: Ask[CostsQuery, Nothing], question: Question, line: Line) -> list[CostsResult]:
    query, currency = ask.query, ask.gw.settings.billing.currency.lower()
    known = dict(zip(question.group_by, line.words, strict=True))

    def result(cost_micros: int, item: str | None = None, charge: Charge | None = None) -> CostsResult:
        return CostsResult(
            amount=Amount(cost_micros / 1e6, currency),
            line_item=item,
            quantity=None if charge is None else _quantity(charge),
            quantity_unit=None if charge is None else _unit(charge),
            project_id=known.get("tenant_id"),
            api_key_id=known.get("key_id"),
            api_source="unlabeled" if "api_source" in query.group_by else None,
        )

    if "line_item" not in query.group_by:
        return [result(line.totals.cost_micros)]
    items = {f"{known['model']}, {ITEM_OF[charge.kind]}": charge for charge in line.totals.charges()}
    return [
        result(charge.cost_micros, item, charge)
        for item, charge in items.items()
        if query.line_items is None or item in query.line_items
    ]


def _quantity(charge: Charge) -> float:
    return charge.quantity / 1e6 if charge.kind == "engine_second" else charge.quantity


def _unit(charge: Charge) -> str | None:
    match charge.kind:
        case "request" | "other":
            return None
        case "engine_second":
            return "duration_seconds"
        case _:
            return "tokens"


ENDPOINTS = [
    OpenAIEndpoint("GET", f"{ROOT}/{path}", handler, answer, READERS, query=query, tenants_scope=USAGE)
    for path, handler, query, answer in (
        ("usage/completions", completions, CompletionsQuery, UsagePage[CompletionsResult]),
        ("usage/embeddings", embeddings, EmbeddingsQuery, UsagePage[EmbeddingsResult]),
        (f"usage/{{kind:{'|'.join(UNUSED)}}}", unused, UnusedQuery, UsagePage[UnusedResult]),
        ("costs", costs, CostsQuery, UsagePage[CostsResult]),
    )
]
