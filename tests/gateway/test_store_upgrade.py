"""Older stores with something in every table, brought up to date on both databases: nothing of it is lost."""

from __future__ import annotations

import os
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command

import migrations
from gateway import store
from gateway.clock import Clock
from gateway.ledger import open_chain, writer_for
from gateway.ledger.closing import DAY_S, close_next
from gateway.ledger.follow import Follower
from gateway.ledger.sums import Rollup
from gateway.ledger.verify import verify
from gateway.prices import PriceHistory
from gateway.store import Store
from tests.builders import an_entry, write_chain
from tests.residents import visiting

NUM_ROWS = 5
CHOSEN = {("keys", "kind"): "api", ("keys", "role"): None, ("service_accounts", "role"): "member"}
"""What a check constraint asks for."""
Tables = dict[str, list[dict[str, Any]]]


def tables_of(connection: sa.Connection) -> sa.MetaData:
    found = sa.MetaData()
    found.reflect(connection)
    found.remove(found.tables["alembic_version"])
    return found


def fill(connection: sa.Connection, revision: str) -> Tables:
    """A store of that revision: the rows of each of its tables. What names a row elsewhere is called as it is."""
    command.upgrade(migrations.config_of(connection), revision)
    for table in tables_of(connection).sorted_tables:
        if table.name not in ("install", "changes"):
            rows = [{column.name: value_of(table, column, n) for column in table.columns} for n in range(1, NUM_ROWS)]
            connection.execute(sa.insert(table), rows)
    connection.execute(sa.text("INSERT INTO install VALUES (1, :secret, 5)"), {"secret": b"s" * 32})
    return rows_of(connection)


def value_of(table: sa.Table, column: sa.Column[Any], number: int) -> Any:
    if (table.name, column.name) in CHOSEN:
        return CHOSEN[table.name, column.name]
    kind = column.type.python_type
    return {str: f"n{number}", bytes: bytes([number]), float: number + 0.5, bool: bool(number % 2)}.get(kind, number)


def rows_of(connection: sa.Connection) -> Tables:
    return {
        table.name: [dict(row._mapping) for row in connection.execute(sa.select(table))]
        for table in tables_of(connection).sorted_tables
    }


@pytest.mark.parametrize("revision", [f"{number:04}" for number in range(1, 17)])
async def test_every_row_comes_along_with_all_that_it_had(new_store, revision):
    os.makedirs(new_store.data_dir)
    async with visiting(new_store) as old, old.engine.begin() as connection:
        before = await connection.run_sync(fill, revision)
    assert {name: len(rows) for name, rows in before.items() if name not in ("install", "changes")} == {
        name: NUM_ROWS - 1 for name in before if name not in ("install", "changes")
    }
    async with store.opened(new_store) as rooms, rooms.engine.begin() as connection:
        assert min(rooms.applied) > revision
        after = await connection.run_sync(rows_of)
    for name, rows in before.items():
        columns = rows[0].keys()
        kept = [{column: row[column] for column in columns} for row in after[name]]
        assert [row for row in rows if row not in kept] == [], name


async def test_sums_that_knew_not_what_is_owed_are_as_if_added_up_anew(new_store):
    """Of rows that are in them, that are behind a gap, that fill one, and that are not added yet."""
    nothing = {"num_prompt_tokens": 0, "num_cached_tokens": 0, "num_completion_tokens": 0}
    failed = [an_entry(status=503, engine_us=5 + n, settled_at=DAY_S + 50 * n, **nothing) for n in range(9)]
    paid = [an_entry(engine_us=70 + n, settled_at=DAY_S + 50 * n, cache="miss" if n % 2 else "hit") for n in range(9)]
    failed_hit = an_entry(status=503, cache="hit", engine_us=3, settled_at=DAY_S, **nothing)
    corrected = an_entry(corrects="req_1", engine_us=-4, settled_at=DAY_S, **nothing)
    one, other = [*failed[:5], *paid[:4], failed_hit], [*paid[4:], *failed[5:], corrected]

    async def sums(rooms: Store) -> list[sa.Row[Any]]:
        async with rooms.engine.connect() as connection:
            return list((await connection.execute(sa.select(store.usage).order_by(*store.usage.primary_key))).all())

    async with store.opened(new_store) as rooms:
        history = PriceHistory(rooms.engine)
        rollup = Rollup(rooms, history.rates, Clock(), lambda: 10 * DAY_S)
        await write_chain(rooms, *one[:3])
        await write_chain(rooms, *one[7:], first_position=8)  # the fourth to the seventh are awaited
        await write_chain(rooms, *other, chain=2)
        await rollup.roll()
        await write_chain(rooms, *one[3:5], first_position=4)
        await rollup.roll()
        await write_chain(rooms, *one[5:7], first_position=6)
        await write_chain(rooms, an_entry(status=503, settled_at=DAY_S, **nothing), first_position=11)
        before = await sums(rooms)
        assert sum(row.num_owed_requests for row in before if row.width_s == DAY_S) == 7
        async with rooms.engine.begin() as connection:
            for name in ("num_owed_requests", "owed_engine_us"):
                await connection.execute(sa.text(f"ALTER TABLE usage DROP COLUMN {name}"))
            await connection.execute(sa.text("UPDATE alembic_version SET version_num = '0016'"))
    async with store.opened(new_store) as rooms:
        assert rooms.applied == ["0017"]
        assert await sums(rooms) == before


async def test_a_ledger_that_knew_no_chains_goes_on_in_one(new_store):
    """Its rows count, are followed, and stay what cannot be verified."""
    os.makedirs(new_store.data_dir)
    async with visiting(new_store) as old, old.engine.begin() as connection:
        before = (await connection.run_sync(fill, "0002"))["ledger"]
    async with store.opened(new_store) as rooms:
        writer, chain = writer_for(rooms), await open_chain(rooms)
        await writer.write([chain.extend(an_entry(), 5) for _ in range(3)])
        await writer.close()
        batch = await Follower(rooms, "usage").next(100)
        assert len(batch.entries) == len(before) + 3
        older = [entry for entry in batch.entries if not entry.chain]
        assert [entry.settled_at for entry in older] == [entry.created_at for entry in older]
        assert await close_next(rooms, 30_000, 0) is not None
        verdict = await verify(rooms)
    assert (verdict.findings, verdict.num_rows, verdict.num_before_chains) == ([], 3, len(before))
