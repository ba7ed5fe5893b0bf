"""What Penstock takes of a machine while nobody asks it anything.

    python -m benchmarks.idle [--only KIND] [--seconds 60]

By ``KIND``:

    sqlite    one gateway with what it has by default: SQLite, and the demo model's worker
    postgres  the same with a PostgreSQL
    shared    two gateways on one port that share a PostgreSQL and a Redis, and the worker that is theirs

Each is started and left alone until what happens once after a start has happened. Then, for each of its processes: the
CPU time of all its threads, as a share of one core, and how often one of them woke up. And how often the database was
asked: statements of SQLite, transactions of PostgreSQL, both from whichever process. Other work on the machine makes
the shares larger, since whoever wakes up finds its caches full of something else.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from benchmarks.counted import num_counted
from benchmarks.gateway.processes import server
from tests import postgres
from tests import redis as redises

KINDS = ("sqlite", "postgres", "shared")
SETTLING_S = 30.0
NAMES = {"worker": "worker", "gateway.member": "gateway", "benchmarks.counted": "serve"}
"""By the module that a process runs. ``serve`` is the gateway itself, where there is one."""


class Process(msgspec.Struct, frozen=True):
    name: str
    cpu_percent: float
    """Of one core."""
    wake_ups_per_s: float


class Figures(msgspec.Struct, frozen=True):
    kind: str
    processes: list[Process]
    asked_per_s: float
    """Statements or transactions of all of them."""


@contextlib.asynccontextmanager
async def served(kind: str, folder: Path) -> AsyncIterator[tuple[int, Callable[[], Awaitable[int]]]]:
    """The process that was started, and what counts how often the database was asked."""
    counted = folder / "counted"
    environ = {"PENSTOCK_STORE__DATA_DIR": str(folder / "data"), "PENSTOCK_SERVER__PORT": "0"}

    async def of_sqlite() -> int:
        return num_counted(counted)

    count: Callable[[], Awaitable[int]] = of_sqlite
    async with contextlib.AsyncExitStack() as stack:
        if kind != "sqlite":
            url = f"{stack.enter_context(postgres.server()).url}/postgres"
            environ["PENSTOCK_STORE__URL"] = url
            engine = create_async_engine(url.replace("/postgres", "/template1"), isolation_level="AUTOCOMMIT")
            stack.push_async_callback(engine.dispose)

            async def of_postgres() -> int:
                query = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = 'postgres'"
                async with engine.connect() as connection:
                    return int((await connection.execute(sa.text(query))).scalar_one())

            count = of_postgres
        if kind == "shared":
            environ["PENSTOCK_REDIS__URL"] = stack.enter_context(redises.server()).url
            environ["PENSTOCK_SERVER__PROCESSES"] = "2"
        command = [sys.executable, "-m", "benchmarks.counted", str(counted), "serve"]
        started = await stack.enter_async_context(server(command, None, folder / "log", environ))
        yield started.pid, count


async def measure(kind: str, seconds: float) -> Figures:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        async with served(kind, Path(folder)) as (pid, count):
            await asyncio.sleep(SETTLING_S)
            began, asked, before = time.monotonic(), await count(), {one: taken_by(one) for one in family(pid)}
            await asyncio.sleep(seconds)
            took_s, asked = time.monotonic() - began, await count() - asked
            processes = []
            for one, (cpu_s, num_wake_ups) in before.items():
                then_s, then = taken_by(one)
                percent = 100 * (then_s - cpu_s) / took_s
                processes.append(Process(name_of(one), percent, (then - num_wake_ups) / took_s))
            return Figures(kind, processes, asked / took_s)


def family(pid: int) -> Iterator[int]:
    """The process and all that descend from it."""
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from family(int(child))


def taken_by(pid: int) -> tuple[float, int]:
    """CPU seconds of its threads, and how often they have waited for something."""
    cpu_ns = num_waits = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # one that has ended meanwhile
            cpu_ns += int((task / "schedstat").read_text().split()[0])
            status = (task / "status").read_text()
            num_waits += int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return 1e-9 * cpu_ns, num_waits


def name_of(pid: int) -> str:
    """What it is, as far as its command line tells."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    return next((name for module, name in NAMES.items() if module in words), words[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    for kind in KINDS if options.only is None else [options.only]:
        figures = asyncio.run(measure(kind, options.seconds))
        asked = "statements" if kind == "sqlite" else "transactions"
        print(f"{kind}: {figures.asked_per_s:.1f} {asked}/s, load {os.getloadavg()[0]:.1f}")
        for each in figures.processes:
            print(f"  {each.name:<8} {each.cpu_percent:.3f} % of a core, {each.wake_ups_per_s:.1f} wake-ups/s")


if __name__ == "__main__":
    main()
