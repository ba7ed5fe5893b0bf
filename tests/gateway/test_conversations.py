"""/v1/conversations as OpenAI's own client sees them: begun, added to, listed, deleted, and nobody else's."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from gateway.conversations import shelf as shelves
from policies import settings
from policies.policy import Policy
from tests.gateway.conftest import Front
from tests.gateway.responding import another_tenant, answered
from tests.gateway.test_responses_shelf import Wall

pytestmark = pytest.mark.usefixtures("patient_store")


def said(text: str, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": text}


async def begun(front: Front, *texts: str, **others: Any) -> str:
    """The id of one in which this was said."""
    items = [said(text) for text in texts]
    return (await front.client.conversations.create(items=items, **others)).id  # type: ignore[arg-type]


async def texts_of(client: openai.AsyncOpenAI, conversation_id: str, **asked: Any) -> list[str]:
    """Over all pages."""
    items = client.conversations.items.list(conversation_id, **{"order": "asc", **asked})
    return [item.content[0].text async for item in items]  # type: ignore[union-attr]


async def num_bytes_of(front: Front) -> list[int]:
    async with front.gw.store.engine.connect() as connection:
        return list((await connection.execute(shelves.sa.select(shelves.rows.c.num_bytes))).scalars())


async def test_one_is_begun_read_changed_and_deleted(open_front, store_settings):
    async with open_front(store=store_settings) as front:
        conversations = front.client.conversations
        one = await conversations.create(items=[said("Hello"), said("Hi", "assistant")], metadata={"ключ": "\0"})
        assert (one.object, one.metadata) == ("conversation", {"ключ": "\0"})
        assert await conversations.retrieve(one.id) == one
        assert (await conversations.update(one.id, metadata={"a": "b"})).metadata == {"a": "b"}
        assert (await conversations.update(one.id, metadata=None)).metadata == {}
        assert await conversations.retrieve(one.id) == one.model_copy(update={"metadata": {}})
        empty = await conversations.create()
        assert (empty.metadata, await texts_of(front.client, empty.id)) == ({}, [])
        gone = await conversations.delete(one.id)
        assert (gone.id, gone.deleted, gone.object) == (one.id, True, "conversation.deleted")
        for asked in (conversations.retrieve(one.id), conversations.delete(one.id), texts_of(front.client, one.id)):
            with pytest.raises(openai.NotFoundError) as missing:
                await asked
            assert missing.value.code == "conversation_not_found"


async def test_items_are_added_listed_page_by_page_read_and_deleted(open_front, store_settings):
    async with open_front(store=store_settings) as front:
        items, texts = front.client.conversations.items, [str(number) for number in range(25)]
        mine = await begun(front, *texts[:5])
        added = await items.create(
            mine, items=[said(text) for text in texts[5:]], include=["message.output_text.logprobs"]
        )
        assert [item.content[0].text for item in added.data] == texts[5:]
        assert (added.first_id, added.last_id, added.has_more) == (added.data[0].id, added.data[-1].id, False)
        assert await texts_of(front.client, mine, limit=7) == texts
        assert await texts_of(front.client, mine, order="desc", limit=7) == texts[::-1]
        newest = await items.list(mine)
        assert ([item.content[0].text for item in newest.data], newest.has_more) == (texts[:4:-1], True)
        assert len({item.id async for item in items.list(mine, limit=100)}) == 25
        third = added.data[2]
        assert await items.retrieve(third.id, conversation_id=mine, include=["reasoning.encrypted_content"]) == third
        assert (await items.delete(third.id, conversation_id=mine)).id == mine
        for asked in (items.retrieve(third.id, conversation_id=mine), items.delete("msg_\0", conversation_id=mine)):
            with pytest.raises(openai.NotFoundError) as missing:
                await asked
            assert missing.value.code == "item_not_found"
        with pytest.raises(openai.BadRequestError) as missing_place:
            await items.list(mine, after=third.id)
        assert missing_place.value.param == "after"
        await items.create(mine, items=[said("last")])
        assert await texts_of(front.client, mine) == [*texts[:7], *texts[8:], "last"]


async def test_items_of_every_kind_come_back_with_ids_of_their_own(front: Front):
    response = await answered(front)
    again = response.output[0].model_dump(exclude_none=True)
    given: list[Any] = [
        said("Be brief.", "system"),
        {"type": "item_reference", "id": response.output[0].id},
        again,
        again,
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "\0"},
    ]
    mine = await begun(front)
    added = (await front.client.conversations.items.create(mine, items=given)).data
    kinds = ["message"] * 4 + ["reasoning", "function_call", "function_call_output"]
    assert [item.type for item in added] == kinds
    assert [item.content[0].text for item in added[1:4]] == ["Hi there."] * 3
    assert len({item.id for item in added} | {response.output[0].id}) == len(given) + 1
    assert [item async for item in front.client.conversations.items.list(mine, order="asc")] == added


async def test_another_tenants_is_not_there(front: Front):
    mine = await begun(front, "Hello")
    (item,) = (await front.client.conversations.items.list(mine)).data
    async with another_tenant(front) as other:
        conversations, items = other.conversations, other.conversations.items
        theirs = (await conversations.create(items=[])).id
        for asked in (
            conversations.retrieve(mine),
            conversations.update(mine, metadata={}),
            conversations.delete(mine),
            items.create(mine, items=[]),
            items.retrieve(item.id, conversation_id=mine),
            items.retrieve(item.id, conversation_id=theirs),
            items.delete(item.id, conversation_id=theirs),
            texts_of(other, mine),
        ):
            with pytest.raises(openai.NotFoundError):
                await asked
    assert await texts_of(front.client, mine) == ["Hello"]


@pytest.mark.parametrize(
    "where", [{"responses": settings.Responses(store=False)}, {"policies": {"default": Policy(store_responses=False)}}]
)
async def test_there_are_none_where_nothing_may_be_stored(open_front, where):
    async with open_front(**where) as front:
        with pytest.raises(openai.BadRequestError) as refused:
            await begun(front)
        assert "Nothing is stored" in refused.value.message


async def test_the_same_idempotency_key_begins_one_and_adds_once(front: Front):
    headers = {"Idempotency-Key": "k"}
    mine = await begun(front, "Hello", extra_headers=headers)
    assert await begun(front, "Hello", extra_headers=headers) == mine
    for _ in range(2):
        await front.client.conversations.items.create(mine, items=[said("Yes")], extra_headers=headers)  # type: ignore[list-item]
    assert await texts_of(front.client, mine) == ["Hello", "Yes"]


async def test_they_expire_when_nothing_is_added_and_take_so_much_room_and_no_more(open_front, store_settings):
    bounds = settings.Responses(retention_s=100, max_bytes_per_tenant=10_000)
    async with open_front(store=store_settings, responses=bounds) as front:
        conversations = front.gw.conversations
        wall = conversations._wall = Wall()
        first, second = await begun(front, "x" * 3000), await begun(front, "x" * 3000)
        wall.now += 60
        await front.client.conversations.items.create(first, items=[said("y")])
        wall.now += 60
        await conversations.sweep()
        assert await texts_of(front.client, first) == ["x" * 3000, "y"]
        with pytest.raises(openai.NotFoundError):
            await texts_of(front.client, second)
        third = await begun(front, "x" * 5000)
        await conversations.sweep()
        assert len(await num_bytes_of(front)) == 2
        await begun(front, "x" * 1000)  # and there is too much, of which the first would expire first
        await conversations.sweep()
        assert len(await num_bytes_of(front)) == 2
        assert await texts_of(front.client, third) == ["x" * 5000]


async def test_what_one_takes_is_what_is_in_it(front: Front):
    mine = await begun(front, metadata={"a": "b"})
    (before,) = await num_bytes_of(front)
    (item,) = (await front.client.conversations.items.create(mine, items=[said("x" * 500)])).data
    await front.client.conversations.update(mine, metadata={"a": "b" * 101})
    assert (await num_bytes_of(front))[0] - before in range(500 + 100, 500 + 100 + 400)
    await front.client.conversations.update(mine, metadata={"a": "b"})
    await front.client.conversations.items.delete(item.id, conversation_id=mine)
    assert await num_bytes_of(front) == [before]


async def test_one_has_room_for_so_many_items(front: Front, monkeypatch):
    monkeypatch.setattr(shelves, "MAX_ITEMS", 3)
    mine = await begun(front, "1", "2")
    with pytest.raises(openai.BadRequestError) as full:
        await front.client.conversations.items.create(mine, items=[said("3"), said("4")])
    assert full.value.param == "items"
    await front.client.conversations.items.create(mine, items=[said("3")])
    assert await texts_of(front.client, mine) == ["1", "2", "3"]


async def test_they_are_there_after_a_restart(open_front, store_settings):
    async with open_front(store=store_settings) as front:
        mine = await begun(front, "Hello")
    async with open_front(store=store_settings) as front:
        assert await texts_of(front.client, mine) == ["Hello"]
