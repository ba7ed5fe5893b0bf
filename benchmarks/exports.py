"""What an export of many rows takes: memory above all.

    python -m benchmarks.exports --rows 10000000

Rows are written into a SQLite ledger of its own, then ``penstock export`` runs as users run it, in a process of its
own, whose peak of resident memory is what counts (wanted: under 300 MB for 10 M rows to Parquet).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from gateway import store
from gateway.launcher import environment
from gateway.ledger.entry import Entry
from policies import settings

FIRST_DAY, DAY_S = 20_700, 86_400
NUM_DAYS = 31
COLUMNS = Entry.__struct_fields__


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--formats", default="parquet")
    parser.add_argument("--what", default="usage", choices=["usage", "costs"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        began_at = time.monotonic()
        fill(home, options.rows)
        size = (home / "data" / "penstock.db").stat().st_size
        print(f"{options.rows:,} rows written in {time.monotonic() - began_at:.0f} s, {size / 1e9:.2f} GB")
        for format in options.formats.split(","):
            export(home, options.what, format)


def fill(home: Path, num_rows: int) -> None:
    """A month of rows, in order."""
    config = settings.Store(data_dir=str(home / "data"))

    async def migrated() -> None:
        async with store.opened(config):
            pass

    asyncio.run(migrated())
    connection = sqlite3.connect(home / "data" / "penstock.db", isolation_level=None)
    for pragma in ("journal_mode = WAL", "synchronous = OFF", "cache_size = -200000"):
        connection.execute(f"PRAGMA {pragma}")
    connection.execute(
        "INSERT INTO ledger_chains (id, opened_at, gateway) VALUES (1, ?, 'benchmark')", [FIRST_DAY * DAY_S]
    )
    insert = f"INSERT INTO ledger ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))})"
    connection.execute("BEGIN")
    connection.executemany(insert, rows(num_rows))
    connection.execute("COMMIT")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()


def rows(number: int) -> Iterator[tuple[object, ...]]:
    chance = random.Random(1)
    some = [an_entry(chance) for _ in range(10_000)]
    places = {name: COLUMNS.index(name) for name in ("request_id", "created_at", "settled_at", "position")}
    for index in range(number):
        row = list(some[index % len(some)])
        at = FIRST_DAY * DAY_S + index * NUM_DAYS * DAY_S // number
        row[places["request_id"]] = f"req_{index:032x}"
        row[places["created_at"]] = row[places["settled_at"]] = at
        row[places["position"]] = index + 1
        yield tuple(row)


def an_entry(chance: random.Random) -> tuple[object, ...]:
    num_prompt = chance.randrange(1, 8000)
    entry = Entry(
        request_id="",
        tenant_id=f"ten_{chance.randrange(40):024x}",
        key_id=f"key_{chance.randrange(400):024x}",
        model=chance.choice(["small", "large", "larger"]),
        endpoint="/v1/chat/completions",
        status=200,
        finish_reason="stop",
        num_prompt_tokens=num_prompt,
        num_cached_tokens=num_prompt // 3,
        num_completion_tokens=chance.randrange(1000),
        num_sequences=1,
        created_at=0,
        queue_ms=chance.random(),
        ttft_ms=chance.random() * 100,
        duration_ms=chance.random() * 1000,
        sla_class=chance.choice(["interactive", "standard", "batch"]),
        service_tier="default",
        cache="miss",
        policy_name="default",
        policy_version=1,
        cost_micros=chance.randrange(100_000),
        engine_us=chance.randrange(10**7),
        end_user=f"user-{chance.randrange(1000)}",
        trace_id=f"{chance.getrandbits(128):032x}",
        chain=1,
        link=chance.randbytes(32),
    )
    return msgspec.structs.astuple(entry)


def export(home: Path, what: str, format: str) -> None:
    output = home / f"{what}.{format}"
    command = [sys.executable, "-m", "gateway", "export", what, "--from", day(0), "--to", day(NUM_DAYS)]
    command += ["--format", format, "--output", str(output)]
    began_at = time.monotonic()
    process = subprocess.Popen(command, cwd=home, env=environment())
    peak = Peak(process.pid)
    if process.wait():
        sys.exit("the export failed")
    took_s = time.monotonic() - began_at
    print(f"{what} as {format}: {took_s:.0f} s, {output.stat().st_size / 1e6:,.0f} MB, peak {peak.megabytes:.0f} MB")


class Peak:
    """The peak of a process's resident memory, as the kernel says it."""

    def __init__(self, pid: int) -> None:
        self.megabytes = 0.0
        self._path = Path(f"/proc/{pid}/status")
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            try:
                line = next(line for line in self._path.read_text().splitlines() if line.startswith("VmHWM"))
            except (OSError, StopIteration):
                return
            self.megabytes = int(line.split()[1]) * 1024 / 1e6
            time.sleep(0.05)


def day(number: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime((FIRST_DAY + number) * DAY_S))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
