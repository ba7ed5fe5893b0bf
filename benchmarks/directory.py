"""What a million keys cost: ``python -m benchmarks.directory [--keys N ...] [--plot PATH]``.

For each number of keys, spread over 10,000 tenants in 100 policies, a store is filled and then: how long a gateway
takes to load them and how much memory they take; what finding out who asks costs; and how long a refresh takes after
one key was revoked and after a thousand were, and for how long at most it keeps the loop from anything else.

Who asks is measured three times, always for keys in random order:

- what a request pays: ``Auth.caller_of`` on a request of aiohttp's, between two of which other work is done, as it is
  in a gateway (header, hash, look-up, checks, and the ``Caller``);
- ``Auth.caller`` in a tight loop, for a known key, an unknown one and a narrowed one;
- the look-up alone, of a digest that is there already.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import math
import os
import random
import resource
import statistics
import tempfile
import time
from pathlib import Path

import aiohttp
import msgspec
import sqlalchemy as sa
import uvloop
from aiohttp import web
from aiohttp.test_utils import TestServer

from gateway import keys, store
from gateway.auth import Auth
from gateway.bootstrap import bootstrap
from gateway.clock import Clock
from gateway.directory import Directory
from gateway.errors import InvalidApiKey
from gateway.store import Store
from policies import settings
from policies.policy import Limits, Narrowing, Policy

NUM_TENANTS, NUM_POLICIES, NUM_LOOKUPS, NUM_REQUESTS = 10_000, 100, 100_000, 50_000
NUM_ROUNDS = 5
REST_S = 0.001
"""Between two looks at whether the loop is free; the driver's thread needs the interpreter, too."""
NARROWING = msgspec.json.encode(Narrowing(limits=Limits(requests_per_minute=60))).decode()


class Figures(msgspec.Struct):
    num_keys: int
    load_s: float
    bytes_per_key: float
    request_us: float
    look_up_us: float
    known_us: float
    unknown_us: float
    narrowed_us: float
    longest_pause_ms: float
    refresh_none_ms: float
    refresh_one_ms: float
    refresh_thousand_ms: float


async def fill(rooms: Store, num_keys: int) -> None:
    """Every tenth key is narrowed."""
    async with rooms.changing() as (connection, revision):
        secret = (await connection.execute(sa.select(store.install.c.key_secret))).scalar_one()
        organization_id = (await connection.execute(sa.select(store.organizations.c.id))).scalar_one()
        born = {"created_at": 1, "version": 1, "revision": revision}
        heads = [{"name": f"p{n}", "current_version": 1, "revision": revision} for n in range(NUM_POLICIES)]
        document = msgspec.json.encode(Policy(limits=Limits(tokens_per_minute=100_000))).decode()
        versions = [
            {"name": f"p{n}", "version": 1, "document": document, "created_at": 1, "created_by": "", "note": ""}
            for n in range(NUM_POLICIES)
        ]
        tenants = [
            {
                "id": store.new_id("ten"),
                "organization_id": organization_id,
                "name": f"t{n}",
                "policy": f"p{n % NUM_POLICIES}",
                "metadata": "{}",
                **born,
            }
            for n in range(NUM_TENANTS)
        ]
        await connection.execute(sa.insert(store.policy_heads), heads)
        await connection.execute(sa.insert(store.policies), versions)
        await connection.execute(sa.insert(store.tenants), tenants)
        for start in range(0, num_keys, 50_000):
            rows = [
                {
                    "id": store.new_id("key"),
                    "tenant_id": tenants[n % NUM_TENANTS]["id"],
                    "kind": "api",
                    "name": f"key number {n}",
                    "hash": keys.hash_of(secret, f"sk-{n}"),
                    "prefix": "",
                    "last_four": "",
                    "narrowing": None if n % 10 else NARROWING,
                    **born,
                }
                for n in range(start, min(start + 50_000, num_keys))
            ]
            await connection.execute(sa.insert(store.keys), rows)


async def measure(num_keys: int, directory: Path, url: str) -> Figures:
    async with store.opened(settings.Store(data_dir=str(directory), url=url)) as rooms:
        await bootstrap(rooms, {})
        await fill(rooms, num_keys)
        gc.collect()
        before = resident_bytes()
        began = time.perf_counter()
        known = await Directory.load(rooms, Clock())
        load_s = time.perf_counter() - began
        gc.collect()
        auth = Auth(known)
        bytes_per_key = (resident_bytes() - before) / num_keys
        gc.freeze()
        chance = random.Random(7)
        asked = [chance.randrange(num_keys) for _ in range(NUM_LOOKUPS)]
        refresh_none_ms, _ = await refresh(known)
        await revoke(rooms, [f"sk-{chance.randrange(num_keys)}"], known.secret)
        refresh_one_ms, _ = await refresh(known)
        await revoke(rooms, [f"sk-{n}" for n in chance.sample(range(num_keys), 1000)], known.secret)
        refresh_thousand_ms, longest_pause_ms = await refresh(known)
        return Figures(
            num_keys,
            load_s,
            bytes_per_key,
            await of_requests(auth, [f"sk-{n}" for n in asked[:NUM_REQUESTS]]),
            look_up(known, [keys.hash_of(known.secret, f"sk-{n}") for n in asked]),
            callers(auth, [f"sk-{n}" for n in asked]),
            callers(auth, [f"no-{n}" for n in asked]),
            callers(auth, [f"sk-{n // 10 * 10}" for n in asked]),
            longest_pause_ms,
            refresh_none_ms,
            refresh_one_ms,
            refresh_thousand_ms,
        )


async def of_requests(auth: Auth, presented: list[str]) -> float:
    """The median's microseconds, on requests that a server of aiohttp's has received; reading the clock included."""
    took = []

    async def handler(request: web.Request) -> web.Response:
        for key in presented:
            asked = request.clone(headers={"authorization": f"Bearer {key}"})  # some microseconds of other work
            began = time.perf_counter()
            with contextlib.suppress(InvalidApiKey):  # a thousand have been revoked
                auth.caller_of(asked)
            took.append(time.perf_counter() - began)
        return web.Response()

    application = web.Application()
    application.router.add_get("/", handler)
    async with (
        TestServer(application) as server,
        aiohttp.ClientSession() as session,
        session.get(server.make_url("/")) as answer,
    ):
        answer.raise_for_status()
    return 1e6 * statistics.median(took)


def look_up(directory: Directory, digests: list[bytes]) -> float:
    """Microseconds for one, until the fields of what is found have been read; the median round's mean."""
    rounds = []
    for _ in range(NUM_ROUNDS):
        began = time.perf_counter()
        for digest in digests:
            key = directory.key(digest)
            if key is not None:
                key.id, key.tenant_id  # noqa: B018
        rounds.append(time.perf_counter() - began)
    return 1e6 * statistics.median(rounds) / len(digests)


def callers(auth: Auth, presented: list[str]) -> float:
    """Microseconds for one, the median round's mean."""
    rounds = []
    for _ in range(NUM_ROUNDS):
        began = time.perf_counter()
        for key in presented:
            auth.caller(key, "127.0.0.1")
        rounds.append(time.perf_counter() - began)
    return 1e6 * statistics.median(rounds) / len(presented)


async def revoke(rooms: Store, revoked: list[str], secret: bytes) -> None:
    hashes = [keys.hash_of(secret, key) for key in revoked]
    async with rooms.changing() as (connection, revision):
        changed = sa.update(store.keys).where(store.keys.c.hash.in_(hashes))
        await connection.execute(changed.values(revoked_at=1, revision=revision))


async def refresh(directory: Directory) -> tuple[float, float]:
    """Milliseconds: how long it took, and for how long the loop did nothing else."""
    pauses = [0.0]
    done = asyncio.Event()

    async def watch() -> None:
        while not done.is_set():
            began = time.perf_counter()
            await asyncio.sleep(REST_S)
            pauses.append(time.perf_counter() - began - REST_S)

    watching = asyncio.create_task(watch())
    began = time.perf_counter()
    await directory.refresh()
    took = time.perf_counter() - began
    done.set()
    await watching
    return 1e3 * took, 1e3 * max(pauses)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def plot(found: list[Figures], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    _, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    nums = [figures.num_keys for figures in found]
    for name, words in (
        ("request_us", "what a request pays (Auth.caller_of)"),
        ("known_us", "Auth.caller in a tight loop"),
        ("look_up_us", "the look-up alone"),
    ):
        values = [getattr(figures, name) for figures in found]
        (line,) = axes.plot(nums, values, marker="o", label=words)
        allowed = [values[0] * math.log(num) / math.log(nums[0]) for num in nums]
        axes.plot(nums, allowed, color=line.get_color(), linestyle=":", linewidth=1)
    axes.set(xscale="log", xlabel="keys", ylabel="µs", title="Who asks (dotted: log n from the first point)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    pyplot.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, nargs="+", default=[1_000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--url", default="", help="An empty PostgreSQL, with one number of keys; else SQLite.")
    parser.add_argument("--json", type=Path, help="Write the figures there.")
    parser.add_argument("--plot", type=Path, help="where the picture goes")
    options = parser.parse_args()
    found = []
    for num_keys in options.keys:
        # In a process of its own, so that memory is this number's alone.
        read, write = os.pipe()
        if not os.fork():
            with tempfile.TemporaryDirectory() as directory:
                figures = uvloop.run(measure(num_keys, Path(directory), options.url))
            os.write(write, msgspec.json.encode(figures))
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as answer:
            found.append(msgspec.json.decode(answer.read(), type=Figures))
        os.wait()
    for name in Figures.__struct_fields__:
        values = [getattr(figures, name) for figures in found]
        print(f"{name:22}" + "".join(f"{value:14,.2f}" for value in values))
    if options.json:
        options.json.write_bytes(msgspec.json.encode(found))
    if options.plot:
        plot(found, options.plot)


if __name__ == "__main__":
    main()
