"""What was used and what it cost, by spans of time and whatever else is asked for: the sums, and the rows that are not
in them yet, as of one instant.

Spans are cut where the question is cut, at whole minutes. Lines are in the order of their beginning and their words, so
that a long answer can be given in parts.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway import store
from gateway.errors import ServiceUnavailable
from gateway.ledger.entry import Entry
from gateway.ledger.follow import NO_CHAIN, gaps_of
from gateway.ledger.sums import FOLLOWER, NUMBERS, WIDTHS, RatesOf, priced
from gateway.store import Store
from policies.pricelist import OF_BATCH
from policies.pricing import FROM_CACHE, Kind

MINUTE_S, HOUR_S, DAY_S = WIDTHS
MAX_TAIL = 25_000
"""Rows that are added up while somebody waits for the answer."""
BATCH = "batch"
"""Whether a row is of a batch's line, as a word: "true" or "false"."""
_IS_OF_BATCH: sa.ColumnElement[str] = sa.literal_column(
    f"CASE WHEN replace(price_version, '{OF_BATCH}', '') = price_version THEN 'false' ELSE 'true' END", sa.Text
)
GROWTH = 4
"""How much more time is read at once when what was read gave too few lines."""
FROM_CACHES = ("num_prompt_tokens", "num_cached_tokens", "num_completion_tokens", "num_reasoning_tokens")
"""Of these, those of answers from the exact cache are added up for themselves too, since they have their own price."""

Place = tuple[int, tuple[str, ...]]
"""A line's beginning and its words."""


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be added up."""

    since: int
    until: int
    """Rows settled from ``since`` on and before ``until``: Unix seconds, at whole minutes."""
    width_s: int
    """One of WIDTHS."""
    group_by: tuple[str, ...] = ()
    """Of WORDS and BATCH; a line for each combination that there is."""
    only: Mapping[str, Sequence[str]] = {}
    """Of the same, the values that count."""
    without: Mapping[str, Sequence[str]] = {}
    """Likewise those that do not."""
    organization_id: str | None = None
    """Of its tenants alone, as they are now."""
    with_charges: bool = False
    """Also what the cost was for, which takes longer."""


class Charge(NamedTuple):
    """What one kind of thing cost."""

    kind: Kind | Literal["other"]
    """Other: nobody knows any more by which price it was counted."""
    quantity: int
    """Tokens, requests, or microseconds of the engine; of what owes nothing there is none."""
    cost_micros: int


class Totals(msgspec.Struct, kw_only=True):
    """Sums over rows; money in micro-units. From ``prompt_micros`` on they are zero unless charges are asked for."""

    num_requests: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    num_reasoning_tokens: int
    engine_us: int
    kv_block_ms: int
    cost_micros: int
    prompt_micros: int = 0
    cached_prompt_micros: int = 0
    completion_micros: int = 0
    reasoning_micros: int = 0
    cache_hit_micros: int = 0
    request_micros: int = 0
    engine_second_micros: int = 0
    num_owed_requests: int = 0
    owed_engine_us: int = 0
    num_prompt_tokens_from_cache: int = 0
    num_cached_tokens_from_cache: int = 0
    num_completion_tokens_from_cache: int = 0
    num_reasoning_tokens_from_cache: int = 0

    def charges(self) -> list[Charge]:
        """What the cost was for; together they are the cost. Without what there was none of."""
        num_prompt = self.num_prompt_tokens - self.num_prompt_tokens_from_cache
        num_cached = self.num_cached_tokens - self.num_cached_tokens_from_cache
        num_completion = self.num_completion_tokens - self.num_completion_tokens_from_cache
        num_reasoning = self.num_reasoning_tokens - self.num_reasoning_tokens_from_cache
        num_from_cache = self.num_prompt_tokens_from_cache + self.num_completion_tokens_from_cache
        charges = [
            Charge("prompt", num_prompt - num_cached, self.prompt_micros),
            Charge("cached_prompt", num_cached, self.cached_prompt_micros),
            Charge("completion", num_completion - num_reasoning, self.completion_micros),
            Charge("reasoning", num_reasoning, self.reasoning_micros),
            Charge("cache_hit", num_from_cache, self.cache_hit_micros),
            Charge("request", self.num_owed_requests, self.request_micros),
            Charge("engine_second", self.owed_engine_us, self.engine_second_micros),
        ]
        rest = Charge("other", 0, self.cost_micros - sum(charge.cost_micros for charge in charges))
        return [charge for charge in (*charges, rest) if charge.quantity or charge.cost_micros]


FIGURES = (*NUMBERS, *(f"{name}_from_cache" for name in FROM_CACHES))
assert Totals.__struct_fields__ == FIGURES
NUM_FIRST = FIGURES.index("cost_micros") + 1
"""Of FIGURES, those that need no charges."""


class Line(msgspec.Struct, frozen=True):
    """One span and one combination of words."""

    starts_at: int
    ends_at: int
    """Unix seconds; within the question."""
    words: tuple[str, ...]
    """In the order of ``group_by``."""
    totals: Totals


class Usage:
    """Answers questions."""

    def __init__(self, rooms: Store, rates_of: RatesOf) -> None:
        self._rooms = rooms
        self._rates_of = rates_of

    async def lines(self, question: Question, max_lines: int, after: Place | None = None) -> tuple[list[Line], bool]:
        """Those behind ``after``, and whether there are more than these. Raises ServiceUnavailable while too much is
        not added up yet, and what the database raises."""
        async with self._as_of_now() as connection:
            found = await _first_sums(connection, question, max_lines + 1, after)
            tail = await _tail(connection, question)
        async for entry, numbers in priced(tail, self._rates_of):
            place = (_start_of(entry.settled_at, question), tuple(_word(entry, word) for word in question.group_by))
            if after is None or place > after:
                is_kept = entry.cache in FROM_CACHE
                figures = (*numbers, *(getattr(entry, name) if is_kept else 0 for name in FROM_CACHES))
                _add(found, place, figures if question.with_charges else figures[:NUM_FIRST])
        places = sorted(found)
        lines = []
        for starts_at, words in places[:max_lines]:
            totals = Totals(**dict(zip(FIGURES, found[starts_at, words], strict=False)))
            lines.append(Line(starts_at, end_of(starts_at, question), words, totals))
        return lines, len(places) > max_lines

    @contextlib.asynccontextmanager
    async def _as_of_now(self) -> AsyncIterator[AsyncConnection]:
        """All that is read sees the same instant: a row is in the sums or behind the cursor, and never in both."""
        async with self._rooms.engine.connect() as connection:
            if self._rooms.database is None:
                connection = await connection.execution_options(isolation_level="REPEATABLE READ")
            yield connection


class Span(NamedTuple):
    """Time that is covered by sums of one width."""

    width_s: int
    since: int
    until: int


def spans(since: int, until: int, width_s: int) -> list[Span]:
    """The widest sums, up to ``width_s``, that cover exactly this time."""
    if since >= until:
        return []
    if width_s == MINUTE_S:
        return [Span(MINUTE_S, since, until)]
    narrower = WIDTHS[WIDTHS.index(width_s) - 1]
    first, last = -(-since // width_s) * width_s, until // width_s * width_s
    if first >= last:
        return spans(since, until, narrower)
    return [*spans(since, first, narrower), Span(width_s, first, last), *spans(last, until, narrower)]


def end_of(starts_at: int, question: Question) -> int:
    """Of the span that begins there."""
    return min(question.until, starts_at - starts_at % question.width_s + question.width_s)


def _start_of(at: int, question: Question) -> int:
    return max(question.since, at - at % question.width_s)


def _add(found: dict[Place, list[int]], place: Place, figures: Any) -> None:
    known = found.get(place)
    found[place] = [*figures] if known is None else [sum(pair) for pair in zip(known, figures, strict=True)]


async def _first_sums(
    connection: AsyncConnection, question: Question, num_lines: int, after: Place | None
) -> dict[Place, list[int]]:
    """At least the first ``num_lines`` behind ``after``, if there are as many; not much more is read than is needed for
    them."""
    found: dict[Place, list[int]] = {}
    since = question.since if after is None else after[0]
    num_spans = 1 if question.group_by else num_lines
    end = 1 + len(question.group_by)
    while since < question.until and len(found) < num_lines:
        until = min(question.until, since - since % question.width_s + num_spans * question.width_s)
        for span in spans(since, until, question.width_s):
            for row in await connection.execute(_sums(connection, question, span, after, num_lines)):
                starts_at, words, figures = row[0], tuple(row[1:end]), row[end:]
                _add(found, (starts_at, words), map(int, figures))
        since, num_spans = until, num_spans * GROWTH
    return found


def _sums(
    connection: AsyncConnection, question: Question, span: Span, after: Place | None, max_lines: int
) -> sa.Select[Any]:
    """(start, words, figures) of the first ``max_lines`` behind ``after``."""
    columns = store.usage.c
    start: sa.ColumnElement[int] = columns.starts_at  # in whose order the table is
    if span.width_s < question.width_s:
        # Written out rather than bound, so that to the database all mentions of the expression are the same.
        width: sa.ColumnElement[int] = sa.literal_column(str(question.width_s), sa.BigInteger)
        first: sa.ColumnElement[int] = sa.literal_column(str(question.since), sa.BigInteger)
        start = columns.starts_at - columns.starts_at % width
        start = sa.case((start < first, first), else_=start)
    # By code points, as Python sorts, whatever language the database was made for.
    collation = "C" if connection.dialect.name == "postgresql" else "BINARY"
    grouped: list[Any] = [_column(columns, word) for word in question.group_by]
    place: list[sa.ColumnElement[Any]] = [start, *(column.collate(collation) for column in grouped)]
    figures = [sa.func.sum(columns[name]) for name in (NUMBERS if question.with_charges else NUMBERS[:NUM_FIRST])]
    if question.with_charges:
        from_cache = columns.cache.in_(FROM_CACHE)
        figures += [sa.func.sum(sa.case((from_cache, columns[name]), else_=0)) for name in FROM_CACHES]
    statement: sa.Select[Any] = sa.select(start.label("start"), *grouped, *figures)
    statement = statement.where(columns.width_s == span.width_s, columns.starts_at >= span.since)
    statement = statement.where(columns.starts_at < span.until)
    statement = statement.where(*_chosen(columns, question))
    if after is not None:
        starts_at, words = after
        statement = statement.where(columns.starts_at >= starts_at, sa.tuple_(*place) > sa.tuple_(starts_at, *words))
    return statement.group_by(start, *grouped).order_by(*place).limit(max_lines)


async def _tail(connection: AsyncConnection, question: Question) -> Sequence[Entry]:
    """The rows that are not in the sums yet. Raises ServiceUnavailable when they are too many."""
    behind = [(chain, position, last) for chain, position, last in await connection.execute(_chains_with_a_tail())]
    _check(sum(last - position for _, position, last in behind))
    columns = store.ledger.c
    rows: list[Any] = []
    for chain, position, last in (*behind, *await gaps_of(connection, FOLLOWER)):
        statement = sa.select(store.ledger).where(columns.chain == chain, columns.position > position)
        statement = statement.where(columns.position <= last)
        statement = statement.where(columns.settled_at >= question.since, columns.settled_at < question.until)
        rows += await connection.execute(statement.where(*_chosen(columns, question)).limit(MAX_TAIL + 1))
        _check(len(rows))
    return [Entry(*row) for row in rows]


def _check(num_rows: int) -> None:
    """Raises ServiceUnavailable."""
    if num_rows > MAX_TAIL:
        raise ServiceUnavailable(
            "The ledger is still being added up. Please try again.", code="not_added_up", retry_after_s=5.0
        )


def _chains_with_a_tail() -> sa.Select[Any]:
    """(chain, the cursor's position, the last row's) of those that have rows behind the cursor."""
    chains = sa.union_all(sa.select(store.ledger_chains.c.id), sa.select(sa.literal(NO_CHAIN))).subquery("chains")
    cursors, rows = store.ledger_cursors.c, store.ledger.c
    position = sa.func.coalesce(cursors.position, 0)
    last = sa.select(rows.position).where(rows.chain == chains.c.id).order_by(rows.position.desc()).limit(1)
    joined = chains.outerjoin(store.ledger_cursors, (cursors.follower == FOLLOWER) & (cursors.chain == chains.c.id))
    found = sa.select(chains.c.id, position.label("position"), last.scalar_subquery().label("last"))
    ends = found.select_from(joined).subquery()
    return sa.select(ends).where(ends.c.last > ends.c.position)


def _chosen(columns: Any, question: Question) -> list[sa.ColumnElement[bool]]:
    chosen = [_column(columns, word).in_(values) for word, values in question.only.items()]
    if question.organization_id is not None:
        own = sa.select(store.tenants.c.id).where(store.tenants.c.organization_id == question.organization_id)
        chosen.append(columns.tenant_id.in_(own))
    return [*chosen, *(_column(columns, word).not_in(values) for word, values in question.without.items())]


def _column(columns: Any, word: str) -> sa.ColumnElement[str]:
    return _IS_OF_BATCH if word == BATCH else columns[word]


def _word(entry: Entry, word: str) -> str:
    """As ``_column``."""
    if word == BATCH:
        return "true" if entry.price_version.endswith(OF_BATCH) else "false"
    return str(getattr(entry, word))
