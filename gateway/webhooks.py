"""Events posted to the operator's address, signed, until they are taken: the Standard Webhooks way.

An event has an id that follows from what happened, so that all gateways who notice it name it alike. Where there is a
Redis, one of them posts it and the others stand by in case it dies; without, each posts it, and the receiver knows the
repetition by its id. Delivery is at least once. What was not taken when the gateway stops is lost here; whoever can
tell what happened by other means (``limits.budgets``, by the ledger) posts it again after the next start.

https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import hmac
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Literal

import aiohttp
import msgspec
import yarl

from gateway.clock import Clock
from gateway.redis import Redis, RedisAway, Script
from policies import settings

log = logging.getLogger(__name__)

SECRET = "PENSTOCK_WEBHOOK_SECRET"
SECRET_PREFIX = "whsec_"
"""What follows it is base64, as Standard Webhooks writes secrets; any other secret counts as it stands."""
MIN_SECRET_BYTES = 16

MAX_WAITING = 1000
"""Events that are not delivered yet; one more is only logged."""
MAX_POSTS = 4
"""At once."""
MAX_REMEMBERED = 10_000
"""Ids of the latest events, which are not posted again."""
MAX_TRIES = 12
"""Of one event, which with these delays takes about six hours."""
FIRST_DELAY_S, MAX_DELAY_S, GROWTH = 1.0, 3600.0, 4.0
"""Between tries."""
TIMEOUT_S = 15.0
"""Of one try."""
MARGIN_S = 15.0
"""How much longer than a try may take an event is ours."""
KEEP_S = 7 * 86_400
"""How long an event that was taken is remembered in Redis."""

Claim = Literal["ours", "theirs", "done"]
Taken = Callable[[str], Awaitable[None]]

CLAIM = Script("""
local holder = redis.call('GET', KEYS[1])
if holder == 'done' then return 'done' end
if holder and holder ~= ARGV[1] then return 'theirs' end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 'ours'
""")


async def _nobody_asks(event_id: str) -> None:
    """Events that nothing follows from after a start."""


class WebhookInvalid(Exception):
    """The address or the secret cannot be used; the message is one sentence for the operator."""


class Event(msgspec.Struct, frozen=True):
    """Something that happened, as it is posted."""

    id: str
    kind: str
    payload: bytes


class Webhooks:
    """The sender. Without an address events are only logged."""

    def __init__(
        self,
        url: str,
        secret: bytes,
        session: aiohttp.ClientSession,
        clock: Clock,
        redis: Redis | None = None,
        timeout_s: float = TIMEOUT_S,
        taken: Taken = _nobody_asks,
    ) -> None:
        """``taken`` hears the ids of events that need no other posting."""
        self._url = url
        self._secret = secret
        self._session = session
        self._clock = clock
        self._redis = redis
        self._timeout_s = timeout_s
        self._taken = taken
        self._name = secrets.token_hex(8)
        """Of this sender, among those that share the Redis."""
        self._places = asyncio.Semaphore(MAX_POSTS)
        self._deliveries: set[asyncio.Task[None]] = set()
        self._remembered: OrderedDict[str, None] = OrderedDict()

    def post(self, event_id: str, kind: str, body: Any) -> None:
        """Takes an event to be delivered; never waits. ``body`` is anything that msgspec encodes.

        The same id again is the same event, and is posted once.
        """
        if event_id in self._remembered:
            return
        self._remembered[event_id] = None
        if len(self._remembered) > MAX_REMEMBERED:
            self._remembered.popitem(last=False)
        now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        payload = msgspec.json.encode({"type": kind, "timestamp": now, "data": body})
        log.warning("event %s: %s", event_id, payload.decode())
        if not self._url:
            return
        if len(self._deliveries) >= MAX_WAITING:
            log.error("event %s is not posted: %d others wait to be taken by the webhook", event_id, MAX_WAITING)
            return
        delivery = asyncio.get_running_loop().create_task(self._deliver(Event(event_id, kind, payload)))
        self._deliveries.add(delivery)
        delivery.add_done_callback(self._ended)

    @property
    def num_waiting(self) -> int:
        return len(self._deliveries)

    async def close(self) -> None:
        """What was not taken yet is lost here, and posted by another gateway if there is one that stands by."""
        deliveries = list(self._deliveries)
        for delivery in deliveries:
            delivery.cancel()
        await asyncio.gather(*deliveries, return_exceptions=True)

    def _ended(self, delivery: asyncio.Task[None]) -> None:
        self._deliveries.discard(delivery)
        if not delivery.cancelled() and (error := delivery.exception()) is not None:
            log.error("an event could not be posted", exc_info=error)

    async def _deliver(self, event: Event) -> None:
        for num_failures in range(1, MAX_TRIES + 1):
            delay_s = backoff_s(num_failures)
            claim = await self._claim(event, self._timeout_s + delay_s + MARGIN_S)
            if claim == "done":
                return
            if claim == "ours":
                async with self._places:
                    outcome = await self._try(event)
                if outcome == "taken":
                    return await self._mark_done(event)
                if outcome == "gone":
                    log.error("event %s is given up: %s wants no more events (410)", event.id, self._url)
                    return await self._mark_done(event)
                log.warning("event %s was not taken (%s); tried %d times", event.id, outcome, num_failures)
            # Whoever has claimed it extends the claim with each try; a claim that ended is one whose holder died.
            if num_failures < MAX_TRIES:
                await self._clock.sleep(delay_s)
        log.error("event %s is given up after %d tries", event.id, MAX_TRIES)

    async def _try(self, event: Event) -> str:
        """ "taken", "gone", or what was wrong."""
        at = int(time.time())
        headers = {
            "content-type": "application/json",
            "user-agent": "penstock",
            "webhook-id": event.id,
            "webhook-timestamp": str(at),
            "webhook-signature": signature(self._secret, event.id, at, event.payload),
        }
        try:
            async with self._session.post(
                self._url,
                data=event.payload,
                headers=headers,
                allow_redirects=False,  # the signature is for this receiver
                timeout=aiohttp.ClientTimeout(self._timeout_s),
            ) as answer:
                if 200 <= answer.status < 300:
                    return "taken"
                return "gone" if answer.status == 410 else f"status {answer.status}"
        except TimeoutError:
            return f"no answer within {self._timeout_s:g} s"
        except aiohttp.ClientError as error:
            return str(error) or type(error).__name__

    async def _claim(self, event: Event, lease_s: float) -> Claim:
        if self._redis is None:
            return "ours"
        try:
            claim = await self._redis.run(
                CLAIM, [self._redis.key(f"event:{event.id}")], [self._name, int(1e3 * lease_s)]
            )
        except RedisAway:  # twice is better than never
            return "ours"
        found: Claim = claim.decode()
        return found

    async def _mark_done(self, event: Event) -> None:
        """Nobody needs to post it again."""
        await self._taken(event.id)
        if self._redis is not None:
            with contextlib.suppress(RedisAway):  # who stands by posts it again, and the receiver knows it by its id
                await self._redis.call("SET", self._redis.key(f"event:{event.id}"), "done", "EX", KEEP_S)


@contextlib.asynccontextmanager
async def opened(
    config: settings.Billing,
    environ: Mapping[str, str],
    clock: Clock,
    redis: Redis | None,
    taken: Taken = _nobody_asks,
) -> AsyncIterator[Webhooks]:
    """The sender, until the gateway closes. Raises WebhookInvalid."""
    secret = secret_of(config, environ)
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:
        webhooks = Webhooks(config.webhook_url, secret, session, clock, redis, taken=taken)
        try:
            yield webhooks
        finally:
            await webhooks.close()


def secret_of(config: settings.Billing, environ: Mapping[str, str]) -> bytes:
    """The key of the signatures, once the address is known to be one. Raises WebhookInvalid."""
    if not config.webhook_url:
        return b""
    try:
        url = yarl.URL(config.webhook_url)
    except ValueError:
        url = yarl.URL()
    if url.scheme not in ("http", "https") or not url.host:
        raise WebhookInvalid("billing.webhook_url is no address such as https://host/path")
    if not environ.get(SECRET):
        raise WebhookInvalid(f"billing.webhook_url is set, but {SECRET} is not, so that nothing could be signed")
    return secret_from(environ[SECRET], SECRET)


def secret_from(written: str, variable: str) -> bytes:
    """A secret as the variable has it. Raises WebhookInvalid."""
    secret = written.encode()
    if written.startswith(SECRET_PREFIX):
        try:
            secret = base64.b64decode(written.removeprefix(SECRET_PREFIX), validate=True)
        except binascii.Error:
            raise WebhookInvalid(f"{variable} begins with {SECRET_PREFIX}, but what follows is no base64") from None
    if len(secret) < MIN_SECRET_BYTES:
        raise WebhookInvalid(f"{variable} is shorter than {MIN_SECRET_BYTES} bytes")
    return secret


def signature(secret: bytes, event_id: str, at: int, payload: bytes) -> str:
    """What ``webhook-signature`` says of an event posted ``at`` a Unix second."""
    signed = hmac.new(secret, f"{event_id}.{at}.".encode() + payload, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(signed).decode()}"


def backoff_s(num_failures: int) -> float:
    """Seconds before the next try after so many failures in a row, >= 1."""
    return float(min(MAX_DELAY_S, FIRST_DELAY_S * GROWTH ** (num_failures - 1)))
