"""Workers shot under their streams: ``python -m benchmarks.failover [--rounds 20] [--streams 32] [--workers 2]``.

A gateway with real workers and the demo model in deterministic mode, over HTTP. The same streams, half of them greedy
and half seeded, with penalties, are read once undisturbed and then in each round again, while a worker that has some of
them is killed with SIGKILL. Each stream must end as it does undisturbed, and owe in one row of the ledger what its
client got. A stream's pause is the gap between the last event before the shot and the first one after it. Exit status 1
when an answer differs or the ledger does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from gateway.flight import Flight
from gateway.workers import Worker
from policies import settings
from tests.builders import until
from tests.house import House, running

PROMPTS = ("Once upon a time", "The hedgehog went", "9 - 6 =", "There was a red ball", "Question:", "One morning")


@dataclass
class Read:
    """A stream, as its client had it."""

    request_id: str = ""
    text: str = ""
    error: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    at: list[float] = field(default_factory=list)
    """When each event came."""

    def pause_s(self, shot_at: float) -> float:
        """Around the shot; 0 when nothing came before it or after it."""
        before = max((at for at in self.at if at <= shot_at), default=None)
        after = min((at for at in self.at if at > shot_at), default=None)
        return 0.0 if before is None or after is None else after - before


def body_of(number: int, num_tokens: int) -> dict[str, Any]:
    sampling: dict[str, Any] = {"temperature": 0}
    if number % 2:
        sampling = {"temperature": 0.8, "top_p": 0.95, "frequency_penalty": 0.3, "presence_penalty": 0.2}
    return {
        "model": "demo",
        # Equal ones would share one computation.
        "prompt": f"{number}. {PROMPTS[number % len(PROMPTS)]}",
        "max_tokens": num_tokens,
        "seed": number,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **sampling,
    }


async def read(session: aiohttp.ClientSession, body: dict[str, Any], stream: Read) -> Read:
    async with session.post("/v1/completions", json=body) as answer:
        stream.request_id = answer.headers.get("x-request-id", "")
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            stream.error = stream.error or str(event.get("error", ""))
            for choice in event.get("choices", ()):
                stream.text += choice["text"]
                stream.at.append(time.monotonic())
            stream.usage = event.get("usage") or stream.usage
    return stream


def held(house: House) -> dict[Worker, list[Flight]]:
    """The streams of each worker."""
    (line,) = house.gw.dispatch._lines.values()
    return {worker: list(seat.flights.values()) for worker, seat in line.seats.items()}


def have_come_to(house: House, num_streams: int, num_tokens: int) -> bool:
    """All streams have begun, and one of them has so many tokens."""
    flights = [flight for each in held(house).values() for flight in each]
    came = [flight.num_tokens for flight in flights]
    return len(came) == num_streams and min(came) > 0 and max(came) >= num_tokens


@dataclass
class Findings:
    num_streams: int = 0
    num_shots: int = 0
    lost: list[float] = field(default_factory=list)
    """Pauses of streams whose worker was shot, seconds."""
    spared: list[float] = field(default_factory=list)
    """Those of the others."""
    differing: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    ledger: list[str] = field(default_factory=list)
    """Rows that are not there once, or not what the client had."""
    num_owed: int = 0
    num_delivered: int = 0

    @property
    def is_good(self) -> bool:
        return not (self.differing or self.failed or self.ledger)

    def told(self) -> str:
        lines = [
            f"{self.num_shots} workers shot under {self.num_streams} streams: {len(self.lost)} had lost theirs",
            f"failed: {len(self.failed)}; other than undisturbed: {len(self.differing)}",
            f"ledger: {self.num_owed} tokens owed, {self.num_delivered} delivered, {len(self.ledger)} rows that differ",
        ]
        for name, pauses in (("of streams that lost their worker", self.lost), ("of the others", self.spared)):
            if pauses:
                median, worst = statistics.median(pauses), max(pauses)
                lines.append(f"pause {name}: median {median:.3f} s, worst {worst:.3f} s")
        return "\n".join([*lines, *self.failed[:3], *self.differing[:3], *self.ledger[:3]])


async def measure(house: House, num_rounds: int, num_streams: int, num_tokens: int, seed: int) -> Findings:
    chance = random.Random(seed)
    findings = Findings()
    bodies = [body_of(number, num_tokens) for number in range(num_streams)]
    everybody: list[Read] = []

    async def all_streams(session: aiohttp.ClientSession) -> list[asyncio.Task[Read]]:
        streams = [Read() for _ in bodies]
        everybody.extend(streams)
        return [asyncio.create_task(read(session, *each)) for each in zip(bodies, streams, strict=True)]

    connector = aiohttp.TCPConnector(limit=0)
    headers = {"authorization": f"Bearer {house.key}"}
    async with aiohttp.ClientSession(house.url, headers=headers, connector=connector) as session:
        undisturbed = await asyncio.gather(*await all_streams(session))
        for number in range(num_rounds):
            workers = house.gw.dispatch.workers()
            await until(lambda: all(worker.facts for worker in workers))  # noqa: B023
            tasks = await all_streams(session)
            wanted = chance.randrange(1, max(2, num_tokens // 4))  # a stream that is guessed well has soon ended
            await until(lambda: have_come_to(house, num_streams, wanted))  # noqa: B023
            worker, flights = max(held(house).items(), key=lambda each: len(each[1]))
            shot = {flight.request.request_id.removeprefix("req_").partition("-")[0] for flight in flights}
            assert worker.facts is not None
            shot_at = time.monotonic()
            os.kill(worker.facts.pid, signal.SIGKILL)
            findings.num_shots += 1
            for index, stream in enumerate(await asyncio.gather(*tasks)):
                name = f"round {number}, stream {index}"
                if stream.error or not stream.usage:
                    findings.failed.append(f"{name}: {stream.error or 'it broke off'}")
                elif stream.text != undisturbed[index].text:
                    findings.differing.append(f"{name}: {stream.text!r}\n  undisturbed: {undisturbed[index].text!r}")
                is_lost = stream.request_id.removeprefix("req_") in shot
                (findings.lost if is_lost else findings.spared).append(stream.pause_s(shot_at))
    findings.num_streams = num_rounds * num_streams
    await _reckon(house, everybody, findings)
    return findings


async def _reckon(house: House, everybody: list[Read], findings: Findings) -> None:
    """Each stream against its row."""
    rows = {row.request_id: row for row in await house.ledger_rows()}
    for stream in everybody:
        row = rows.pop(stream.request_id, None)
        num_tokens = stream.usage.get("completion_tokens", 0)
        findings.num_delivered += num_tokens
        if row is None or (row.num_completion_tokens, row.status) != (num_tokens, 200):
            findings.ledger.append(f"{stream.request_id}: {num_tokens} delivered, {row}")
        else:
            findings.num_owed += row.num_completion_tokens
    findings.ledger += [f"{request_id}: owed by nobody" for request_id in rows]


def sections(num_workers: int) -> dict[str, Any]:
    """The settings."""
    # The same whether a token was computed in a prompt or by itself, and beside whatever others.
    engine = settings.Engine(device="cpu", deterministic=True, num_threads=1, max_kv_bytes=256 << 20)
    return {
        "models": {"demo": settings.Model(replicas=num_workers, engine=engine)},
        "workers": settings.Workers(restart_backoff_s=0.05, max_restart_backoff_s=0.1),
        "cache": settings.Cache(max_bytes=0),
    }


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=20)
    options.add_argument("--streams", type=int, default=32)
    options.add_argument("--tokens", type=int, default=256)
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--seed", type=int, default=1)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as directory, running(Path(directory), **sections(chosen.workers)) as house:
        findings = asyncio.run(measure(house, chosen.rounds, chosen.streams, chosen.tokens, chosen.seed))
    print(findings.told())
    return 0 if findings.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
