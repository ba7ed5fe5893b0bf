"""Rows of versions that knew no chains, which no closing covers, are exported too: each once, on its own day."""

from __future__ import annotations

import msgspec
import pytest
import sqlalchemy as sa

from gateway import store
from gateway.exports import pieces
from gateway.exports.files import write_file
from gateway.exports.pieces import Export
from gateway.ledger.usage import Question, Usage
from gateway.prices import PriceHistory
from tests.builders import an_entry, write_chain
from tests.gateway.test_exports import DAY_S, FIRST, an_order, closed, exported, rooms, rows_of  # noqa: F401

SETTLED_ON = (1, 0, 2, 0, 1)
"""Days of the older rows, in the order in which they lie in the store."""


@pytest.fixture
async def older(rooms) -> list[str]:  # noqa: F811
    """Their ids. What came later is in a chain."""
    entries = [an_entry(settled_at=(FIRST + day) * DAY_S + 5) for day in SETTLED_ON]
    async with rooms.engine.begin() as connection:
        await connection.execute(sa.insert(store.ledger), [msgspec.structs.asdict(entry) for entry in entries])
    await write_chain(rooms, *(an_entry(settled_at=(FIRST + day) * DAY_S + 9) for day in (2, 3)))
    async with rooms.engine.begin() as connection:
        await connection.execute(sa.update(store.ledger_chains).values(opened_at=(FIRST + 2) * DAY_S))
    return [entry.request_id for entry in entries]


async def test_each_is_on_the_day_that_it_was_settled_on_whatever_is_closed(rooms, older):  # noqa: F811
    ids = dict.fromkeys(older)
    for until in range(FIRST + 2, FIRST + 5):
        await closed(rooms, until)
        for day in range(4):
            found = [row["request_id"] for row in await rows_of(rooms, an_order(first=FIRST + day, days=1))]
            of_day = [id for id, settled_on in zip(older, SETTLED_ON, strict=True) if settled_on == day]
            assert [id for id in found if id in ids] == of_day
            assert len(found) == len(of_day) + (day >= 2)
        assert len(await rows_of(rooms, an_order(days=4))) == len(older) + 2


async def test_what_they_cost_is_for_what_the_sums_say(rooms):  # noqa: F811
    """There were no price lists either: each was charged by its policy."""
    document = {"prices": {"*": {"prompt": "3", "completion": "15"}}}
    async with rooms.engine.begin() as connection:
        head = {"name": "gold", "current_version": 2, "revision": 1}
        await connection.execute(sa.insert(store.policy_heads), head)
        policy = {"name": "gold", "version": 2, "created_at": 0, "created_by": "test", "note": ""}
        policy["document"] = msgspec.json.encode(document).decode()
        await connection.execute(sa.insert(store.policies), policy)
    entry = an_entry(settled_at=FIRST * DAY_S, policy_name="gold", policy_version=2, cost_micros=546)
    await write_chain(rooms, entry)
    lines = [(row["kind"], row["cost"]) for row in await rows_of(rooms, an_order("costs")) if row["cost"] != "0.000000"]
    question = Question(since=FIRST * DAY_S, until=(FIRST + 1) * DAY_S, width_s=DAY_S, with_charges=True)
    (((line,), _)) = await Usage(rooms, PriceHistory(rooms.engine).rates).lines(question, 10)
    charged = sorted((charge.kind, f"{charge.cost_micros / 1e6:.6f}") for charge in line.totals.charges())
    assert lines == [one for one in charged if one[1] != "0.000000"]


async def test_an_export_that_was_interrupted_among_them_goes_on(rooms, older, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(pieces, "PIECE_ROWS", 1)
    monkeypatch.setattr("gateway.exports.spans.PAGE_ROWS", 1)

    class Interrupted(Exception):
        pass

    await closed(rooms, FIRST + 3)
    file = tmp_path / "usage.csv"
    for _ in range(len(older) + 2):
        heard: list[int] = []

        def tell(num_read: int, heard: list[int] = heard) -> None:
            heard.append(num_read)
            if len(heard) > 1:
                raise Interrupted

        with pytest.raises(Interrupted):
            await write_file(await Export.begin(rooms, an_order(days=4)), file, tell)
    await write_file(await Export.begin(rooms, an_order(days=4)), file, lambda num_read: None)
    assert file.read_bytes() == await exported(rooms, an_order(days=4))
