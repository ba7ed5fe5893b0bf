"""One computation, many readers: each reads all of it, and it goes on until the last of them has left."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest

from gateway import errors
from gateway.cache import Cache, Memory
from gateway.flight import Flight
from policies import settings, wire
from policies.answers import Asked
from policies.policy import Cache as Rules
from tests.builders import a_submit, an_order

SCOPE = ("ten_1", Rules())
TRACEPARENT = f"00-{'4b' * 16}-{'0f' * 8}-01"


class Engine:
    """Keeps flights as a line does, and says what the test wants said."""

    def __init__(self, clock):
        self.clock = clock
        self.flights: list[Flight] = []
        self.abandoned: list[Flight] = []
        self.cancelled: list[tuple[str, int]] = []

    def submit(self, request: wire.Submit, after: Flight | None = None) -> Flight:
        flight = Watched(self, request, an_order(request), self.clock.now())
        self.flights.append(flight)
        return flight

    def abandon(self, flight: Flight) -> None:
        if not flight.finished:
            self.abandoned.append(flight)
            flight.fail(errors.RequestFailed("The request was cancelled."))

    def say(self, flight, token_ids, reason=None, index=0, num_cached_tokens=0, times=(0.0, 0.0, 0.0), engine_s=0.0):
        ends = reason == "stop" and bool(token_ids)
        finish = reason and wire.Finish(reason, num_cached_tokens, 0, *times, engine_s, has_end_token=ends)
        delta = wire.Delta(flight.request.request_id, index, list(token_ids), None, finish)
        flight.arrive(delta, self.clock.now())


class Watched(Flight):
    """A flight whose cancelled sequences can be told apart."""

    def cancel(self, request_id: str, index: int) -> None:
        self.keeper.cancelled.append((self.request.request_id, index))


@pytest.fixture
def engine(clock):
    return Engine(clock)


@pytest.fixture
def cache(clock):
    return Cache(settings.Cache(), b"secret" * 6, Memory(1 << 20, clock), clock)


def asking(num_sequences=1, **sampling) -> Asked:
    submit = a_submit(num_sequences=num_sequences, **{"temperature": 0.0, **sampling})
    return Asked("demo", "fp", [submit], (), False)


def tokens_of(deltas, index=0):
    return [token for delta in deltas if delta.index == index for token in delta.token_ids]


async def read_all(source, num_sequences=1):
    deltas = []
    while sum(delta.finish is not None for delta in deltas) < num_sequences:
        deltas += await source.deltas()
    return deltas


async def turns(num=5):
    for _ in range(num):
        await asyncio.sleep(0)


async def test_equal_requests_at_once_are_one_flight_and_later_ones_are_told_what_is_kept(cache, engine):
    async with cache.look(*SCOPE, asking()) as first, cache.look(*SCOPE, asking()) as second:
        one, other = first.launch(engine.submit), second.launch(engine.submit)
        (flight,) = engine.flights
        assert (one.outcome, other.outcome) == ("miss", "shared")
        engine.say(flight, [1, 2])
        assert tokens_of(await one.deltas()) == [1, 2]
        engine.say(flight, [3], "stop", num_cached_tokens=2)
        deltas = await read_all(other)
        assert tokens_of(deltas) == [1, 2, 3]
        assert {delta.request_id for delta in deltas} == {second._asked.submits[0].request_id}
        assert (await read_all(one))[-1].finish.num_cached_tokens == 2, "what the engine reused is on one bill"
        assert deltas[-1].finish.num_cached_tokens == 0
    async with cache.look(*SCOPE, asking()) as third:
        assert third.outcome == "hit"
        replay = third.launch(engine.submit)
        assert replay.outcome == "hit"
        assert tokens_of(await replay.deltas()) == [1, 2, 3]
    assert len(engine.flights) == 1
    assert not engine.abandoned


@pytest.mark.parametrize("num_prompts", [1, 2])
async def test_whoever_reads_along_knows_whose_computation_it_is(cache, engine, num_prompts):
    def prompts() -> Asked:
        return Asked("demo", "fp", [a_submit(temperature=0.0) for _ in range(num_prompts)], (), False)

    def traced(request: wire.Submit, after: Flight | None) -> Flight:
        return engine.submit(msgspec.structs.replace(request, traceparent=TRACEPARENT))

    async with cache.look(*SCOPE, prompts()) as first, cache.look(*SCOPE, prompts()) as second:
        assert second.followed == ""
        first.launch(traced)
        second.launch(engine.submit)
        assert second.followed == TRACEPARENT
        assert len(engine.flights) == num_prompts


async def test_a_flight_outlives_its_first_reader_and_the_next_one_pays(cache, engine):
    async with cache.look(*SCOPE, asking()) as second:
        async with cache.look(*SCOPE, asking()) as first:
            one = first.launch(engine.submit)
            waiting = asyncio.create_task(one.deltas())
            await turns()
            other = second.launch(engine.submit)
            reading = asyncio.create_task(read_all(other))
            await turns()
            waiting.cancel()  # the one that waited for the worker on behalf of both
        (flight,) = engine.flights
        assert not engine.abandoned
        assert (one.outcome, other.outcome) == ("miss", "miss")
        engine.say(flight, [1], "stop", num_cached_tokens=1)
        deltas = await reading
        assert tokens_of(deltas) == [1]
        assert deltas[-1].finish.num_cached_tokens == 1, "who pays for the prompt has its discount"


async def test_what_the_engine_spent_is_on_the_account_of_the_one_who_pays_in_the_end(cache, engine, clock):
    async with cache.look(*SCOPE, asking()) as first, cache.look(*SCOPE, asking()) as third:
        one = first.launch(engine.submit)
        clock.advance(0.5)
        async with cache.look(*SCOPE, asking()) as second:
            other = second.launch(engine.submit)
            clock.advance(1.0)
            last = third.launch(engine.submit)
            one.close()
            assert not other.is_over
            assert (one.is_over, one.spent.engine_s) == (True, 0.0), "whoever left has nothing to wait for"
            (flight,) = engine.flights
            engine.say(flight, [1], "stop", times=(1.0, 2.0, 3.0), engine_s=0.25)
            for source in (other, last):
                await read_all(source)
        assert (other.spent.engine_s, last.spent.engine_s) == (0.25, 0.0)
        assert other.is_over
        assert last.is_over
        assert other.spent[-3:] == (0.5, 2.0, 3.0), "the half second before it came was not its own"
        assert last.spent[-3:] == (0.0, 1.5, 3.0)


async def test_the_last_reader_takes_the_flight_along(cache, engine):
    async with cache.look(*SCOPE, asking()) as first, cache.look(*SCOPE, asking()) as second:
        first.launch(engine.submit)
        second.launch(engine.submit)
    assert engine.abandoned == engine.flights
    async with cache.look(*SCOPE, asking()) as third:
        assert third.outcome == "miss", "what was not finished is not kept, and nobody joins what has ended"


async def test_all_readers_hear_of_a_failure_after_what_came_before_it_and_nothing_is_kept(cache, engine):
    async with cache.look(*SCOPE, asking()) as first, cache.look(*SCOPE, asking()) as second:
        sources = [first.launch(engine.submit), second.launch(engine.submit)]
        engine.say(engine.flights[0], [1])
        assert tokens_of(await sources[0].deltas()) == [1]
        waiting = asyncio.create_task(sources[0].deltas())
        await turns()
        engine.flights[0].fail(errors.WorkerLost("lost"))
        with pytest.raises(errors.WorkerLost):
            await waiting
        assert tokens_of(await sources[1].deltas()) == [1]
        with pytest.raises(errors.WorkerLost):
            await sources[1].deltas()
    async with cache.look(*SCOPE, asking()) as third:
        assert third.outcome == "miss"


@pytest.mark.parametrize("reason", ["error", "cancelled"])
async def test_an_answer_that_was_broken_off_is_not_kept(cache, engine, reason):
    async with cache.look(*SCOPE, asking()) as first:
        source = first.launch(engine.submit)
        engine.say(engine.flights[0], [1], reason)
        await read_all(source)
    async with cache.look(*SCOPE, asking()) as again:
        assert again.outcome == "miss"


async def test_an_answer_that_ends_with_a_stop_string_is_whole(cache, engine):
    async with cache.look(*SCOPE, asking(2)) as first, cache.look(*SCOPE, asking(2)) as second:
        one, other = first.launch(engine.submit), second.launch(engine.submit)
        (flight,) = engine.flights
        engine.say(flight, [1, 2])
        await one.deltas()
        mine = second._asked.submits[0].request_id
        other.cancel(mine, 0)
        one.cancel(flight.request.request_id, 0)
        assert engine.cancelled == [(flight.request.request_id, 0)], "once, and by the name that the worker knows"
        engine.say(flight, [], "cancelled")
        engine.say(flight, [5], "length", index=1)
        await read_all(one, 2)
    async with cache.look(*SCOPE, asking(2)) as third:
        replay = third.launch(engine.submit)
        deltas = await replay.deltas()
        assert (tokens_of(deltas, 0), tokens_of(deltas, 1)) == ([1, 2], [5])


async def test_a_request_that_is_more_important_does_not_wait_in_the_place_of_one_that_is_less(cache, engine):
    async with (
        cache.look(*SCOPE, asking(), rank=2) as batch,
        cache.look(*SCOPE, asking(), rank=0) as interactive,
        cache.look(*SCOPE, asking(), rank=1) as standard,
    ):
        assert batch.launch(engine.submit).outcome == "miss"
        assert interactive.launch(engine.submit).outcome == "miss"
        assert standard.launch(engine.submit).outcome == "shared", "the better place is the one to share"
        assert len(engine.flights) == 2


async def test_it_does_share_what_a_worker_has_begun(cache, engine, clock):
    async with cache.look(*SCOPE, asking(), rank=2) as batch, cache.look(*SCOPE, asking(), rank=0) as interactive:
        batch.launch(engine.submit)
        engine.flights[0].sent_at = clock.now()
        assert interactive.launch(engine.submit).outcome == "shared"


async def test_what_one_reader_finds_while_it_looks_it_keeps(cache, engine):
    async with cache.look(*SCOPE, asking()) as second:
        async with cache.look(*SCOPE, asking()) as first:
            assert first.outcome == "miss"
            assert second.outcome == "miss"
            first.launch(engine.submit)
            async with cache.look(*SCOPE, asking()) as third:
                assert third.outcome == "shared", "it reads along from now on, so it takes no tokens from its limits"
        assert engine.abandoned, "it left without having launched"
        assert second.launch(engine.submit).outcome == "miss"


async def test_no_cache_computes_afresh_and_leaves_what_it_got(cache, engine):
    for token in (1, 2):
        async with cache.look(*SCOPE, asking(), "no-cache") as found:
            source = found.launch(engine.submit)
            assert source.outcome == "miss"
            engine.say(engine.flights[-1], [token], "stop")
            await read_all(source)
    async with cache.look(*SCOPE, asking()) as found:
        assert tokens_of(await found.launch(engine.submit).deltas()) == [2]


async def test_a_request_that_takes_no_part_is_given_the_flight_itself(cache, engine):
    for scope, control in ((SCOPE, "no-store"), (("ten_1", Rules(exact="off")), "")):
        async with cache.look(*scope, asking(), control) as found:
            source = found.launch(engine.submit)
            assert source.outcome == "bypass"
            engine.say(engine.flights[-1], [1], "stop")
            await read_all(source)
        assert (await cache.held_in_all()).num_entries == 0
    async with cache.look(*SCOPE, asking(), "no-store") as found:
        found.launch(engine.submit)
    assert engine.abandoned == engine.flights[-1:]


async def test_what_is_older_than_the_policy_allows_by_now_is_not_given(cache, engine, monkeypatch):
    async with cache.look("ten_1", Rules(ttl_s=3600), asking()) as found:
        source = found.launch(engine.submit)
        engine.say(engine.flights[0], [1], "stop")
        await read_all(source)
    async with cache.look("ten_1", Rules(ttl_s=1), asking()) as found:
        assert found.outcome == "hit"
    monkeypatch.setattr("gateway.cache.time.time", lambda: 4e9)
    async with cache.look("ten_1", Rules(ttl_s=1), asking()) as found:
        assert found.outcome == "miss"


async def test_a_flush_reaches_what_is_still_being_computed(cache, engine):
    async with cache.look(*SCOPE, asking()) as found:
        source = found.launch(engine.submit)
        await cache.flush(*SCOPE)
        engine.say(engine.flights[0], [1], "stop")
        await read_all(source)
        async with cache.look(*SCOPE, asking()) as another:
            assert another.outcome == "miss"
    assert (await cache.held(*SCOPE)).num_entries == 0


async def test_a_stranger_finds_neither_what_is_being_computed_nor_what_is_kept(cache, engine):
    strangers = [("ten_2", Rules()), ("ten_1", Rules(sharing_group="ten_1")), ("ten_2", Rules(sharing_group="group"))]
    async with cache.look(*SCOPE, asking()) as found:
        source = found.launch(engine.submit)
        for stranger in strangers:
            async with cache.look(*stranger, asking()) as theirs:
                assert theirs.outcome == "miss"
        engine.say(engine.flights[0], [1], "stop")
        await read_all(source)
    for stranger in strangers:
        async with cache.look(*stranger, asking()) as theirs:
            assert theirs.outcome == "miss"
            assert theirs.launch(engine.submit).outcome == "miss"


async def test_tenants_that_name_the_same_group_share_both(cache, engine):
    group = Rules(sharing_group="group")
    async with cache.look("ten_1", group, asking()) as one, cache.look("ten_2", group, asking()) as other:
        source = one.launch(engine.submit)
        assert other.launch(engine.submit).outcome == "shared"
        engine.say(engine.flights[0], [1], "stop")
        await read_all(source)
    async with cache.look("ten_3", group, asking()) as third:
        assert third.outcome == "hit"


async def test_a_long_walk_loses_no_token_and_leaves_no_flight_behind(clock):
    for seed in range(60):
        await walk(seed, clock)


async def walk(seed: int, clock) -> None:
    draw, engine = random.Random(seed), Engine(clock)
    cache = Cache(settings.Cache(), b"secret" * 6, Memory(1 << 20, clock), clock)
    said: dict[str, list[int]] = {}
    readers: set[asyncio.Task] = set()
    results: list[tuple[list[int], bool]] = []

    async def read(patience: int) -> None:
        async with cache.look(*SCOPE, asking(max_tokens=50)) as found:
            if draw.random() < 0.3:
                await asyncio.sleep(0)
            source = found.launch(engine.submit)
            got: list[int] = []
            for _ in range(patience):
                deltas = await source.deltas()
                got += tokens_of(deltas)
                if deltas[-1].finish is not None:
                    results.append((got, True))
                    return
            results.append((got, False))

    def open_flights():
        return [flight for flight in engine.flights if not flight.finished]

    for _ in range(300):
        match draw.randrange(4):
            case 0 if len(readers) < 8:
                task = asyncio.create_task(read(draw.choice([1, 3, 1000])))
                readers.add(task)
                task.add_done_callback(readers.discard)
            case 1 if readers:
                draw.choice(sorted(readers, key=id)).cancel()
            case 2 if open_flights():
                flight = draw.choice(open_flights())
                tokens = said.setdefault(flight.request.request_id, [])
                tokens.append(len(tokens))  # so a reader can tell what it missed
                ends = draw.random() < 0.1
                engine.say(flight, tokens[-1:], "stop" if ends else None)
                if ends:
                    await cache._keeper.flush(*cache._scopes(*SCOPE))
            case _:
                await turns(draw.randrange(4))
        for got, _ in results:
            assert got == list(range(len(got))), seed
        assert len([run for run in cache._runs.values() if not run.is_over]) == len(cache._runs), seed
    for task in list(readers):
        task.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    await turns()
    assert not cache._runs, seed
    assert not open_flights(), seed
