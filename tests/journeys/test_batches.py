"""Batches whose gateway is killed: every line is in the outputs once, and in the ledger once, with the same numbers."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import openai
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from gateway import store
from gateway.ledger.verify import verify
from policies import settings
from tests import official
from tests.batches import begun, lines, outputs, over, when
from tests.builders import PATIENCE_S
from tests.family import Family, answered_by, family, sharing

NUM_LINES, MAX_IN_FLIGHT = 1200, 32
SLOWLY = {"PENSTOCK_BATCHES__MAX_IN_FLIGHT": str(MAX_IN_FLIGHT)}
"""So that a batch takes some seconds, and is caught in the middle."""


def client_of(house: Family) -> openai.AsyncOpenAI:
    return official.Client(base_url=f"{house.url}/v1", api_key=house.key, max_retries=5, timeout=PATIENCE_S)


async def in_ledger(url: str) -> list[Any]:
    engine = create_async_engine(url)
    try:
        async with engine.connect() as connection:
            return list((await connection.execute(sa.select(store.ledger))).all())
    finally:
        await engine.dispose()


def check(batch: Any, found: list[Any], rows: list[Any], num_lines: int) -> None:
    """The outputs are whole and the ledger agrees with them, line by line."""
    assert (batch.status, batch.error_file_id) == ("completed", None)
    assert batch.request_counts.completed == batch.request_counts.total == num_lines
    assert [one["custom_id"] for one in found] == [f"line-{number}" for number in range(num_lines)]
    said = {one["response"]["request_id"]: one["response"]["body"]["usage"] for one in found}
    assert len(said) == num_lines
    paid = {row.request_id: row for row in rows if row.status == 200 or row.cost_micros or row.num_completion_tokens}
    assert paid.keys() == said.keys()
    for request_id, usage in said.items():
        row = paid[request_id]
        assert row.num_prompt_tokens == usage["prompt_tokens"]
        assert row.num_completion_tokens == usage["completion_tokens"]
    assert batch.usage.output_tokens == sum(row.num_completion_tokens for row in paid.values())


async def test_a_gateway_that_is_killed_again_and_again_answers_each_line_once(tmp_path, start_scripted_worker):
    options = ("--tokens-per-step", 2, "--step-s", 0.02, "--emitted", tmp_path / "emitted")
    environ = {**answered_by(await start_scripted_worker(*options)), **SLOWLY}
    batch = None
    for share in (0.2, 0.5, 0.8):
        async with family(tmp_path, **environ) as house, client_of(house) as client:
            if batch is None:
                batch = await begun(client, lines(NUM_LINES))
            await when(client, batch, lambda batch, least=share: batch.request_counts.completed >= least * NUM_LINES)
            house.process.kill()
            await house.process.wait()
    async with family(tmp_path, **environ) as house, client_of(house) as client:
        batch = await over(client, batch)
        found = await outputs(client, batch.output_file_id)
        await house.end()
    check(batch, found, await in_ledger(f"sqlite+aiosqlite:///{tmp_path / 'data' / 'penstock.db'}"), NUM_LINES)
    assert not list((tmp_path / "data" / "files").glob("*.journal"))
    async with store.beside(settings.Store(data_dir=str(tmp_path / "data"))) as rooms:
        assert (await verify(rooms)).findings == []
    # What was under way at a kill was asked again, and nothing else was: a line has four tokens in two steps.
    emitted = [words.split() for words in (tmp_path / "emitted").read_text().splitlines()]
    num_asked = len({request_id for request_id, *_ in emitted})
    assert NUM_LINES <= num_asked <= NUM_LINES + 3 * MAX_IN_FLIGHT


async def test_another_gateway_goes_on_with_the_batch_of_one_that_is_killed(
    tmp_path, postgres, redis_settings, start_scripted_worker
):
    address = await start_scripted_worker("--tokens-per-step", 2, "--step-s", 0.02)
    environ = {**answered_by(address), **sharing(redis_settings, postgres, 2), **SLOWLY}
    environ["PENSTOCK_BATCHES__LEASE_S"] = "1"
    async with family(tmp_path, **environ) as house, client_of(house) as client:
        batch = await begun(client, lines(NUM_LINES))
        await when(client, batch, lambda batch: batch.request_counts.completed >= NUM_LINES // 4)
        engine = create_async_engine(postgres)
        async with engine.connect() as connection:
            owner = (await connection.execute(sa.select(store.batches.c.owner))).scalar_one()
        await engine.dispose()
        pid = int(owner.split(":")[-2])
        assert pid in house.gateways()
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(3 * PATIENCE_S):
            batch = await over(client, batch)
        found = await outputs(client, batch.output_file_id)
        await house.end()
    check(batch, found, await in_ledger(postgres), NUM_LINES)


async def test_a_gateway_that_is_asked_to_stop_loses_no_line(tmp_path, start_scripted_worker):
    environ = {**answered_by(await start_scripted_worker("--tokens-per-step", 2, "--step-s", 0.02)), **SLOWLY}
    async with family(tmp_path, **environ) as house, client_of(house) as client:
        batch = await begun(client, lines(1200))
        await when(client, batch, lambda batch: batch.request_counts.completed >= 100)
        assert await house.end() == 0
    async with family(tmp_path, **environ) as house, client_of(house) as client:
        batch = await over(client, batch)
        found = await outputs(client, batch.output_file_id)
        await house.end()
    check(batch, found, await in_ledger(f"sqlite+aiosqlite:///{tmp_path / 'data' / 'penstock.db'}"), 1200)
