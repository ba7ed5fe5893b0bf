"""Asks, kills, and reckons up."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.audit.client import Asked, Heard, ask
from benchmarks.audit.house import KEY, House
from benchmarks.audit.reckoning import Reckoning, Sums, emitted_in, reckon, rows_of
from policies import settings
from tests import postgres
from tests import redis as redises
from tests.family import sharing

KINDS = {"stream": 6, "body": 4, "cut": 4, "half": 3, "impatient": 4, "alike": 3, "idempotent": 2, "several": 1}
"""How often each; "alike" ask what others ask at the same time, or have asked."""
MAX_TOKENS, MAX_TRIES, NUM_ALIKE = 120, 4, 20

notes = Console(stderr=True, highlight=False)


class Audit:
    """One run. Every choice of it comes from its seed; what is killed when it is hit does not."""

    def __init__(self, house: House, seed: int, num_requests: int, gateway_every_s: float, worker_every_s: float):
        self.heard: list[Heard] = []
        self._house = house
        self._chance = random.Random(seed)
        self._every_s = {"gateway": gateway_every_s, "worker": worker_every_s}
        self._num_requests = num_requests
        self._numbers = itertools.count(1)

    async def run(self, num_clients: int) -> None:
        killing = [asyncio.create_task(self._kill(what)) for what in self._every_s]
        try:
            clients = [asyncio.create_task(self._client()) for _ in range(num_clients)]
            await asyncio.gather(*clients)
        finally:
            for task in killing:
                task.cancel()

    async def _kill(self, what: str) -> None:
        while True:
            await asyncio.sleep(self._chance.expovariate(1 / self._every_s[what]))
            self._house.kill(what, self._chance)

    async def _client(self) -> None:
        while len(self.heard) < self._num_requests:
            for asked in self._planned():
                for _ in range(MAX_TRIES):
                    await self._house.ready.wait()
                    heard = await ask(self._house.port, KEY, asked)
                    if heard.how == "unreached" and not heard.status:
                        await asyncio.sleep(0.05)  # before it is told that nobody listens
                    self.heard.append(heard)
                    if heard.how in ("whole", "left"):
                        break
                    if "idempotency-key" not in asked.headers:
                        asked = self._again(asked)

    def _planned(self) -> Iterator[Asked]:
        """One request, or the same twice under one key."""
        chance = self._chance
        (kind,) = chance.choices(list(KINDS), list(KINDS.values()))
        number = next(self._numbers)
        body: dict[str, Any] = {
            "model": "demo",
            "messages": [{"role": "user", "content": f"Number {number}"}],
            "max_tokens": chance.randint(1, MAX_TOKENS),
            "stream": chance.random() < 0.7,
        }
        asked = Asked(kind, f"client-{number}", body)
        match kind:
            case "stream":
                body["stream"] = True
                body["stream_options"] = {"include_usage": chance.random() < 0.5}
            case "body":
                body["stream"] = False
            case "cut" | "half":
                body["stream"] = True
                asked.ending = "half" if kind == "half" else "abort"
                asked.leaves_after = chance.randint(1, body["max_tokens"])
            case "impatient":
                asked.gives_up_s = chance.expovariate(10.0)
            case "alike":
                which = chance.randrange(NUM_ALIKE)
                body |= {"messages": [{"role": "user", "content": f"Alike {which}"}], "temperature": 0.0}
                body["max_tokens"] = 10 + 5 * which
            case "several":
                body["n"] = 2
            case "idempotent":
                asked.headers["idempotency-key"] = asked.user
                asked.gives_up_s = chance.expovariate(5.0)
                yield asked
                asked = Asked(kind, asked.user, body, asked.headers)
        yield asked

    def _again(self, asked: Asked) -> Asked:
        """A retry is another request."""
        user = f"client-{next(self._numbers)}"
        return Asked(asked.kind, user, asked.body, asked.headers, asked.ending, asked.leaves_after, asked.gives_up_s)


async def measure(
    folder: Path,
    num_requests: int,
    num_clients: int = 64,
    num_workers: int = 2,
    seed: int = 1,
    gateway_every_s: float = 5.0,
    worker_every_s: float = 3.0,
    step_s: float = 0.002,
    environ: Mapping[str, str] | None = None,
) -> tuple[Reckoning, House, int]:
    """The reckoning, what was killed, and how many requests were made."""
    mark_tokens = settings.Ledger().mark_tokens
    async with House(folder, num_workers, step_s, environ or {}) as house:
        audit = Audit(house, seed, num_requests, gateway_every_s, worker_every_s)
        await audit.run(num_clients)
        house.kill("gateway", random.Random(seed))
        await asyncio.sleep(0.1)
        await house.ready.wait()
        await house.restart()
    config = settings.Store(data_dir=str(folder / "data"), url=(environ or {}).get("PENSTOCK_STORE__URL", ""))
    reckoning = reckon(audit.heard, await rows_of(config), emitted_in(house.emitted), mark_tokens)
    return reckoning, house, len(audit.heard)


def show(reckoning: Reckoning) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("", "requests", "delivered", "in the ledger", "emitted", "most lacking", "most extra"):
        table.add_column(name, justify="left" if not name else "right")

    def add(name: str, sums: Sums) -> None:
        numbers = (sums.num, sums.num_delivered, sums.num_owed, sums.num_emitted, sums.most_lacking, sums.most_extra)
        table.add_row(name, *(f"{number:,}" for number in numbers))

    for reason, sums in sorted(reckoning.reasons.items(), key=lambda item: -item[1].num):
        add(reason, sums)
    add("all", reckoning.total)
    Console(highlight=False, width=150).print(table)


def _shared(stack: contextlib.ExitStack, num_processes: int) -> dict[str, str]:
    database, redis = stack.enter_context(postgres.server()), stack.enter_context(redises.server())
    config = settings.Redis(url=redis.url, prefix="audit:", timeout_ms=1000.0)
    return sharing(config, f"{database.url}/postgres", num_processes)


@click.command()
@click.option("--requests", "num_requests", type=click.IntRange(1), default=20_000, show_default=True)
@click.option("--clients", "num_clients", type=click.IntRange(1), default=64, show_default=True, help="At once.")
@click.option("--workers", "num_workers", type=click.IntRange(1), default=2, show_default=True)
@click.option("--gateway-every", "gateway_every_s", type=float, default=5.0, show_default=True, help="Seconds, mean.")
@click.option("--worker-every", "worker_every_s", type=float, default=3.0, show_default=True, help="Seconds, mean.")
@click.option("--seed", type=int, default=1, show_default=True)
@click.option(
    "--processes",
    "num_processes",
    type=click.IntRange(1, 16),
    default=1,
    show_default=True,
    help="Gateways on the port; more than one share a PostgreSQL and a Redis of the audit's own.",
)
def main(num_requests: int, num_processes: int, **options: Any) -> None:
    """Asks in every way while gateways and workers are killed, and compares what clients counted, what is in the ledger
    and what the workers emitted."""
    began_at = time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="audit-")))
        environ = _shared(stack, num_processes) if num_processes > 1 else {}
        reckoning, house, num_asked = uvloop.run(measure(folder, num_requests, environ=environ, **options))
    show(reckoning)
    kills = ", ".join(f"{number} {what}s" for what, number in house.num_kills.items())
    print(f"{num_asked:,} requests, {kills} killed, {time.monotonic() - began_at:.0f} s")
    for line in reckoning.unexplained[:20]:
        notes.print(line)
    print(f"{len(reckoning.unexplained)} unexplained")
    sys.exit(1 if reckoning.unexplained else 0)


if __name__ == "__main__":
    main()
