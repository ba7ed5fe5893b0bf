"""Receivers of usage events on real ports, each as strict as the one it stands for, and as unreliable as it is told."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import urllib.parse
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from aiohttp import web

KEY = "sk_live_of_the_tests"
SECRET = "0123456789abcdef0123456789abcdef"

Step = int | str | tuple[int, dict[str, str]]
"""A status, perhaps with headers; "stall", "close", or "close after", which takes what was sent first."""


class Receiver:
    """Takes what is proper, once by its id, unless ``script`` says otherwise for the next posts."""

    def __init__(self) -> None:
        self.url = ""
        self.script: list[Step] = []
        self.counted: dict[str, Any] = {}
        """What it was told, by the ids of the events: each once."""
        self.order: list[str] = []
        self.num_posts = 0
        self.num_repeats = 0
        self.customers: set[str] | None = None
        """Those that it knows; None: all."""

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.num_posts += 1
        step = self.script.pop(0) if self.script else 200
        if isinstance(step, tuple):
            return web.Response(status=step[0], headers=step[1])
        if step == "stall":
            await asyncio.Event().wait()
        if step in ("close", "close after"):
            if step == "close after":
                self.answer(request, body)
            assert request.transport is not None
            request.transport.abort()
        if isinstance(step, int) and step != 200:
            return web.Response(status=step, text=f"{request.path_qs}: {request.headers.get('authorization')}")
        return self.answer(request, body)

    def answer(self, request: web.Request, body: bytes) -> web.Response:
        raise NotImplementedError

    def knows(self, customer: str) -> bool:
        return self.customers is None or customer in self.customers

    def count(self, event_id: str, told: Any) -> None:
        """Told the same thing twice, it is the same to the byte."""
        if event_id in self.counted:
            self.num_repeats += 1
            assert self.counted[event_id] == told
        else:
            self.counted[event_id] = told
            self.order.append(event_id)


class StripeReceiver(Receiver):
    """One post at a time for a customer and a meter, and an identifier once."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: Counter[tuple[str, str]] = Counter()
        self.now: Callable[[], float] = lambda: 0.0

    async def take(self, request: web.Request) -> web.Response:
        form = await request.post()
        place = (str(form["event_name"]), str(form["payload[stripe_customer_id]"]))
        assert not self.inside[place]
        self.inside[place] += 1
        try:
            await asyncio.sleep(0)
            return await super().take(request)
        finally:
            self.inside[place] -= 1

    def answer(self, request: web.Request, body: bytes) -> web.Response:
        assert request.content_type == "application/x-www-form-urlencoded"
        if request.headers["authorization"] != f"Bearer {KEY}":
            return self.wrong(401, "Invalid API Key provided")
        form = dict(urllib.parse.parse_qsl(body.decode()))
        assert len(form["identifier"]) <= 100
        customer, value = form["payload[stripe_customer_id]"], int(form["payload[value]"])
        if not self.knows(customer):
            return self.wrong(404, f"No such customer: '{customer}'", "payload[stripe_customer_id]")
        if not self.now() - 35 * 86_400 <= int(form["timestamp"]) <= self.now() + 300:
            return self.wrong(400, "The timestamp is too far in the past", "timestamp")
        is_repeat = form["identifier"] in self.counted
        self.count(form["identifier"], (customer, form["event_name"], value))
        if is_repeat:
            return self.wrong(400, f"An event already exists with identifier {form['identifier']}.")
        return web.json_response({"object": "billing.meter_event", **form})

    def wrong(self, status: int, message: str, param: str = "") -> web.Response:
        error = {"type": "invalid_request_error", "message": message, **({"param": param} if param else {})}
        return web.json_response({"error": error}, status=status)


class CloudEventsReceiver(Receiver):
    """All of a batch or nothing, and what it has had before is left out without a word."""

    def answer(self, request: web.Request, body: bytes) -> web.Response:
        assert request.content_type == "application/cloudevents-batch+json"
        assert request.headers["authorization"] == f"Bearer {KEY}"
        events = msgspec.json.decode(body)
        assert 0 < len(events) <= 100
        if not all(self.knows(event["subject"]) for event in events):
            return web.json_response({"title": "Bad Request"}, status=400)
        for event in events:
            assert event["specversion"] == "1.0"
            assert event["source"] == "penstock"
            assert event["time"].endswith("Z")
            self.count(event["id"], (event["subject"], event["type"], event["data"]["value"]))
        return web.Response(status=204)


class LagoReceiver(Receiver):
    """All of a batch or nothing, with what is wrong by number; what it has had before is wrong."""

    def answer(self, request: web.Request, body: bytes) -> web.Response:
        assert request.headers["authorization"] == f"Bearer {KEY}"
        events = msgspec.json.decode(body)["events"]
        assert 0 < len(events) <= 100
        wrong: dict[str, Any] = {}
        for number, event in enumerate(events):
            if event["transaction_id"] in self.counted:
                self.num_repeats += 1
                wrong[str(number)] = {"transaction_id": ["value_already_exist"]}
            elif not self.knows(event["external_subscription_id"]):
                wrong[str(number)] = {"external_subscription_id": ["subscription_not_found"]}
        if wrong:
            told = {"status": 422, "code": "validation_errors", "error_details": wrong}
            return web.json_response(told, status=422)
        for event in events:
            told = (event["external_subscription_id"], event["code"], event["properties"]["value"])
            self.count(event["transaction_id"], told)
        return web.json_response({"events": events})


class WebhookReceiver(Receiver):
    """Takes what is signed."""

    def answer(self, request: web.Request, body: bytes) -> web.Response:
        event_id, at = request.headers["webhook-id"], request.headers["webhook-timestamp"]
        signed = hmac.new(SECRET.encode(), f"{event_id}.{at}.".encode() + body, hashlib.sha256).digest()
        assert request.headers["webhook-signature"] == f"v1,{base64.b64encode(signed).decode()}"
        told = msgspec.json.decode(body)
        if not self.knows(told["data"]["customer"]):
            return web.Response(status=400, text="who is that?")
        self.count(event_id, told)
        return web.Response(status=204)


RECEIVERS: dict[str, type[Receiver]] = {
    "stripe": StripeReceiver,
    "cloudevents": CloudEventsReceiver,
    "lago": LagoReceiver,
    "webhook": WebhookReceiver,
}


@contextlib.asynccontextmanager
async def receiving(kind: str) -> AsyncIterator[Any]:
    """One on a free port."""
    receiver = RECEIVERS[kind]()
    application = web.Application()
    application.router.add_post("/events", receiver.take)
    runner = web.AppRunner(application, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        receiver.url = f"http://{host}:{port}/events"
        yield receiver
    finally:
        await runner.cleanup()
