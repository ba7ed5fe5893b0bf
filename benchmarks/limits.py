"""What limits cost and whether they hold: ``python -m benchmarks.limits [--only memory|redis|burst]``.

memory: admission and settlement together, for up to a million keys of 10,000 tenants, each held against ten ceilings of
tenant, key and model; besides, a tenant with four ceilings and one with none.
redis: the same through a real Redis, from one process and from three.
burst: 1,000 requests at once against 100,000 tokens in a minute, in memory and from three processes over one Redis.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvloop

from gateway.auth import Caller
from gateway.clock import Clock
from gateway.errors import RateLimited
from gateway.limits import Limits
from gateway.redis import Redis
from policies import settings
from policies.policy import Limits as Ceilings
from policies.policy import Policy
from policies.terms import Usage
from tests import redis as redises

NUM_TENANTS = 10_000
NUM_OPS = 100_000
NUM_ROUNDS = 5
CLIENTS, SECONDS = 64, 5.0
BURST, CEILING, PROMPT, MOST = 1000, 100_000, 100, 1000

HIGH = 10**12
WIDE = Ceilings(requests_per_minute=HIGH, tokens_per_minute=HIGH, tokens_per_day=HIGH, concurrent_requests=1_000_000)
EVERYTHING = Policy(
    limits=WIDE, key_limits=Ceilings(requests_per_minute=HIGH, tokens_per_minute=HIGH), model_limits={"*": WIDE}
)
FOUR = Policy(limits=WIDE)
USAGE = Usage(100, 0, 50)


def caller(policy: Policy, number: int = 0) -> Caller:
    tenant = number % NUM_TENANTS
    return Caller("org", f"ten_{tenant:026x}", "a tenant", f"key_{number:026x}", policy, "default", 1)


@asynccontextmanager
async def limits_over(url: str, prefix: str) -> AsyncIterator[Limits]:
    """Patient, because what is measured is the time."""
    redis_settings = settings.Redis(url=url, prefix=prefix, timeout_ms=10_000.0)
    clock = Clock()
    redis = Redis(redis_settings, clock)
    limits = Limits(settings.Settings(redis=redis_settings), clock, redis)
    async with limits.watched():
        yield limits
    await redis.close()


# In memory


async def cost_us(limits: Limits, callers: list[Caller]) -> float:
    """The median round's mean of admission and settlement together, microseconds."""
    rounds = []
    for _ in range(NUM_ROUNDS):
        gc.collect()
        began_at = time.perf_counter()
        for who in callers:
            async with limits.admit(who, "demo", 100, 500, "r") as ticket:
                ticket.covers(50)
                ticket.settle(USAGE)
        rounds.append(1e6 * (time.perf_counter() - began_at) / len(callers))
    return statistics.median(rounds)


async def memory() -> None:
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)  # as the gateway does
    for name, policy in (("no ceiling", Policy()), ("four ceilings", FOUR), ("ten ceilings", EVERYTHING)):
        limits = Limits(settings.Settings(), Clock())
        who = caller(policy)
        print(f"memory, one tenant, {name}: {await cost_us(limits, [who] * NUM_OPS):.2f} us")
    rng = random.Random(1)
    for num_keys in (1, 1000, 10_000, 100_000, 1_000_000):
        limits = Limits(settings.Settings(), Clock())
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began_at = time.perf_counter()
        for number in range(num_keys):  # every key has been here once
            async with limits.admit(caller(EVERYTHING, number), "demo", 100, 500, "r") as ticket:
                ticket.settle(USAGE)
        first_us = 1e6 * (time.perf_counter() - began_at) / num_keys
        grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        chosen = [caller(EVERYTHING, rng.randrange(num_keys)) for _ in range(NUM_OPS)]
        print(
            f"memory, {num_keys} keys: {await cost_us(limits, chosen):.2f} us, first time {first_us:.2f} us, "
            f"{limits.local.num_gauges} gauges, {grown / num_keys:.0f} bytes a key more than before",
            flush=True,
        )
        del limits, chosen
        gc.collect()


# Through Redis


async def client(url: str, prefix: str, num_keys: int, seed: int) -> None:
    """One gateway's clients, for a while; prints what they saw as JSON."""
    rng, took_ms, num_done = random.Random(seed), [], 0
    async with limits_over(url, prefix) as limits:
        stop_at = time.perf_counter() + SECONDS

        async def ask(number: int) -> None:
            nonlocal num_done
            while (began_at := time.perf_counter()) < stop_at:
                who = caller(EVERYTHING, rng.randrange(num_keys))
                num_done += 1
                async with limits.admit(who, "demo", 100, 500, f"{seed}.{number}.{num_done}") as ticket:
                    took_ms.append(1e3 * (time.perf_counter() - began_at))
                    ticket.settle(USAGE)

        await asyncio.gather(*(ask(number) for number in range(CLIENTS)))
    print(json.dumps({"num": num_done, "took_ms": sorted(took_ms)[:: max(1, len(took_ms) // 1000)]}))


async def in_redis() -> None:
    with redises.server() as server:
        for num_gateways, num_keys in ((1, 1), (1, 1000), (1, 100_000), (3, 100_000)):
            outcomes = [
                json.loads(line)
                for line in started("client", server.url, f"{num_gateways}.{num_keys}:", num_keys, num=num_gateways)
            ]
            took_ms = sorted(took for outcome in outcomes for took in outcome["took_ms"])
            async with limits_over(server.url, "") as limits:
                assert limits.shared is not None
                stats = await limits.shared._redis.client.info("commandstats")
                await limits.shared._redis.client.config_resetstat()
            print(
                f"redis, {num_gateways} gateways, {CLIENTS} clients each, {num_keys} keys: "
                f"{sum(outcome['num'] for outcome in outcomes) / SECONDS:.0f} requests/s, "
                f"admission p50 {took_ms[len(took_ms) // 2]:.2f} ms, p99 {took_ms[int(0.99 * len(took_ms))]:.2f} ms, "
                f"{stats['cmdstat_evalsha']['usec_per_call']} us of Redis a script",
                flush=True,
            )


def started(what: str, *arguments: object, num: int) -> list[str]:
    """What ``num`` processes of this file print, run at once."""
    command = [sys.executable, "-m", "benchmarks.limits", "--as", what, *map(str, arguments)]
    running = [subprocess.Popen([*command, str(seed)], stdout=subprocess.PIPE, text=True) for seed in range(num)]
    return [process.communicate()[0].strip() for process in running]


# A burst


async def burst(limits: Limits, num_requests: int, seed: int) -> dict[str, int]:
    """Requests at once, each of which wants up to 400 tokens of answer, and writes what it may."""
    rng = random.Random(seed)
    who = caller(Policy(limits=Ceilings(tokens_per_minute=CEILING)))
    delivered, refused, cut = [], [], []

    async def request(number: int, wanted: int) -> None:
        try:
            async with limits.admit(who, "demo", PROMPT, MOST, f"{seed}.{number}") as ticket:
                written = 0
                while written < wanted:
                    if not (ticket.covers(written + 1) or await ticket.top_up(written + 1)):
                        cut.append(number)
                        break
                    written += 1
                    if written % 16 == 0:
                        await asyncio.sleep(0)
                ticket.settle(Usage(PROMPT, 0, written))
                delivered.append(PROMPT + written)
        except RateLimited:
            refused.append(number)

    await asyncio.gather(*(request(number, rng.randrange(400)) for number in range(num_requests)))
    return {"tokens": sum(delivered), "answered": len(delivered), "cut": len(cut), "refused": len(refused)}


async def member(url: str, num_requests: int, seed: int) -> None:
    async with limits_over(url, "burst:") as limits:
        outcome = await burst(limits, num_requests, seed)
    print(json.dumps(outcome))


async def bursts() -> None:
    alone = await burst(Limits(settings.Settings(), Clock()), BURST, 0)
    print(f"burst, memory: {alone}, {max(0, alone['tokens'] - CEILING)} tokens over {CEILING}")
    with redises.server() as server:
        parts = [json.loads(line) for line in started("member", server.url, -(-BURST // 3), num=3)]
    total = {name: sum(part[name] for part in parts) for name in parts[0]}
    print(f"burst, 3 processes, one Redis: {total}, {max(0, total['tokens'] - CEILING)} tokens over {CEILING}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["memory", "redis", "burst"])
    parser.add_argument("--as", nargs="+", dest="role", help=argparse.SUPPRESS)
    options = parser.parse_args()
    match options.role:
        case ["client", url, prefix, num_keys, seed]:
            return uvloop.run(client(url, prefix, int(num_keys), int(seed)))
        case ["member", url, num_requests, seed]:
            return uvloop.run(member(url, int(num_requests), int(seed)))
    for name, part in (("memory", memory), ("redis", in_redis), ("burst", bursts)):
        if options.only in (None, name):
            uvloop.run(part())


if __name__ == "__main__":
    main()
