"""Threads that tenants take in turn."""

from __future__ import annotations

import asyncio
from threading import Event

import pytest

from gateway import turns
from gateway.errors import ServiceUnavailable
from gateway.turns import Turns


class Works:
    """What is done, in order; the first waits until it is let go."""

    def __init__(self, num_threads: int = 1) -> None:
        self.turns = Turns(num_threads, "works", "too many")
        self.go, self.done = Event(), list[str]()

    def start(self, tenant_id: str, name: str) -> asyncio.Task[str]:
        def work() -> str:
            if name == "first":
                self.go.wait()
            self.done.append(name)
            return name

        return asyncio.create_task(self.turns.run(tenant_id, work))


async def begun(works: Works) -> asyncio.Task[str]:
    first = works.start("grey", "first")
    await asyncio.sleep(0)
    assert works.turns._own == {"grey": 1}
    return first


async def test_tenants_take_turns_however_many_one_of_them_has_waiting():
    works = Works()
    first = await begun(works)
    others = [works.start("grey", f"grey {number}") for number in range(20)]
    others += [works.start("blue", f"blue {number}") for number in range(2)] + [works.start("green", "green")]
    await asyncio.sleep(0)
    works.go.set()
    assert await asyncio.gather(first, *others) == [
        "first",
        *[f"grey {n}" for n in range(20)],
        "blue 0",
        "blue 1",
        "green",
    ]
    assert works.done[:7] == ["first", "grey 0", "blue 0", "green", "grey 1", "blue 1", "grey 2"]
    assert await works.start("blue", "again") == "again"


async def test_of_several_threads_one_tenant_leaves_one_to_others():
    works = Works(num_threads=2)
    first = await begun(works)
    second, other = works.start("grey", "second"), works.start("blue", "other")
    assert await other == "other"
    assert await works.start("green", "third") == "third"
    assert not second.done()
    works.go.set()
    assert await asyncio.gather(first, second) == ["first", "second"]


async def test_who_leaves_has_no_turn_and_costs_nobody_theirs():
    works = Works()
    first = await begun(works)
    gone, stays = works.start("blue", "gone"), works.start("blue", "stays")
    alone = works.start("green", "alone")
    await asyncio.sleep(0)
    first.cancel()
    gone.cancel()
    alone.cancel()
    await asyncio.sleep(0)
    assert not works.done
    works.go.set()
    assert await stays == "stays"
    assert works.done == ["first", "stays"]
    assert await works.start("grey", "again") == "again"
    assert not works.turns._waiting
    assert not works.turns._num_waiting


async def test_a_turn_whose_owner_is_just_leaving_is_the_next_ones():
    turns = Works().turns
    await turns.turn("grey")
    gone, stays = asyncio.create_task(turns.turn("blue")), asyncio.create_task(turns.turn("blue"))
    await asyncio.sleep(0)
    gone.cancel()
    turns._over("grey")
    await stays
    assert (turns._own, turns._num_free, turns._num_waiting, turns._waiting) == ({"blue": 1}, 0, 0, {})


async def test_where_too_many_wait_those_are_refused_who_have_their_part(monkeypatch):
    monkeypatch.setattr(turns, "MAX_WAITING", 4)
    works = Works()
    first = await begun(works)
    grey = [works.start("grey", f"grey {number}") for number in range(5)]
    await asyncio.wait([grey[4]])
    with pytest.raises(ServiceUnavailable, match="too many"):
        await grey[4]
    blue = [works.start("blue", f"blue {number}") for number in range(3)]
    await asyncio.wait([blue[2]])
    with pytest.raises(ServiceUnavailable):
        await blue[2]
    works.go.set()
    await asyncio.gather(first, *grey[:4], *blue[:2])


async def test_work_that_fails_gives_its_thread_back():
    works = Works()

    def fails() -> None:
        raise ValueError("as it may")

    with pytest.raises(ValueError, match="as it may"):
        await works.turns.run("grey", fails)
    assert await works.start("grey", "next") == "next"
