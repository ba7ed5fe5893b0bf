"""Marks: what a stream's client may have seen is never further ahead of the disk than agreed, and is owed whoever
dies."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
from collections.abc import AsyncIterator
from decimal import Decimal
from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa

from gateway import store
from gateway.clock import Clock
from gateway.errors import LedgerBehind
from gateway.ledger import Ledger, open_chain, writer_for
from gateway.ledger.entry import Entry
from gateway.ledger.marks import Mark, Marks, Progress
from gateway.ledger.marks.recovery import Recovery
from gateway.ledger.marks.segment import FILE_BYTES, NUM_SLOTS, OPENINGS_AT, Opening, Segment, Word, read, spelled
from gateway.ledger.spool import Spool, SpooledWriter
from gateway.store import Store
from policies import settings, wire
from policies.policy import Price
from policies.pricing import rates_of
from tests.builders import PATIENCE_S, an_entry, until

PROGRESS = Progress(num_cached_tokens=4, cache="miss", ttft_ms=12.5, queue_ms=0.25, duration_ms=250.0)
MARK_TOKENS = 10
FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "marks"


@pytest.fixture
async def marks(directory: Path) -> AsyncIterator[Marks]:
    async with Marks(directory, MARK_TOKENS, Clock()).opened() as marks:
        yield marks


class Disk:
    """What a machine that is switched off would find: each file as it was when it was last brought to the disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files: dict[Path, bytes] = {}
        self.failure: OSError | None = None
        really = Segment.sync

        def sync(segment: Segment) -> None:
            if self.failure is not None:
                raise self.failure
            self.files[segment.path] = segment.path.read_bytes()  # no later than what is brought there
            really(segment)

        monkeypatch.setattr(Segment, "sync", sync)

    def num_tokens(self, directory: Path) -> dict[str, int]:
        """By request."""
        found: dict[str, int] = {}
        directory.mkdir()
        for number, data in enumerate(self.files.values()):
            path = directory / f"{number}.marks"
            path.write_bytes(data)
            found |= {request_id: words[Word.TOKENS] for request_id, words in left_in(directory).items()}
            path.unlink()
        directory.rmdir()
        return found


def an_opening(**others: object) -> Entry:
    return an_entry(status=500, finish_reason="error", num_cached_tokens=0, num_completion_tokens=0, **others)


def left_in(directory: Path) -> dict[str, tuple[int, ...]]:
    """The slots of streams that were not settled, as a later gateway reads them, by request."""
    found = {}
    for path in directory.glob("*.marks"):
        with path.open("rb") as file:
            left, torn = read(file.fileno())
        assert not torn
        found.update({each.opening.entry.request_id: each.words for each in left})
    return found


async def deliver(mark: Mark, num_tokens: int) -> None:
    """As a reply does it."""
    async with asyncio.timeout(PATIENCE_S):
        await mark.room(num_tokens)
    mark.reached(num_tokens)


async def test_nothing_may_be_delivered_before_the_opening_is_on_the_disk(marks):
    mark = marks.open(an_opening(), None, lambda: PROGRESS)
    assert mark.allowed < 0
    await mark.room(1)
    assert mark.allowed == MARK_TOKENS


async def test_a_killed_process_leaves_exactly_what_was_delivered(marks, directory):
    mark, settled = (marks.open(an_opening(), None, lambda: PROGRESS) for _ in range(2))
    for num_tokens in (1, 2, 7):
        await deliver(mark, num_tokens)
    await deliver(settled, 3)
    settled.end()
    (words,) = left_in(directory).values()
    assert (words[Word.TOKENS], words[Word.CACHED_TOKENS], words[Word.TTFT_US]) == (7, 4, 12_500)


@pytest.mark.parametrize("seed", range(3))
async def test_whenever_the_machine_is_lost_no_stream_is_further_ahead_than_agreed(seed, tmp_path, monkeypatch):
    disk, chance = Disk(monkeypatch), random.Random(seed)
    monkeypatch.setattr("gateway.ledger.marks.segment.NUM_SLOTS", 8)  # so that files fill up, too
    async with Marks(tmp_path / "marks", MARK_TOKENS, Clock()).opened() as marks:
        streams: dict[str, tuple[Mark, int]] = {}
        for _ in range(300):
            if len(streams) < 12 and chance.random() < 0.3:
                entry = an_opening()
                streams[entry.request_id] = (marks.open(entry, None, lambda: PROGRESS), 0)
            if not streams:
                continue
            request_id = chance.choice(list(streams))
            mark, num_tokens = streams[request_id]
            if chance.random() < 0.05:
                mark.end()
                del streams[request_id]
            else:
                num_tokens += chance.randint(1, MARK_TOKENS)
                await deliver(mark, num_tokens)
                streams[request_id] = (mark, num_tokens)
            durable = disk.num_tokens(tmp_path / "switched off")
            for request_id, (_, num_tokens) in streams.items():
                if num_tokens:
                    assert durable[request_id] <= num_tokens <= durable[request_id] + MARK_TOKENS


async def test_while_the_disk_fails_streams_wait_and_nobody_is_let_in(marks, monkeypatch):
    disk = Disk(monkeypatch)
    mark = marks.open(an_opening(), None, lambda: PROGRESS)
    await deliver(mark, MARK_TOKENS)
    disk.failure = FULL
    waiting = asyncio.create_task(deliver(mark, MARK_TOKENS + 1))
    await until(lambda: marks._failure)
    with pytest.raises(LedgerBehind):
        marks.check_room()
    with pytest.raises(LedgerBehind):  # nothing was delivered of it, so it may as well be refused
        await marks.open(an_opening(), None, lambda: PROGRESS).room(1)
    assert not waiting.done()
    disk.failure = None
    await waiting
    marks.check_room()


async def test_a_file_whose_streams_are_settled_is_removed(directory):
    async with Marks(directory, MARK_TOKENS, Clock()).opened() as marks:
        streams = [marks.open(an_opening(), None, lambda: PROGRESS) for _ in range(NUM_SLOTS + 1)]
        first = streams[0].segment.path
        for mark in streams[1:]:
            mark.end()
        assert first.exists()
        streams[0].end()
        await until(lambda: not first.exists())
    assert not list(directory.glob("*.marks"))


def test_more_tokens_than_agreed_are_delivered_one_portion_after_the_other():
    mark = Mark.__new__(Mark)
    mark.most = MARK_TOKENS
    logprobs = [wire.TokenLogprob(-float(token), [], []) for token in range(24)]
    finish = wire.Finish("length", 0, 0, 0.0, 0.0, 0.0)
    rest = [wire.Delta("req_1", 0, list(range(3))), wire.Delta("req_1", 1, list(range(24)), logprobs, finish)]
    portions = []
    while rest:
        portion, rest = mark.portion(rest)
        portions.append(portion)
    assert [sum(len(delta.token_ids) for delta in portion) for portion in portions] == [10, 10, 7]
    second = [delta for portion in portions for delta in portion if delta.index == 1]
    assert [token for delta in second for token in delta.token_ids] == list(range(24))
    assert [logprob for delta in second for logprob in delta.logprobs] == logprobs
    assert [delta.finish for delta in second] == [None, None, finish]


# Recovery


@contextlib.asynccontextmanager
async def settling(rooms: Store, spooled: bool = False) -> AsyncIterator[tuple[Ledger, SpooledWriter | None]]:
    writer, spool = writer_for(rooms), None
    if spooled:
        writer = spool = SpooledWriter(writer, rooms.data_dir / "spool.db", Clock())
    ledger = Ledger(writer, settings.Store(), Clock(), await open_chain(rooms))
    yield ledger, spool
    await ledger.close(PATIENCE_S)


async def rows(rooms: Store) -> dict[str, sa.Row]:
    async with rooms.engine.connect() as connection:
        return {row.request_id: row for row in await connection.execute(sa.select(store.ledger))}


async def recover(directory: Path, rooms: Store) -> None:
    async with settling(rooms) as (ledger, _):
        assert await Recovery(directory, rooms, ledger, None, Clock()).tried()


def abandon(directory: Path, *streams: tuple[Entry, int], rates=None) -> Path:
    """Leaves a file as a process does that is killed: streams with so many tokens delivered."""
    segment = Segment(directory)
    for entry, num_tokens in streams:
        opening = msgspec.msgpack.encode(Opening(entry, "" if rates is None else spelled(rates)))
        first, offset = segment.take(opening)
        segment.keep(opening, offset)
        segment.words[first + Word.TOKENS] = num_tokens
        segment.words[first + Word.CACHED_TOKENS] = 4
        segment.words[first + Word.TTFT_US] = 12_500
    segment.close()
    return segment.path


async def test_a_stream_that_was_left_owes_what_was_delivered_at_its_own_price(rooms, directory):
    price = Price(prompt=Decimal(1), cached_prompt=Decimal("0.5"), completion=Decimal(2), request=Decimal(1_000_000))
    begun, just_begun, unseen = an_opening(), an_opening(), an_opening()
    path = abandon(directory, (begun, 34), (just_begun, 1), (unseen, 0), rates=rates_of(price))
    await recover(directory, rooms)
    found = await rows(rooms)
    row = found[begun.request_id]
    assert (row.status, row.finish_reason, row.ttft_ms) == (500, "error", 12.5)
    assert (row.num_prompt_tokens, row.num_cached_tokens, row.num_completion_tokens) == (12, 4, 34)
    assert row.cost_micros == 1_000_000_000_000 + 8 + 2 + 68
    assert found[just_begun.request_id].cost_micros == 1_000_000_000_000 + 8 + 2 + 2
    assert (found[unseen.request_id].num_prompt_tokens, found[unseen.request_id].cost_micros) == (0, 0)
    assert not path.exists()


@pytest.mark.parametrize(("num_tokens", "num_reasoning", "cost"), [(9, 6, 3 * 2 + 6 * 5), (4, 4, 4 * 5)])
async def test_reasoning_of_a_stream_that_was_left_has_its_own_price(num_tokens, num_reasoning, cost, rooms, directory):
    """Of what was counted before it was delivered only what was delivered is owed."""
    entry, progress = an_opening(), msgspec.structs.replace(PROGRESS, num_reasoning_tokens=6)
    price = Price(completion=Decimal(2), reasoning=Decimal(5))
    async with Marks(directory, MARK_TOKENS, Clock()).opened() as marks:
        await deliver(marks.open(entry, rates_of(price), lambda: progress), num_tokens)
    await recover(directory, rooms)
    row = (await rows(rooms))[entry.request_id]
    assert (row.num_completion_tokens, row.num_reasoning_tokens, row.cost_micros) == (num_tokens, num_reasoning, cost)


async def test_a_stream_that_was_settled_is_not_settled_again(rooms, directory):
    settled, kept, left = an_opening(), an_opening(), an_opening()
    async with settling(rooms, spooled=True) as (ledger, spool):
        await ledger.settle(settled)
        Spool(rooms.data_dir / "spool.db").keep([msgspec.structs.replace(kept, chain=1, position=7)])
        abandon(directory, (settled, 5), (kept, 5), (left, 5))
        assert await Recovery(directory, rooms, ledger, spool, Clock()).tried()
    found = await rows(rooms)
    assert found[settled.request_id].num_completion_tokens == 0
    assert found[left.request_id].num_completion_tokens == 5
    assert kept.request_id not in found


async def test_recovering_twice_is_recovering_once(rooms, directory):
    entry = an_opening()
    path = abandon(directory, (entry, 5))
    data = path.read_bytes()
    await recover(directory, rooms)
    path.write_bytes(data)
    await recover(directory, rooms)
    assert len(await rows(rooms)) == 1


async def test_what_a_living_gateway_writes_is_left_to_it(rooms, directory, marks):
    mark = marks.open(an_opening(), None, lambda: PROGRESS)
    await deliver(mark, 5)
    await recover(directory, rooms)
    assert not await rows(rooms)
    assert left_in(directory)
    mark.end()


@pytest.mark.parametrize("seed", range(5))
async def test_of_a_file_that_is_torn_the_rest_is_recovered_and_what_is_lost_is_told(seed, rooms, directory, caplog):
    chance, streams = random.Random(seed), [(an_opening(), 5) for _ in range(20)]
    path = abandon(directory, *streams)
    data = bytearray(path.read_bytes())
    lost = chance.sample(range(20), 3)
    opening_bytes = len(data[OPENINGS_AT:].rstrip(b"\0")) // 20
    for number in lost:
        data[OPENINGS_AT + opening_bytes * number + chance.randrange(opening_bytes - 1)] ^= 0xFF
    path.write_bytes(data)
    await recover(directory, rooms)
    expected = {entry.request_id for number, (entry, _) in enumerate(streams) if number not in lost}
    assert set(await rows(rooms)) == expected
    assert caplog.text.count("of which 5 tokens were delivered") == 3
    assert path.with_suffix(".torn").exists()


@pytest.mark.parametrize("num_bytes", [0, 10, 5000, OPENINGS_AT + 100])
async def test_a_file_that_is_cut_is_no_obstacle(num_bytes, rooms, directory):
    path, whole = abandon(directory, (an_opening(), 5)), abandon(directory, (an_opening(), 5))
    assert whole.stat().st_size == FILE_BYTES
    os.truncate(path, num_bytes)
    (directory / "of somebody else.marks").write_text("no file of ours")
    await recover(directory, rooms)
    assert len(await rows(rooms)) == 1
