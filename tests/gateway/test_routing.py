"""Two workers of one model: who gets which request, by what each of them is about to have or says that it has."""

from __future__ import annotations

import msgspec
import pytest

from policies import wire
from policies.prefix import digests_of
from tests import builders
from tests.builders import answer, dispatching, until

LONG = list(range(2000))


def asking(token_ids: list[int], salt: bytes = b"") -> wire.Submit:
    return msgspec.structs.replace(builders.a_submit(), prompt_token_ids=token_ids, cache_salt=salt)


def seats(dispatch):
    (line,) = dispatch._lines.values()
    return list(line.seats.values())


def worker_of(flight):
    assert flight.worker is not None
    return flight.worker


async def test_prompts_that_begin_alike_go_to_one_worker_and_others_to_the_other(start_scripted_worker):
    addresses = [await start_scripted_worker("--fault", "mute") for _ in range(2)]
    async with dispatching(*addresses) as dispatch:
        first = builders.send(dispatch, asking(LONG))
        other = builders.send(dispatch, asking(LONG[::-1]))
        alike = builders.send(dispatch, asking([*LONG[:1900], 7]))
        alike_too = builders.send(dispatch, asking([*LONG[::-1], 7]))
        assert worker_of(first) is not worker_of(other)
        assert worker_of(alike) is worker_of(first)
        assert worker_of(alike_too) is worker_of(other)
        assert alike.num_missing_tokens < 100


async def test_many_prompts_that_begin_alike_keep_every_worker_busy(start_scripted_worker):
    addresses = [await start_scripted_worker("--fault", "mute", "--num-blocks", 8192) for _ in range(2)]
    async with dispatching(*addresses) as dispatch:
        for number in range(24):
            builders.send(dispatch, asking([*LONG, number]))
        assert min(seat.num_sequences for seat in seats(dispatch)) > 8


async def test_a_short_prompt_goes_around_a_worker_that_has_a_long_one_to_compute(start_scripted_worker):
    addresses = [await start_scripted_worker("--fault", "mute") for _ in range(2)]
    async with dispatching(*addresses) as dispatch:
        long = builders.send(dispatch, asking(LONG))
        for _ in range(5):
            assert worker_of(builders.send(dispatch, builders.a_submit())) is not worker_of(long)


async def test_prompts_of_strangers_share_nothing(start_scripted_worker):
    addresses = [await start_scripted_worker("--fault", "mute") for _ in range(2)]
    async with dispatching(*addresses) as dispatch:
        one = builders.send(dispatch, asking(LONG, b"one"))
        other = builders.send(dispatch, asking(LONG, b"other"))
        assert worker_of(one) is not worker_of(other)
        assert other.num_missing_tokens == len(LONG)


async def test_what_a_worker_says_that_it_keeps_brings_it_the_request(start_scripted_worker):
    addresses = [await start_scripted_worker("--fault", "mute") for _ in range(2)]
    async with dispatching(*addresses) as dispatch:
        _, other = seats(dispatch)
        digests = digests_of(LONG, other.worker.facts.block_size, b"", 1024)
        other.kept(wire.KvEvents(digests, []))
        flight = builders.send(dispatch, asking(LONG))
        assert worker_of(flight) is other.worker
        other.kept(wire.KvEvents([], digests))
        assert other.candidate(flight).num_matched_tokens > 0, "it is computing them"


async def test_a_single_worker_has_no_prompt_named(start_scripted_worker):
    async with dispatching(await start_scripted_worker("--fault", "mute")) as dispatch:
        assert builders.send(dispatch, asking(LONG)).digests == []


async def test_what_was_computed_is_remembered_until_the_worker_has_told_of_it(start_scripted_worker):
    addresses = [await start_scripted_worker("--stats-s", 0.01) for _ in range(2)]
    async with dispatching(*addresses) as dispatch:
        flight = builders.send(dispatch, asking(LONG))
        (seat,) = [seat for seat in seats(dispatch) if seat.worker is flight.worker]
        await answer(flight)
        assert seat.candidate(flight).num_matched_tokens > 0
        await until(lambda: not seat.candidate(flight).num_matched_tokens)  # this one keeps nothing
        assert seat.num_pending_tokens == 0


async def test_a_worker_that_keeps_more_than_it_has_is_at_fault(start_scripted_worker):
    async with dispatching(await start_scripted_worker("--num-blocks", 4)) as dispatch:
        (seat,) = seats(dispatch)
        with pytest.raises(wire.WireError, match="5 blocks"):
            seat.kept(wire.KvEvents([bytes([number]) * 16 for number in range(5)], []))
