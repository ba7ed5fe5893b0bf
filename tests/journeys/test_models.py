"""Several models with real workers: one leaves for the other, comes back when it is asked for, and answers as then."""

from __future__ import annotations

import os
from pathlib import Path

import demo
from gateway.memory import need_of
from policies import settings
from tests.builders import until
from tests.house import House, running

ENGINE = settings.Engine(device="cpu", dtype="float32", num_threads=1, max_kv_bytes=32 << 20)


async def answered(house: House, model: str) -> str:
    async with house.client() as client:
        answer = await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "Once"}], max_tokens=12, temperature=0
        )
    return answer.choices[0].message.content or ""


def pids(house: House) -> list[int]:
    return [worker.facts.pid for worker in house.gw.dispatch.workers() if worker.facts is not None]


async def test_two_models_take_turns_where_only_one_has_room(tmp_path: Path):
    room = int(1.5 * need_of(demo.MODEL_DIR, ENGINE).least_bytes)
    models = {"one": settings.Model(engine=ENGINE), "two": settings.Model(engine=ENGINE)}
    with running(tmp_path, models=models, memory=settings.Memory(budget_bytes=room)) as house:
        state = house.gw.dispatch.residence.state
        (first,) = sorted(models, key=state)[:1]  # whichever's files were read first
        other = ({*models} - {first}).pop()
        assert (state(first), state(other)) == ("ready", "unloaded")
        before, (pid,) = await answered(house, first), pids(house)
        assert await answered(house, other) == before  # the same files under another name
        assert (state(first), state(other)) == ("unloaded", "ready")
        await until(lambda: not os.path.exists(f"/proc/{pid}"))
        assert await answered(house, first) == before
        assert len(pids(house)) == 1
        rows = await house.ledger_rows(status=200)
    assert [row.model for row in rows] == [first, other, first]
