"""Whatever an administrator sends, what is wrong with it is named, and nothing is half done."""

from __future__ import annotations

import asyncio
import contextlib
import re
import urllib.parse
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gateway import admin
from gateway.clock import Clock
from gateway.directory import Directory
from policies import settings
from tests.builders import PATIENCE_S
from tests.gateway.bad_bodies.admin import CASES, SPARE
from tests.gateway.conftest import OpenFront
from tests.gateway.desk import Desk, Reply

INVALID = "urn:penstock:problem:invalid_fields"
LONG = "x" * 300
KEYS = {"tenant_id": "TENANT", "name": "a"}


def document(**fields: object) -> dict[str, object]:
    return {"name": "new", "document": fields}


def narrowing(**fields: object) -> dict[str, object]:
    return KEYS | {"narrowing": fields}


REFUSED: list[tuple[str, str, object, str]] = [
    # the body as a whole
    ("POST", "tenants", b"", "body"),
    ("POST", "tenants", b"{", "body"),
    ("POST", "tenants", b"\xff\xfe", "body"),
    ("POST", "tenants", b'{"name": "\\ud800"}', "body"),
    ("POST", "tenants", b'{"metadata": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", "metadata"),
    ("POST", "tenants", b'{"name": "a", "name": "b"}', "name"),
    ("POST", "tenants", b'{"name": "a", "metadata": {"b": "1", "b": "2"}}', "metadata.b"),
    ("POST", "tenants", [], "body"),
    ("POST", "tenants", None, "body"),
    ("DELETE", "keys/key_1", {"why": "not"}, "why"),
    # fields
    ("POST", "tenants", {}, "name"),
    ("POST", "tenants", {"name": ""}, "name"),
    ("POST", "tenants", {"name": " \u00a0 "}, "name"),
    ("POST", "tenants", {"name": 5}, "name"),
    ("POST", "tenants", {"name": None}, "name"),
    ("POST", "tenants", {"name": LONG}, "name"),
    ("POST", "tenants", {"name": "a\nb"}, "name"),
    ("POST", "tenants", {"name": "a\n"}, "name"),
    ("POST", "tenants", {"name": "a\0"}, "name"),
    ("POST", "tenants", {"name": "a", "nmae": "b"}, "nmae"),
    ("POST", "tenants", {"name": "a", "policy": "none"}, "policy"),
    ("POST", "tenants", {"name": "a", "policy": "../x"}, "policy"),
    ("POST", "tenants", {"name": "a", "organization_id": "org_none"}, "organization_id"),
    ("POST", "tenants", {"name": "a", "metadata": {"a": 5}}, "metadata[...]"),
    ("POST", "tenants", {"name": "a", "metadata": {str(i): "" for i in range(17)}}, "metadata"),
    ("POST", "tenants", {"name": "a", "metadata": {"a": "x" * 513}}, "metadata[...]"),
    ("POST", "tenants", {"name": "a", "metadata": {"a" * 65: "x"}}, "metadata"),
    ("PATCH", "tenants/TENANT", {"disabled": "yes"}, "disabled"),
    ("PATCH", "tenants/TENANT", {"disabled": None}, "disabled"),
    ("PATCH", "tenants/TENANT", {"created_at": 5}, "created_at"),
    ("PATCH", "tenants/TENANT", {"name": "navy", "policy": "none"}, "policy"),
    ("POST", "organizations", {"name": "x" * 129}, "name"),
    ("POST", "service_accounts", {"tenant_id": "ten_none", "name": "a"}, "tenant_id"),
    ("POST", "service_accounts", {"tenant_id": "TENANT", "name": "a", "role": "king"}, "role"),
    # policies
    ("POST", "policies", {"name": "a b", "document": {}}, "name"),
    ("POST", "policies", {"name": "a\n", "document": {}}, "name"),
    ("POST", "policies", {"name": "x" * 65, "document": {}}, "name"),
    ("POST", "policies", {"name": "new"}, "document"),
    ("POST", "policies", {"name": "new", "document": {}, "note": "a\0"}, "note"),
    ("POST", "policies", document(limit={}), "document.limit"),
    ("POST", "policies", document(limits={"tokens": 5}), "document.limits.tokens"),
    ("POST", "policies", document(limits={"tokens_per_minute": 0}), "document.limits.tokens_per_minute"),
    ("POST", "policies", document(limits={"tokens_per_minute": -5}), "document.limits.tokens_per_minute"),
    ("POST", "policies", document(limits={"tokens_per_day": 10**13}), "document.limits.tokens_per_day"),
    ("POST", "policies", document(limits={"tokens_per_day": 10**400}), "document.limits.tokens_per_day"),
    ("POST", "policies", document(limits={"concurrent_requests": 1.5}), "document.limits.concurrent_requests"),
    ("POST", "policies", document(limits={"requests_per_minute": "5"}), "document.limits.requests_per_minute"),
    ("POST", "policies", document(weight=0), "document.weight"),
    ("POST", "policies", document(weight=-1), "document.weight"),
    ("POST", "policies", document(weight=1e300), "document.weight"),
    ("POST", "policies", b'{"name": "new", "document": {"weight": NaN}}', "body"),
    ("POST", "policies", document(sla_class="gold"), "document.sla_class"),
    ("POST", "policies", document(sla_classes=["batch", "gold"]), "document.sla_classes[1]"),
    ("POST", "policies", document(models="demo"), "document.models"),
    ("POST", "policies", document(models=[""]), "document.models"),
    ("POST", "policies", document(models=[str(i) for i in range(1001)]), "document.models"),
    ("POST", "policies", document(models=[LONG]), "document.models"),
    ("POST", "policies", document(models=["a\nb"]), "document.models"),
    ("POST", "policies", document(model_limits={"a\0": {}}), "document.model_limits"),
    ("POST", "policies", document(model_limits={"": {}}), "document.model_limits"),
    ("POST", "policies", document(prices={str(i): {} for i in range(1001)}), "document.prices"),
    (
        "POST",
        "policies",
        document(model_limits={"demo": {"tokens_per_day": -1}}),
        "document.model_limits[...].tokens_per_day",
    ),
    ("POST", "policies", document(budget={}), "document.budget.amount"),
    ("POST", "policies", document(budget={"amount": "-1"}), "document.budget.amount"),
    ("POST", "policies", document(budget={"amount": "NaN"}), "document.budget.amount"),
    ("POST", "policies", document(budget={"amount": "1e999999999"}), "document.budget.amount"),
    ("POST", "policies", document(budget={"amount": "1e-999999999"}), "document.budget.amount"),
    ("POST", "policies", document(budget={"amount": "0.1" + "0" * 40 + "1"}), "document.budget.amount"),
    ("POST", "policies", document(budget={"amount": "much"}), "document.budget.amount"),
    ("POST", "policies", document(budget={"amount": 1, "period": "year"}), "document.budget.period"),
    ("POST", "policies", document(budget={"amount": 1, "alerts_at": [0]}), "document.budget.alerts_at[0]"),
    ("POST", "policies", document(budget={"amount": 1, "alerts_at": [1] * 17}), "document.budget.alerts_at"),
    ("POST", "policies", document(prices={"*": {"prompt": "-0.1"}}), "document.prices.*.prompt"),
    ("POST", "policies", document(prices={"*": {"prompt": "0.1234567"}}), "document.prices.*.prompt"),
    ("POST", "policies", document(prices={"*": {"request": 10**7}}), "document.prices.*.request"),
    ("POST", "policies", document(prices={"*": {"engine_second": "0.1234567"}}), "document.prices.*.engine_second"),
    ("POST", "policies", document(discount=1), "document.discount"),
    ("POST", "policies", document(discount="0.12345"), "document.discount"),
    ("POST", "policies", document(discount=-0.1), "document.discount"),
    ("POST", "policies", document(discount="half"), "document.discount"),
    ("POST", "policies", document(cache={"ttl_s": 0}), "document.cache.ttl_s"),
    ("POST", "policies", document(cache={"exact": "maybe"}), "document.cache.exact"),
    ("POST", "policies", document(cache={"sharing_group": LONG}), "document.cache.sharing_group"),
    ("POST", "policies", document(cache={"sharing_group": "a\n"}), "document.cache.sharing_group"),
    ("POST", "policies", document(cache={"prefix_group": "a\0"}), "document.cache.prefix_group"),
    ("POST", "policies", document(without_redis="hope"), "document.without_redis"),
    ("PUT", "policies/default", {"document": {"weight": 0}}, "document.weight"),
    ("PUT", "policies/default", {"document": {}, "name": "other"}, "name"),
    ("POST", "policies/default/rollback", {"version": 2}, "version"),
    ("POST", "policies/default/rollback", {"version": 0}, "version"),
    ("POST", "policies/default/rollback", {"version": 10**30}, "version"),
    ("POST", "policies/default/rollback", {"version": "1"}, "version"),
    # keys
    ("POST", "keys", {"tenant_id": "ten_none", "name": "a"}, "tenant_id"),
    ("POST", "keys", {"tenant_id": "a b", "name": "a"}, "tenant_id"),
    ("POST", "keys", KEYS | {"service_account_id": "svc_none"}, "service_account_id"),
    ("POST", "keys", KEYS | {"expires_at": 1}, "expires_at"),
    ("POST", "keys", KEYS | {"expires_at": -1}, "expires_at"),
    ("POST", "keys", KEYS | {"expires_at": 10**18}, "expires_at"),
    ("POST", "keys", KEYS | {"networks": ["10.0.0.0/8", "10.0.0.1/8"]}, "networks[1]"),
    ("POST", "keys", KEYS | {"networks": ["everywhere"]}, "networks[0]"),
    ("POST", "keys", KEYS | {"networks": ["::/0"] * 65}, "networks"),
    ("POST", "keys", KEYS | {"scopes": {"endpoints": ["world"]}}, "scopes.endpoints[0]"),
    ("POST", "keys", KEYS | {"scopes": {"admin": True}}, "scopes.admin"),
    ("POST", "keys", KEYS | {"key": "sk-mine"}, "key"),
    ("POST", "keys", narrowing(limits={"tokens_per_minute": 0}), "narrowing.limits.tokens_per_minute"),
    ("POST", "keys", narrowing(weight=2), "narrowing.weight"),
    ("POST", "keys", narrowing(budget={"amount": "-1"}), "narrowing.budget.amount"),
    ("POST", "keys", narrowing(budget={"amount": "0.0000001"}), "narrowing.budget.amount"),
    ("POST", "keys", narrowing(budget={"amount": "1", "period": "30d"}), "narrowing.budget.period"),
    ("POST", "keys", narrowing(sla_class="gold"), "narrowing.sla_class"),
    ("POST", "keys", narrowing(exact_cache="all"), "narrowing.exact_cache"),
    ("PATCH", "keys/KEY", {"tenant_id": "ten_other"}, "tenant_id"),
    ("PATCH", "keys/KEY", {"name": "b", "expires_at": 1}, "expires_at"),
    ("POST", "keys/KEY/rotate", {"overlap_s": -1}, "overlap_s"),
    ("POST", "keys/KEY/rotate", {"overlap_s": 10**9}, "overlap_s"),
    ("POST", "admin_keys", {"name": "a", "role": "king"}, "role"),
    ("POST", "admin_keys", {"name": "a", "role": "owner", "expires_at": 1}, "expires_at"),
    # queries
    ("GET", "tenants?limit=0", None, "limit"),
    ("GET", "tenants?limit=501", None, "limit"),
    ("GET", "tenants?limit=1e3", None, "limit"),
    ("GET", "tenants?limit=" + "9" * 400, None, "limit"),
    ("GET", "tenants?limit=5&limit=6", None, "limit"),
    ("GET", "tenants?lmit=5", None, "lmit"),
    ("GET", "tenants?order=up", None, "order"),
    ("GET", "tenants?disabled=perhaps", None, "disabled"),
    ("GET", "tenants?name=%00", None, "name"),
    ("GET", "tenants?after=x", None, "after"),
    ("GET", "tenants?after=%ff", None, "after"),
    ("GET", "tenants?after=" + "x" * 600, None, "after"),
    ("GET", "tenants?after=bnVsbA==", None, "after"),
    ("GET", "policies/default/versions?after=WyJwb2xpY2llcy52ZXJzaW9uIiwiYXNjIiwieCJd", None, "after"),
    ("GET", "audit_log?since=yesterday", None, "since"),
    ("GET", "audit_log?object_id=a%00b", None, "object_id"),
    ("DELETE", "keys/KEY?really=yes", None, "really"),
    ("GET", "tenants/TENANT/limits?model=", None, "model"),
    ("GET", "tenants/TENANT/limits?model=" + LONG, None, "model"),
    ("GET", "keys/KEY/limits?limit=5", None, "limit"),
    ("POST", "caches/exact/TENANT/flush", {"all": True}, "all"),
    ("POST", "workers/none/drain", {"at_once": True}, "at_once"),
]

NOWHERE = [
    ("GET", "nothing"),
    ("GET", "tenants/ten_none"),
    ("GET", "tenants/%00"),
    ("GET", "tenants/%ff"),
    ("GET", "tenants/a%20b"),
    ("GET", "tenants/" + "x" * 300),
    ("DELETE", "policies/none"),
    ("PUT", "policies/none"),
    ("GET", "policies/default/versions/2"),
    ("GET", "policies/default/versions/-1"),
    ("GET", "policies/default/versions/%C2%B2"),
    ("GET", "policies/default/versions/" + "9" * 40),
    ("POST", "policies/none/rollback"),
    ("PATCH", "keys/key_none"),
    ("POST", "keys/key_none/rotate"),
    ("DELETE", "admin_keys/KEY"),
]
"""KEY is a tenant's, and none of the administration."""


@contextlib.asynccontextmanager
async def opened(open_front: OpenFront, **sections: Any) -> AsyncIterator[tuple[Desk, dict[str, str]]]:
    """A desk, and what TENANT and KEY stand for."""
    async with open_front(**sections) as front:
        desk = Desk(front)
        ((tenant),) = (await desk.got("tenants"))["data"]
        ((key),) = (await desk.got("keys"))["data"]
        yield desk, {"TENANT": tenant["id"], "KEY": key["id"]}


def filled(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, bytes | None):
        return value
    text = msgspec.json.encode(value).decode()
    for name, id in names.items():
        text = text.replace(name, id)
    return msgspec.json.decode(text)


@pytest.mark.parametrize(
    ("method", "path", "body", "message"),
    [
        (
            "POST",
            "policies",
            document(budget={"amount": 1, "period": "year"}),
            "expected one of 'day', 'month', 'week', got 'year'",
        ),
        ("POST", "keys", KEYS | {"scopes": {"endpoints": ["chat"]}}, "'chat.completions', 'completions'"),
        ("GET", "tenants?order=up", None, "expected one of 'asc', 'desc', got 'up'"),
        ("GET", "/v1/organization/admin_api_keys?order=up", None, "expected one of 'asc', 'desc', got 'up'"),
    ],
)
async def test_who_sends_no_word_that_a_field_knows_hears_which_it_knows(open_front, method, path, body, message):
    async with opened(open_front) as (desk, names):
        reply = await desk(method, path, filled(body, names))
        assert (reply.status, message in str(reply.body)) == (400, True), reply.body


async def test_what_is_wrong_is_named_and_nothing_is_done(open_front: OpenFront, store_settings: settings.Store):
    async with opened(open_front, store=store_settings) as (desk, names):
        await desk.made("upstreams", SPARE)
        before = await desk.everything()
        wrong = []
        for method, path, body, field in [*REFUSED, *CASES]:
            match = {"if_match": "*"} if method in ("PUT", "PATCH") else {}
            reply = await desk(method, filled(path, names), filled(body, names), **match)
            fields = reply.fields() if reply.body.get("type") == INVALID else None
            if (reply.status, fields) != (400, [field]):
                wrong.append((method, path, str(body)[:200], field, reply.status, str(reply.body)[:300]))
        assert not wrong, "\n".join(map(str, wrong))
        for method, path in NOWHERE:
            body = {"document": {}} if method == "PUT" else {"version": 1} if "rollback" in path else {}
            reply = await desk(method, filled(path, names), body, if_match="*")
            assert (reply.status, reply.fields()) == (404, []), (path, reply)
        assert await desk.everything() == before


def test_there_are_enough_and_no_two_are_alike():
    seen = {(method, path, repr(body)) for method, path, body, _ in [*REFUSED, *CASES]}
    assert len(seen) == len(REFUSED) + len(CASES)
    assert len(CASES) >= 200


async def test_a_version_that_is_not_there_is_refused_whatever_it_looks_like(open_front: OpenFront):
    async with opened(open_front) as (desk, names):
        before = await desk.everything()
        for tag in ('"2"', '"0"', "1", 'W/"2"', '"one"', '""', '"1', '"' + "1" * 400 + '"', "x" * 4000):
            reply = await desk("PATCH", filled("tenants/TENANT", names), {"name": "navy"}, if_match=tag)
            assert (reply.status, reply.etag) == (412, '"1"'), tag
            assert (await desk("PUT", "policies/default", {"document": {}}, if_match=tag)).status == 412
        for method, path, body in (
            ("PATCH", "tenants/TENANT", {"name": "navy"}),
            ("PUT", "policies/default", {"document": {}}),
            ("PATCH", "keys/KEY", {"name": "b"}),
        ):
            reply = await desk(method, filled(path, names), body)
            assert (reply.status, reply.body["type"]) == (428, "urn:penstock:problem:if_match_required")
        for key in ("x" * 256, ""):
            reply = await desk("POST", "tenants", {"name": "navy"}, idempotency_key=key)
            assert (reply.status, reply.fields()) == (400, ["Idempotency-Key"])
        assert (await desk("PUT", "tenants")).status == 405
        assert (await desk("POST", "tenants", {"name": "x"}, content_type="text/plain")).status == 415
        huge = b'{"name": "' + b"x" * (1 << 20) + b'"}'
        assert (await desk("POST", "tenants", huge)).status == 413
        assert await desk.everything() == before


async def test_a_key_can_only_take_away_and_only_within_its_own_tenant(open_front: OpenFront):
    async with opened(open_front) as (desk, names):
        blue = await desk.made("tenants", {"name": "blue"})
        theirs = await desk.made("service_accounts", {"tenant_id": blue["id"], "name": "robot"})
        strict = {
            "key_limits": {"requests_per_minute": 5},
            "models": ["demo"],
            "sla_class": "batch",
            "sla_classes": ["batch"],
        }
        assert (await desk("PUT", "policies/default", {"document": strict}, if_match="*")).status == 200
        before = await desk.everything()
        wider = {
            "narrowing.limits.requests_per_minute": {"limits": {"requests_per_minute": 6}},
            "narrowing.models": {"models": ["demo", "other"]},
            "narrowing.sla_class": {"sla_class": "interactive"},
            "narrowing.sla_classes": {"sla_classes": ["batch", "standard"]},
            "narrowing.narrowing": {"narrowing": {}},
        }
        for field, narrowing_of_it in wider.items():
            made = await desk("POST", "keys", filled(KEYS | {"narrowing": narrowing_of_it}, names))
            assert (made.status, made.fields()) == (400, [field])
            change = {"name": "wider", "narrowing": narrowing_of_it}
            changed = await desk("PATCH", filled("keys/KEY", names), change, if_match="*")
            assert (changed.status, changed.fields()) == (400, [field])
        stolen = await desk("POST", "keys", filled(KEYS | {"service_account_id": theirs["id"]}, names))
        assert (stolen.status, stolen.fields()) == (400, ["service_account_id"])
        assert await desk.everything() == before


async def test_a_revoked_key_stays_as_it_is(open_front: OpenFront):
    async with opened(open_front) as (desk, names):
        key = await desk.made("keys", filled(KEYS, names))
        assert (await desk("DELETE", f"keys/{key['id']}")).status == 200
        before = await desk.everything()
        assert (await desk("POST", f"keys/{key['id']}/rotate", {})).status == 409
        assert (await desk("PATCH", f"keys/{key['id']}", {"name": "b"}, if_match="*")).status == 409
        assert (await desk.can(key["key"]), await desk.everything()) == (401, before)


async def test_a_name_is_given_once(open_front: OpenFront, store_settings: settings.Store):
    async with opened(open_front, store=store_settings) as (desk, _):
        await desk.made("tenants", {"name": "blue"})
        before = await desk.everything()
        for path, body in (
            ("tenants", {"name": "default"}),
            ("organizations", {"name": "default"}),
            ("policies", {"name": "default", "document": {}}),
        ):
            reply = await desk("POST", path, body)
            assert (reply.status, reply.fields()) == (409, ["name"])
        blue = before["tenants"][1]["id"]
        assert (await desk("PATCH", f"tenants/{blue}", {"name": "default"}, if_match="*")).status == 409
        assert await desk.everything() == before


texts = st.text(max_size=8) | st.sampled_from(["default", "demo", "batch", "*", "1e400", "NaN", "-1", "\0", "a\n"])
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
names = st.sampled_from(
    [
        *("name", "document", "note", "version", "limits", "key_limits", "model_limits", "tokens_per_minute", "budget"),
        *("amount", "alerts_at", "sla_class", "sla_classes", "models", "weight", "cache", "prices", "prompt", "ttl_s"),
        *("tenant_id", "scopes", "endpoints", "networks", "narrowing", "expires_at", "role", "overlap_s", "metadata"),
    ]
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names | texts, inner, max_size=4), max_leaves=8
)
bodies = st.dictionaries(names, values, max_size=4).map(msgspec.json.encode) | values.map(msgspec.json.encode)
# A stream of what happens has no end that could be waited for.
endpoints = st.sampled_from([each for each in admin.ENDPOINTS if "text/event-stream" not in each.files])
queries = st.dictionaries(
    st.sampled_from(["limit", "after", "order", "name", "policy", "disabled", "since", "action", "role", "x"]),
    st.text(st.characters(codec="ascii"), max_size=12),
    max_size=3,
)
headers = st.fixed_dictionaries(
    {},
    optional={
        "if_match": st.sampled_from(['"1"', "*", '"7"', "x"]),
        "idempotency_key": st.sampled_from(["a", "b", "x" * 256]),
        "if_none_match": st.sampled_from(['"1"', "*"]),
    },
)


async def test_no_request_ever_makes_it_fail(open_front: OpenFront):
    loop = asyncio.get_running_loop()
    async with opened(open_front) as (desk, ids):
        known = st.sampled_from([*ids.values(), "default", "none", "1", "%00", "%2e%2e", "a%2fb"])

        @hypothesis_settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
        @given(endpoint=endpoints, part=known, other=known, query=queries, body=bodies, headers=headers)
        def ask(
            endpoint: Any, part: str, other: str, query: dict[str, str], body: bytes, headers: dict[str, str]
        ) -> None:
            path = endpoint.path.replace("{version}", other)
            path = re.sub(r"\{[^}]*\}", lambda _: part, path)
            if query:
                path += "?" + urllib.parse.urlencode(query)
            asked = asyncio.run_coroutine_threadsafe(desk(endpoint.method, path, body, **headers), loop)
            reply: Reply = asked.result(PATIENCE_S)
            assert reply.status < 500, (endpoint.method, path, reply)

        await asyncio.to_thread(ask)
        # Whatever was let through can be read, by the administration and by whoever serves requests.
        await desk.everything()
        fresh = await Directory.load(desk.front.gw.store, Clock())
        assert fresh.revision == desk.front.gw.directory.revision
