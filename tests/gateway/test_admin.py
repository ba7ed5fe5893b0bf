"""The administration: organizations, tenants, service accounts, policies and the audit log, on both kinds of store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from policies import settings
from tests.gateway.conftest import KEY, OpenFront
from tests.gateway.desk import Desk


@pytest.fixture
async def desk(open_front: OpenFront, store_settings: settings.Store) -> AsyncIterator[Desk]:
    async with open_front(store=store_settings) as front:
        yield Desk(front)


async def actions(desk: Desk, **query: str) -> list[str]:
    asked = "&".join(f"{name}={value}" for name, value in query.items())
    return [entry["action"] for entry in (await desk.got(f"audit_log?{asked}"))["data"]]


async def test_a_tenant_is_made_read_changed_and_disabled_and_all_of_it_is_in_the_audit_log(desk):
    made = await desk("POST", "tenants", {"name": "blue", "metadata": {"cost_center": "7"}})
    tenant = made.body
    assert (made.status, made.etag) == (201, '"1"')
    assert tenant | {"id": "", "organization_id": "", "created_at": 0} == {
        "id": "",
        "organization_id": "",
        "name": "blue",
        "policy": "default",
        "metadata": {"cost_center": "7"},
        "created_at": 0,
        "disabled_at": None,
        "version": 1,
    }
    path = f"tenants/{tenant['id']}"
    read = await desk("GET", path)
    assert (read.body, read.etag) == (tenant, '"1"')
    assert (await desk("GET", path, if_none_match='"1"')).status == 304

    changed = await desk("PATCH", path, {"name": "navy"}, if_match='"1"')
    assert (changed.status, changed.body, changed.etag) == (200, tenant | {"name": "navy", "version": 2}, '"2"')
    disabled = await desk("PATCH", path, {"disabled": True}, if_match="*")
    assert disabled.body["disabled_at"] is not None
    assert [one["id"] for one in (await desk.got("tenants?disabled=true"))["data"]] == [tenant["id"]]

    log = (await desk.got(f"audit_log?object_id={tenant['id']}"))["data"]
    assert [(entry["action"], entry["before"], entry["after"]) for entry in log] == [
        ("tenant.created", None, tenant),
        ("tenant.updated", tenant, changed.body),
        ("tenant.disabled", changed.body, disabled.body),
    ]
    assert {(entry["actor_name"], entry["address"]) for entry in log} == {("bootstrap", "127.0.0.1")}
    assert made.headers["x-request-id"] == log[0]["request_id"]


async def test_two_who_change_the_same_thing_do_not_overwrite_each_other(desk):
    tenant = await desk.made("tenants", {"name": "blue"})
    path = f"tenants/{tenant['id']}"
    assert (await desk("PATCH", path, {"name": "navy"})).status == 428
    replies = await asyncio.gather(
        *(desk("PATCH", path, {"name": f"navy-{number}"}, if_match='"1"') for number in range(5))
    )
    assert sorted(reply.status for reply in replies) == [200, 412, 412, 412, 412]
    stale = next(reply for reply in replies if reply.status == 412)
    assert stale.etag == '"2"'
    assert stale.body["type"] == "urn:penstock:problem:stale_version"
    assert await actions(desk, object_id=tenant["id"]) == ["tenant.created", "tenant.updated"]


@pytest.mark.parametrize(
    ("if_match", "status"),
    [
        ('"1"', 200),
        ('"9", "1"', 200),
        ("*", 200),
        ("", 428),
        (",", 428),
        ('W/"1"', 412),
        ('"9"', 412),
        ("1", 412),
        ('a"1"b', 412),
        ('"9", *', 412),
    ],
)
async def test_a_change_is_held_against_whole_strong_etags(desk, if_match, status):
    tenant = await desk.made("tenants", {"name": "blue"})
    reply = await desk("PATCH", f"tenants/{tenant['id']}", {"name": "navy"}, if_match=if_match)
    assert reply.status == status
    assert (await desk.got(f"tenants/{tenant['id']}"))["name"] == ("navy" if status == 200 else "blue")


async def test_a_creation_that_is_repeated_with_its_idempotency_key_is_made_once(desk):
    body = {"name": "blue"}
    replies = await asyncio.gather(*(desk("POST", "tenants", body, idempotency_key="first") for _ in range(4)))
    assert len({(reply.status, str(reply.body), reply.etag) for reply in replies}) == 1
    assert sum("idempotent-replayed" in reply.headers for reply in replies) == 3
    assert await actions(desk, object_kind="tenant") == ["tenant.created"]

    other = await desk("POST", "tenants", {"name": "green"}, idempotency_key="first")
    assert (other.status, other.body["type"]) == (409, "urn:penstock:problem:idempotency_key_reused")
    refused = await desk("POST", "tenants", {"name": "blue"}, idempotency_key="second")
    assert refused.status == 409
    made = await desk("POST", "tenants", {"name": "red"}, idempotency_key="third")
    assert made.status == 201
    # A refusal is not kept: the same key works once the obstacle is gone.
    await desk("PATCH", f"tenants/{replies[0].body['id']}", {"name": "navy"}, if_match="*")
    assert (await desk("POST", "tenants", {"name": "blue"}, idempotency_key="second")).status == 201


async def test_a_list_comes_in_pages_that_neither_repeat_nor_miss_anything(desk):
    ids = [(await desk.made("tenants", {"name": f"team-{number}"}))["id"] for number in range(7)]
    default, *_ = (await desk.got("tenants?name=default"))["data"]
    for order, expected in (("asc", [default["id"], *sorted(ids)]), ("desc", [*sorted(ids)[::-1], default["id"]])):
        seen, after = [], ""
        while True:
            page = await desk.got(f"tenants?limit=3&order={order}{after}")
            seen += [tenant["id"] for tenant in page["data"]]
            assert page["has_more"] == (page["next_cursor"] is not None)
            if not page["has_more"]:
                break
            after = f"&after={page['next_cursor']}"
        assert seen == expected
    cursor = (await desk.got("tenants?limit=3"))["next_cursor"]
    for elsewhere in (
        f"keys?after={cursor}",
        f"tenants?order=desc&after={cursor}",
        "policies/default/versions?after=x",
    ):
        reply = await desk("GET", elsewhere)
        assert (reply.status, reply.fields()) == (400, ["after"])


async def test_a_tenant_belongs_to_an_organization_that_is_named_once_there_are_several(desk):
    acme = await desk("POST", "organizations", {"name": "acme"})
    assert (await desk("POST", "tenants", {"name": "blue"})).fields() == ["organization_id"]
    tenant = await desk.made("tenants", {"name": "blue", "organization_id": acme.body["id"]})
    theirs = (await desk.got(f"tenants?organization_id={acme.body['id']}"))["data"]
    assert [one["id"] for one in theirs] == [tenant["id"]]
    path = f"organizations/{acme.body['id']}"
    renamed = await desk("PATCH", path, {"name": "Acme Inc."}, if_match=acme.etag)
    assert await desk.got(path) == renamed.body == acme.body | {"name": "Acme Inc.", "version": 2}
    assert (await desk("PATCH", path, {"name": "default"}, if_match="*")).status == 409
    assert len((await desk.got("organizations"))["data"]) == 2


async def test_a_policy_has_versions_and_an_older_one_can_count_again(desk):
    first = await desk("POST", "policies", {"name": "gold", "document": {"weight": 4}, "note": "as sold"})
    assert (first.status, first.etag, first.body["document"]) == (201, '"1"', {"weight": 4.0})
    limits = {"limits": {"tokens_per_minute": 1000}, "prices": {"*": {"prompt": "0.150001"}}}
    second = await desk("PUT", "policies/gold", {"document": limits}, if_match='"1"')
    assert second.body["document"] == limits
    assert (await desk("PUT", "policies/gold", {"document": {}}, if_match='"1"')).status == 412

    back = await desk.made("policies/gold/rollback", {"version": 1})
    assert (back["version"], back["document"], back["current"]) == (3, {"weight": 4.0}, True)
    versions = (await desk.got("policies/gold/versions"))["data"]
    assert [(one["version"], one["current"]) for one in versions] == [(1, False), (2, False), (3, True)]
    assert (await desk.got("policies/gold/versions/2"))["document"] == limits
    assert (await desk("GET", "policies/gold/versions/4")).status == 404
    newest = await desk.got("policies/gold/versions?limit=1&order=desc")
    assert [one["version"] for one in newest["data"]] == [3]
    older = await desk.got(f"policies/gold/versions?order=desc&after={newest['next_cursor']}")
    assert [one["version"] for one in older["data"]] == [2, 1]
    missing = await desk("POST", "policies/gold/rollback", {"version": 9})
    assert (missing.status, missing.fields()) == (400, ["version"])
    assert [one["name"] for one in (await desk.got("policies"))["data"]] == ["default", "gold"]
    assert await actions(desk, object_kind="policy") == ["policy.created", "policy.updated", "policy.rolled_back"]


async def test_a_policy_counts_for_its_tenants_at_once_and_cannot_be_deleted_while_they_have_it(desk):
    await desk.made("policies", {"name": "none", "document": {"models": []}})
    tenant = await desk.made("tenants", {"name": "blue", "policy": "none"})
    key = (await desk.made("keys", {"tenant_id": tenant["id"], "name": "a"}))["key"]
    call = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}]}
    assert (await desk.front.post("/v1/chat/completions", call, authorization=f"Bearer {key}"))[0] == 404
    in_use = await desk("DELETE", "policies/none")
    assert in_use.status == 409
    assert tenant["id"] in in_use.body["detail"]

    await desk("PATCH", f"tenants/{tenant['id']}", {"policy": "default"}, if_match="*")
    assert (await desk("DELETE", "policies/none", if_match='"1"')).status == 200
    assert (await desk("GET", "policies/none")).status == 404
    assert (await desk("POST", "tenants", {"name": "c", "policy": "none"})).fields() == ["policy"]
    again = await desk.made("policies", {"name": "none", "document": {}})
    assert again["version"] == 2


async def test_a_service_account_leaves_with_its_keys(desk):
    tenant = await desk.made("tenants", {"name": "blue"})
    account = await desk.made("service_accounts", {"tenant_id": tenant["id"], "name": "nightly"})
    key = await desk.made("keys", {"tenant_id": tenant["id"], "name": "a", "service_account_id": account["id"]})
    assert await desk.can(key["key"]) == 200
    assert (await desk.got(f"service_accounts?tenant_id={tenant['id']}"))["data"] == [account]
    path = f"service_accounts/{account['id']}"
    assert (await desk("DELETE", path, if_match='"9"')).status == 412
    assert (await desk("DELETE", path)).status == 200
    assert await desk.can(key["key"]) == 401
    assert (await desk.got(f"keys/{key['id']}"))["revoked_at"] is not None
    assert (await desk("GET", path)).status == 404
    orphan = {"tenant_id": tenant["id"], "name": "b", "service_account_id": account["id"]}
    assert (await desk("POST", "keys", orphan)).fields() == ["service_account_id"]
    assert await desk.can(KEY) == 200


async def test_the_audit_log_is_found_by_who_what_and_when(desk):
    operator = await desk.made("admin_keys", {"name": "night shift", "role": "operator"})
    tenant = await desk.made("tenants", {"name": "blue"}, key=operator["key"])
    (entry,) = (await desk.got(f"audit_log?actor_key_id={operator['id']}"))["data"]
    assert (entry["object_id"], entry["actor_name"]) == (tenant["id"], "night shift")
    assert await actions(desk, action="admin_key.created") == ["admin_key.created"]
    assert await actions(desk, until=str(entry["at"] - 3600)) == []
    assert await actions(desk, since=str(entry["at"] - 3600)) == ["admin_key.created", "tenant.created"]


async def test_the_models_are_those_of_the_settings(desk):
    (model,) = (await desk.got("models"))["data"]
    assert (model["name"], model["ready"], model["replicas"], len(model["addresses"])) == ("demo", True, 0, 1)
