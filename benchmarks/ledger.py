"""What writing the ledger costs: ``python -m benchmarks.ledger [--only sqlite|postgres] [--seconds N] [--dir DIR]``.

For SQLite on a disk, and for a PostgreSQL that is started for it on the same disk and the same cores, rows go through
the gateway's own ``Ledger`` (with their places in a chain), and it is told:

- at 500 requests a second, at random (Poisson), of which 50 are open at any time: how long settling holds up the last
  byte of an answer. The disk's own p50 and p99 of a write of 4 KiB with fdatasync, measured in the same run, are the
  limit of it;
- at 5,000 rows a second, evenly offered: whether all of them were written by the end, and how long each took;
- how many rows a second are written when there is always one more to write, with 256 and with 2,000 requests settling
  at the same time;
- the 500 requests a second again, in the ledger that has come of it, once the disk is at rest;
- how fast ``penstock ledger verify`` reads the rows again, in how much more memory.

And once, without a database, what a row's place in its chain costs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import resource
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import uvloop

from gateway import store
from gateway.clock import Clock
from gateway.head import new_request_id
from gateway.ledger import Chain, Entry, Ledger, open_chain, writer_for
from gateway.ledger.verify import verify
from gateway.store import Store
from policies import settings
from tests import postgres

ROW = Entry(
    request_id="",
    tenant_id="ten_01976b8a0d5f3a2b1c4d5e6f",
    key_id="key_01976b8a0d5f3a2b1c4d5e6f",
    model="llama-3.1-8b-instruct",
    endpoint="/v1/chat/completions",
    status=200,
    finish_reason="stop",
    num_prompt_tokens=1234,
    num_cached_tokens=1024,
    num_completion_tokens=256,
    num_sequences=1,
    created_at=1_795_000_000,
    queue_ms=0.254,
    ttft_ms=112.53,
    duration_ms=2321.125,
    sla_class="standard",
    service_tier="default",
    cache="miss",
    policy_name="default",
    policy_version=1,
    cost_micros=731,
    engine_us=48_211,
    kv_block_ms=101_323,
    price_version="list:17",
    end_user="user-8842",
    metadata='{"team":"search","feature":"summary"}',
)
OFFERED, REQUESTS, OPEN = 5000, 500, 50


def a_row() -> Entry:
    return msgspec.structs.replace(ROW, request_id=new_request_id())


@contextlib.asynccontextmanager
async def ledger_of(rooms: Store, num_open: Callable[[], int]) -> AsyncIterator[Ledger]:
    ledger = Ledger(writer_for(rooms), settings.Store(), Clock(), await open_chain(rooms), num_open)
    try:
        yield ledger
    finally:
        await ledger.close(60)


async def flat_out(rooms: Store, num_at_once: int, seconds: float) -> float:
    """Rows a second."""
    async with ledger_of(rooms, lambda: num_at_once) as ledger:
        end = time.perf_counter() + seconds
        num_rows = 0

        async def settle_on() -> None:
            nonlocal num_rows
            while time.perf_counter() < end:
                await ledger.settle(a_row())
                num_rows += 1

        began_at = time.perf_counter()
        await asyncio.gather(*(settle_on() for _ in range(num_at_once)))
        return num_rows / (time.perf_counter() - began_at)


async def offered(rooms: Store, rows_per_s: float, seconds: float, chance: random.Random | None) -> dict[str, float]:
    """Milliseconds that settling takes, from the instant at which a row was due; evenly, or by ``chance``."""
    taken: list[float] = []
    settling: set[asyncio.Task[None]] = set()
    async with ledger_of(rooms, lambda: OPEN + len(settling)) as ledger:

        async def settle(due: float) -> None:
            await ledger.settle(a_row())
            taken.append(time.perf_counter() - due)

        due = began_at = time.perf_counter()
        most_waiting = num_rows = 0
        while due < began_at + seconds:
            if (wait_s := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            task = asyncio.create_task(settle(due))
            settling.add(task)
            task.add_done_callback(settling.discard)
            num_rows += 1
            most_waiting = max(most_waiting, len(settling))
            due += chance.expovariate(rows_per_s) if chance else 1 / rows_per_s
        await asyncio.gather(*settling)
        lasted_s = time.perf_counter() - began_at
    return {"rows_per_s": num_rows / lasted_s, "most_waiting": most_waiting, **quantiles(taken)}


def quantiles(seconds: list[float]) -> dict[str, float]:
    """In milliseconds."""
    cuts = statistics.quantiles(seconds, n=1000)
    return {"p50_ms": 1e3 * cuts[499], "p99_ms": 1e3 * cuts[989], "max_ms": 1e3 * max(seconds)}


def disk(folder: Path, num_writes: int = 1000) -> dict[str, float]:
    """Writes of 4 KiB to the end of a file, each durable before the next."""
    took = []
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(num_writes):
            began_at = time.perf_counter()
            os.write(file.fileno(), bytes(4096))
            os.fdatasync(file.fileno())
            took.append(time.perf_counter() - began_at)
    return quantiles(took)


def place_us(num_rows: int = 20_000) -> float:
    """Of a row in its chain; the best of five."""
    rows = [a_row() for _ in range(num_rows)]
    best = float("inf")
    for _ in range(5):
        chain = Chain(1)
        began_at = time.perf_counter()
        for row in rows:
            chain.extend(row, 1_795_000_000)
        best = min(best, (time.perf_counter() - began_at) / num_rows)
    return 1e6 * best


async def measure(name: str, config: settings.Store, seconds: float) -> None:
    async with store.opened(config) as rooms:
        await flat_out(rooms, 256, 0.2)  # connections, statements
        await rest(rooms)
        show(name, "disk, 4 KiB", **disk(Path(config.data_dir)))
        show(name, f"{REQUESTS}/s, at random", **await offered(rooms, REQUESTS, 2 * seconds, random.Random(1)))
        show(name, f"{OFFERED}/s, evenly", **await offered(rooms, OFFERED, seconds, None))
        for num_at_once in (256, 2000):
            show(name, f"{num_at_once} at once", rows_per_s=await flat_out(rooms, num_at_once, seconds))
        await rest(rooms)
        show(name, f"{REQUESTS}/s, once more", **await offered(rooms, REQUESTS, 2 * seconds, random.Random(2)))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began_at = time.perf_counter()
        verdict = await verify(rooms)
        assert not verdict.num_findings
        lasted_s = time.perf_counter() - began_at
        grew_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        show(name, "verify", num_rows=verdict.num_rows, rows_per_s=verdict.num_rows / lasted_s, grew_mib=grew_mib)


async def rest(rooms: Store) -> None:
    """Until what was written is where it belongs: a ledger that grows at the usual pace has nothing of it waiting."""
    statement = "CHECKPOINT" if rooms.database is None else "PRAGMA wal_checkpoint(TRUNCATE)"
    async with rooms.engine.connect() as connection:
        await (await connection.execution_options(isolation_level="AUTOCOMMIT")).exec_driver_sql(statement)
    os.sync()


def show(name: str, what: str, **figures: float) -> None:
    shown = "  ".join(f"{figure} {value:,.2f}" for figure, value in figures.items())
    print(f"{name:10} {what:20} {shown}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--only", choices=["sqlite", "postgres"])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each part")
    parser.add_argument("--dir", help="on the disk to measure [the system's for temporary files]")
    options = parser.parse_args()
    print(f"a row's place in its chain: {place_us():.2f} us")
    with tempfile.TemporaryDirectory(dir=options.dir, ignore_cleanup_errors=True) as folder:
        if options.only != "postgres":
            uvloop.run(measure("sqlite", settings.Store(data_dir=folder), options.seconds))
        if options.only != "sqlite":
            with postgres.server() as server:
                config = settings.Store(data_dir=folder, url=f"{server.url}/postgres")
                uvloop.run(measure("postgres", config, options.seconds))


if __name__ == "__main__":
    main()
