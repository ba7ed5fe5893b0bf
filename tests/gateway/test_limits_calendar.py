"""What a budget's period has cost is what its days have cost, wherever the machines say that they are."""

from __future__ import annotations

import asyncio
import random
import time
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from gateway import store
from gateway.bootstrap import bootstrap
from gateway.clock import Clock
from gateway.directory import Directory
from gateway.ledger.sums import Rollup
from gateway.ledger.usage import DAY_S, Question, Usage
from gateway.limits import Limits
from gateway.limits.budgets import Budgets
from policies import pricing, settings
from policies.policy import Budget, Policy, Price
from policies.pricing import Rates
from tests.builders import HandClock, an_entry, write_chain
from tests.residents import add_tenant, add_version

SINCE = int(datetime(2027, 12, 20, tzinfo=UTC).timestamp())
UNTIL = int(datetime(2028, 11, 20, tzinfo=UTC).timestamp())
EDGES = [
    datetime(2028, 1, 1, tzinfo=UTC),
    datetime(2028, 2, 1, tzinfo=UTC),
    datetime(2028, 2, 29, tzinfo=UTC),
    datetime(2028, 3, 1, tzinfo=UTC),
    datetime(2028, 3, 12, 10, tzinfo=UTC),  # clocks go forward in Los Angeles
    datetime(2028, 3, 26, 1, tzinfo=UTC),  # in Berlin
    datetime(2028, 4, 1, 16, tzinfo=UTC),  # back in Lord Howe, by half an hour
    datetime(2028, 10, 29, 1, tzinfo=UTC),
    datetime(2028, 10, 30, tzinfo=UTC),  # a Monday
    datetime(2028, 11, 1, tzinfo=UTC),
]
PERIODS = {
    "day": lambda at: (at, at + timedelta(days=1)),
    "week": lambda at: (at - timedelta(days=at.weekday()), at - timedelta(days=at.weekday() - 7)),
    "month": lambda at: (at.replace(day=1), (at.replace(day=28) + timedelta(days=4)).replace(day=1)),
}


async def rates_of(price_version: str, model: str) -> Rates:
    return pricing.rates_of(Price())


@pytest.fixture
def zone(request, monkeypatch):
    """Of this process, and of the database's sessions."""
    monkeypatch.setenv("TZ", request.param)
    monkeypatch.setenv("PGTZ", request.param)
    time.tzset()
    yield request.param
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize("store_settings", ["postgres"], indirect=True)
@pytest.mark.parametrize(
    "zone", ["America/Los_Angeles", "Europe/Berlin", "Australia/Lord_Howe", "Pacific/Kiritimati"], indirect=True
)
async def test_a_budget_counts_what_the_days_of_its_period_have_cost(zone, store_settings):
    rng = random.Random(zone)
    async with store.opened(store_settings) as rooms:
        async with rooms.engine.begin() as connection:
            name = rooms.engine.url.database
            await connection.exec_driver_sql(f"ALTER DATABASE \"{name}\" SET timezone TO '{zone}'")
        await rooms.engine.dispose()
        await bootstrap(rooms, {})
        owners = {}
        for kind in PERIODS:
            policy = Policy(budget=Budget(Decimal(10**6), kind))
            await add_version(rooms, kind, policy)
            owners[kind] = await add_tenant(rooms, f"by {kind}", kind), policy
        rows = []
        for number in range(600):
            tenant_id, _ = rng.choice([*owners.values()])
            edge = int(rng.choice(EDGES).timestamp())
            at = rng.choice([rng.randrange(SINCE, UNTIL), edge + rng.choice([-3600, -1, 0, 1, 3599, 3600, 7200])])
            request_id = f"req_{(1000 * at << 80) + number:032x}"
            cost = rng.randrange(1, 10_000)
            rows.append(
                an_entry(tenant_id=tenant_id, request_id=request_id, created_at=at, settled_at=at, cost_micros=cost)
            )
        rows.sort(key=lambda row: row.settled_at)
        await write_chain(rooms, *rows)
        rollup, asked = Rollup(rooms, rates_of, Clock()), Usage(rooms, rates_of)
        await rollup.roll()
        question = Question(
            since=SINCE, until=UNTIL, width_s=DAY_S, group_by=("tenant_id",), with_charges=False, only={}
        )
        lines, has_more = await asked.lines(question, 10_000, None)
        assert not has_more
        by_day = {(line.starts_at, line.words[0]): line.totals.cost_micros for line in lines}
        assert sum(by_day.values()) == sum(row.cost_micros for row in rows)
        assert all(starts_at % DAY_S == 0 for starts_at, _ in by_day)
        directory = await Directory.load(rooms, HandClock())
        for at in [*EDGES, *(datetime.fromtimestamp(rng.randrange(SINCE, UNTIL), UTC) for _ in range(6))]:
            for seconds in (-1, 0):
                now = at.timestamp() + seconds
                limits = Limits(settings.Settings(), HandClock(), wall=lambda now=now: now)
                budgets = Budgets(
                    rooms, directory, limits, HandClock(), asyncio.Event(), lambda alert: None, lambda now=now: now
                )
                await budgets.restore()
                for kind, (tenant_id, policy) in owners.items():
                    day = datetime.fromtimestamp(now, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
                    first, last = (int(end.timestamp()) for end in PERIODS[kind](day))
                    of_period = [
                        cost for (starts_at, owner), cost in by_day.items() if owner == tenant_id and first <= starts_at
                    ]
                    (reading,) = await limits.peek(policy, tenant_id)
                    assert reading.used == sum(of_period), (zone, kind, at, seconds)  # later rows are there by then
                    assert reading.reset_ms == int(1e3 * (last - now)), (zone, kind, at, seconds)
