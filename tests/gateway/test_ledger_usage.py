"""Usage and costs on both databases: whatever is asked, the answer is what adding up the rows gives."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Awaitable, Callable
from decimal import Decimal

import msgspec
import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from gateway import errors, store
from gateway.clock import Clock
from gateway.ledger import Entry, usage
from gateway.ledger.follow import Follower
from gateway.ledger.sums import FOLLOWER, GAP_S, KINDS, LOOK_S, WIDTHS, WORDS, Rollup
from gateway.ledger.usage import BATCH, Question, Usage, spans
from policies import pricing
from policies.policy import Price
from policies.pricing import Rates
from tests import builders
from tests.builders import an_entry, until, write_chain

DAY_S = 86_400
NOON = 1_795_000_000 // DAY_S * DAY_S + DAY_S // 2
PRICE = Price(
    prompt=Decimal("0.31"), cached_prompt=Decimal("0.07"), completion=Decimal("1.7"), cache_hit=Decimal("0.1")
)


async def rates_of(price_version: str, model: str) -> Rates:
    """Everything costs the same, but for what nobody knows any more."""
    if price_version == "list:lost":
        raise LookupError("there is no such price")
    return pricing.rates_of(PRICE)


def a_random_entry(chance: random.Random, at: int) -> Entry:
    num_prompt, num_completion = chance.randrange(1, 4000), chance.randrange(900)
    tokens = terms_of(num_prompt, chance.randrange(num_prompt), num_completion)
    cache = chance.choice(["miss", "hit", "shared", "bypass"])
    entry = an_entry(
        tenant_id=chance.choice(["ten_1", "ten_2", "ten_3"]),
        key_id=chance.choice(["key_1", "key_2"]),
        model=chance.choice(["demo", "Large", "größer"]),
        cache=cache,
        price_version=chance.choice(["list:1", "list:2", "list:2;batch", "list:lost", "", ";batch"]),
        num_prompt_tokens=tokens.num_prompt_tokens,
        num_cached_tokens=tokens.num_cached_tokens,
        num_completion_tokens=tokens.num_completion_tokens,
        engine_us=chance.randrange(10**7),
        kv_block_ms=chance.randrange(10**6),
        cost_micros=pricing.cost_micros(PRICE, tokens, cache),
        settled_at=at,
    )
    if chance.random() < 0.1:
        return msgspec.structs.replace(
            entry, endpoint="correction", corrects="req_1", num_completion_tokens=-7, cost_micros=-12
        )
    if chance.random() < 0.1:
        nothing = {"num_prompt_tokens": 0, "num_cached_tokens": 0, "num_completion_tokens": 0, "cost_micros": 0}
        return msgspec.structs.replace(entry, status=503, **nothing)
    return entry


def terms_of(num_prompt: int, num_cached: int, num_completion: int) -> pricing.Usage:
    return pricing.Usage(num_prompt, num_cached, num_completion)


def said(entry: Entry, word: str) -> str:
    if word == BATCH:
        return "true" if entry.price_version.endswith(";batch") else "false"
    return str(getattr(entry, word))


def added_up(entries: list[Entry], question: Question) -> dict[usage.Place, dict[str, int]]:
    """The obvious way."""
    found: dict[usage.Place, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for entry in entries:
        if not question.since <= entry.settled_at < question.until:
            continue
        if any(said(entry, word) not in values for word, values in question.only.items()):
            continue
        start = max(question.since, entry.settled_at // question.width_s * question.width_s)
        figures = found[start, tuple(said(entry, word) for word in question.group_by)]
        figures["num_requests"] += entry.corrects is None
        figures["num_owed_requests"] += entry.corrects is None and entry.is_owed
        figures["owed_engine_us"] += entry.engine_us if entry.is_owed and entry.cache not in ("hit", "shared") else 0
        for name in ("num_prompt_tokens", "num_cached_tokens", "num_completion_tokens", "engine_us", "cost_micros"):
            figures[name] += getattr(entry, name)
        if entry.cache in ("hit", "shared"):
            figures["num_prompt_tokens_from_cache"] += entry.num_prompt_tokens
    return found


async def everything(asked: Usage, question: Question, max_lines: int = 1000) -> list[usage.Line]:
    """All parts of the answer."""
    lines: list[usage.Line] = []
    has_more, after = True, None
    while has_more:
        part, has_more = await asked.lines(question, max_lines, after)
        assert len(part) <= max_lines
        lines += part
        after = (part[-1].starts_at, part[-1].words) if part else None
    return lines


def a_question(chance: random.Random) -> Question:
    width_s = chance.choice(WIDTHS)
    since, until = sorted(NOON + 60 * chance.randrange(-4000, 4000) for _ in range(2))
    only = {"tenant_id": ["ten_1", "ten_3"], "model": ["größer", "Large", "none"], "cache": ["hit"], BATCH: ["true"]}
    return Question(
        since=since,
        until=until,
        width_s=width_s,
        group_by=tuple(chance.sample((*WORDS, BATCH), chance.randrange(4))),
        with_charges=True,
        only={word: only[word] for word in chance.sample(sorted(only), chance.randrange(3))},
    )


@pytest.mark.parametrize("seed", range(3))
async def test_an_answer_is_what_adding_up_the_rows_gives(rooms, seed):
    chance = random.Random(seed)
    rollup, asked = Rollup(rooms, rates_of, Clock()), Usage(rooms, rates_of)
    entries: list[Entry] = []
    positions = {1: 1, 2: 1}
    for _ in range(6):
        chain = chance.choice([1, 2])
        rows = [a_random_entry(chance, NOON + chance.randrange(-4 * DAY_S, 4 * DAY_S)) for _ in range(60)]
        entries += await write_chain(rooms, *rows, chain=chain, first_position=positions[chain])
        positions[chain] += len(rows)
        if chance.random() < 0.6:
            await rollup.roll()
        for _ in range(6):
            question = a_question(chance)
            lines = await everything(asked, question, max_lines=chance.choice([1, 7, 1000]))
            expected = added_up(entries, question)
            assert [(line.starts_at, line.words) for line in lines] == sorted(expected), f"seed {seed}"
            for line in lines:
                figures = expected[line.starts_at, line.words]
                assert {name: getattr(line.totals, name) for name in figures} == figures, f"seed {seed}"


@given(st.integers(0, 10_000), st.integers(0, 10_000), st.sampled_from(WIDTHS))
def test_sums_of_few_widths_cover_the_time_without_gaps(since, length, width_s):
    since, until_ = 60 * since, 60 * (since + length)
    covering = spans(since, until_, width_s)
    assert len(covering) <= 5
    at = since
    for span in covering:
        assert (span.since, span.since % span.width_s, span.until % span.width_s) == (at, 0, 0)
        assert span.width_s <= width_s
        at = span.until
    assert at == until_


async def test_what_each_kind_cost_adds_up_to_the_row_in_whatever_spans(rooms):
    chance = random.Random(7)
    rows = [a_random_entry(chance, NOON + number) for number in range(100)]
    known = [row for row in rows if row.price_version != "list:lost"]
    await write_chain(rooms, *rows)
    asked = Usage(rooms, rates_of)
    rollup = Rollup(rooms, rates_of, Clock())
    answers = []
    for _ in range(2):  # from the rows, and from the sums
        for width_s in WIDTHS:
            question = Question(since=NOON - DAY_S, until=NOON + DAY_S, width_s=width_s, with_charges=True)
            lines = await everything(asked, question)
            answers.append([sum(getattr(line.totals, f"{kind}_micros") for line in lines) for kind in KINDS])
            assert sum(line.totals.cost_micros for line in lines) == sum(row.cost_micros for row in rows)
        assert await rollup.roll() in (0, 100)
    of_rows, of_sums = answers[: len(WIDTHS)], answers[len(WIDTHS) :]
    for alike in (of_rows, of_sums):
        assert all(answer == alike[0] for answer in alike)
        assert sum(alike[0]) == sum(row.cost_micros for row in known)
    # A sum is divided as a whole, so each part may be off by what the rounding of its rows comes to.
    assert all(abs(one - other) <= len(rows) for one, other in zip(of_rows[0], of_sums[0], strict=True))
    one = await everything(asked, question)
    charges = one[0].totals.charges()
    assert sum(charge.cost_micros for charge in charges) == one[0].totals.cost_micros
    quantities = {charge.kind: charge.quantity for charge in charges}
    computed = [row for row in rows if row.cache not in ("hit", "shared")]
    kept = [row for row in rows if row.cache in ("hit", "shared")]
    assert quantities["prompt"] == sum(row.num_prompt_tokens - row.num_cached_tokens for row in computed)
    assert quantities["cache_hit"] == sum(row.num_prompt_tokens + row.num_completion_tokens for row in kept)


async def test_what_failed_has_no_part_in_what_others_paid_for(rooms):
    dear = pricing.rates_of(Price(completion=Decimal(2), request=Decimal("0.0001"), engine_second=Decimal("0.5")))

    async def as_dear(price_version: str, model: str) -> Rates:
        return dear

    paid = an_entry(settled_at=NOON, num_completion_tokens=10_000, engine_us=1000, cost_micros=20_600)
    nothing = {"num_prompt_tokens": 0, "num_cached_tokens": 0, "num_completion_tokens": 0}
    failed = [an_entry(settled_at=NOON, status=503, engine_us=10**6, **nothing) for _ in range(50)]
    await write_chain(rooms, *failed, paid)
    asked, rollup = Usage(rooms, as_dear), Rollup(rooms, as_dear, Clock())
    for _ in range(2):  # from the rows, and from the sums
        question = Question(since=NOON, until=NOON + DAY_S, width_s=DAY_S, with_charges=True)
        (line,) = await everything(asked, question)
        totals = line.totals
        assert (totals.completion_micros, totals.request_micros, totals.engine_second_micros) == (20_000, 100, 500)
        assert (totals.num_requests, totals.engine_us, totals.cost_micros) == (51, 50_001_000, 20_600)
        quantities = {charge.kind: charge.quantity for charge in totals.charges()}
        assert (quantities["request"], quantities["engine_second"]) == (1, 1000)
        await rollup.roll()


async def test_a_row_that_comes_late_is_found_before_it_is_in_the_sums_and_after(rooms):
    first, second, third = (an_entry(settled_at=NOON) for _ in range(3))
    await write_chain(rooms, first)
    await write_chain(rooms, third, first_position=3)
    rollup, asked = Rollup(rooms, rates_of, Clock(), lambda: NOON), Usage(rooms, rates_of)
    question = Question(since=NOON, until=NOON + 60, width_s=60)

    async def num_requests() -> int:
        ((line,), _) = await asked.lines(question, 10)
        return line.totals.num_requests

    assert await num_requests() == 2
    assert await rollup.roll() == 1
    assert await num_requests() == 2
    await write_chain(rooms, second, first_position=2)
    assert await num_requests() == 3
    assert await rollup.roll() == 2
    assert await num_requests() == 3


async def test_a_row_that_stays_away_holds_up_no_others_and_counts_when_it_comes(rooms, caplog):
    rows = [an_entry(settled_at=NOON) for _ in range(6)]
    await write_chain(rooms, *rows[1:3], first_position=2)
    await write_chain(rooms, rows[5], first_position=6)
    now = [NOON + GAP_S]
    rollup = Rollup(rooms, rates_of, Clock(), lambda: now[0])
    asked = Usage(rooms, rates_of)
    question = Question(since=NOON, until=NOON + 60, width_s=60)

    async def check(num_requests: int) -> None:
        ((line,), _) = await asked.lines(question, 10)
        assert line.totals.num_requests == num_requests

    assert await rollup.roll() == 0
    await check(3)
    now[0] += 1
    assert await rollup.roll() == 2
    assert await rollup.roll() == 1
    assert caplog.messages == [
        "ledger: chain 1 lacks rows 1 to 1; they count when they come",
        "ledger: chain 1 lacks rows 4 to 5; they count when they come",
    ]
    await check(3)
    await write_chain(rooms, rows[4], first_position=5)
    await check(4)
    assert await rollup.roll() == 0
    await check(4)
    await write_chain(rooms, rows[3], first_position=4)
    await write_chain(rooms, rows[0], first_position=1)
    await check(6)
    assert await rollup.roll() == 3
    await check(6)
    await write_chain(rooms, an_entry(settled_at=NOON), first_position=7)
    assert await rollup.roll() == 1
    assert await rollup.roll() == 0
    await check(7)


@pytest.mark.parametrize("seed", range(2))
async def test_rows_in_whatever_order_they_come_are_added_once(rooms, seed):
    chance = random.Random(seed)
    waiting = {chain: [a_random_entry(chance, NOON) for _ in range(40)] for chain in (1, 2)}
    unwritten = [(chain, position) for chain in waiting for position in range(1, 41)]
    unwritten.sort(key=lambda place: place[1] + chance.uniform(0, 15))
    rollup, asked = Rollup(rooms, rates_of, Clock(), lambda: NOON + 2 * GAP_S), Usage(rooms, rates_of)
    question = Question(since=NOON, until=NOON + 60, width_s=60, group_by=("tenant_id",), with_charges=True)
    written: list[Entry] = []
    while unwritten:
        for chain, position in [unwritten.pop(0) for _ in range(min(len(unwritten), chance.randrange(1, 9)))]:
            entry = waiting[chain][position - 1]
            written += await write_chain(rooms, entry, chain=chain, first_position=position)
        if chance.random() < 0.7:
            await rollup.roll()
        expected = added_up(written, question)
        for line in await everything(asked, question):
            figures = expected.pop((line.starts_at, line.words))
            assert {name: getattr(line.totals, name) for name in figures} == figures, f"seed {seed}"
        assert not expected
    await rollup.roll()
    async with rooms.engine.connect() as connection:
        of_minutes = sa.select(sa.func.sum(store.usage.c.cost_micros)).where(store.usage.c.width_s == 60)
        assert (await connection.execute(of_minutes)).scalar_one() == sum(entry.cost_micros for entry in written)


async def test_a_look_ends_however_many_rows_come_meanwhile(rooms):
    num_written = 0

    async def write_one() -> None:
        nonlocal num_written
        num_written += 1
        entry = an_entry(settled_at=NOON, cost_micros=5, price_version="list:1")
        await write_chain(rooms, entry, first_position=num_written)

    async def rates_while_another_settles(price_version: str, model: str) -> Rates:
        await write_one()
        return await rates_of(price_version, model)

    await write_one()
    rollup = Rollup(rooms, rates_while_another_settles, Clock())
    assert [await rollup.roll() for _ in range(3)] == [1, 1, 1]


async def test_while_too_much_is_not_added_up_there_is_no_answer(rooms, monkeypatch):
    monkeypatch.setattr(usage, "MAX_TAIL", 10)
    await write_chain(rooms, *(an_entry(settled_at=NOON) for _ in range(11)))
    asked = Usage(rooms, rates_of)
    question = Question(since=NOON, until=NOON + 60, width_s=60)
    with pytest.raises(errors.ServiceUnavailable, match="still being added up"):
        await asked.lines(question, 10)
    await Rollup(rooms, rates_of, Clock()).roll()
    ((line,), has_more) = await asked.lines(question, 10)
    assert (line.totals.num_requests, has_more) == (11, False)


async def test_sums_keep_up_and_go_on_when_the_database_was_away(rooms, clock: builders.HandClock, caplog):
    async def reached(position: int) -> bool:
        async with rooms.engine.connect() as connection:
            return (await Follower(rooms, FOLLOWER).positions(connection)).get(1) == position

    async def complained() -> bool:
        return bool(caplog.messages)

    async def it_looks_until(condition: Callable[[], Awaitable[bool]]) -> None:
        while not await condition():
            await until(lambda: clock.waits())
            clock.advance(LOOK_S)

    async with Rollup(rooms, rates_of, clock).watched():
        await write_chain(rooms, an_entry(settled_at=NOON))
        await it_looks_until(lambda: reached(1))
        async with rooms.engine.begin() as connection:
            await connection.execute(sa.text("ALTER TABLE usage RENAME TO hidden"))
        await write_chain(rooms, an_entry(settled_at=NOON), first_position=2)
        await it_looks_until(complained)
        async with rooms.engine.begin() as connection:
            await connection.execute(sa.text("ALTER TABLE hidden RENAME TO usage"))
        await it_looks_until(lambda: reached(2))
    (message,) = caplog.messages
    assert message.startswith("the ledger cannot be added up: ")
    question = Question(since=NOON, until=NOON + 60, width_s=60)
    ((line,), _) = await Usage(rooms, rates_of).lines(question, 10)
    assert line.totals.num_requests == 2
