"""Stored responses: how long they are kept and how much room they may take, and who may end one."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import zlib
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace

import msgspec
import pytest
import sqlalchemy as sa

from gateway import store
from gateway.clock import Clock
from gateway.errors import InvalidRequest
from gateway.responses import shelf as shelves
from gateway.responses.items import AnyItem, said_by_user
from gateway.responses.requests import parse
from gateway.responses.shapes import ResponseBody, begun
from gateway.responses.shelf import LEASE_S, LOST, Kept, Shelf, said_in
from gateway.shelving import SWEEP_S
from policies import settings

pytestmark = pytest.mark.usefixtures("patient_store")

ASKED = {"model": "demo", "input": "Hello"}


class Wall:
    """Unix seconds, moved by hand."""

    now = 1_795_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def wall() -> Wall:
    return Wall()


@contextlib.asynccontextmanager
async def a_shelf(where: settings.Store, wall: Wall, **bounds: float) -> AsyncIterator[Shelf]:
    async with store.opened(where) as rooms:
        shelf = Shelf(rooms, settings.Responses(**bounds), Clock(), wall)  # type: ignore[arg-type]
        yield shelf


def a_body(number: int, previous: int | None = None, background: bool = False) -> ResponseBody:
    asked = {**ASKED, "background": background}
    if previous is not None:
        asked["previous_response_id"] = id_of(previous)
    body = begun(parse(msgspec.json.encode(asked)), id_of(number), 1, True)
    return body if background else msgspec.structs.replace(body, status="completed")


def id_of(number: int) -> str:
    return f"resp_{number:032x}"


def a_response(number: int, tenant_id: str = "ten_1", text: str = "Hello", **others: object) -> Kept:
    return Kept.of(tenant_id, a_body(number, **others), [said_by_user(text)])  # type: ignore[arg-type]


async def there(shelf: Shelf, *numbers: int, tenant_id: str = "ten_1") -> list[int]:
    return [number for number in numbers if await shelf.find(tenant_id, id_of(number)) is not None]


async def test_what_has_expired_is_not_found_and_then_deleted(store_settings, wall):
    async with a_shelf(store_settings, wall, retention_s=100) as shelf:
        await shelf.put(a_response(1))
        wall.now += 60
        await shelf.put(a_response(2, previous=1))
        assert await there(shelf, 1, 2) == [1, 2]
        wall.now += 60
        assert await there(shelf, 1, 2) == [2]
        (kept,) = await shelf.chain("ten_1", id_of(2))  # what came before it is missing
        assert kept.previous_id == id_of(1)
        await shelf.sweep()
        wall.now -= 60
        assert await there(shelf, 1, 2) == [2]


async def test_of_a_tenant_that_has_too_much_the_oldest_are_deleted(store_settings, wall):
    async with a_shelf(store_settings, wall, max_bytes_per_tenant=10_000) as shelf:
        await shelf.put(a_response(9, tenant_id="ten_2"))
        for number in range(1, 6):
            wall.now += 1
            await shelf.put(a_response(number, text="x" * 3000))
        await shelf.sweep()
        assert await there(shelf, 1, 2, 3, 4, 5) == [4, 5]
        assert await there(shelf, 9, tenant_id="ten_2") == [9]


async def test_a_conversation_is_found_oldest_first_and_has_an_end(store_settings, wall, monkeypatch):
    async with a_shelf(store_settings, wall) as shelf:
        await shelf.put(a_response(1))
        for number in range(2, 7):
            await shelf.put(a_response(number, previous=number - 1))
        await shelf.put(a_response(7, tenant_id="ten_2", previous=6))
        assert [kept.id for kept in await shelf.chain("ten_1", id_of(6))] == [id_of(number) for number in range(1, 7)]
        assert [kept.id for kept in await shelf.chain("ten_2", id_of(7))] == [id_of(7)]
        assert await shelf.chain("ten_2", id_of(6)) == []
        monkeypatch.setattr(shelves, "MAX_CHAIN", 5)
        assert len(await shelf.chain("ten_1", id_of(5))) == 5
        with pytest.raises(InvalidRequest):
            await shelf.chain("ten_1", id_of(6))


async def test_what_a_response_goes_on_from_has_a_bound_that_is_looked_at_before_it_is_read(
    store_settings, wall, monkeypatch
):
    async with a_shelf(store_settings, wall) as shelf:
        chain = [a_response(number, text="x" * 1000 * number, previous=number - 1 or None) for number in (1, 2, 3)]
        for kept in chain:
            await shelf.put(kept)
        num_bytes = sum(len(kept.input) + len(kept.body) for kept in chain)
        monkeypatch.setattr(shelves, "MAX_CHAIN_BYTES", num_bytes)
        assert await shelf.chain("ten_1", id_of(3)) == chain
        monkeypatch.setattr(shelves, "MAX_CHAIN_BYTES", num_bytes - 1)
        read: list[str] = []
        sa.event.listen(shelf._engine.sync_engine, "before_cursor_execute", lambda *asked: read.append(asked[2]))
        said = f"the 3 responses that it goes on from have {num_bytes} bytes, and may have {num_bytes - 1} at most"
        with pytest.raises(InvalidRequest, match=said) as refused:
            await shelf.chain("ten_1", id_of(3))
        assert (refused.value.status, refused.value.param) == (400, "previous_response_id")
        assert [asked.count("length(") for asked in read if "ORDER BY" in asked or "length(" in asked] == [4]
        assert await shelf.chain("ten_1", id_of(2)) == chain[:2]


async def test_what_a_response_goes_on_from_is_read_some_at_a_time(store_settings, wall, monkeypatch):
    async with a_shelf(store_settings, wall) as shelf:
        chain = [a_response(number, text="x" * 1000, previous=number - 1 or None) for number in range(1, 6)]
        for kept in chain:
            await shelf.put(kept)
        monkeypatch.setattr("gateway.shelving.PIECE_BYTES", 2 * chain[-1].num_bytes)
        read: list[int] = []
        reading = Shelf._some

        async def read_and_delete(self: Shelf, tenant_id: str, ids: list[str]) -> dict[str, Kept]:
            found = await reading(self, tenant_id, ids)
            read.append(len(found))
            if len(read) == 2:
                await shelf.delete("ten_1", id_of(1))
            return found

        monkeypatch.setattr(Shelf, "_some", read_and_delete)
        assert await shelf.chain("ten_1", id_of(5)) == chain[1:]
        assert read == [2, 2, 0]


async def test_all_that_was_said_before_has_as_many_items_as_a_conversation_and_is_read_beside_the_event_loop(
    monkeypatch,
):
    said = [said_by_user(f"{number}") for number in range(5000)]
    chain = [Kept.of("ten_1", a_body(number), said) for number in (1, 2, 3)]
    threads: list[int] = []

    def read(self: Kept) -> list[AnyItem]:
        threads.append(threading.get_ident())
        return msgspec.json.decode(self.input, type=list[AnyItem])

    monkeypatch.setattr(Kept, "items", read)
    assert await said_in(chain[:2]) == ([*said, *said], chain[0].response())
    assert await said_in(chain[:1], 5000) == (said, chain[0].response())
    for long, num_more in ((chain[:2], 1), (chain, 0), (chain[:1], 5001)):
        with pytest.raises(InvalidRequest, match="may have 10000 items at most") as refused:
            await said_in(long, num_more)
        assert (refused.value.status, refused.value.param) == (400, "previous_response_id")
    assert threading.get_ident() not in threads
    assert len(threads) == 2 + 1 + 2 + 3 + 1


async def test_one_that_is_written_ends_once(store_settings, wall):
    async with a_shelf(store_settings, wall) as shelf:
        body = a_body(1, background=True)
        await shelf.put(Kept.of("ten_1", body, [said_by_user("Hello")]))
        said = [b"event: a\ndata: %d\n\n" % number for number in range(7)]
        assert await shelf.advance(body, 0, said[:3])
        assert await shelf.advance(body, 3, said[3:5])
        assert await shelf.advance(body, 3, said[3:6])  # nobody was told that this had come to be written
        assert await shelf.events(body.id, 0) == said[:6]
        assert await shelf.events(body.id, 4) == said[4:6]
        assert await shelf.events(body.id, 6) == []
        assert await shelf.advance(msgspec.structs.replace(body, status="completed"), 6, said[6:])
        assert not await shelf.advance(msgspec.structs.replace(body, status="failed"), 7, said)
        kept = await shelf.find("ten_1", body.id)
        assert kept is not None
        assert not await shelf.end_elsewhere(kept, "cancelled")
        assert (kept.status, await shelf.events(body.id, 0)) == ("completed", said)
        assert await shelf.delete("ten_1", body.id)
        assert await shelf.events(body.id, 0) == []


async def test_one_that_is_ended_elsewhere_keeps_all_that_was_told_of_it(store_settings, wall):
    said = [b"event: a\ndata: %d\n\n" % number for number in range(8)]
    async with a_shelf(store_settings, wall) as shelf:
        for number in range(1, 31):
            body = a_body(number, background=True)
            await shelf.put(kept := Kept.of("ten_1", body, []))
            assert await shelf.advance(body, 0, said[:3])
            ending = asyncio.create_task(shelf.end_elsewhere(kept, "cancelled"))
            was_told = await shelf.advance(body, 3, said[3:])
            assert await ending
            *before, last = await shelf.events(body.id, 0)
            assert before == (said if was_told else said[:3])
            assert b'"sequence_number":%d,' % len(before) in last


async def test_one_that_nobody_renews_has_lost_its_gateway(store_settings, wall):
    async with a_shelf(store_settings, wall) as shelf:
        for number in (1, 2):
            await shelf.put(Kept.of("ten_1", a_body(number, background=True), []))
        for _ in range(3):
            wall.now += LEASE_S / 3
            await shelf.sweep()
        assert await shelf.advance(a_body(2, background=True), 0, [])
        await shelf.sweep()
        wall.now += 1
        await shelf.sweep()
        lost, alive = [await shelf.find("ten_1", id_of(number)) for number in (1, 2)]
        assert lost is not None
        assert (lost.status, lost.response().error) == ("failed", LOST)
        assert alive is not None
        assert alive.status == "queued"


async def test_that_the_time_is_set_ahead_loses_nothing_that_is_renewed(store_settings, wall):
    """As it is for a machine that has slept."""
    async with a_shelf(store_settings, wall) as shelf:
        for number in (1, 2):
            await shelf.put(Kept.of("ten_1", a_body(number, background=True), []))
        wall.now += 3600
        await shelf.sweep()
        assert await shelf.advance(a_body(2, background=True), 0, [])
        for _ in range(4):
            wall.now += SWEEP_S
            await shelf.sweep()
            assert await shelf.advance(a_body(2, background=True), 0, [])
        kept = [await shelf.find("ten_1", id_of(number)) for number in (1, 2)]
        assert [one and one.status for one in kept] == ["failed", "queued"]


async def test_what_nobody_could_renew_while_the_store_was_away_is_not_lost_by_that(store_settings, wall, clock):
    async with store.opened(store_settings) as rooms:
        shelf = Shelf(rooms, settings.Responses(), clock, wall)

        async def status(after_s: float) -> str:
            wall.now += after_s
            clock.advance(after_s)
            await shelf.sweep()
            kept = await shelf.find("ten_1", id_of(1))
            assert kept is not None
            return kept.status

        await shelf.put(Kept.of("ten_1", a_body(1, background=True), []))
        assert await status(SWEEP_S) == "queued"
        assert [await status(5 * LEASE_S), await status(SWEEP_S)] == ["queued", "queued"]
        assert [await status(SWEEP_S) for _ in range(3)][-1] == "failed"


async def test_long_events_are_packed_and_unpacked_beside_the_event_loop(store_settings, wall, monkeypatch):
    threads: list[int] = []

    def noted(work: Callable[..., bytes]) -> Callable[..., bytes]:
        return lambda *given: [threads.append(threading.get_ident()), work(*given)][1]  # type: ignore[func-returns-value]

    names = ("compress", "decompress")
    monkeypatch.setattr(shelves, "zlib", SimpleNamespace(**{name: noted(getattr(zlib, name)) for name in names}))
    drawn = random.Random(1)
    said = [b"event: x\ndata: %b\n\n" % drawn.randbytes(20_000).hex().encode() for _ in range(3)]
    async with a_shelf(store_settings, wall) as shelf:
        body = a_body(1, background=True)
        await shelf.put(Kept.of("ten_1", body, []))
        assert await shelf.advance(body, 0, said)
        assert await shelf.events(body.id, 1) == said[1:]
        assert await shelf.end_of(body.id) == (2, said[-1:])
    assert len(threads) == 3
    assert threading.get_ident() not in threads
