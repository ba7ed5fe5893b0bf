"""What clients counted, what the ledger says and what the engines emitted, request by request: each difference has a
reason with a bound, or it is unexplained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from benchmarks.audit.client import Heard
from benchmarks.audit.house import PRICE
from gateway import store
from policies import pricing, settings
from policies.pricing import FROM_CACHE
from policies.terms import Usage

Row = sa.Row[Any]
WHOLE = "answered: all three agree"
FROM_A_CACHE = "answered from the cache or along with another"
TOLD = "broke off, and the client was told"
LEFT = "the client left"
HALF = "the client left, and read what was on its way"
RECOVERED = "gateway killed, settled by the next"
RECOVERED_LEFT = "the client left, and then the gateway was killed"
CUT_OFF = "gateway killed after the row, before the last byte"
UNHEARD = "settled, and the client never heard its id"
REFUSED = "refused or failed before the first byte"
NO_ROW = "no row, and nothing delivered"
ORDER = ("whole", "failed", "left", "broken", "refused", "unreached")
"""Of those who heard of one request, the one who heard most."""


@dataclass
class Sums:
    """Of one reason."""

    num: int = 0
    num_delivered: int = 0
    num_owed: int = 0
    num_emitted: int = 0
    most_lacking: int = 0
    """Tokens that one request's client saw and the ledger has not."""
    most_extra: int = 0
    """The other way round."""


@dataclass
class Reckoning:
    reasons: dict[str, Sums] = field(default_factory=dict)
    unexplained: list[str] = field(default_factory=list)

    @property
    def total(self) -> Sums:
        return Sums(
            *(sum(getattr(each, name) for each in self.reasons.values()) for name in list(Sums.__annotations__)[:4])
        )

    def add(self, reason: str, num_delivered: int, num_owed: int, num_emitted: int) -> None:
        sums = self.reasons.setdefault(reason, Sums())
        sums.num += 1
        sums.num_delivered += num_delivered
        sums.num_owed += num_owed
        sums.num_emitted += num_emitted
        sums.most_lacking = max(sums.most_lacking, num_delivered - num_owed)
        sums.most_extra = max(sums.most_extra, num_owed - num_delivered)


async def rows_of(config: settings.Store) -> list[Row]:
    engine = create_async_engine(store.url_of(config))
    async with engine.connect() as connection:
        rows = list((await connection.execute(sa.select(store.ledger))).all())
    await engine.dispose()
    return rows


def emitted_in(files: Sequence[Path]) -> dict[str, int]:
    """Tokens by request, of all its sequences, as the workers wrote them down. What a worker wrote and did not live to
    send another one emitted again, in the same place."""
    ends: dict[tuple[str, str], int] = {}
    for path in files:
        for line in path.read_text().splitlines():
            request_id, index, start, num_more = line.split(" ")
            ends[request_id, index] = max(ends.get((request_id, index), 0), int(start) + int(num_more))
    emitted: dict[str, int] = {}
    for (request_id, _), num_tokens in ends.items():
        emitted[request_id] = emitted.get(request_id, 0) + num_tokens
    return emitted


def reckon(heard: Sequence[Heard], rows: Sequence[Row], emitted: Mapping[str, int], mark_tokens: int) -> Reckoning:
    reckoning = Reckoning()
    listeners: dict[str, list[Heard]] = {}
    for each in heard:
        if each.request_id:
            listeners.setdefault(each.request_id, []).append(each)
        else:
            reckoning.add(NO_ROW, each.num_tokens, 0, 0)  # or a row of its own, below
    emitted = dict(emitted)
    for row in rows:
        best = min(listeners.pop(row.request_id, []), key=lambda each: ORDER.index(each.how), default=None)
        num_emitted = emitted.pop(row.request_id, 0)
        reason = _reason(row, best, num_emitted, mark_tokens)
        if reason is None:
            reckoning.unexplained.append(f"{_facts(row)}, {num_emitted} emitted, {best}")
        else:
            reckoning.add(reason, best.num_tokens if best else 0, row.num_completion_tokens, num_emitted)
    for request_id, several in listeners.items():
        if any(each.num_tokens or each.how == "whole" for each in several):
            reckoning.unexplained.append(f"{request_id} has no row: {several}")
        else:
            reckoning.add(NO_ROW, 0, 0, emitted.pop(request_id, 0))
    for num_emitted in emitted.values():  # bodies that were killed with their gateway
        reckoning.add(NO_ROW, 0, 0, num_emitted)
    return reckoning


def _reason(row: Row, best: Heard | None, num_emitted: int, mark_tokens: int) -> str | None:
    """Why the three numbers are as they are; None: there is no reason."""
    num_owed = row.num_completion_tokens
    usage = Usage(row.num_prompt_tokens, row.num_cached_tokens, num_owed)
    num_delivered = 0 if best is None else best.num_tokens
    # Whoever reads along may become the one who pays for what was emitted under the other's id.
    is_alike = row.cache in FROM_CACHE or (best is not None and best.asked.kind == "alike")
    if max(num_owed, num_delivered) > num_emitted and not is_alike:
        return None
    is_charged = usage.num_prompt_tokens or row.cost_micros
    if row.cost_micros != (pricing.cost_micros(PRICE, usage, row.cache) if is_charged else 0):
        return None
    is_recovered = row.status == 500 and row.finish_reason == "error"
    lacking = num_delivered - num_owed
    if best is None:  # it left before the headers came, or none did
        if is_recovered and num_owed:
            return RECOVERED_LEFT if num_owed <= mark_tokens else None
        return UNHEARD if row.status in (200, 499) or num_owed <= mark_tokens else None
    match best.how:
        case "whole" if not lacking and row.status == 200:
            return FROM_A_CACHE if is_alike else WHOLE if num_owed == num_emitted else None
        case "failed" if not lacking and not is_recovered:
            return TOLD
        case "refused" if not num_owed and not row.cost_micros:
            return REFUSED
        case "broken" if is_recovered and 0 <= lacking <= mark_tokens:
            return RECOVERED
        case "left" if is_recovered and abs(lacking) <= mark_tokens:
            return RECOVERED_LEFT
        case "broken" if lacking <= 0 and not is_recovered:  # it had ended, or was about to be told that it broke off
            is_bounded = -lacking <= mark_tokens or not best.asked.body.get("stream")
            return CUT_OFF if is_bounded else None
        case "left" if (
            best.asked.ending == "half" and row.status == 499 and "idempotency-key" not in best.asked.headers
        ):
            return None if lacking else HALF
        case "left" if lacking <= 0:
            return LEFT
    return None


def _facts(row: Row) -> str:
    return (
        f"{row.request_id} {row.status} {row.finish_reason} {row.cache}: {row.num_completion_tokens} owed "
        f"for {row.cost_micros}"
    )
