"""Commands to a real Redis: together, in time, and while it is away."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from redis.exceptions import ResponseError

from gateway.clock import Clock
from gateway.redis import MAX_WAITING, Breaker, Redis, RedisAway, RedisUrlError, Script
from policies import settings
from tests.builders import PATIENCE_S, HandClock
from tests.conftest import PATIENT_MS
from tests.ports import free_port
from tests.redis import stalled

ADD = Script("return redis.call('INCRBY', KEYS[1], ARGV[1])")


async def outcomes(*calls):
    """What each call came to; none is left waiting."""
    async with asyncio.timeout(PATIENCE_S):
        return await asyncio.gather(*calls, return_exceptions=True)


async def test_answers_come_back_to_those_who_asked(redis):
    await outcomes(*(redis.call("SET", redis.key(f"n{n}"), n) for n in range(500)))
    assert await outcomes(*(redis.call("GET", redis.key(f"n{n}")) for n in range(500))) == [
        str(n).encode() for n in range(500)
    ]


async def test_a_script_runs_also_after_redis_forgot_it(redis):
    assert await redis.run(ADD, [redis.key("n")], [2]) == 2
    await redis.call("SCRIPT FLUSH")
    sums = await outcomes(*(redis.run(ADD, [redis.key("n")], [3]) for _ in range(100)))
    assert sorted(sums) == list(range(5, 305, 3))


async def test_a_bad_command_is_its_callers_fault_alone(redis):
    good, bad = await outcomes(redis.call("SET", redis.key("s"), "text"), redis.call("INCR", redis.key("s")))
    assert good
    assert isinstance(bad, ResponseError)
    assert not redis.is_away


async def test_a_caller_that_leaves_takes_nobody_along(redis):
    leaving = asyncio.create_task(redis.call("INCR", redis.key("n")))
    staying = asyncio.create_task(redis.call("INCR", redis.key("m")))
    await asyncio.sleep(0)
    leaving.cancel()
    assert await staying == 1
    assert await redis.call("GET", redis.key("m")) == b"1"


@pytest.fixture
async def fragile(fragile_redis):
    clock = HandClock()
    redis = Redis(settings.Redis(url=fragile_redis.url, timeout_ms=PATIENT_MS, retry_s=2.0), clock)
    yield redis, clock, fragile_redis
    await redis.close()


async def test_a_stalled_redis_is_given_up_in_time_by_all_and_left_alone_for_a_while(fragile):
    redis, clock, server = fragile
    await redis.call("SET", "k", "v")
    with stalled(server, redis):
        heard = await outcomes(*(redis.call("GET", "k") for _ in range(1000)))
        assert {type(answer) for answer in heard} == {RedisAway}
        assert redis.is_away
        with pytest.raises(RedisAway, match="left alone"):
            await redis.call("GET", "k")
        clock.advance(2.0)
        first, second = await outcomes(redis.call("GET", "k"), redis.call("GET", "k"))
        assert "in time" in str(first) or "within" in str(first)
        assert "left alone" in str(second)  # one tries, the others do not wait for it
    clock.advance(2.0)
    assert await redis.call("GET", "k") == b"v"  # and not what was asked before
    assert not redis.is_away


async def test_a_killed_redis_is_away_until_it_is_back(fragile):
    redis, clock, server = fragile
    await outcomes(*(redis.call("INCR", "n") for _ in range(200)))
    server.kill()
    assert {type(answer) for answer in await outcomes(*(redis.call("GET", "n") for _ in range(200)))} == {RedisAway}
    server.start()
    clock.advance(2.0)
    assert await redis.run(ADD, ["n"], [1]) == 1


async def test_a_redis_that_was_never_there_is_away():
    redis = Redis(settings.Redis(url=f"redis://127.0.0.1:{free_port()}"), Clock())
    assert isinstance((await outcomes(redis.call("PING")))[0], RedisAway)
    await redis.close()


async def test_more_calls_than_may_wait_are_turned_away(fragile):
    redis, _, server = fragile
    with stalled(server, redis):
        heard = await outcomes(*(redis.call("GET", "k") for _ in range(MAX_WAITING + 10)))
    assert sum("wait for Redis already" in str(answer) for answer in heard) == 10


async def test_closing_ends_what_is_under_way(fragile):
    redis, _, server = fragile
    server.stall()
    calls = [asyncio.create_task(redis.call("GET", "k")) for _ in range(1000)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await redis.close()
    assert {type(answer) for answer in await outcomes(*calls, redis.call("GET", "k"))} == {RedisAway}


async def test_a_full_redis_counts_as_away_though_it_speaks(fragile):
    redis, _, _ = fragile
    await redis.call("CONFIG", "SET", "maxmemory", "1")
    with pytest.raises(RedisAway):
        await redis.call("SET", "k", "v")
    assert redis.is_away


async def test_for_a_command_that_is_forbidden_redis_is_away_and_for_no_other(fragile, caplog):
    redis, _, _ = fragile
    await redis.call("ACL", "SETUSER", "default", "-set")
    for _ in range(2):
        with pytest.raises(RedisAway):
            await redis.call("SET", "k", "v")
    assert await redis.call("GET", "k") is None
    assert ["'set'" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize("write", [lambda redis: redis.call("SET", "k", "v"), lambda redis: redis.run(ADD, ["n"], [1])])
async def test_a_redis_that_takes_no_writes_without_its_replicas_counts_as_away(fragile, write):
    redis, clock, _ = fragile
    await redis.call("CONFIG", "SET", "min-replicas-to-write", "1")
    with pytest.raises(RedisAway, match="NOREPLICAS"):
        await write(redis)
    clock.advance(2.0)
    await redis.call("CONFIG", "SET", "min-replicas-to-write", "0")
    assert await write(redis)
    assert not redis.is_away


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("http://:s3cret@here", "must specify"),
        ("redis://here:s3cret", "is no Redis URL, such as"),
        ("redis://:s3cret/more@here:6379/0", "%2F for /"),
        ("redis://:s3cret@here:63x9/0", "is no Redis URL"),
        ("redis://:s3cret@here/0?socket_timeout=s3cret", "Invalid value for 'socket_timeout'"),
        ("redis://:s3cret@here/0?nonsense=s3cret", "its option 'nonsense' is none that a Redis has"),
        ("rediss://:s3cret@here/0?ssl_cert_reqs=perhaps", "perhaps"),
    ],
)
def test_a_url_that_cannot_be_used_is_one_sentence_that_names_the_setting_and_no_password(url, what):
    with pytest.raises(RedisUrlError) as refused:
        Redis(msgspec.structs.replace(settings.Redis(), url=url), Clock())
    sentence = str(refused.value)
    assert sentence.startswith("redis.url (PENSTOCK_REDIS__URL) ")
    assert what in sentence
    assert "s3cret" not in sentence
    assert "\n" not in sentence


async def test_a_redis_may_be_on_a_socket_of_this_machine(redis_server, tmp_path):
    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while said := await reader.read(1 << 16):
            writer.write(said)
        writer.close()

    async def beside(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other = await asyncio.open_connection("127.0.0.1", redis_server.port)
        await asyncio.gather(carry(reader, other[1]), carry(other[0], writer))

    async with await asyncio.start_unix_server(beside, tmp_path / "socket"):
        redis = Redis(settings.Redis(url=f"unix://{tmp_path}/socket", timeout_ms=PATIENT_MS), Clock())
        assert await redis.call("PING")
        await redis.close()


async def test_a_redis_without_the_database_that_the_url_names_is_away(redis_server, caplog):
    url = redis_server.url.removesuffix("0")
    redis = Redis(settings.Redis(url=f"{url}999", timeout_ms=PATIENT_MS), Clock())
    assert {type(answer) for answer in await outcomes(redis.call("PING"), redis.call("PING"))} == {RedisAway}
    await redis.close()
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == "the Redis of redis.url (PENSTOCK_REDIS__URL) is away: DB index is out of range"


def test_while_the_breaker_is_open_one_call_passes_in_each_period():
    breaker = Breaker(retry_s=2.0)
    assert [breaker.passes(at) for at in (0.0, 0.0)] == [True, True]
    breaker.failed(1.0)
    assert [breaker.passes(at) for at in (1.0, 2.9, 3.0, 3.0, 4.9, 5.0)] == [False, False, True, False, False, True]
    breaker.succeeded()
    assert [breaker.passes(at) for at in (5.0, 5.0)] == [True, True]
