"""Who gets in: the right key, in time, from the right place, for the right thing; refusals that give nothing away."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from gateway import head, store
from gateway.auth import BILLING_READER, OPERATOR, Auth
from gateway.bootstrap import bootstrap
from gateway.clock import Clock
from gateway.directory import Directory
from gateway.errors import InvalidApiKey, PermissionDenied
from gateway.restrictions import Scopes
from policies import settings
from policies.policy import Narrowing, Policy
from tests.builders import PATIENCE_S
from tests.residents import add_key, add_tenant, add_version, change, visiting

NOW = 1_795_000_000
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


@pytest.fixture
async def rooms(tmp_path):
    async with store.opened(settings.Store(data_dir=str(tmp_path))) as rooms:
        await bootstrap(rooms, {})
        yield rooms


async def auth_of(rooms: store.Store) -> Auth:
    return Auth(await Directory.load(rooms, Clock()), wall=lambda: NOW)


def request(authorization: str | None) -> web.Request:
    asked = make_mocked_request("GET", "/", {} if authorization is None else {"authorization": authorization})
    head.begin(asked)
    return asked


async def test_every_key_that_opens_nothing_is_refused_in_the_same_words(rooms):
    tenant, disabled = await add_tenant(rooms, "north"), await add_tenant(rooms, "gone", disabled_at=1)
    presented = [
        "sk-penstock-unknown",
        "none of ours",
        "x" * 100_000,
        await add_key(rooms, None),
        await add_key(rooms, tenant, expires_at=NOW),
        await add_key(rooms, tenant, revoked_at=NOW - 1),
        await add_key(rooms, disabled),
        # Where it may be used from is not told to those for whom it opens nothing anyway.
        await add_key(rooms, disabled, networks=["192.0.2.0/24"]),
    ]
    auth = await auth_of(rooms)
    refusals = set()
    for key in presented:
        with pytest.raises(InvalidApiKey) as refused:
            auth.caller_of(request(f"Bearer {key}"))
        refusals.add((str(refused.value), refused.value.status, refused.value.code, refused.value.param))
    assert refusals == {("Incorrect API key provided.", 401, "invalid_api_key", None)}
    assert auth.caller("\udcff\udcfe") is None  # bytes that are no text


@pytest.mark.parametrize("authorization", [None, "", "Bearer", "Bearer  ", "Basic abc", "sk-penstock-x"])
async def test_without_a_key_it_says_how_to_send_one(rooms, authorization):
    auth = await auth_of(rooms)
    for door in (auth.caller_of, auth.admin_of):
        with pytest.raises(InvalidApiKey, match="Send it in the Authorization header"):
            door(request(authorization))


async def test_a_key_opens_until_the_second_in_which_it_expires(rooms):
    key = await add_key(rooms, await add_tenant(rooms, "north"), expires_at=NOW + 1)
    auth = await auth_of(rooms)
    assert auth.caller(key) is not None
    late = Auth(await Directory.load(rooms, Clock()), wall=lambda: NOW + 1)
    assert late.caller(key) is None


@pytest.mark.parametrize(
    ("networks", "address", "opens"),
    [
        (["192.0.2.0/24"], "192.0.2.77", True),
        (["192.0.2.0/24"], "192.0.3.1", False),
        (["192.0.2.0/24", "2001:db8::/32"], "2001:db8::1", True),
        (["192.0.2.0/24"], "::ffff:192.0.2.1", True),
        (["0.0.0.0/0"], "::1", False),
        (["192.0.2.0/24"], "", False),
        (["192.0.2.0/24"], None, False),
        ([], None, True),
    ],
)
async def test_a_key_may_be_bound_to_networks(rooms, networks, address, opens):
    key = await add_key(rooms, await add_tenant(rooms, "north"), networks=networks)
    auth = await auth_of(rooms)
    if opens:
        assert auth.caller(key, address) is not None
    else:
        with pytest.raises(PermissionDenied) as refused:
            auth.caller(key, address)
        assert (refused.value.status, refused.value.code) == (403, "ip_not_authorized")


async def test_the_administration_opens_to_its_own_keys_and_by_role(rooms):
    tenant = await add_tenant(rooms, "north")
    keys = {role: await add_key(rooms, None, role=role) for role in ("owner", OPERATOR, BILLING_READER)}
    keys["api"] = await add_key(rooms, tenant)
    keys["expired"] = await add_key(rooms, None, expires_at=NOW)
    auth = await auth_of(rooms)

    def enter(who: str, *roles: str) -> str:
        try:
            return auth.admin_of(request(f"Bearer {keys[who]}"), *roles).role
        except (InvalidApiKey, PermissionDenied) as refused:
            return str(refused.status)

    assert [enter(who) for who in keys] == ["owner", OPERATOR, BILLING_READER, "401", "401"]
    assert [enter(who, OPERATOR) for who in keys] == ["owner", OPERATOR, "403", "401", "401"]
    assert [enter(who, "owner") for who in keys] == ["owner", "403", "403", "401", "401"]


async def test_a_running_house_holds_each_caller_to_its_policy_and_scopes(start_house):
    house = start_house("--num-tokens", 1)
    async with visiting(house.config.store) as rooms:
        await add_version(rooms, "other", Policy(models=("another",)))
        tenant = await add_tenant(rooms, "north")
        elsewhere = await add_key(rooms, await add_tenant(rooms, "south", "other"))
        chats = await add_key(rooms, tenant, scopes=Scopes(("chat.completions",)))
        lists = await add_key(rooms, tenant, scopes=Scopes(("models",)))
        narrow = await add_key(rooms, tenant, narrowing=Narrowing(models=("another",)))
        remote = await add_key(rooms, tenant, networks=["192.0.2.0/24"])
        local = await add_key(rooms, tenant, networks=["127.0.0.0/8"])
        await house.inside(house.gw.directory.refresh())

    async def outcomes(key: str) -> list[object]:
        async with house.http(key) as session:
            chat = await said(session.post("/v1/chat/completions", json={"model": house.model, **CHAT}))
            text = await said(session.post("/v1/completions", json={"model": house.model, "prompt": "a"}))
            models = await said(session.get("/v1/models"))
            return [chat, text, models, await said(session.get(f"/v1/models/{house.model}"))]

    hidden = (404, "model_not_found")
    assert await outcomes(local) == [200, 200, 200, 200]
    assert await outcomes(chats) == [200, *[(403, "missing_scope")] * 3]
    assert await outcomes(lists) == [(403, "missing_scope"), (403, "missing_scope"), 200, 200]
    assert await outcomes(remote) == [(403, "ip_not_authorized")] * 4
    for key in (elsewhere, narrow):
        assert await outcomes(key) == [hidden, hidden, 200, hidden]
        async with house.http(key) as session:
            async with session.get("/v1/models") as response:
                assert (await response.json())["data"] == []
            # What it may not use and what nobody has are told in the same words.
            sentences = set()
            for model in (house.model, "nobody-has-this"):
                async with session.post("/v1/chat/completions", json={"model": model, **CHAT}) as response:
                    sentences.add((await response.json())["error"]["message"].replace(model, "MODEL"))
            assert len(sentences) == 1


async def said(asking: Any) -> object:
    """200, or the status and the code of the error."""
    async with asking as response:
        body = await response.json()
        return 200 if response.status == 200 else (response.status, body["error"]["code"])


async def test_a_key_that_is_revoked_elsewhere_is_refused_at_the_next_look(start_house):
    house = start_house("--num-tokens", 1)
    async with visiting(house.config.store) as rooms:
        key = await add_key(rooms, await add_tenant(rooms, "north"))
        async with house.http(key) as session:
            await opens(session, 200)
            key_id = house.gw.auth.caller(key).key_id
            await change(rooms, store.keys, key_id, revoked_at=int(time.time()))
            await opens(session, 401)


async def test_a_key_that_was_made_elsewhere_opens_at_once(start_house):
    house = start_house("--num-tokens", 1)
    chat = {"model": house.model, **CHAT}
    async with visiting(house.config.store) as rooms:
        for ask in (
            lambda session: session.post("/v1/chat/completions", json=chat),
            lambda session: session.post("/v1/chat/completions", json=chat, headers={"expect": "100-continue"}),
            lambda session: session.get("/v1/models"),
        ):
            for _ in range(3):
                async with house.http(await add_key(rooms, await add_tenant(rooms, store.new_id("t")))) as session:
                    assert await said(ask(session)) == 200
        async with house.http(await add_key(rooms, None, role="owner")) as session:
            assert await said(session.get("/admin/v1/tenants")) == 200


async def opens(session: aiohttp.ClientSession, status: int) -> None:
    """Until asking for the models has this status."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            async with session.get("/v1/models") as response:
                if response.status == status:
                    return
