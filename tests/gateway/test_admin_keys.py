"""Keys: shown once, narrowed but never widened, rotated with an overlap, revoked at once; and who may deal in them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import sqlalchemy as sa

from gateway import store
from policies import settings
from tests.gateway.conftest import ADMIN_KEY, KEY, OpenFront
from tests.gateway.desk import Desk


@pytest.fixture
async def desk(open_front: OpenFront, store_settings: settings.Store) -> AsyncIterator[Desk]:
    async with open_front(store=store_settings) as front:
        yield Desk(front)


async def own_tenant(desk: Desk) -> str:
    ((tenant),) = (await desk.got("tenants"))["data"]
    return str(tenant["id"])


async def test_a_key_is_shown_once_opens_the_door_at_once_and_is_found_nowhere_in_the_store(desk):
    body = {"tenant_id": await own_tenant(desk), "name": "ci"}
    made = await desk.made("keys", body, idempotency_key="only-once")
    key = made["key"]
    assert key.startswith("sk-penstock-")
    assert (made["prefix"], made["last_four"]) == ("sk-penstock-", key[-4:])
    assert await desk.can(key) == 200
    without = {name: value for name, value in made.items() if name != "key"}
    assert await desk.got(f"keys/{made['id']}") == without
    assert without in (await desk.got("keys"))["data"]

    # Whoever lost the answer has it again; the store does not have it.
    again = await desk("POST", "keys", body, idempotency_key="only-once")
    assert (again.body, again.headers["idempotent-replayed"]) == (made, "true")
    async with desk.front.gw.store.engine.connect() as connection:
        for table in store.metadata.sorted_tables:
            for row in await connection.execute(sa.select(table)):
                assert key not in str(row)
                assert key.encode() not in b"".join(value for value in row if isinstance(value, bytes))


async def test_a_revoked_key_opens_nothing_any_more_and_stays_as_it_is(desk):
    made = await desk.made("keys", {"tenant_id": await own_tenant(desk), "name": "ci"})
    path = f"keys/{made['id']}"
    assert (await desk("DELETE", path, if_match='"2"')).status == 412
    assert await desk.can(made["key"]) == 200
    revoked = await desk("DELETE", path, if_match='"1"')
    assert (revoked.status, revoked.etag) == (200, '"2"')
    assert await desk.can(made["key"]) == 401
    assert (await desk("PATCH", path, {"name": "x"}, if_match="*")).status == 409
    assert (await desk("POST", f"{path}/rotate", {})).status == 409
    again = await desk("DELETE", path)
    assert (again.status, again.body, again.etag) == (200, revoked.body, revoked.etag)
    log = (await desk.got(f"audit_log?object_id={made['id']}"))["data"]
    assert [entry["action"] for entry in log] == ["key.created", "key.revoked"]
    assert [key["id"] for key in (await desk.got("keys?revoked=true"))["data"]] == [made["id"]]


async def test_a_rotated_key_lives_on_beside_its_successor_for_the_overlap(desk):
    scopes = {"endpoints": ["models"]}
    made = await desk.made("keys", {"tenant_id": await own_tenant(desk), "name": "ci", "scopes": scopes})
    path = f"keys/{made['id']}"
    successor = await desk.made(f"{path}/rotate", {"overlap_s": 3600})
    assert successor["rotated_from"] == made["id"]
    assert successor["scopes"] == scopes
    assert (await desk.can(made["key"]), await desk.can(successor["key"])) == (200, 200)
    old = await desk.got(path)
    assert old["expires_at"] - successor["created_at"] == 3600
    last = await desk.made(f"keys/{successor['id']}/rotate", {"overlap_s": 0})
    assert (await desk.can(successor["key"]), await desk.can(last["key"])) == (401, 200)
    log = (await desk.got("audit_log?object_kind=key"))["data"]
    assert sorted(entry["action"] for entry in log) == sorted(
        ["key.created", "key.created", "key.rotated", "key.created", "key.revoked"]
    )


async def test_a_key_is_rotated_once_and_its_successor_is_good_for_as_long_as_it_was(desk):
    made = await desk.made("keys", {"tenant_id": await own_tenant(desk), "name": "ci"})
    path, overlap = f"keys/{made['id']}/rotate", {"overlap_s": 3600}
    successor = await desk.made(path, overlap)
    again = await desk("POST", path, overlap)
    assert (again.status, successor["id"] in again.body["detail"]) == (409, True)
    assert (await desk("DELETE", f"keys/{successor['id']}")).status == 200
    other = await desk.made(path, overlap)
    assert (successor["expires_at"], other["expires_at"]) == (None, None)
    admin = await desk.made("admin_keys", {"name": "ci", "role": "operator"})
    assert [(await desk("POST", f"admin_keys/{admin['id']}/rotate", overlap)).status for _ in range(2)] == [201, 409]


async def test_what_a_key_may_do_is_narrowed_and_changed_without_a_restart(desk):
    narrowing = {"models": ["other"], "limits": {"requests_per_minute": 5}}
    body = {"tenant_id": await own_tenant(desk), "name": "ci", "narrowing": narrowing}
    made = await desk.made("keys", body)
    assert made["narrowing"] == narrowing
    call = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}]}
    headers = {"authorization": f"Bearer {made['key']}"}
    assert (await desk.front.post("/v1/chat/completions", call, **headers))[0] == 404
    path = f"keys/{made['id']}"
    await desk("PATCH", path, {"narrowing": None, "scopes": {"endpoints": ["completions"]}}, if_match='"1"')
    assert (await desk.front.post("/v1/chat/completions", call, **headers))[0] == 403
    here = await desk("PATCH", path, {"scopes": None, "networks": ["10.0.0.0/8"]}, if_match='"2"')
    assert (here.body["networks"], await desk.can(made["key"])) == (["10.0.0.0/8"], 403)
    await desk("PATCH", path, {"networks": ["127.0.0.1", "10.0.0.0/8"]}, if_match='"3"')
    assert await desk.can(made["key"]) == 200


async def test_a_narrowing_that_widens_is_refused_by_the_name_of_its_field(desk):
    document = {"key_limits": {"requests_per_minute": 10}, "sla_classes": ["batch"], "sla_class": "batch"}
    await desk.made("policies", {"name": "small", "document": document | {"models": ["demo"]}})
    tenant = await desk.made("tenants", {"name": "blue", "policy": "small"})
    wide = {
        "limits": {"requests_per_minute": 11},
        "sla_class": "interactive",
        "sla_classes": ["batch", "standard"],
        "models": ["*"],
    }
    refused = await desk("POST", "keys", {"tenant_id": tenant["id"], "name": "a", "narrowing": wide})
    assert (refused.status, refused.fields()) == (
        400,
        ["narrowing.limits.requests_per_minute", "narrowing.sla_class", "narrowing.sla_classes", "narrowing.models"],
    )
    made = await desk.made("keys", {"tenant_id": tenant["id"], "name": "a", "narrowing": {"models": ["demo"]}})
    refused = await desk("PATCH", f"keys/{made['id']}", {"narrowing": wide}, if_match="*")
    assert (refused.status, len(refused.fields())) == (400, 4)
    assert await desk.got(f"keys/{made['id']}") == {name: value for name, value in made.items() if name != "key"}


async def test_none_but_owners_deal_in_admin_keys_and_readers_of_bills_change_nothing(desk):
    keys = {
        role: (await desk.made("admin_keys", {"name": role, "role": role}))["key"]
        for role in ("owner", "operator", "billing_reader")
    }
    allowed = {}
    for role, key in keys.items():
        asked = [
            await desk("GET", "tenants", key=key),
            await desk("GET", "keys", key=key),
            await desk("POST", "tenants", {"name": role}, key=key),
            await desk("GET", "admin_keys", key=key),
        ]
        allowed[role] = [reply.status for reply in asked]
    assert allowed == {
        "owner": [200, 200, 201, 200],
        "operator": [200, 200, 201, 403],
        "billing_reader": [200, 403, 403, 403],
    }
    for key in (KEY, "sk-penstock-admin-nobody", ""):
        assert (await desk("GET", "tenants", key=key)).status == 401
    assert await desk.can(ADMIN_KEY) == 401


async def test_the_last_owner_cannot_lock_the_door_behind_himself(desk):
    (first,) = (await desk.got("admin_keys"))["data"]
    assert (await desk("DELETE", f"admin_keys/{first['id']}")).status == 409
    soon = await desk.made("admin_keys", {"name": "guest", "role": "owner", "expires_at": first["created_at"] + 9999})
    assert (await desk("DELETE", f"admin_keys/{first['id']}")).status == 409
    second = await desk.made(f"admin_keys/{first['id']}/rotate", {"overlap_s": 60})
    assert second["role"] == "owner"
    replies = [await desk("DELETE", f"admin_keys/{first['id']}", key=second["key"]) for _ in range(2)]
    assert [(reply.status, reply.body) for reply in replies] == [(200, replies[0].body)] * 2
    log = (await desk.got("audit_log?action=admin_key.revoked", key=second["key"]))["data"]
    assert [entry["object_id"] for entry in log] == [first["id"]]
    assert (await desk("GET", "admin_keys")).status == 401
    revoked = await desk.got("admin_keys?revoked=true", key=second["key"])
    assert [key["id"] for key in revoked["data"]] == [first["id"]]
    owners = (await desk.got("admin_keys?role=owner&revoked=false", key=second["key"]))["data"]
    assert [key["id"] for key in owners] == [soon["id"], second["id"]]
