"""Clients that leave, stall and trickle: ``python -m benchmarks.hostile_clients [--rounds 2000] [--at-once 8]``.

A gateway with a real worker and the demo model, over HTTP, on raw sockets. In each round one client asks one endpoint
and behaves in one of ``MANNERS``. Before and after, everything that a request holds is counted (``Held``): it has to be
the same. A client that trickles sends each byte alone and waits for nothing. Exit status 1 when something is left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from policies import settings
from policies.policy import Limits, Policy
from tests.builders import PATIENCE_S
from tests.house import House, running

HELLO = [{"role": "user", "content": "Tell me of the valley."}]
LONG = {"max_tokens": 48, "temperature": 1}
ENDPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": HELLO, **LONG}),
    "chat, streamed": ("/v1/chat/completions", {"messages": HELLO, "stream": True, "n": 2, **LONG}),
    "chat, shared": ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 48, "temperature": 0, "stream": True}),
    "chat, kept": ("/v1/chat/completions", {"messages": HELLO, "stream": True, "store": True, **LONG}),
    "completions": ("/v1/completions", {"prompt": ["One", "Two"], **LONG}),
    "completions, streamed": ("/v1/completions", {"prompt": "Once", "stream": True, **LONG}),
    "responses": ("/v1/responses", {"input": "Hello", "max_output_tokens": 48}),
    "responses, streamed": ("/v1/responses", {"input": "Hello", "max_output_tokens": 48, "stream": True}),
    "messages": ("/v1/messages", {"messages": HELLO, "max_tokens": 48}),
    "messages, streamed": ("/v1/messages", {"messages": HELLO, "max_tokens": 48, "stream": True}),
    "embeddings": ("/v1/embeddings", {"input": ["Hello"] * 8}),
}


class Client:
    """One connection, and the bytes of one request."""

    def __init__(self, house: House, path: str, body: dict[str, Any], rng: random.Random) -> None:
        parts = urlsplit(house.url)
        self._host, self._port = parts.hostname, parts.port
        data = json.dumps({"model": house.model, **body}).encode()
        lines = (
            f"POST {path} HTTP/1.1",
            f"host: {parts.netloc}",
            f"authorization: Bearer {house.key}",
            "content-type: application/json",
            f"content-length: {len(data)}",
        )
        self.head = "\r\n".join(lines).encode() + b"\r\n\r\n"
        self.body = data
        self.rng = rng

    async def __aenter__(self) -> Client:
        self.reader, self.writer = await asyncio.open_connection(self._host, self._port, limit=1 << 12)
        self._socket: socket.socket = self.writer.get_extra_info("socket")
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def trickle(self, data: bytes) -> None:
        """A byte at a time, each in a segment of its own."""
        for byte in data:
            await self.send(bytes((byte,)))
            await asyncio.sleep(0)

    async def read_some(self) -> None:
        """As much of the answer's beginning as is here at once."""
        await self.reader.read(self.rng.randrange(1, 2000))

    async def read_whole(self) -> None:
        """As much as its head says, or all of its chunks."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        fields = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:-2])
        if b"content-length" in fields:
            await self.reader.readexactly(int(fields[b"content-length"]))
            return
        while size := int((await self.reader.readuntil(b"\r\n")).strip(), 16):
            await self.reader.readexactly(size + 2)
        await self.reader.readuntil(b"\r\n")

    def reset(self) -> None:
        """Goes away with a RST, as a process does that is killed with data unread."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


async def leaves_in_the_head(client: Client) -> None:
    await client.send(client.head[: client.rng.randrange(len(client.head))])


async def leaves_in_the_body(client: Client) -> None:
    await client.send(client.head + client.body[: client.rng.randrange(len(client.body))])


async def leaves_at_once(client: Client) -> None:
    await client.send(client.head + client.body)
    client.reset()


async def leaves_midway(client: Client) -> None:
    await client.send(client.head + client.body)
    await client.read_some()
    client.reset()


async def times_out(client: Client) -> None:
    """It waits for a moment of chance: before the answer, in it, or behind it."""
    await client.send(client.head + client.body)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(client.rng.uniform(0.0, 0.2)):
            await client.read_whole()


async def half_closes(client: Client) -> None:
    """It says that nothing more will come, and reads on."""
    await client.send(client.head + client.body)
    client.writer.write_eof()
    while await client.reader.read(1 << 12):
        pass


async def half_closes_midway(client: Client) -> None:
    await client.send(client.head + client.body)
    await client.read_some()
    client.writer.write_eof()
    await client.read_some()


async def reads_nothing(client: Client) -> None:
    """What was sent to it lies unread when it goes."""
    await client.send(client.head + client.body)
    await asyncio.sleep(client.rng.uniform(0.0, 0.2))
    client.reset()


async def trickles(client: Client) -> None:
    await client.trickle(client.head + client.body)
    await client.read_whole()


async def trickles_and_leaves(client: Client) -> None:
    whole = client.head + client.body
    await client.trickle(whole[: client.rng.randrange(len(whole))])
    client.reset()


async def reads_byte_by_byte(client: Client) -> None:
    await client.send(client.head + client.body)
    for _ in range(client.rng.randrange(1, 300)):  # all answers are longer, with their heads
        if not await client.reader.read(1):
            break


async def stays(client: Client) -> None:
    """As they all should: between the others, so that something is shared with them."""
    await client.send(client.head + client.body)
    await client.read_whole()


MANNERS: tuple[Callable[[Client], Awaitable[None]], ...] = (
    leaves_in_the_head,
    leaves_in_the_body,
    leaves_at_once,
    leaves_midway,
    times_out,
    half_closes,
    half_closes_midway,
    reads_nothing,
    trickles,
    trickles_and_leaves,
    reads_byte_by_byte,
    stays,
)


OWN = (".db", ".marks")
"""Files that are the gateway's and no request's: connections of its database's pool, and the ledger's marks, of which
there is one file and from its half on a spare one. Both have bounds of their own."""


@dataclass(frozen=True)
class Held:
    """What requests hold of a house."""

    blocks: int
    """Of the worker's KV, not counting what is only cached."""
    requests: int
    flights: int
    runs: int
    """Of equal requests that share one computation."""
    leases: int
    """Requests and money that limits have set aside."""
    background: int
    pending_rows: int
    tasks: int
    files: int
    """Open handles of the gateway's process, and of its clients, as they are in the same one, without ``OWN``."""
    worker_files: int

    @classmethod
    async def by(cls, house: House) -> Held:
        gw, loop = house.gw, house._loop
        leases = 0
        for gauge in gw.limits.local._gauges.values():
            held = getattr(gauge, "leases", gauge)
            leases += len(getattr(held, "held", ()))
        pids = [worker.facts.pid for worker in gw.dispatch.workers() if worker.facts is not None]
        return cls(
            blocks=await house.num_used_blocks(),
            requests=await house.num_open_requests(),
            flights=sum(line.num_flights for line in gw.dispatch._lines.values()),
            runs=len(gw.cache._runs),
            leases=leases,
            background=len(gw.responses.background._running),
            pending_rows=gw.ledger.num_pending,
            tasks=len(asyncio.all_tasks(loop)),
            files=len([name for name in handles() if not is_own(name)]),
            worker_files=sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids),
        )


def is_own(name: str) -> bool:
    return any(word in name for word in OWN)


def handles() -> list[str]:
    """What the open ones of this process lead to."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return found


async def at_rest(house: House, wanted: Held | None = None) -> Held:
    """What is held when nothing is asked any more; where it should be ``wanted``, as soon as it is that."""
    await house.quiet()
    held = await Held.by(house)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            while wanted is not None and held != wanted:
                await asyncio.sleep(0.05)
                held = await Held.by(house)
    return held


async def rounds(house: House, num_rounds: int, at_once: int, seed: int) -> Counter[str]:
    """Each with a manner and an endpoint in turn. How each manner ended: as its client wanted, or cut by the server."""
    told: Counter[str] = Counter()
    names, places = list(ENDPOINTS), asyncio.Semaphore(at_once)

    async def one(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        manner = MANNERS[number % len(MANNERS)]
        path, body = ENDPOINTS[names[(number + number // len(MANNERS)) % len(names)]]
        async with places:
            try:
                async with asyncio.timeout(PATIENCE_S), Client(house, path, body, rng) as client:
                    await manner(client)
                told[manner.__name__] += 1
            except (ConnectionError, asyncio.IncompleteReadError):
                told[f"{manner.__name__}, cut"] += 1

    await asyncio.gather(*[one(number) for number in range(num_rounds)])
    return told


async def visited(house: House, num_rounds: int, at_once: int = 8, seed: int = 0) -> tuple[Held, Held, Counter[str]]:
    """What is held before and after, and how the rounds ended. A few rounds go before, which open what stays open."""
    await rounds(house, 2 * len(MANNERS), at_once, seed + 1)
    before = await at_rest(house)
    told = await rounds(house, num_rounds, at_once, seed)
    return before, await at_rest(house, before), told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    limits = Policy(limits=Limits(concurrent_requests=10_000, requests_per_minute=1_000_000))
    engine = settings.Engine(device="cpu", num_threads=1, max_kv_bytes=64 << 20)
    with (
        tempfile.TemporaryDirectory() as place,
        running(Path(place), policies={"default": limits}, models={"demo": settings.Model(engine=engine)}) as house,
    ):
        before, after, told = asyncio.run(visited(house, given.rounds, given.at_once, given.seed))
        num_own = sum(map(is_own, handles()))
    for name, count in sorted(told.items()):
        print(f"{name:28} {count:5}")
    print(f"{'files of its own':28} {num_own:5} after")
    for name, value in asdict(before).items():
        print(f"{name:28} {value:5} before, {asdict(after)[name]:5} after")
    sys.exit(before != after)


if __name__ == "__main__":
    main()
