"""Idempotency-Key: a repeated request is answered once and billed once, also while the first is being answered, after
its client has hung up, and on another gateway."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import openai
import pytest
from multidict import CIMultiDict

from gateway import head, unconnected
from gateway.cache import Memory
from gateway.errors import Draining, IdempotencyKeyReused, ServiceUnavailable
from gateway.idempotency.record import Record, Recorded
from gateway.idempotency.slots import LEASE_S, POLL_S, Slots
from gateway.redis import Redis
from policies import settings, wire
from tests.builders import PATIENCE_S, HandClock, until
from tests.conftest import PATIENT_MS
from tests.gateway.conftest import HELLO, KEY

BODY: dict[str, Any] = {"model": "demo", "messages": HELLO}
CHAT = "/v1/chat/completions"


def asking(front, key: str = "key-1", **others: Any) -> asyncio.Task[Any]:
    """A chat completion under way, through OpenAI's own client, with its headers."""
    create = front.client.chat.completions.with_raw_response.create
    return asyncio.create_task(create(**{**BODY, **others}, extra_headers={"idempotency-key": key}))


async def answered(front, text: str = "Hi", key: str = "key-1", **others: Any) -> Any:
    asked = asking(front, key, **others)
    front.peer.say(await front.peer.submitted(), [*front.ids(text), 3], "stop")
    return await asked


async def events(front, key: str = "key-1", **others: Any) -> tuple[bytes, Any]:
    """All of a stream as it was sent, and its headers."""
    body = {**BODY, "stream": True, **others}
    async with front.http.post(front.url + CHAT, json=body, headers={"idempotency-key": key}) as response:
        assert response.status == 200
        return await response.read(), response.headers


async def test_a_repeated_request_gets_the_same_answer_and_is_billed_once(front):
    first = await answered(front)
    second = await asking(front)
    assert second.text == first.text, "id, created, text and usage"
    assert second.headers["idempotent-replayed"] == "true"
    assert "idempotent-replayed" not in first.headers
    assert second.headers["x-request-id"] == first.headers["x-request-id"], "the row that it is billed under"
    await front.settled(1)
    assert front.peer.is_quiet()


async def test_a_stream_is_repeated_as_the_same_stream(front):
    first = asyncio.create_task(events(front))
    submit = await front.peer.submitted()
    for token_id in front.ids("Hi there"):
        front.peer.say(submit, [token_id])
    front.peer.say(submit, [3], "stop")
    told, headers = await first
    assert told.endswith(b"data: [DONE]\n\n")
    assert b" there" in told
    again, headers = await events(front)
    assert again == told
    assert headers["content-type"].startswith("text/event-stream")
    await front.settled(1)


async def test_sampled_requests_are_repeated_too_and_other_keys_are_other_requests(front):
    first = await answered(front, "Hi", temperature=1)
    other = await answered(front, "you", "key-2", temperature=1)
    assert other.parse().choices[0].message.content != first.parse().choices[0].message.content
    assert (await asking(front, temperature=1)).text == first.text
    await front.settled(2)


async def test_the_same_key_with_another_body_is_refused_and_says_so(front):
    await answered(front)
    with pytest.raises(openai.ConflictError) as refused:
        await asking(front, temperature=0.5)
    assert refused.value.code == "idempotency_key_reused"
    assert refused.value.response.headers["x-should-retry"] == "false", "OpenAI's client would repeat a 409"
    assert (await asking(front)).http_response.status_code == 200
    await front.settled(1)


async def test_also_while_the_first_is_being_answered(front):
    first = asking(front)
    submit = await front.peer.submitted()
    with pytest.raises(openai.ConflictError):
        await asking(front, temperature=0.5)
    front.peer.say(submit, [3], "stop")
    await first


async def test_another_endpoint_is_another_request(front):
    await answered(front)
    create = front.client.completions.with_raw_response.create
    asked = asyncio.create_task(create(model="demo", prompt="Hello", extra_headers={"idempotency-key": "key-1"}))
    front.peer.say(await front.peer.submitted(), [3], "stop")
    assert (await asked).http_response.status_code == 200


async def test_repetitions_join_what_is_being_answered(front):
    first = asking(front)
    submit = await front.peer.submitted()
    others = [asking(front) for _ in range(3)]
    await until(lambda: front.gw.ledger.num_pending == 0 and num_inside(front) == 5)
    front.peer.say(submit, [*front.ids("Hi"), 3], "stop")
    answers = await asyncio.gather(first, *others)
    assert len({answer.text for answer in answers}) == 1
    assert [answer.headers.get("idempotent-replayed") for answer in answers] == [None, "true", "true", "true"]
    await front.settled(1)
    assert front.peer.is_quiet()


def num_inside(front) -> int:
    return front.gw.ledger._num_open()


async def test_a_stream_is_joined_in_the_middle_and_read_from_its_beginning(front):
    first = asyncio.create_task(events(front))
    submit = await front.peer.submitted()
    front.peer.say(submit, front.ids("Hi"))
    second = asyncio.create_task(events(front))
    await until(lambda: num_inside(front) == 3)
    front.peer.say(submit, [*front.ids(" there"), 3], "stop")
    assert (await first)[0] == (await second)[0]
    await front.settled(1)


async def test_a_request_goes_on_without_its_client_and_is_there_when_it_comes_back(front):
    first = asking(front)
    submit = await front.peer.submitted()
    first.cancel()
    await until(lambda: num_inside(front) == 1)
    front.peer.say(submit, front.ids("Hi"))
    second = asking(front)
    await until(lambda: num_inside(front) == 2)
    front.peer.say(submit, [*front.ids(" there"), 3], "stop")
    assert (await second).parse().choices[0].message.content == "Hi there"
    (row,) = await front.settled(1)
    assert (row["status"], row["finish_reason"]) == (200, "stop")
    assert front.peer.is_quiet(), "and nobody cancelled it"


async def test_a_stream_goes_on_without_its_client(front):
    reading = asyncio.create_task(events(front))
    submit = await front.peer.submitted()
    front.peer.say(submit, front.ids("Hi"))
    await until(lambda: any(running.record.said for running in front.gw.idempotency._running.values()))
    reading.cancel()
    await until(lambda: num_inside(front) == 1)
    front.peer.say(submit, [*front.ids(" there"), 3], "stop")
    (row,) = await front.settled(1)
    assert row["status"] == 200
    told, _ = await events(front)
    assert b" there" in told


async def test_a_failure_is_told_to_all_and_kept_for_nobody(front):
    asked = [asking(front), asking(front)]
    submit = await front.peer.submitted()
    await until(lambda: num_inside(front) == 3)
    front.peer.send(wire.Failed(submit.request_id, "overloaded", "no"))
    for failed in await asyncio.gather(*asked, return_exceptions=True):
        assert failed.status_code == 503
    assert (await answered(front)).http_response.status_code == 200


async def test_a_stream_that_breaks_off_is_not_kept(front):
    first = asyncio.create_task(events(front))
    submit = await front.peer.submitted()
    front.peer.say(submit, front.ids("Hi"))
    front.peer.send(wire.Failed(submit.request_id, "internal", "no"))
    told, _ = await first
    assert b'"error"' in told
    second = asyncio.create_task(events(front))
    front.peer.say(await front.peer.submitted(), [*front.ids("Hi"), 3], "stop")
    told, _ = await second
    assert b'"error"' not in told
    await front.settled(2)


async def test_whoever_asks_as_the_gateway_goes_is_told_so(front):
    headers = CIMultiDict({"idempotency-key": "key-1"})
    request = unconnected.post(CHAT, b"{}", headers, 2)
    head.begin(request)
    answer = asyncio.Event().wait  # which never comes
    keys, caller = front.gw.idempotency, front.gw.auth.caller(KEY)
    async with keys.opened():
        asked = asyncio.create_task(keys.once(request, caller, b"{}", answer))
    with pytest.raises(Draining):
        await asyncio.wait_for(asked, PATIENCE_S)


async def test_what_was_never_a_request_takes_no_key(front):
    status, _, _ = await front.post(CHAT, {"model": "demo"}, **{"idempotency-key": "key-1"})
    assert status == 400
    await answered(front)


@pytest.mark.parametrize("key", ["", "x" * 256, "caf\u00e9", "tab\there"])
async def test_a_key_has_a_shape(front, key):
    status, body, _ = await front.post(CHAT, BODY, **{"idempotency-key": key})
    assert status == 400
    assert body["error"]["param"] == "Idempotency-Key"
    assert front.peer.is_quiet()


async def test_without_room_in_memory_repetitions_still_join(open_front):
    async with open_front(cache=settings.Cache(max_bytes=0)) as front:
        asked = [asking(front), asking(front)]
        submit = await front.peer.submitted()
        await until(lambda: num_inside(front) == 3)
        front.peer.say(submit, [3], "stop")
        one, other = await asyncio.gather(*asked)
        assert one.text == other.text
        assert (await answered(front)).text != one.text


# Several gateways


async def test_another_gateway_repeats_what_one_has_answered(open_front, redis_settings):
    async with open_front(redis=redis_settings) as front:
        first = await answered(front)
        stream = asyncio.create_task(events(front, "key-2"))
        front.peer.say(await front.peer.submitted(), [*front.ids("Hi"), 3], "stop")
        told, _ = await stream
        front.gw.idempotency._slots.memory = Memory(0, front.gw.clock)  # as a gateway that has seen none of it
        assert (await asking(front)).text == first.text
        assert (await events(front, "key-2"))[0] == told
        with pytest.raises(openai.ConflictError):
            await asking(front, temperature=0.5)
        await front.settled(2)


SCOPE, NAME, ASKED = b"scope", b"name" * 8, b"asked" * 6
ANSWER = Recorded(ASKED, "req_1", False, b"{}")


@pytest.fixture
def gateways(redis) -> list[tuple[Slots, HandClock]]:
    clocks = [HandClock(), HandClock()]
    return [(Slots(Memory(1 << 20, clock), redis, 3600.0, clock), clock) for clock in clocks]


async def polled(clock: HandClock, task: asyncio.Task[Any]) -> Any:
    """The result of one that looks again and again."""

    def look() -> bool:
        clock.advance(POLL_S)
        return task.done()

    await until(look)
    return task.result()


async def test_one_gateway_waits_for_the_answer_that_another_one_is_computing(gateways):
    (one, _), (other, clock) = gateways
    slot = one.slot(SCOPE, NAME, ASKED)
    assert await slot.find(refuses=False) is None
    waiting = asyncio.create_task(other.slot(SCOPE, NAME, ASKED).find(refuses=False))
    await until(clock.waits)
    await slot.keep(ANSWER)
    assert await polled(clock, waiting) == ANSWER


async def test_it_computes_itself_when_the_other_one_failed(gateways):
    (one, _), (other, clock) = gateways
    slot = one.slot(SCOPE, NAME, ASKED)
    assert await slot.find(refuses=False) is None
    waiting = asyncio.create_task(other.slot(SCOPE, NAME, ASKED).find(refuses=False))
    await until(clock.waits)
    await slot.free()
    assert await polled(clock, waiting) is None
    again = asyncio.create_task(one.slot(SCOPE, NAME, ASKED).find(refuses=False))
    await until(gateways[0][1].waits)
    again.cancel()  # claimed, so this one would wait


async def test_a_claim_is_its_gateways_for_as_long_as_that_renews_it(gateways, redis):
    (one, clock), (other, _) = gateways
    slot = one.slot(SCOPE, NAME, ASKED)
    await slot.find(refuses=False)
    key = redis.key(f"idempotency:{NAME.hex()}")
    async with slot.renewed():
        await until(clock.waits)
        await redis.call("PEXPIRE", key, 1000 * 60)
        clock.advance(LEASE_S / 3)
        await until(clock.waits)
        assert 0 < await redis.call("PTTL", key) <= 1000 * LEASE_S
    await redis.call("DEL", key)  # it took too long, and another one took over
    late = other.slot(SCOPE, NAME, ASKED)
    assert await late.find(refuses=False) is None
    await slot.keep(ANSWER)
    await slot.free()
    with pytest.raises(IdempotencyKeyReused):
        await other.slot(SCOPE, NAME, b"something else").find(refuses=False)


async def test_the_key_of_another_request_is_refused_at_once_though_it_is_not_answered_yet(gateways):
    (one, _), (other, _) = gateways
    await one.slot(SCOPE, NAME, ASKED).find(refuses=False)
    with pytest.raises(IdempotencyKeyReused):
        await other.slot(SCOPE, NAME, b"something else").find(refuses=False)


@pytest.mark.parametrize("fault", ["stall", "kill"])
async def test_without_redis_a_gateway_answers_for_itself_or_refuses_as_the_policy_says(fragile_redis, fault):
    clock = HandClock()
    redis = Redis(settings.Redis(url=fragile_redis.url, timeout_ms=100.0), clock)
    slots = Slots(Memory(1 << 20, clock), redis, 3600.0, clock)
    getattr(fragile_redis, fault)()
    try:
        async with asyncio.timeout(PATIENCE_S):
            slot = slots.slot(SCOPE, NAME, ASKED)
            assert await slot.find(refuses=False) is None
            with pytest.raises(ServiceUnavailable):
                await slots.slot(SCOPE, NAME, ASKED).find(refuses=True)
            await slot.keep(ANSWER)
            assert await slots.slot(SCOPE, NAME, ASKED).find(refuses=True) == ANSWER, (
                "what is known here needs no Redis"
            )
    finally:
        await redis.close()


async def test_whoever_waits_for_another_gateway_when_redis_goes_is_told_to_come_back(fragile_redis):
    clock = HandClock()
    redis = Redis(settings.Redis(url=fragile_redis.url, timeout_ms=PATIENT_MS), clock)
    one, other = (Slots(Memory(1 << 20, clock), redis, 3600.0, clock) for _ in range(2))
    try:
        await one.slot(SCOPE, NAME, ASKED).find(refuses=False)
        waiting = asyncio.create_task(other.slot(SCOPE, NAME, ASKED).find(refuses=False))
        await until(clock.waits)
        fragile_redis.kill()
        with pytest.raises(ServiceUnavailable):  # it may be computed there, so not here
            await polled(clock, waiting)
    finally:
        await redis.close()


async def test_what_another_version_kept_is_answered_anew(gateways, redis):
    (one, _), _ = gateways
    await redis.call("SET", redis.key(f"idempotency:{NAME.hex()}"), msgspec.msgpack.encode(["reply-9", b"?"]))
    assert await one.slot(SCOPE, NAME, ASKED).find(refuses=False) is None


async def test_a_record_tells_each_reader_all_of_it():
    record = Record("req_1")

    async def read() -> bytes:
        await record.begun()
        told, num_read = b"", 0
        while chunks := await record.more(num_read):
            num_read += len(chunks)
            told += b"".join(chunks)
        return told

    readers = [asyncio.create_task(read())]
    await asyncio.sleep(0)
    for number in range(10):
        await record.write(b"%d" % number)
        readers.append(asyncio.create_task(read()))
        await asyncio.sleep(0)
    record.finish(await record.end(b"end"))
    assert set(await asyncio.gather(*readers)) == {b"0123456789end"}


async def test_what_a_record_was_told_has_left_when_one_of_its_readers_has_passed_it_on():
    record = Record("req_1")
    await record.write(b"1")
    await record.flush()  # nobody reads, so nobody is waited for
    assert not record.is_flushed
    record.num_readers = 2
    flushing = asyncio.create_task(record.flush())
    await asyncio.sleep(0)
    assert not flushing.done()
    record.passed_on(1)
    await flushing
    record.passed_on(0)  # the other one is slower
    assert record.is_flushed
    await record.write(b"2")
    assert not record.is_flushed
