"""Conversations with two real gateways over one PostgreSQL: both write in one, one of them is killed, one deletes what
the other is writing in."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests import official
from tests.builders import PATIENCE_S
from tests.family import Family, answered_by
from tests.journeys.test_responses import until_status
from tests.journeys.test_shared import two_hosts


@contextlib.asynccontextmanager
async def client_of(house: Family) -> AsyncIterator[openai.AsyncOpenAI]:
    options: dict[str, Any] = {"max_retries": 0, "timeout": PATIENCE_S}
    async with official.Client(base_url=f"{house.url}/v1", api_key=house.key, **options) as client:
        yield client


def said(text: str, role: str = "user") -> Any:
    return {"role": role, "content": text}


async def items_of(client: openai.AsyncOpenAI, conversation_id: str, limit: int = 100) -> list[tuple[str, str]]:
    """(role, text), oldest first."""
    items: Any = client.conversations.items.list(conversation_id, order="asc", limit=limit)
    return [(item.role, item.content[0].text) async for item in items]


async def answered(client: openai.AsyncOpenAI, text: str, conversation_id: str, num_tokens: int) -> str:
    """What is said to it, as soon as nobody else is answered there."""
    call: Any = {"model": "demo", "conversation": conversation_id, "max_output_tokens": num_tokens}
    while True:
        try:
            response = await client.responses.create(input=text, **call)
        except openai.BadRequestError as refused:
            if refused.code != "conversation_locked":
                raise
            await asyncio.sleep(0.1)
        else:
            assert response.conversation is not None
            return response.output_text


async def writing(client: openai.AsyncOpenAI, conversation_id: str) -> str:
    """The id of a long response that is being written in it, in the background."""
    asked: Any = {"model": "demo", "background": True, "max_output_tokens": 4000}
    begun = await client.responses.create(input="Go on.", conversation=conversation_id, **asked)
    await until_status(client.responses, begun.id, "in_progress")
    return begun.id


async def test_two_gateways_write_in_one_conversation_turn_by_turn(
    tmp_path, start_scripted_worker, redis_settings, postgres
):
    worker = answered_by(await start_scripted_worker("--step-s", 0.01))
    async with (
        two_hosts(tmp_path, redis_settings, postgres, worker) as (first, second),
        client_of(first) as here,
        client_of(second) as there,
    ):
        clients = (here, there)
        mine = (await here.conversations.create(items=[said("Hello")])).id

        async def asked(number: int) -> str:
            return await answered(clients[number % 2], f"asked {number}", mine, 4 + number)

        async def added(number: int) -> None:
            items = [said(f"added {number}.{part}") for part in range(3)]
            await clients[number % 2].conversations.items.create(mine, items=items)

        answers, _ = await asyncio.gather(asyncio.gather(*map(asked, range(6))), asyncio.gather(*map(added, range(8))))
        items = await items_of(here, mine)
        assert items == await items_of(there, mine, limit=3)
        assert (items[0], len(items)) == (("user", "Hello"), 1 + 6 * 2 + 8 * 3)
        for number, answer in enumerate(answers):
            place = items.index(("user", f"asked {number}"))
            assert items[place + 1] == ("assistant", answer)
        for number in range(8):
            place = items.index(("user", f"added {number}.0"))
            assert items[place : place + 3] == [("user", f"added {number}.{part}") for part in range(3)]

        ids = [item.id async for item in there.conversations.items.list(mine, order="asc", limit=5)]
        page = await here.conversations.items.list(mine, order="asc", limit=5)
        await asyncio.gather(*[there.conversations.items.delete(each, conversation_id=mine) for each in ids[5:8]])
        assert [item.id for item in (await page.get_next_page()).data] == ids[8:13]
        with pytest.raises(openai.BadRequestError, match="not found"):
            await here.conversations.items.list(mine, after=ids[6])


async def test_a_conversation_that_a_killed_gateway_was_writing_in_is_as_it_was_and_soon_free(
    tmp_path, start_scripted_worker, redis_settings, postgres
):
    worker = answered_by(await start_scripted_worker("--step-s", 0.01))
    async with (
        two_hosts(tmp_path, redis_settings, postgres, worker) as (first, second),
        client_of(first) as here,
        client_of(second) as there,
    ):
        mine, gone = [(await here.conversations.create(items=[said("Hello")])).id for _ in range(2)]
        lost = await writing(here, gone)
        await there.conversations.delete(gone)
        assert (await there.responses.cancel(lost)).status == "cancelled"
        with pytest.raises(openai.NotFoundError):
            await here.conversations.retrieve(gone)

        short = (await there.conversations.create()).id
        ended = await writing(there, short)
        with pytest.raises(openai.BadRequestError) as locked:
            await here.responses.create(model="demo", input="And?", conversation=short)
        assert locked.value.code == "conversation_locked"
        assert (await here.responses.cancel(ended)).status == "cancelled"
        answer = await answered(here, "And?", short, 2)
        assert await items_of(there, short) == [("user", "And?"), ("assistant", answer)]

        await writing(here, mine)
        first.process.kill()
        with pytest.raises(openai.BadRequestError) as locked:
            await there.responses.create(model="demo", input="And?", conversation=mine)
        assert locked.value.code == "conversation_locked"
        answer = await answered(there, "And?", mine, 2)
        assert await items_of(there, mine) == [("user", "Hello"), ("user", "And?"), ("assistant", answer)]
