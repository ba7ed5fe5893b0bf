"""What a million keys cost: ``python -m benchmarks.directory [--keys N ...]``.

For each number of keys, spread over 10,000 tenants in 100 policies, a store is filled and then: how long a gateway
takes to load them and how much memory they take, what one look-up costs (a known key, an unknown one, a narrowed one),
and how long a refresh takes after one key was revoked and after a thousand were, and for how long at most it keeps the
loop from anything else.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import resource
import tempfile
import time
from pathlib import Path

import msgspec
import sqlalchemy as sa
import uvloop

from gateway import keys, store
from gateway.auth import Auth
from gateway.bootstrap import bootstrap
from gateway.clock import Clock
from gateway.directory import Directory
from gateway.store import Store
from policies import settings
from policies.policy import Limits, Narrowing, Policy

NUM_TENANTS, NUM_POLICIES, NUM_LOOKUPS = 10_000, 100, 100_000
REST_S = 0.001
"""Between two looks at whether the loop is free; the driver's thread needs the interpreter, too."""
NARROWING = msgspec.json.encode(Narrowing(limits=Limits(requests_per_minute=60))).decode()


class Figures(msgspec.Struct):
    num_keys: int
    load_s: float
    bytes_per_key: float
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
            look_up(auth, [f"sk-{n}" for n in asked]),
            look_up(auth, [f"no-{n}" for n in asked]),
            look_up(auth, [f"sk-{n // 10 * 10}" for n in asked]),
            longest_pause_ms,
            refresh_none_ms,
            refresh_one_ms,
            refresh_thousand_ms,
        )


def look_up(auth: Auth, presented: list[str]) -> float:
    """Microseconds for one."""
    began = time.perf_counter()
    for key in presented:
        auth.caller(key, "127.0.0.1")
    return 1e6 * (time.perf_counter() - began) / len(presented)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--url", default="", help="An empty PostgreSQL, with one number of keys; else SQLite.")
    parser.add_argument("--json", type=Path, help="Write the figures there.")
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


if __name__ == "__main__":
    main()
