"""Rows sorted into columns, against looking at each row."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from gateway.ledger.entry import Entry
from gateway.ledger.tally import AT_ONCE, Columns, Tally
from policies.settings import CLASSES
from tests.builders import an_entry


def some_row(rng: random.Random) -> Entry:
    ttft_ms = rng.choice((None, 1.0, 100.0, 1e6))
    return an_entry(
        model=rng.choice("ab"),
        tenant_id=rng.choice("xyz"),
        sla_class=rng.choice((*CLASSES, "former")),
        status=rng.choice((200, 200, 429, 499, 500)),
        finish_reason=rng.choice(("stop", "length", None)),
        cache=rng.choice(("hit", "miss")),
        ttft_ms=ttft_ms,
        duration_ms=(ttft_ms or 0.0) + rng.choice((0.0, 10.0, 1e5)),
        num_sequences=rng.randint(1, 2),
        num_prompt_tokens=rng.randint(0, 9),
        num_completion_tokens=rng.randint(0, 30),
        cost_micros=rng.randint(0, 99),
    )


def is_kept(row: Entry) -> bool:
    """The promise of its class, if somebody still knows it."""
    promised = CLASSES.get(row.sla_class)
    if row.status != 200 or promised is None or row.ttft_ms is None:
        return row.status == 200
    num_each = row.num_completion_tokens / row.num_sequences
    tpot_ms = (row.duration_ms - row.ttft_ms) / (num_each - 1) if num_each > 1 else 0.0
    return row.ttft_ms <= promised.ttft_ms and tpot_ms <= promised.tpot_ms


@pytest.mark.parametrize("seed", range(20))
def test_columns_add_up_to_what_each_row_says(seed):
    rng = random.Random(seed)
    rows = [some_row(rng) for _ in range(rng.randint(1, 60))]
    columns = Columns(rows, CLASSES)
    assert sum(alike.num for alike in columns.alike) == len(rows)
    assert len({alike.kind for alike in columns.alike}) == len(columns.alike)
    for alike in columns.alike:
        own = [
            row for row in rows if alike.kind == (row.model, row.endpoint, row.sla_class, row.status, row.finish_reason)
        ]
        assert list(alike.num_prompt_tokens) == [row.num_prompt_tokens for row in own]
        assert list(alike.duration_ms) == [row.duration_ms for row in own]
        assert alike.ttft_ms == [row.ttft_ms for row in own if row.ttft_ms is not None]
        assert alike.num_kept == sum(map(is_kept, own))
        assert alike.count_for_promise == (alike.kind[3] in (200, 500))
        assert len(alike.tpot_ms) == len(alike.num_gaps)
        assert min(alike.num_gaps, default=1) > 0
    for tenant_id, owed in columns.tenants.items():
        own = [row for row in rows if row.tenant_id == tenant_id]
        assert owed[0] == len(own)
        assert owed[2:] == [sum(row.num_completion_tokens for row in own), sum(row.cost_micros for row in own)]
    assert columns.outcomes == Counter(row.cache for row in rows)


def test_rows_are_counted_when_enough_have_come_or_somebody_asks_and_each_once():
    tally, seen = Tally(CLASSES), []
    tally.watchers.append(lambda ended: seen.append(sum(alike.num for alike in ended.alike)))
    for _ in range(AT_ONCE - 1):
        tally.add([an_entry()])
    assert seen == []
    tally.add([an_entry(), an_entry()])
    assert seen == [AT_ONCE + 1]
    tally.add([an_entry()])
    tally.flush()
    tally.flush()
    assert seen == [AT_ONCE + 1, 1]


def test_a_count_that_fails_is_logged_and_keeps_nothing_from_being_written(caplog):
    def fail(ended: Columns) -> None:
        raise RuntimeError("no room")

    tally = Tally(CLASSES)
    tally.watchers.append(fail)
    tally.add([an_entry()])
    tally.flush()
    assert "1 rows were not counted" in caplog.text
