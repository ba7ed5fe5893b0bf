"""What does not come over from the spool by itself: it stays, is told, and holds up nothing else."""

from __future__ import annotations

import sqlite3
import threading

import msgspec
import pytest

from gateway.clock import Clock
from gateway.ledger import WriteError, spool
from gateway.ledger.entry import RowRefused
from gateway.ledger.spool import Spool, SpooledWriter
from tests.builders import PATIENCE_S, an_entry, until
from tests.gateway.test_spool import arrived, config, settled, spooled

__all__ = ["config"]


class Database:
    """A ``Writer`` that refuses what it is told to, and is away when it is told so."""

    def __init__(self) -> None:
        self.rows, self.refused, self.is_away = [], set(), False

    async def write(self, entries):
        if self.is_away:
            raise WriteError("away")
        if not self.refused.isdisjoint(entries):
            raise RowRefused("not such a row")
        self.rows += [entry for entry in entries if entry not in self.rows]

    async def close(self):
        pass


def odd_rows(path, num_rows):
    """Their ids; no version that we know has written them."""
    kept, odd = Spool(path), [an_entry() for _ in range(num_rows)]
    kept.keep(odd)
    with kept._open() as connection:
        connection.execute("UPDATE spool SET entry = ?", [b'{"of": "another version"}'])
    kept.close()
    return {entry.request_id for entry in odd}


async def test_rows_that_nobody_understands_stay_and_those_behind_them_come_over(tmp_path, monkeypatch):
    monkeypatch.setattr(spool, "MAX_BATCH", 5)
    path = tmp_path / "spool.db"
    odd = odd_rows(path, 12)
    kept = Spool(path)
    kept.keep(good := [an_entry() for _ in range(12)])
    kept.close()
    writer = SpooledWriter(database := Database(), path, Clock())
    await until(lambda: database.rows == good)
    assert await writer.kept(sorted(odd)) == odd
    await until(lambda: writer.num_rows == 12)
    await writer.close()
    monkeypatch.setattr(spool, "MAX_ROWS", 12)
    kept = Spool(path)
    assert kept.num_rows == 0  # nobody has looked
    assert kept.oldest(10) == []
    with pytest.raises(WriteError, match="holds 12 rows already"):
        kept.keep([an_entry()])
    with kept._open() as connection:  # as if this were the version whose they are
        connection.execute("UPDATE aside SET entry = ?", [msgspec.json.encode(msgspec.structs.asdict(good[0]))])
    kept.close()
    assert Spool(path).oldest(100) == [good[0]] * 12


async def test_a_row_that_the_database_refuses_holds_up_none_of_the_others(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(spool, "RETRY_S", 0.01)
    writer = SpooledWriter(database := Database(), tmp_path / "spool.db", Clock())
    entries = [an_entry() for _ in range(50)]
    database.refused = {entries[7], entries[31], entries[32]}
    await writer.write(entries)
    good = [entry for entry in entries if entry not in database.refused]
    await until(lambda: set(database.rows) == set(good) and writer.num_rows == 3)
    assert not writer.is_away
    database.is_away = True
    await writer.write(late := [an_entry() for _ in range(3)])
    await until(lambda: writer.is_away)
    database.is_away, database.refused = False, set()
    await until(lambda: set(late) <= set(database.rows))
    await writer.close()
    writer = SpooledWriter(database, tmp_path / "spool.db", Clock())
    await until(lambda: set(database.rows) == {*entries, *late})
    await until(lambda: writer.num_rows == 0)
    await writer.close()
    assert caplog.text.count("set aside") == 3


async def test_what_postgres_refuses_is_told_from_its_being_away(config):
    async with spooled(config) as ledger:
        poison = an_entry(model="a\0b")
        good = await settled(ledger, 3)
        await ledger.settle(poison)
        good |= await settled(ledger, 3)
        await arrived(config, good)
        assert not ledger._writer.is_away
        assert await ledger._writer.kept([poison.request_id]) == {poison.request_id}


async def test_rows_kept_while_the_last_look_ends_are_not_left_behind(tmp_path, monkeypatch):
    looked, returned = threading.Event(), threading.Event()

    def oldest(kept, num_rows, real=Spool.oldest):
        found = real(kept, num_rows)
        if not found and not looked.is_set():
            looked.set()
            assert returned.wait(PATIENCE_S)
        return found

    monkeypatch.setattr(Spool, "oldest", oldest)
    database, rows = Database(), [an_entry(), an_entry()]
    writer = SpooledWriter(database, tmp_path / "spool.db", Clock())
    database.is_away = True
    await writer.write(rows[:1])
    database.is_away = False
    await until(looked.is_set)
    database.is_away = True
    await writer.write(rows[1:])
    database.is_away = False
    returned.set()
    await until(lambda: database.rows == rows)
    await writer.close()


async def test_a_spool_that_fails_once_is_tried_again(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(spool, "RETRY_S", 0.01)
    failures = [sqlite3.OperationalError("database or disk is full")] * 3

    def forget(kept, entries, real=Spool.forget):
        if failures:
            raise failures.pop()
        real(kept, entries)

    monkeypatch.setattr(Spool, "forget", forget)
    kept = Spool(tmp_path / "spool.db")
    kept.keep(rows := [an_entry(), an_entry()])
    kept.close()
    writer = SpooledWriter(database := Database(), tmp_path / "spool.db", Clock())
    await until(lambda: not failures and writer.num_rows == 0)
    assert database.rows == rows
    await writer.close()
    assert caplog.text.count("cannot be brought over now") == 1


def test_a_damaged_number_of_a_row_is_not_counted_up_to(tmp_path, caplog):
    path = tmp_path / "spool.db"
    kept = Spool(path)
    kept.keep([an_entry() for _ in range(200)])
    with kept._open() as connection:
        connection.execute("UPDATE spool SET rowid = rowid + (1 << 60) WHERE rowid > 100")
    kept.close()
    data = bytearray(path.read_bytes())
    middle = len(data) // 2 // 4096 * 4096
    data[middle : middle + 4096] = bytes(4096)
    path.write_bytes(data)
    assert len(Spool(path).oldest(1000)) > 100
    assert "was damaged" in caplog.text
