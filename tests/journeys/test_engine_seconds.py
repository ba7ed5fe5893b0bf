"""What the engine did is on somebody's account, all of it: rows against the worker's own clock."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

import pytest

from gateway.reply import account
from policies import settings
from tests import house as houses
from tests.builders import PATIENCE_S
from tests.failing_worker import CURSED_PROMPT

COMPUTED = {"cache-control": "no-store"}
ENGINE = settings.Engine(device="cpu", num_threads=1, max_kv_bytes=64 << 20)


def chat(house, number, **parameters):
    content = f"Tell me a story about {number} foxes."
    return {"model": house.model, "messages": [{"role": "user", "content": content}], **parameters}


async def answered(http, house, body, headers=COMPUTED):
    async with http.post("/v1/chat/completions", json=body, headers=headers) as response:
        await response.read()
        return response.status


async def hung_up(http, house, body, after_s):
    """A client that waits no longer."""
    try:
        async with asyncio.timeout(after_s):
            return await answered(http, house, body)
    except TimeoutError:
        return None


async def hung_up_in_mid_stream(http, house, body, num_events):
    async with http.post("/v1/chat/completions", json={**body, "stream": True}, headers=COMPUTED) as response:
        async for line in response.content:
            num_events -= line.startswith(b"data:")
            if num_events < 0:
                return


async def cursed(http, house):
    body = {"model": house.model, "prompt": [CURSED_PROMPT, [50, 51, 52, 53]], "max_tokens": 8}
    async with http.post("/v1/completions", json=body) as response:
        assert response.status in (200, 500), await response.text()
        return response.status


async def test_the_seconds_of_all_rows_are_the_seconds_that_the_worker_was_busy(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(account, "LAST_WORD_S", PATIENCE_S)
    chance = random.Random(4)
    command = (sys.executable, "-m", "tests.failing_worker")
    with houses.running(tmp_path, command=command, models={"demo": settings.Model(engine=ENGINE)}) as house:
        async with house.http() as http:
            work = []
            for number in range(12):
                cut = {"ignore_eos": True, "max_tokens": 200}
                work += [
                    answered(http, house, chat(house, number, max_tokens=chance.randrange(1, 60))),
                    answered(http, house, chat(house, number, n=3, max_tokens=20, seed=number, stop=["fox"])),
                    answered(http, house, chat(house, number, temperature=0, max_tokens=20), {}),
                    answered(http, house, chat(house, number, temperature=0, max_tokens=20), {}),
                    hung_up(http, house, chat(house, number, **cut), chance.uniform(0.01, 0.5)),
                    hung_up_in_mid_stream(http, house, chat(house, number, n=2, **cut), chance.randrange(1, 30)),
                ]
            chance.shuffle(work)
            await asyncio.gather(*work)
            beside = [answered(http, house, chat(house, 1, max_tokens=60)) for _ in range(4)]
            assert 500 in await asyncio.gather(cursed(http, house), *beside)
            for _ in range(2):
                assert await answered(http, house, chat(house, 20, temperature=0, max_tokens=20), {}) == 200
        await house.quiet()
        rows = await house.ledger_rows()
        (worker,) = house.gw.dispatch.workers()
        assert worker.stats is not None
        busy_s = worker.stats.busy_s
    assert {200, 499, 500} <= {row.status for row in rows}
    assert {"miss", "hit", "bypass"} <= {row.cache for row in rows}
    assert busy_s > 0.1
    assert sum(row.engine_us for row in rows) / 1e6 == pytest.approx(busy_s, rel=0.01)
    assert all(row.engine_us == row.kv_block_ms == 0 for row in rows if row.cache in ("hit", "shared"))
    assert all(row.engine_us > 0 for row in rows if row.status == 200 and row.cache not in ("hit", "shared"))


async def test_a_receipt_of_the_real_engine(house):
    async with house.client() as client:
        stream = await client.chat.completions.create(
            **chat(house, 77, max_tokens=30, stream=True),
            extra_headers={**COMPUTED, "x-penstock-receipt": "true"},
            extra_body={"ignore_eos": True},
        )
        *_, last = [chunk async for chunk in stream]
    told = last.penstock["receipt"]
    assert told["completion_tokens"] == 30
    assert told["prefill_ms"] > 0
    assert told["decode_ms"] > 0
    assert 0 < told["engine_seconds"] <= told["total_ms"] / 1e3
    assert told["kv_block_seconds"] > 0
    parts = [told[name] for name in ("queue_ms", "prefill_ms", "decode_ms", "gateway_ms")]
    assert sum(parts) == pytest.approx(told["total_ms"])
