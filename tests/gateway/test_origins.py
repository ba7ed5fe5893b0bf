"""Pages of other origins: what a browser asks before it sends, and what lets a page read the answer, whatever it is."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any

import pytest

from gateway import api
from policies.settings import Server
from tests.gateway.conftest import HELLO, Front
from tests.gateway.desk import Desk
from tests.gateway.responding import END

PAGE, ANOTHER = "https://app.example.com", "https://evil.example"
ALL_PAGES = (PAGE, "http://localhost:3000")
CHAT = "/v1/chat/completions"
SENT = (
    "authorization, content-type, x-stainless-lang, x-stainless-retry-count, x-api-key, anthropic-version, openai-beta"
)
"""Headers of the packages that run in browsers."""
ROUTES = [(route.method, re.sub(r"{[^}]*}", "x", route.path)) for route in api.routes()]


@pytest.fixture
async def front(open_front):
    async with open_front(server=Server(cors_origins=ALL_PAGES, max_body_bytes=4096)) as opened:
        yield opened


async def preflight(front: Front, origin: str, method: str, path: str) -> tuple[int, Mapping[str, str]]:
    asks = {"origin": origin, "access-control-request-method": method, "access-control-request-headers": SENT}
    async with front.http.options(front.url + path, headers=asks) as told:
        return told.status, told.headers


def lets(headers: Mapping[str, str], origin: str | None) -> bool:
    """Whether a page of ``origin`` may read an answer with these headers, and all of it; None: no page may."""
    named = [name.lower() for name in headers]
    assert named.count("vary") == named.count("x-request-id") == 1
    assert headers["vary"] == "Origin"
    if origin is None:
        return not any(name.startswith("access-control-") for name in named)
    exposed = headers["access-control-expose-headers"] == "*" and "access-control-allow-credentials" not in headers
    return headers["access-control-allow-origin"] == origin and exposed


async def test_a_browser_may_ask_any_address_first_and_pages_of_other_origins_are_told_nothing(front: Front):
    for method, path in (*ROUTES, ("PATCH", "/admin/v1/keys/x"), ("POST", "/nowhere")):
        for origin in (PAGE, ALL_PAGES[1], PAGE.upper()):
            status, headers = await preflight(front, origin, method, path)
            assert status == 204
            assert lets(headers, origin.lower()), (method, path)
            assert method in headers["access-control-allow-methods"].split(", ")
            assert headers["access-control-allow-headers"] == "*, authorization", "an asterisk is not for that one"
        for origin in (ANOTHER, "null", f"{PAGE}.evil.example", f"{PAGE}:8443"):
            _, headers = await preflight(front, origin, method, path)
            assert lets(headers, None), (method, path)


async def test_whatever_an_address_answers_a_page_may_read(front: Front):
    for method, path in ROUTES:
        for origin, allowed in ((PAGE, PAGE), (ANOTHER, None), (None, None)):
            headers = {} if origin is None else {"origin": origin}
            async with front.http.request(method, front.url + path, headers=headers) as answer:
                assert lets(answer.headers, allowed), (method, path, origin, answer.status)


async def test_every_refusal_may_be_read(front: Front):
    desk = Desk(front)
    await desk.made("policies", {"name": "tight", "document": {"limits": {"requests_per_minute": 1}}})
    tenant = await desk.made("tenants", {"name": "tight", "policy": "tight"})
    key = (await desk.made("keys", {"tenant_id": tenant["id"], "name": "tight"}))["key"]
    limited = {"authorization": f"Bearer {key}"}
    call: dict[str, Any] = {"model": "demo", "messages": HELLO}

    async def refused(body: object, path: str = CHAT, **headers: str) -> tuple[int, Mapping[str, str]]:
        status, _, told = await front.post(path, body, origin=PAGE, **headers)
        return status, told

    asked = asyncio.create_task(refused(call, **limited))
    front.peer.say(await front.peer.submitted(), [END], "stop")
    status, headers = await asked
    assert (status, lets(headers, PAGE)) == (200, True)
    failing = asyncio.create_task(refused({**call, "seed": 1}))
    front.peer.say(await front.peer.submitted(), [], "error")
    found = [
        await failing,
        await refused(call, **limited),
        await refused(call, authorization="Bearer nobody"),
        await refused({**call, "model": "nobody"}),
        await refused(b"{"),
        await refused({**call, "user": "x" * 5000}),
        await refused(call, **{"content-type": "text/plain"}),
        await refused(call, path="/v1/nowhere"),
        await refused(call, path="/v1/models"),
    ]
    assert [status for status, _ in found] == [500, 429, 401, 404, 400, 413, 415, 404, 405]
    assert [lets(headers, PAGE) for _, headers in found] == [True] * len(found)
    assert {"retry-after", "x-ratelimit-limit-requests"} <= {name.lower() for name in found[1][1]}


STREAMS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": HELLO}),
    ("/v1/completions", {"prompt": "Hello"}),
    ("/v1/responses", {"input": "Hello"}),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 5}),
    ("/api/chat", {"messages": HELLO}),
    ("/api/generate", {"prompt": "Hello"}),
]


@pytest.mark.parametrize(("path", "body"), STREAMS, ids=[path for path, _ in STREAMS])
async def test_a_stream_may_be_read(front: Front, path, body):
    for origin, allowed in ((PAGE, PAGE), (ANOTHER, None)):
        sent = {"model": "demo", "stream": True, **body, "penstock": {"cache": "off"}}
        asked = asyncio.create_task(front.http.post(front.url + path, json=sent, headers={"origin": origin}))
        front.peer.say(await front.peer.submitted(), [*front.ids("Hi."), END], "stop")
        async with await asked as answer:
            assert answer.status == 200
            assert "json" in answer.content_type or answer.content_type == "text/event-stream"
            assert lets(answer.headers, allowed)
            await answer.read()


async def test_no_page_may_call_unless_settings_say_so(open_front):
    async with (
        open_front() as front,
        front.http.get(f"{front.url}/v1/models", headers={"origin": PAGE}) as answer,
    ):
        assert not [name for name in answer.headers if name.lower().startswith(("access-control", "vary"))]


async def test_an_asterisk_lets_all_pages_call(open_front):
    async with open_front(server=Server(cors_origins=("*",))) as front:
        for headers in ({"origin": ANOTHER}, {"origin": "null"}, {}):
            async with front.http.get(f"{front.url}/v1/models", headers=headers) as answer:
                assert lets(answer.headers, "*" if headers else None), "what a cache keeps of one is not for the other"
        status, headers = await preflight(front, ANOTHER, "POST", CHAT)
        assert (status, lets(headers, "*")) == (204, True)
