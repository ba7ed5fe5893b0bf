"""What was asked before: found again by whoever asked it, and by nobody else, in either cache of the real thing.

Times are compared in benchmarks/cache_probe.py; here is what makes them equal: a stranger hits nothing.
"""

from __future__ import annotations

import asyncio
import random
import string
import uuid

import pytest

from tests.builders import until


@pytest.fixture
async def stranger(house):
    """The key of another tenant."""
    return await a_key(house)


async def a_key(house, policy: str = "default") -> str:
    name = uuid.uuid4().hex
    async with house.http(house.admin_key) as session:
        async with session.post("/admin/v1/tenants", json={"name": name, "policy": policy}) as response:
            assert response.status == 201, await response.text()
            tenant = await response.json()
        key = {"tenant_id": tenant["id"], "name": name}
        async with session.post("/admin/v1/keys", json=key) as response:
            assert response.status == 201, await response.text()
            return (await response.json())["key"]


async def a_group(house) -> str:
    """A policy whose tenants share both caches."""
    name = f"group-{uuid.uuid4().hex}"
    cache = {"sharing_group": name, "prefix_group": name}
    async with (
        house.http(house.admin_key) as session,
        session.post("/admin/v1/policies", json={"name": name, "document": {"cache": cache}}) as response,
    ):
        assert response.status == 201, await response.text()
    return name


def a_secret() -> str:
    draw = random.Random(uuid.uuid4().int)
    return " ".join("".join(draw.choices(string.ascii_lowercase, k=8)) for _ in range(40))


async def ask(house, secret, key=None, control="", **parameters):
    """The outcome of the exact cache, prompt tokens that the engine reused, and the text."""
    async with house.client(key) as client:
        raw = await client.chat.completions.with_raw_response.create(
            model=house.model,
            messages=[{"role": "system", "content": secret}, {"role": "user", "content": "Hello"}],
            extra_headers={"cache-control": control},
            **{"temperature": 0, "max_tokens": 8, **parameters},
        )
        answer = raw.parse()
        reused = answer.usage.prompt_tokens_details.cached_tokens
        return raw.headers["x-penstock-cache"], reused, answer.choices[0].message.content


async def test_a_stranger_finds_nothing_of_what_a_tenant_has_asked(house, stranger):
    for _ in range(5):
        secret = a_secret()
        outcome, reused, text = await ask(house, secret)
        assert outcome == "miss"
        outcome, theirs, same = await ask(house, secret, stranger)
        assert (outcome, theirs) == ("miss", min(theirs, reused)), "no more than of a prompt that nobody has asked"
        assert same == text, "it is the model that says the same, not the cache"
        assert (await ask(house, secret))[0] == "hit"
        _, reused, _ = await ask(house, secret, control="no-store")
        assert reused > 100, "whereas the tenant's own prefix is there"


async def test_nor_does_a_user_of_what_another_has_asked_under_another_salt(house):
    secret, ann, bob = a_secret(), {"cache_salt": "ann"}, {"cache_salt": "bob"}
    _, of_anything, _ = await ask(house, a_secret(), extra_body={"cache_salt": uuid.uuid4().hex})
    assert (await ask(house, secret, extra_body=ann))[0] == "miss"
    outcome, reused, _ = await ask(house, secret, extra_body=bob)
    assert (outcome, reused) == ("miss", of_anything), "no more than of a prompt that nobody has asked"
    assert (await ask(house, secret, extra_body=bob))[0] == "hit"
    assert (await ask(house, secret, control="no-store", extra_body=ann))[1] > 100, "whereas their own prefix is there"


async def test_a_stranger_is_not_let_onto_a_flight(house, stranger):
    secret = a_secret()
    long = {"max_tokens": 200, "extra_body": {"ignore_eos": True}}
    before = {row.request_id for row in await house.ledger_rows()}
    answers = [asyncio.create_task(ask(house, secret, key, **long)) for key in (None, stranger, None, stranger)]
    outcomes = [outcome for outcome, _, _ in await asyncio.gather(*answers)]
    assert sorted(outcomes[::2]) == sorted(outcomes[1::2]) == ["miss", "shared"]
    rows = [row for row in await house.ledger_rows() if row.request_id not in before]
    assert sorted(row.cache for row in rows) == ["miss", "miss", "shared", "shared"]


async def test_tenants_of_one_group_find_what_each_other_asked(house):
    policy = await a_group(house)
    one, other = await a_key(house, policy), await a_key(house, policy)
    secret = a_secret()
    outcome, _, text = await ask(house, secret, one)
    assert outcome == "miss"
    assert await ask(house, secret, other) == ("hit", 0, text)
    _, reused, _ = await ask(house, secret, other, control="no-store")
    assert reused > 100
    _, reused, _ = await ask(house, secret, control="no-store")
    assert reused < 64


async def test_a_hit_is_the_same_answer_as_a_stream_and_holds_no_block(house):
    secret = a_secret()
    _, _, text = await ask(house, secret)
    async with house.client() as client:
        stream = await client.chat.completions.create(
            model=house.model,
            messages=[{"role": "system", "content": secret}, {"role": "user", "content": "Hello"}],
            temperature=0,
            max_tokens=8,
            stream=True,
        )
        assert stream.response.headers["x-penstock-cache"] == "hit"
        parts = [choice.delta.content or "" async for chunk in stream for choice in chunk.choices]
    assert "".join(parts) == text
    await house.quiet()
    assert await house.num_used_blocks() == 0


async def test_when_the_first_of_two_hangs_up_the_other_one_gets_it_all(house):
    secret = a_secret()
    body = {"temperature": 0, "max_tokens": 1200, "ignore_eos": True}
    async with house.stream(secret, **body) as first:
        await first.take(2)
        async with house.stream(secret, **body) as second:
            assert second.response.headers["x-penstock-cache"] == "shared"
            first.response.close()
            whole = await second.text()
    async with house.stream(secret, **body) as third:
        assert third.response.headers["x-penstock-cache"] == "hit"
        assert await third.text() == whole
    await house.quiet()
    assert await house.num_used_blocks() == 0


async def test_a_request_with_an_idempotency_key_is_computed_once_though_its_client_hangs_up(house):
    before = {row.request_id for row in await house.ledger_rows()}
    body = {"model": house.model, "prompt": a_secret(), "max_tokens": 50, "stream": True, "ignore_eos": True}
    headers = {"idempotency-key": uuid.uuid4().hex}
    async with house.http() as session:
        async with session.post("/v1/completions", json=body, headers=headers) as response:
            request_id = response.headers["x-request-id"]
            await response.content.readline()
            response.close()
        told = []
        for _ in range(2):
            async with session.post("/v1/completions", json=body, headers=headers) as response:
                assert response.headers["x-request-id"] == request_id
                told.append(await response.read())
    assert told[0] == told[1]
    assert told[0].endswith(b"data: [DONE]\n\n")
    await until(lambda: house.gw.ledger.num_pending == 0)
    (row,) = [row for row in await house.ledger_rows() if row.request_id not in before]
    assert (row.request_id, row.status, row.num_completion_tokens) == (request_id, 200, 50)
