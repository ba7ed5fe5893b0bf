"""Conversations where several gateways share them: whose turn it is, and in which order items lie."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
import pytest
import sqlalchemy as sa

from gateway import store
from gateway.clock import Clock
from gateway.conversations import shelf
from gateway.conversations.shelf import HOLD_S, ConversationLocked, Conversations
from gateway.errors import InvalidRequest
from gateway.responses.items import AnyItem, MessageItem, named, said_by_user
from gateway.responses.shapes import ItemsQuery
from policies import settings
from tests.gateway.test_responses_shelf import Wall

pytestmark = pytest.mark.usefixtures("patient_store")

MINE = "conv_" + "0" * 32


@contextlib.asynccontextmanager
async def two_shelves(where: settings.Store, wall: Wall) -> AsyncIterator[tuple[Conversations, Conversations]]:
    """Of two gateways, with one conversation."""
    async with store.opened(where) as rooms:
        one, other = [Conversations(rooms, settings.Responses(), Clock(), wall) for _ in range(2)]
        await one.create("ten_1", MINE, {}, [])
        yield one, other


async def a_hold(shelf: Conversations) -> None:
    """For a moment."""
    async with shelf.held("ten_1", MINE, "resp_0"):
        pass


def a_turn(number: int) -> list[AnyItem]:
    said: list[AnyItem] = [said_by_user(f"{number}.{part}") for part in range(3)]
    return named(said, f"resp_{number:032x}")


async def test_a_conversation_is_held_by_one_gateway_as_long_as_it_says_so(store_settings):
    wall = Wall()
    async with two_shelves(store_settings, wall) as (one, other):
        async with one.held("ten_1", MINE, "resp_1"):
            for _ in range(3):
                wall.now += HOLD_S - 1
                await one.sweep()
            with pytest.raises(ConversationLocked):
                await a_hold(other)
        async with other.held("ten_1", MINE, "resp_2"):
            wall.now += HOLD_S
            async with one.held("ten_1", MINE, "resp_3"):
                await other.sweep()  # it has lost its hold, and takes it from nobody
                await other.add("ten_1", MINE, a_turn(2), "resp_2")
                with pytest.raises(ConversationLocked):
                    await a_hold(other)
                await one.add("ten_1", MINE, a_turn(3), "resp_3")
            await a_hold(other)
        said = await one.items(await one.find("ten_1", MINE))
        assert said == [*a_turn(2), *a_turn(3)]


async def test_turns_that_are_added_at_once_lie_one_behind_the_other(store_settings):
    async with two_shelves(store_settings, Wall()) as shelves:
        await asyncio.gather(*[shelves[number % 2].add("ten_1", MINE, a_turn(number)) for number in range(12)])
        said = await shelves[0].items(await shelves[0].find("ten_1", MINE))
        texts = [item.text for item in said if isinstance(item, MessageItem)]
        order = [int(text.partition(".")[0]) for text in texts[::3]]
        assert sorted(order) == list(range(12))
        assert texts == [f"{number}.{part}" for number in order for part in range(3)]


async def test_items_are_read_some_at_a_time_and_a_page_has_what_can_be_read_at_once(store_settings, monkeypatch):
    async with two_shelves(store_settings, Wall()) as (one, _):
        for number in (1, 2):
            await one.add("ten_1", MINE, a_turn(number))
        kept, said = await one.find("ten_1", MINE), [*a_turn(1), *a_turn(2)]
        num_bytes = len(msgspec.json.encode(said[0]))
        for num_at_once, read in ((0, [1] * 6), (2, [2] * 3), (5, [5, 1]), (6, [6])):
            monkeypatch.setattr("gateway.shelving.PIECE_BYTES", num_at_once * num_bytes)
            sent: list[int] = []
            some = Conversations._some

            async def counted(*asked, some=some, sent=sent):
                sent.append(len(found := await some(*asked)))
                return found

            with monkeypatch.context() as patch:
                patch.setattr(Conversations, "_some", counted)
                assert await one.items(kept) == said
            assert sent == read
            most = min(max(1, num_at_once), 4)
            assert await one.page(kept, ItemsQuery(limit=4, order="asc")) == (said[:most], True)
            assert await one.page(kept, ItemsQuery(limit=4, order="desc")) == (said[::-1][:most], True)
            assert await one.page(kept, ItemsQuery(limit=4, after=said[1].id)) == (said[:1], False)


async def test_what_was_let_go_is_not_renewed_by_a_sweep_that_began_before(store_settings):
    async with two_shelves(store_settings, Wall()) as (one, other), one.held("ten_1", MINE, "resp_1"):
        still_held = dict(one._held)
        await one.add("ten_1", MINE, a_turn(1), "resp_1")
        one._held |= still_held
        await one.sweep()
        await a_hold(other)


async def test_whoever_hangs_up_while_it_is_being_held_leaves_it_free(store_settings, monkeypatch):
    async with two_shelves(store_settings, Wall()) as (one, other):
        tasks: list[asyncio.Task[None]] = []

        def hung_up(*_: object) -> None:
            asyncio.get_running_loop().call_soon(tasks[-1].cancel)

        for event in ("before_cursor_execute", "commit"):
            sa.event.listen(one._engine.sync_engine, event, hung_up)
            for _ in range(5):
                tasks.append(asyncio.create_task(a_hold(one)))
                with pytest.raises(asyncio.CancelledError):
                    await tasks[-1]
            sa.event.remove(one._engine.sync_engine, event, hung_up)
            await a_hold(other)


async def test_a_conversation_has_a_bound_and_only_what_was_answered_goes_beyond_it(store_settings, monkeypatch):
    monkeypatch.setattr(shelf, "MAX_BYTES", 3000)
    async with two_shelves(store_settings, Wall()) as (one, other):
        kept = await one.find("ten_1", MINE)
        await one.add("ten_1", MINE, a_turn(1))
        large = named([said_by_user("x" * 3000)], f"resp_{2:032x}")
        with pytest.raises(InvalidRequest, match="3000 bytes"):
            await other.add("ten_1", MINE, large)
        assert await other.items(kept) == a_turn(1)
        await one.add("ten_1", MINE, large, f"resp_{2:032x}")
        with pytest.raises(InvalidRequest, match="3000 bytes"):
            await one.items(kept)
        with pytest.raises(InvalidRequest, match="3000 bytes"):
            await one.add("ten_1", MINE, a_turn(3))
        await one.remove(kept, large[0].id)
        await one.add("ten_1", MINE, a_turn(3))
        assert await one.items(kept) == [*a_turn(1), *a_turn(3)]
