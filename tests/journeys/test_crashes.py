"""Processes that are killed and disks that are full: what was delivered is owed, once, and nothing else is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import resource
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from benchmarks.audit.__main__ import measure
from benchmarks.audit.client import Asked, Heard
from benchmarks.audit.reckoning import reckon
from gateway import store
from gateway.ledger.verify import verify
from policies import settings
from tests.builders import PATIENCE_S, when
from tests.family import Family, answered_by, family

MARK_TOKENS = settings.Ledger().mark_tokens
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hello!"}]}


def rows_in(directory: Path) -> list[dict[str, Any]]:
    with contextlib.closing(sqlite3.connect(directory / "data" / "penstock.db")) as connection:
        connection.row_factory = sqlite3.Row
        return [dict(row) for row in connection.execute("SELECT * FROM ledger ORDER BY rowid")]


class Reading:
    """A stream, and how many tokens of it have come."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self._answer = answer
        self.num_tokens = 0

    async def to(self, num_tokens: float) -> int:
        """Until so many have come, or it has ended, which it may anywhere."""
        async with asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(aiohttp.ClientError):
                while self.num_tokens < num_tokens and (line := await self._answer.content.readline()):
                    if line.startswith(b"data: {") and (choices := json.loads(line[6:])["choices"]):
                        # A token of the script is a letter.
                        self.num_tokens += len(choices[0]["delta"].get("content") or "")
        return self.num_tokens

    async def to_its_end(self) -> int:
        return await self.to(math.inf)


@contextlib.asynccontextmanager
async def streaming(house: Family, num_tokens: int) -> AsyncIterator[Reading]:
    body = {**CHAT, "stream": True, "max_tokens": num_tokens}
    async with house.http() as session, session.post("/v1/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        yield Reading(answer)


async def test_a_stream_whose_gateway_is_killed_owes_what_its_client_has(tmp_path, start_scripted_worker):
    environ = answered_by(await start_scripted_worker("--step-s", 0.005))
    async with family(tmp_path, **environ) as house, streaming(house, 4000) as reading:
        await reading.to(100)
        house.process.kill()
        num_delivered = await reading.to_its_end()
    assert not rows_in(tmp_path)
    async with family(tmp_path, **environ) as next_house:
        (row,) = rows_in(tmp_path)
        await next_house.end()
    assert (row["status"], row["finish_reason"]) == (500, "error")
    assert row["num_prompt_tokens"] > 0
    assert row["num_completion_tokens"] <= num_delivered <= row["num_completion_tokens"] + MARK_TOKENS
    assert not list((tmp_path / "data" / "marks").glob("*.marks"))


async def grown(path: Path) -> None:
    """Until a file grows no more."""
    async with asyncio.timeout(PATIENCE_S):
        size = -1
        while size != (size := path.stat().st_size):  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(0.2)


async def test_a_client_that_reads_slowly_owes_no_more_than_it_can_have(tmp_path, start_scripted_worker):
    """What still lay in the process goes down with it, and is not owed."""
    options = ("--tokens-per-step", 20, "--max-model-tokens", 200_000, "--emitted", tmp_path / "emitted")
    environ = answered_by(await start_scripted_worker(*options))
    async with family(tmp_path, **environ) as house, streaming(house, 190_000) as reading:
        await reading.to(100)
        await grown(tmp_path / "emitted")  # it reads nothing meanwhile, and every buffer on the way fills
        house.process.kill()
        num_delivered = await reading.to_its_end()
    async with family(tmp_path, **environ):
        (row,) = rows_in(tmp_path)
    assert 1000 < num_delivered < 190_000
    assert row["num_completion_tokens"] <= num_delivered <= row["num_completion_tokens"] + MARK_TOKENS


async def test_a_full_disk_lets_nobody_in_and_what_was_delivered_waits(tmp_path, start_scripted_worker):
    environ = answered_by(await start_scripted_worker("--step-s", 0.02))
    async with family(tmp_path, **environ) as house, streaming(house, 150) as reading, house.http() as session:
        await reading.to(20)
        limits = resource.prlimit(house.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(house.process.pid, resource.RLIMIT_FSIZE, (0, limits[1]))  # no file takes a byte more
        body = asyncio.create_task(reading.to_its_end())
        async with session.post("/v1/chat/completions", json={**CHAT, "stream": True}) as refused:
            assert (refused.status, (await refused.json())["error"]["code"]) == (503, "server_is_overloaded")
        await until_refused(session)
        assert not body.done()
        assert not rows_in(tmp_path)
        resource.prlimit(house.process.pid, resource.RLIMIT_FSIZE, limits)
        assert await body == 150
        await when(lambda: status_of(session), lambda status: status == 200)  # the disk is tried now and then
    delivered = [row for row in rows_in(tmp_path) if row["num_completion_tokens"] == 150]
    assert [row["status"] for row in delivered] == [200]
    assert all(row["status"] in (200, 503) for row in rows_in(tmp_path))


async def status_of(session: aiohttp.ClientSession) -> int:
    async with session.post("/v1/chat/completions", json={**CHAT, "max_tokens": 1}) as answer:
        await answer.read()
        return answer.status


async def until_refused(session: aiohttp.ClientSession) -> None:
    """Whole answers, too: those that were let in before it was known wait for their rows."""
    async with asyncio.timeout(PATIENCE_S):
        waiting = [asyncio.create_task(status_of(session))]
        while not any(task.done() and task.result() == 503 for task in waiting):
            waiting.append(asyncio.create_task(status_of(session)))
            await asyncio.wait(waiting, timeout=0.2)
        for task in waiting:
            task.cancel()


async def test_the_audit_finds_nothing_unexplained(tmp_path):
    reckoning, house, num_asked = await measure(
        tmp_path, 600, num_clients=24, gateway_every_s=2.5, worker_every_s=1.5, step_s=0.004
    )
    assert reckoning.unexplained == []
    assert num_asked >= 600
    assert house.num_kills["gateway"] >= 2
    assert len(reckoning.reasons) >= 5
    await check_chains(tmp_path)


async def check_chains(directory: Path) -> None:
    """However its writers ended, the ledger is one that can be verified, and without a gap."""
    async with store.beside(settings.Store(data_dir=str(directory / "data"))) as rooms:
        verdict = await verify(rooms)
    assert verdict.findings == []
    assert verdict.num_rows == len(rows_in(directory))
    assert verdict.num_chains > 1


class ARow(msgspec.Struct):
    """Of the ledger, as far as the audit looks."""

    request_id: str = "req_1"
    status: int = 200
    finish_reason: str = "length"
    cache: str = "bypass"
    num_prompt_tokens: int = 4
    num_cached_tokens: int = 0
    num_completion_tokens: int = 10
    cost_micros: int = 26


@pytest.mark.parametrize(
    ("row", "num_delivered", "num_emitted"),
    [
        (ARow(), 9, 10),
        (ARow(), 10, 11),
        (ARow(num_completion_tokens=11, cost_micros=28), 10, 10),
        (ARow(cost_micros=25), 10, 10),
        (None, 10, 10),
    ],
    ids=["more owed than came", "more emitted", "more owed than emitted", "another price", "no row"],
)
def test_the_audit_sees_what_is_wrong(row, num_delivered, num_emitted):
    heard = [Heard(Asked("stream", "client-1", {"stream": True}), "whole", 200, "req_1", num_delivered)]
    assert reckon(heard, [] if row is None else [row], {"req_1": num_emitted}, 64).unexplained
    right = [Heard(Asked("stream", "client-1", {"stream": True}), "whole", 200, "req_1", 10)]
    assert not reckon(right, [ARow()], {"req_1": 10}, 64).unexplained
