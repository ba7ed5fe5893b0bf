"""The journal of a batch: durable before it counts, one owner at a time, whole again after whatever has happened."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import threading

import msgspec
import pytest

from gateway.batches import journal as journals
from gateway.batches.journal import ANSWERED, FAILED, WAITING, Busy, Record
from gateway.clock import Clock
from tests.builders import an_entry, until


def a_record(number: int, is_answered: bool = True) -> Record:
    entry = an_entry(num_completion_tokens=number) if is_answered else None
    return Record(number, is_answered, entry, msgspec.Raw(b'{"line":%d}' % number))


async def test_what_was_added_is_found_again_and_counts_once(tmp_path):
    path = tmp_path / "journal"
    async with journals.opened(path, Clock(), 5) as journal:
        assert journal.read() == []
        await asyncio.gather(*(journal.add(a_record(number, number != 1)) for number in (3, 1, 0)))
        await journal.add(a_record(3))
    async with journals.opened(path, Clock(), 5) as journal:
        entries = journal.read()
        assert list(journal.states) == [ANSWERED, FAILED, WAITING, ANSWERED, WAITING]
        assert [entry.num_completion_tokens for entry in entries] == [3, 0]
        assert (journal.counts.num_completed, journal.counts.num_failed, journal.num_waiting) == (2, 1, 2)
        assert journal.counts.num_completion_tokens == 3
        assert list(journal.outputs()) == [(True, b'{"line":0}'), (False, b'{"line":1}'), (True, b'{"line":3}')]


async def test_wherever_it_is_cut_short_the_whole_records_before_count_and_it_is_written_on(tmp_path):
    path = tmp_path / "journal"
    async with journals.opened(path, Clock(), 8) as journal:
        for number in range(4):
            await journal.add(a_record(number))
    whole = path.read_bytes()
    ends = [index + 1 for index, byte in enumerate(whole) if byte == 10]
    for size in [*random.Random(5).sample(range(len(whole)), 40), *ends]:
        path.write_bytes(whole[:size])
        num_whole = sum(end <= size for end in ends)
        async with journals.opened(path, Clock(), 8) as journal:
            assert len(journal.read()) == num_whole
            await journal.add(a_record(7))
        async with journals.opened(path, Clock(), 8) as journal:
            assert len(journal.read()) == num_whole + 1
            assert journal.num_waiting == 7 - num_whole


async def test_one_that_is_damaged_within_is_not_gone_on_with(tmp_path):
    path = tmp_path / "journal"
    async with journals.opened(path, Clock(), 3) as journal:
        for number in range(3):
            await journal.add(a_record(number))
    path.write_bytes(b"x" + path.read_bytes()[1:])
    async with journals.opened(path, Clock(), 3) as journal:
        with pytest.raises(msgspec.DecodeError):
            journal.read()


async def test_nobody_else_has_it_meanwhile(tmp_path):
    async with journals.opened(tmp_path / "journal", Clock(), 1):
        with pytest.raises(Busy):
            async with journals.opened(tmp_path / "journal", Clock(), 1):
                pass
    async with journals.opened(tmp_path / "journal", Clock(), 1):
        pass


async def test_who_leaves_it_waits_for_what_is_being_written(tmp_path, monkeypatch):
    """A file that was opened meanwhile would have the number of this one, and what the thread goes on to do with it."""
    path, is_writing, may_end, sync = tmp_path / "journal", threading.Event(), threading.Event(), os.fdatasync

    def slowly(number: int) -> None:
        is_writing.set()
        may_end.wait()
        sync(number)

    async def write() -> None:
        async with journals.opened(path, Clock(), 1) as journal:
            await journal.add(a_record(0))

    monkeypatch.setattr(os, "fdatasync", slowly)
    writing = asyncio.create_task(write())
    await until(is_writing.is_set)
    writing.cancel()
    try:
        await asyncio.wait([writing], timeout=0.2)
        with pytest.raises(Busy):
            async with journals.opened(path, Clock(), 1):
                pass
    finally:
        may_end.set()
    await asyncio.wait([writing])
    async with journals.opened(path, Clock(), 1) as journal:
        assert len(journal.read()) == 1


async def test_what_the_disk_does_not_take_is_tried_again_and_leaves_no_halves(tmp_path, clock):
    path = tmp_path / "journal"
    async with journals.opened(path, clock, 2) as journal:
        await journal.add(a_record(0))
        before = path.read_bytes()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, hard))
        try:
            adding = asyncio.create_task(journal.add(a_record(1)))
            await until(lambda: journal.is_stuck and clock.waits())
            assert not adding.done()
            assert journal.states[1] == WAITING
            assert path.read_bytes() == before
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        clock.advance(journals.RETRY_S)
        await adding
        assert not journal.is_stuck
        assert len(list(journal.outputs())) == 2
