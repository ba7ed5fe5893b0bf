"""Answers in a real Redis: found by every gateway, flushed for all of them, and never waited for."""

from __future__ import annotations

import asyncio

import pytest

from gateway.cache import Cache, Memory, Shared
from gateway.clock import Clock
from gateway.redis import Redis, RedisAway
from policies import settings
from policies.policy import Cache as Rules
from tests.builders import PATIENCE_S, HandClock
from tests.conftest import PATIENT_MS
from tests.gateway.test_cache_runs import Engine, asking, read_all, tokens_of, turns

SCOPE = ("ten_1", Rules())


def a_cache(keeper, clock):
    return Cache(settings.Cache(), b"secret" * 6, keeper, clock)


async def kept(shared: Shared) -> None:
    """Until what is on its way to Redis is there."""
    await asyncio.gather(*shared._writes)


async def give(cache, shared, clock, token_ids) -> None:
    engine = Engine(clock)
    async with cache.look(*SCOPE, asking()) as found:
        source = found.launch(engine.submit)
        engine.say(engine.flights[0], token_ids, "stop")
        await read_all(source)
    await kept(shared)


async def test_what_one_gateway_kept_another_one_finds(redis, clock):
    shared = Shared(redis)
    await give(a_cache(shared, clock), shared, clock, [1, 2, 3])
    async with a_cache(Shared(redis), clock).look(*SCOPE, asking()) as found:
        source = found.launch(Engine(clock).submit)
        assert source.outcome == "hit"
        assert tokens_of(await source.deltas()) == [1, 2, 3]
    async with a_cache(Shared(redis), clock).look("ten_2", Rules(), asking()) as found:
        assert found.outcome == "miss"


async def test_redis_forgets_it_when_its_time_is_up(redis, clock):
    shared = Shared(redis)
    shared.put(b"scope", b"name", b"value", ttl_s=1000.0)
    await kept(shared)
    (key,) = [key async for keys in shared._keys(b"scope") for key in keys]
    assert 990_000 < await redis.call("PTTL", key) <= 1_000_000


async def test_a_flush_holds_for_all_gateways_and_for_one_scope(redis):
    one, other = Shared(redis), Shared(redis)
    for number in range(2500):  # more than one look at the keys finds
        await one._put(one._key(b"mine", number.to_bytes(4)), b"value", 60.0)
    one.put(b"theirs", b"name", b"value", 60.0)
    await kept(one)
    held = await other.held(b"mine")
    assert held.num_entries == 2500
    assert held.num_bytes > 2500 * len(b"value")
    assert (await other.held()).num_entries == 2501
    assert await other.flush(b"mine") == 2500
    assert (await one.held(b"mine")).num_entries == 0
    assert await one.get(b"theirs", b"name") == b"value"


async def test_a_prefix_with_signs_in_it_is_taken_as_it_stands(redis_server):
    redises = [
        Redis(settings.Redis(url=redis_server.url, prefix=prefix, timeout_ms=PATIENT_MS), Clock())
        for prefix in ("a[b]*?\\:", "ab*?\\:")
    ]
    try:
        one, other = map(Shared, redises)
        for shared in (one, other):
            shared.put(b"scope", b"name", b"value", 60.0)
            await kept(shared)
        assert await one.flush(b"scope") == 1
        assert await other.flush(b"scope") == 1
    finally:
        for each in redises:
            await each.close()


@pytest.fixture
async def fragile(fragile_redis):
    redis = Redis(settings.Redis(url=fragile_redis.url, timeout_ms=100.0, retry_s=2.0), HandClock())
    yield redis, fragile_redis
    await redis.close()


@pytest.mark.parametrize("fault", ["stall", "kill"])
async def test_without_redis_nothing_is_found_nothing_is_kept_and_nobody_waits(fragile, clock, fault):
    redis, server = fragile
    shared = Shared(redis)
    cache = a_cache(shared, clock)
    await give(cache, shared, clock, [1])
    getattr(server, fault)()
    async with asyncio.timeout(PATIENCE_S):
        async with cache.look(*SCOPE, asking()) as found:
            assert found.outcome == "miss"
        await give(cache, shared, clock, [1])
        with pytest.raises(RedisAway):
            await cache.flush(*SCOPE)
        with pytest.raises(RedisAway):
            await cache.held(*SCOPE)


async def test_what_cannot_be_read_is_computed_again(redis, clock):
    shared = Shared(redis)
    cache = a_cache(shared, clock)
    await give(cache, shared, clock, [1])
    (key,) = [key async for keys in shared._keys(None) for key in keys]
    await redis.call("SET", key, b"of another version")
    async with cache.look(*SCOPE, asking()) as found:
        assert found.outcome == "miss"


async def test_too_many_answers_on_their_way_are_not_kept(redis):
    shared = Shared(redis)
    for number in range(300):
        shared.put(b"scope", number.to_bytes(4), b"value", 60.0)
    await kept(shared)
    await turns()
    assert (await shared.held()).num_entries == 256


async def test_memory_and_redis_tell_the_same_story(redis, clock):
    for keeper in (Memory(1 << 20, clock), shared := Shared(redis)):
        keeper.put(b"a", b"1", b"value", 60.0)
        keeper.put(b"b", b"1", b"other", 60.0)
        await kept(shared)
        assert [await keeper.get(scope, b"1") for scope in (b"a", b"b", b"c")] == [b"value", b"other", None]
        assert await keeper.flush(b"a") == 1
        assert await keeper.get(b"a", b"1") is None
        assert (await keeper.held()).num_entries == (await keeper.held(b"b")).num_entries == 1
