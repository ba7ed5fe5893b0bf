"""How long a question about a month of 50 million requests takes: ``python -m benchmarks.usage [--database postgres]``.

The sums of such a month are written straight into their table, as the rollup would have left them: 50 M requests of
1,000 tenants with two keys each, two models, and one in five answered from the exact cache. Every sum of the month's
days and hours is there, and of the last day's minutes. Then questions are asked of ``gateway.ledger.usage``, as the
addresses of the administration and OpenAI's ask it: the first page of each. At last the rollup itself: how many rows a
second it adds up while nothing else happens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sqlite3
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import asyncpg
import uvloop

from gateway import store
from gateway.clock import Clock
from gateway.ledger import sums
from gateway.ledger.entry import Entry
from gateway.ledger.sums import Rollup
from gateway.ledger.usage import Question, Usage
from gateway.store import Store
from policies import pricing, settings, terms
from policies.policy import Price
from policies.pricing import Rates
from tests import postgres
from tests.builders import an_entry, write_chain

NUM_REQUESTS = 50_000_000
NUM_DAYS = 30
NUM_TENANTS, NUM_KEYS, NUM_MODELS = 1000, 2, 2
MINUTE_S, HOUR_S, DAY_S = sums.WIDTHS
MONTH = 20_000 * DAY_S
"""Its first midnight."""
END = MONTH + NUM_DAYS * DAY_S
PRICE = Price(prompt=Decimal("0.31"), cached_prompt=Decimal("0.07"), completion=Decimal("1.7"))
COLUMNS = ("width_s", "starts_at", *sums.WORDS, *sums.NUMBERS)
AT_ONCE = 50_000
NUM_ROLLED = 20_000


def groups() -> list[tuple[str, ...]]:
    """All combinations of words that there are, in the order of the table."""
    return sorted(
        (
            f"ten_{tenant:05}",
            f"key_{tenant:05}_{key}",
            f"model-{model}",
            "/v1/chat/completions",
            "standard",
            "default",
            cache,
            "list:1",
        )
        for tenant in range(NUM_TENANTS)
        for key in range(NUM_KEYS)
        for model in range(NUM_MODELS)
        for cache in ("miss", "hit")
    )


def rows() -> Iterator[tuple[Any, ...]]:
    """Of the table, in its order. What is asked takes as long whatever the numbers are."""
    all_groups = groups()
    requests_a_second = NUM_REQUESTS / NUM_DAYS / DAY_S
    chance = random.Random(1)
    for width_s, since in ((MINUTE_S, END - DAY_S), (HOUR_S, MONTH), (DAY_S, MONTH)):
        mean = requests_a_second * width_s / len(all_groups)
        for starts_at in range(since, END, width_s):
            for words in all_groups:
                share = 0.4 if words[6] == "hit" else 1.6
                if mean < 1 and chance.random() >= mean * share:
                    continue
                num = max(1, round(mean * share))
                yield (width_s, starts_at, *words, num, 400 * num, 90 * num, 150 * num, 0, 9000 * num, 700 * num,
                       378 * num, 100 * num, 6 * num, 272 * num, 0, 0, 0, 0)  # fmt: skip


def fill_sqlite(database: Path) -> int:
    with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("BEGIN")
        insert = f"INSERT INTO usage ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))})"
        connection.executemany(insert, rows())
        connection.execute("COMMIT")
        (num_rows,) = connection.execute("SELECT count(*) FROM usage").fetchone()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").close()
    return int(num_rows)


async def fill_postgres(url: str) -> int:
    connection = await asyncpg.connect(url.replace("+asyncpg", ""))
    num_rows = 0
    portion: list[tuple[Any, ...]] = []
    for row in rows():
        portion.append(row)
        if len(portion) == AT_ONCE:
            await connection.copy_records_to_table("usage", records=portion, columns=COLUMNS)
            num_rows += len(portion)
            portion.clear()
    await connection.copy_records_to_table("usage", records=portion, columns=COLUMNS)
    await connection.execute("VACUUM ANALYZE usage")
    await connection.close()
    return num_rows + len(portion)


def questions() -> dict[str, tuple[Question, int]]:
    """With the lines of a page."""
    month: dict[str, Any] = {"since": MONTH, "until": END, "width_s": DAY_S}
    week: dict[str, Any] = {"since": END - 7 * DAY_S, "until": END, "width_s": HOUR_S}
    one: dict[str, Any] = {"only": {"tenant_id": ["ten_00500"]}}
    return {
        "the month by days": (Question(**month), 100),
        "the month by days and model": (Question(**month, group_by=("model",)), 1000),
        "the month by days and tenant, first 1,000 lines": (Question(**month, group_by=("tenant_id",)), 1000),
        "the month by days and tenant, a page of 5,000": (Question(**month, group_by=("tenant_id",)), 5000),
        "its costs by days, model and kind": (Question(**month, group_by=("model",), with_charges=True), 1000),
        "one tenant's month by days, key and model": (Question(**month, **one, group_by=("key_id", "model")), 5000),
        "a month cut at 10:30, by days": (
            Question(**{**month, "since": END - 29 * DAY_S - 48_600, "until": END - 48_600}), 100),
        "the month by hours, first 100": (Question(**{**month, "width_s": HOUR_S}), 100),
        "a week by hours (OpenAI's largest page)": (Question(**week), 168),
        "one tenant's week by hours": (Question(**week, **one), 168),
        "a day by minutes (OpenAI's largest page)": (
            Question(since=END - DAY_S, until=END, width_s=MINUTE_S), 1440),
    }  # fmt: skip


async def ask(rooms: Store, num_times: int) -> None:
    async def rates_of(price_version: str, model: str) -> Rates:
        return pricing.rates_of(PRICE)

    asked = Usage(rooms, rates_of)
    for name, (question, max_lines) in questions().items():
        took_ms = []
        for _ in range(num_times):
            began_at = time.perf_counter()
            lines, _ = await asked.lines(question, max_lines)
            took_ms.append(1e3 * (time.perf_counter() - began_at))
        print(f"{name:50} {statistics.median(took_ms):8.0f} {max(took_ms):8.0f}  {len(lines):5} lines", flush=True)


async def roll(rooms: Store) -> None:
    """Rows as a busy gateway has them: all different in key and model, settled over some seconds."""
    entries = [a_row(number) for number in range(NUM_ROLLED)]
    for first in range(0, NUM_ROLLED, 1000):
        await write_chain(rooms, *entries[first : first + 1000], first_position=first + 1)

    async def rates_of(price_version: str, model: str) -> Rates:
        return pricing.rates_of(PRICE)

    began_at, began_cpu = time.perf_counter(), time.process_time()
    num_rows = await Rollup(rooms, rates_of, Clock()).roll()
    took_s, cpu_s = time.perf_counter() - began_at, time.process_time() - began_cpu
    each = f"{num_rows / took_s:,.0f} rows/s, {1e6 * cpu_s / num_rows:.0f} us of the gateway's CPU a row"
    print(f"rollup: {num_rows:,} rows in {took_s:.2f} s, {each}")


def a_row(number: int) -> Entry:
    tenant, key, model = number % NUM_TENANTS, number // 7 % NUM_KEYS, number // 3 % NUM_MODELS
    usage = terms.Usage(400, 90, 150)
    return an_entry(
        tenant_id=f"ten_{tenant:05}",
        key_id=f"key_{tenant:05}_{key}",
        model=f"model-{model}",
        price_version="list:1",
        num_prompt_tokens=400,
        num_cached_tokens=90,
        num_completion_tokens=150,
        cost_micros=pricing.cost_micros(PRICE, usage),
        settled_at=END + number // 500,
    )


@contextlib.asynccontextmanager
async def opened(database: str, folder: Path) -> AsyncIterator[Store]:
    with contextlib.ExitStack() as stack:
        url = ""
        if database == "postgres":
            url = f"{stack.enter_context(postgres.server()).url}/postgres"
        config = settings.Store(data_dir=str(folder), url=url)
        async with store.opened(config) as rooms:
            began_at = time.perf_counter()
            if rooms.database is None:
                num_rows = await fill_postgres(url)
            else:
                num_rows = await asyncio.to_thread(fill_sqlite, rooms.database)
            print(f"{database}: {num_rows:,} sums written in {time.perf_counter() - began_at:.0f} s", flush=True)
            yield rooms


async def run(database: str, num_times: int) -> None:
    with tempfile.TemporaryDirectory(prefix="usage-") as folder:
        async with opened(database, Path(folder) / "data") as rooms:
            print(f"{'':50} {'median':>8} {'slowest':>8}  ms of {num_times}")
            await ask(rooms, num_times)
            await roll(rooms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--database", choices=["sqlite", "postgres"], default="sqlite")
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    uvloop.run(run(options.database, options.times))


if __name__ == "__main__":
    main()
