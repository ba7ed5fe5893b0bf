"""A browser that signed in with an admin key, and what it may do by its cookie."""

from __future__ import annotations

import asyncio
from http.cookies import SimpleCookie

import aiohttp
import pytest
import sqlalchemy as sa

from gateway import store
from gateway.console import sessions
from policies import settings
from policies.console import Console
from tests.builders import until
from tests.gateway.conftest import ADMIN_KEY, KEY, Front
from tests.gateway.desk import Desk


class Browser:
    """What signed in: a cookie, and the token that its pages send along."""

    def __init__(self, front: Front, key: str = ADMIN_KEY) -> None:
        self.front = front
        self.desk = Desk(front)
        self.key = key
        self.cookie = self.csrf_token = ""

    async def sign_in(self, **headers: str) -> Browser:
        reply = await self.desk("POST", "session", key=self.key, **headers)
        assert reply.status == 201, reply.body
        self.body, self.set_cookie = reply.body, reply.headers["set-cookie"]
        ((name, morsel),) = SimpleCookie(self.set_cookie).items()
        self.cookie, self.csrf_token = f"{name}={morsel.value}", reply.body["csrf_token"]
        return self

    async def __call__(self, method: str, path: str, body: object = None, **headers: str):
        sent = {"cookie": self.cookie, "x_csrf_token": self.csrf_token, **headers}
        return await self.desk(method, path, body, key=None, **{name: value for name, value in sent.items() if value})


@pytest.fixture
async def browser(front: Front) -> Browser:
    return await Browser(front).sign_in()


async def test_a_session_does_what_its_key_may_by_the_same_addresses(browser):
    made = await browser("POST", "tenants", {"name": "blue"})
    assert made.status == 201
    assert (made.headers["cache-control"], made.headers["x-content-type-options"]) == ("no-store", "nosniff")
    assert [each["name"] for each in (await browser("GET", "tenants")).body["data"]] == ["default", "blue"]
    me = await browser("GET", "session")
    assert (me.status, me.body["role"], me.body["csrf_token"]) == (200, "owner", browser.csrf_token)
    (entry,) = (await browser("GET", f"audit_log?object_id={made.body['id']}")).body["data"]
    assert entry["actor_key_id"] == me.body["session"]["key_id"]
    reader = (await browser("POST", "admin_keys", {"name": "reader", "role": "billing_reader"})).body["key"]
    other = await Browser(browser.front, reader).sign_in()
    assert (await other("GET", "tenants")).status == 200
    assert (await other("POST", "tenants", {"name": "red"})).body["type"].endswith("insufficient_role")


async def test_the_cookie_is_for_this_site_and_no_script(browser):
    assert all(word in browser.set_cookie for word in ("HttpOnly", "SameSite=Strict", "Path=/", "Max-Age=43200"))
    assert "Secure" not in browser.set_cookie
    async with browser.front.gw.store.engine.connect() as connection:
        row = (await connection.execute(sa.select(store.sessions))).one()
    token = browser.cookie.partition("=")[2]
    assert token.encode() not in row.hash + row.key_hash
    assert ADMIN_KEY.encode() not in row.hash + row.key_hash


async def test_under_tls_the_cookie_is_secure_and_of_this_host_alone(open_front):
    proxied = settings.Server(trusted_proxies=("127.0.0.0/8",))
    async with open_front(server=proxied) as front:
        browser = await Browser(front).sign_in(x_forwarded_proto="https", x_forwarded_for="10.0.0.1")
        assert browser.set_cookie.startswith("__Host-penstock_session=")
        assert "; Secure" in browser.set_cookie
        assert (await browser("GET", "session", x_forwarded_proto="https")).status == 200
        assert (await browser("GET", "session")).status == 401  # in clear nobody should have it


async def test_what_changes_something_needs_the_token(browser):
    for token in ("", "0" * 64, "ä", browser.csrf_token[:-1]):
        for method, path in (("POST", "tenants"), ("DELETE", "session"), ("PUT", "policies/default")):
            reply = await browser(method, path, {"name": "red"}, x_csrf_token=token)
            assert (reply.status, reply.body["type"]) == (403, "urn:penstock:problem:csrf_token"), (method, token)
    assert len((await browser("GET", "tenants", x_csrf_token="")).body["data"]) == 1
    another = await Browser(browser.front).sign_in()
    assert (await browser("POST", "tenants", {"name": "red"}, x_csrf_token=another.csrf_token)).status == 403


async def test_forged_foreign_and_expired_sessions_are_refused(open_front):
    async with open_front(console=Console(session_hours=0.5)) as front:
        browser = await Browser(front).sign_in()
        name, _, token = browser.cookie.partition("=")
        for forged in (token[:-1] + ("a" if token[-1] != "a" else "b"), "x" * 43, "1", "' or 1=1", "ä" * 43):
            reply = await browser("GET", "tenants", cookie=f"{name}={forged}")
            assert (reply.status, reply.body["type"]) == (401, "urn:penstock:problem:invalid_api_key"), forged
        for site in ("cross-site", "same-site"):
            assert (await browser("GET", "tenants", sec_fetch_site=site)).status == 403
        assert (await browser("GET", "tenants", sec_fetch_site="same-origin")).status == 200
        front.gw.sessions._wall = lambda: 4e9
        assert (await browser("GET", "tenants")).status == 401
        front.gw.sessions._wall = lambda: 0.0
        async with front.gw.store.engine.begin() as connection:
            await connection.execute(sa.update(store.sessions).values(hash=b"another install's"))
        assert (await browser("GET", "tenants")).status == 401


async def test_signing_out_ends_it_and_so_does_the_end_of_the_key(browser):
    reply = await browser("DELETE", "session")
    assert (reply.status, "Max-Age=0" in reply.headers["set-cookie"]) == (200, True)
    assert (await browser("GET", "session")).status == 401
    desk = browser.desk
    made = await desk.made("admin_keys", {"name": "another", "role": "operator"})
    another = await Browser(browser.front, made["key"]).sign_in()
    assert (await another("GET", "tenants")).status == 200
    assert (await desk("DELETE", f"admin_keys/{made['id']}")).status == 200
    assert (await another("GET", "tenants")).status == 401


async def test_only_the_administrations_keys_sign_in_and_attempts_are_bounded(front, monkeypatch):
    desk = Desk(front)
    for key in ("", "sk-nobody", KEY):
        assert (await desk("POST", "session", key=key)).status == 401
    monkeypatch.setattr(sessions, "MAX_FAILURES", 3)
    reply = await desk("POST", "session")
    assert (reply.status, 0 < int(reply.headers["retry-after"]) <= 60) == (429, True)
    monkeypatch.setattr(sessions, "WINDOW_S", 0.0)
    assert (await desk("POST", "session")).status == 201
    assert (await desk("GET", "session")).status == 404  # a key has none


async def test_sessions_of_a_key_are_bounded_and_those_that_expired_are_swept(front, monkeypatch):
    monkeypatch.setattr(sessions, "MAX_OF_A_KEY", 2)
    browsers = [await Browser(front).sign_in() for _ in range(3)]
    assert [(await browser("GET", "session")).status for browser in browsers] == [401, 200, 200]
    front.gw.sessions._wall = lambda: 4e9
    await Browser(front).sign_in()
    async with front.gw.store.engine.connect() as connection:
        assert len((await connection.execute(sa.select(store.sessions))).all()) == 1


async def test_a_key_that_is_sent_counts_before_any_cookie(browser):
    desk = Desk(browser.front)
    assert (await desk("GET", "tenants", key="sk-nobody", cookie=browser.cookie)).status == 401
    assert (await desk("POST", "tenants", {"name": "red"}, cookie=browser.cookie)).status == 201


async def test_a_repeated_change_of_a_session_has_its_first_answer(browser):
    (tenant,) = (await browser("GET", "tenants")).body["data"]
    body = {"tenant_id": tenant["id"], "name": "once"}
    first = await browser("POST", "keys", body, idempotency_key="one")
    again = await browser("POST", "keys", body, idempotency_key="one")
    assert (first.status, again.body) == (201, first.body)
    assert again.headers["idempotent-replayed"] == "true"


async def test_what_another_session_of_the_key_has_changed_is_neither_repeated_nor_told(browser):
    (tenant,) = (await browser("GET", "tenants")).body["data"]
    body = {"tenant_id": tenant["id"], "name": "once"}
    made = await browser("POST", "keys", body, idempotency_key="one")
    assert made.status == 201
    other = await Browser(browser.front).sign_in()
    for again in (
        await other("POST", "keys", body, idempotency_key="one"),
        await other.desk("POST", "keys", body, idempotency_key="one"),
    ):
        assert (again.status, again.body["type"]) == (409, "urn:penstock:problem:idempotency_key_reused")
        assert "is done" in again.body["detail"]
    assert [each["name"] for each in (await other("GET", "keys")).body["data"]].count("once") == 1
    assert (await browser("POST", "keys", body, idempotency_key="one")).body == made.body


async def test_a_watcher_whose_session_ends_is_told_no_more(browser, monkeypatch):
    monkeypatch.setattr("gateway.admin.live.LOOK_S", 0.0)
    monkeypatch.setattr("gateway.live.TICK_S", 0.05)
    front = browser.front
    async with (
        aiohttp.ClientSession(headers={"cookie": browser.cookie}) as http,
        http.get(f"{front.url}/admin/v1/live") as answer,
    ):
        assert answer.status == 200
        await answer.content.readline()
        assert (await browser("DELETE", "session")).status == 200
        await answer.read()
    await until(lambda: front.gw.live.num_watchers == 0)


async def test_without_a_console_there_is_neither_page_nor_session(open_front):
    async with open_front(console=Console(enabled=False)) as front:
        assert (await Desk(front)("POST", "session")).status == 404
        async with front.http.get(front.url + "/console") as answer:
            assert answer.status == 404


async def test_two_gateways_of_one_store_know_the_same_sessions(browser):
    front = browser.front
    other = sessions.Sessions(front.gw.settings, front.gw.store, front.gw.directory, front.gw.clock)
    object.__setattr__(front.gw, "sessions", other)
    assert (await browser("GET", "session")).status == 200
    await asyncio.gather(*(browser("GET", "tenants") for _ in range(5)))
