"""Events on their way to a real receiver that takes them, fails, stalls or is gone."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac

import aiohttp
import msgspec
import pytest
from aiohttp import web

from gateway import webhooks
from gateway.webhooks import MAX_TRIES, MAX_WAITING, SECRET, WebhookInvalid, Webhooks, backoff_s
from policies import settings
from tests.builders import PATIENCE_S, HandClock, until
from tests.ports import free_port

KEY = b"0123456789abcdef0123456789abcdef"


class Receiver:
    """Takes events, or does what ``script`` says for the next ones: a status, or "stall"."""

    def __init__(self) -> None:
        self.seen: list[tuple[dict[str, str], bytes]] = []
        self.script: list[int | str] = []
        self.url = ""

    async def take(self, request: web.Request) -> web.Response:
        self.seen.append((dict(request.headers), await request.read()))
        step = self.script.pop(0) if self.script else 204
        if step == "stall":
            await asyncio.Event().wait()
        return web.Response(status=step, headers={"location": "/elsewhere"} if step == 302 else {})

    @property
    def ids(self) -> list[str]:
        return [headers["webhook-id"] for headers, _ in self.seen]


@pytest.fixture
async def receiver():
    receiver = Receiver()
    application = web.Application()
    application.router.add_post("/events", receiver.take)
    runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0]
    receiver.url = f"http://{host}:{port}/events"
    yield receiver
    await runner.cleanup()


@contextlib.asynccontextmanager
async def sending(url, clock, redis=None, timeout_s=10.0):
    async with aiohttp.ClientSession() as session:
        sender = Webhooks(url, KEY, session, clock, redis, timeout_s)
        try:
            yield sender
        finally:
            await sender.close()


async def test_an_event_arrives_signed_so_that_its_receiver_can_tell(receiver, clock):
    async with sending(receiver.url, clock) as sender:
        sender.post("alert_ten1_2026-08_80", "budget.alert", {"share": "0.8"})
        await until(lambda: not sender.num_waiting)
    ((headers, body),) = receiver.seen
    told = msgspec.json.decode(body)
    assert told["type"] == "budget.alert"
    assert told["data"] == {"share": "0.8"}
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    version, _, signature = headers["webhook-signature"].partition(",")
    assert version == "v1"
    assert base64.b64decode(signature) == hmac.new(KEY, signed, hashlib.sha256).digest()


@pytest.mark.parametrize("trouble", [500, 429, 404, 302, "stall"])
async def test_what_was_not_taken_is_posted_again_later_with_the_same_id(receiver, clock, trouble):
    receiver.script = [trouble, trouble]
    async with sending(receiver.url, clock, timeout_s=1.0 if trouble == "stall" else PATIENCE_S) as sender:
        sender.post("e1", "budget.alert", {})
        for num_failures in (1, 2):
            await until(lambda: clock.waits() == [backoff_s(num_failures)])  # noqa: B023
            clock.advance(backoff_s(num_failures))
        await until(lambda: not sender.num_waiting)
    assert receiver.ids == ["e1"] * 3
    assert len({body for _, body in receiver.seen}) == 1


async def test_a_receiver_that_is_away_for_good_is_given_up(clock):
    async with sending(f"http://127.0.0.1:{free_port()}/", clock) as sender:
        sender.post("e1", "budget.alert", {})
        for _ in range(MAX_TRIES - 1):
            await until(clock.waits)
            clock.advance(clock.waits()[0])
        await until(lambda: not sender.num_waiting)


async def test_a_receiver_that_says_gone_is_not_asked_again(receiver, clock):
    receiver.script = [410]
    async with sending(receiver.url, clock) as sender:
        sender.post("e1", "budget.alert", {})
        await until(lambda: not sender.num_waiting)
    assert receiver.ids == ["e1"]


async def test_the_same_event_twice_is_posted_once(receiver, clock):
    async with sending(receiver.url, clock) as sender:
        for event_id in ("e1", "e2", "e1"):
            sender.post(event_id, "budget.alert", {})
        await until(lambda: not sender.num_waiting)
        sender.post("e2", "budget.alert", {})
        assert not sender.num_waiting
    assert sorted(receiver.ids) == ["e1", "e2"]


async def test_one_that_fails_does_not_hold_up_the_others_and_all_together_are_bounded(receiver, clock):
    receiver.script = ["stall"]
    async with sending(receiver.url, clock) as sender:
        for number in range(MAX_WAITING + 5):
            sender.post(f"e{number}", "budget.alert", {})
        assert sender.num_waiting == MAX_WAITING
        await until(lambda: sender.num_waiting == 1)
    assert len(set(receiver.ids)) == MAX_WAITING


async def test_gateways_that_notice_the_same_post_it_once(receiver, redis):
    clocks = [HandClock() for _ in range(3)]
    async with contextlib.AsyncExitStack() as stack:
        senders = [await stack.enter_async_context(sending(receiver.url, clock, redis)) for clock in clocks]
        for sender in senders:
            sender.post("e1", "budget.alert", {})
        await until(lambda: sum(sender.num_waiting for sender in senders) <= 2 and receiver.ids)
        await until(
            lambda: all(clock.waits() or not sender.num_waiting for clock, sender in zip(clocks, senders, strict=True))
        )
        for clock in clocks:
            clock.advance(backoff_s(1))
        await until(lambda: not any(sender.num_waiting for sender in senders))
    assert receiver.ids == ["e1"]


async def test_a_gateway_that_dies_leaves_its_events_to_another(receiver, redis):
    receiver.script = ["stall"]
    first_clock, second_clock = HandClock(), HandClock()
    async with sending(receiver.url, second_clock, redis) as second:
        async with sending(receiver.url, first_clock, redis) as first:
            first.post("e1", "budget.alert", {})
            await until(lambda: receiver.ids)
            second.post("e1", "budget.alert", {})
            await until(second_clock.waits)
        # As if the claim's time had come: Redis has a clock of its own.
        await redis.call("DEL", redis.key("event:e1"))
        second_clock.advance(second_clock.waits()[0])
        await until(lambda: not second.num_waiting)
    assert receiver.ids == ["e1", "e1"]


async def test_without_redis_an_event_is_posted_all_the_same(receiver, clock, redis):
    await redis.close()
    async with sending(receiver.url, clock, redis) as sender:
        sender.post("e1", "budget.alert", {})
        await until(lambda: not sender.num_waiting)
    assert receiver.ids == ["e1"]


@pytest.mark.parametrize(
    ("url", "secret"),
    [
        ("https://receiver/", None),
        ("https://receiver/", "short"),
        ("https://receiver/", "whsec_!!!"),
        ("ftp://receiver/", "a" * 32),
        ("receiver", "a" * 32),
    ],
)
def test_what_cannot_be_posted_or_signed_is_one_sentence_at_the_start(url, secret):
    with pytest.raises(WebhookInvalid, match=r"webhook_url|SECRET"):
        webhooks.secret_of(settings.Billing(webhook_url=url), {SECRET: secret} if secret else {})


def test_a_secret_in_the_standards_form_is_decoded():
    config = settings.Billing(webhook_url="https://receiver/")
    assert webhooks.secret_of(config, {SECRET: "whsec_" + base64.b64encode(KEY).decode()}) == KEY
    assert webhooks.secret_of(settings.Billing(), {}) == b""
