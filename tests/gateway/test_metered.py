"""An answer that ends where its ticket does, over one gateway's own gauges."""

from __future__ import annotations

from gateway.limits import metered
from policies import wire
from policies.terms import Usage
from tests.builders import a_caller, a_submit, tokens
from tests.gateway.limited import DEMO, a_policy, limits_of, used
from tests.gateway.test_cache_runs import Engine


async def test_only_what_has_not_ended_ends_at_the_ceiling_and_the_worker_is_told(clock):
    limits, engine = limits_of(clock), Engine(clock)
    caller, submit = a_caller(a_policy(tokens_per_minute=44)), a_submit(num_sequences=3, max_tokens=500)
    flight = engine.submit(submit)
    async with limits.admit(caller, DEMO, 4, 1500, submit.request_id, num_sequences=3) as ticket:
        source = metered(flight, ticket, [submit])
        engine.say(flight, range(10), "stop", index=0, num_cached_tokens=3)
        engine.say(flight, range(20), index=1)
        deltas = await source.deltas()
        engine.say(flight, range(20, 50), index=1)
        deltas += await source.deltas()
        assert [len(tokens(deltas, index)) for index in range(3)] == [10, 30, 0]
        ends = [(delta.index, delta.finish.reason) for delta in deltas if delta.finish is not None]
        assert ends == [(0, "stop"), (1, "length"), (2, "length")]
        assert engine.abandoned == [flight]
        ticket.settle(Usage(4, 0, 40))
    assert used(limits, caller) == {"tenant tokens_per_minute": 44}


async def test_an_answer_that_is_cut_owes_its_prompt_as_the_one_found_it_that_began_with_the_fewest(clock):
    limits, engine = limits_of(clock), Engine(clock)
    caller, submit = a_caller(a_policy(tokens_per_minute=44)), a_submit(num_sequences=2, max_tokens=500)
    flight = engine.submit(submit)
    async with limits.admit(caller, DEMO, 4, 1000, submit.request_id, num_sequences=2) as ticket:
        source = metered(flight, ticket, [submit])
        for index, num_cached_tokens in ((0, 1), (1, 3)):
            flight.arrive(wire.Delta(submit.request_id, index, [5], num_cached_tokens=num_cached_tokens), clock.now())
        engine.say(flight, range(50), index=0)
        ends = [delta.finish for delta in await source.deltas() if delta.finish is not None]
        assert [(finish.reason, finish.num_cached_tokens) for finish in ends] == [("length", 1)] * 2
        ticket.settle(Usage(4, 1, 40))
