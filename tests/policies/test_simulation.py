"""A trial: what it says would have happened, held against what its parts must do."""

from __future__ import annotations

import random
from decimal import Decimal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import simulation
from policies.costs import predicted
from policies.policy import Budget, Limits, Narrowing, Policy, Price
from policies.pricelist import Listed
from policies.settings import CLASSES
from policies.simulation import Arrival, NarrowedKey, Outcome, TooMuch, Trial, WorkerModel, check, run, worker
from policies.simulation.worker import Work

SMALL = WorkerModel(max_sequences=4, num_blocks=200)
ANYTHING = Policy(limits=Limits())


def at(at_s: float, num_prompt_tokens: int = 100, num_completion_tokens: int = 20, **facts) -> Arrival:
    return Arrival(
        **{
            "at_s": at_s,
            "tenant": "a",
            "model": "m",
            "num_prompt_tokens": num_prompt_tokens,
            "num_completion_tokens": num_completion_tokens,
            **facts,
        }
    )


def trial(*arrivals: Arrival, policy: Policy = ANYTHING, model: WorkerModel = SMALL, **facts) -> Trial:
    policies = {arrival.tenant: policy for arrival in arrivals}
    return Trial(**{"arrivals": arrivals, "policies": policies, "workers": {"m": model}, **facts})


def tokens_of(outcome: Outcome) -> int:
    return outcome.total.num_prompt_tokens + outcome.total.num_completion_tokens


def test_a_request_alone_takes_what_its_steps_cost():
    outcome = run(trial(at(5.0, 100, 3)))
    prompt = Work(num_prefill_tokens=100, num_prefill_pairs=5050, num_chunks=1)
    steps = [prompt, Work(num_decodes=1, num_decode_context_tokens=101), Work(0, 1, 102)]
    seconds = [predicted(SMALL.weights, work) for work in steps]
    assert outcome.total.ttft_ms.p50 == pytest.approx(1e3 * seconds[0])
    assert outcome.total.tpot_ms.max == pytest.approx(1e3 * sum(seconds[1:]) / 2)
    assert outcome.duration_s == pytest.approx(sum(seconds))
    assert outcome.utilisation == pytest.approx(1.0)


def test_what_was_found_in_a_cache_is_not_computed_again():
    cold = run(trial(at(0.0, 4000, 2))).total.ttft_ms.max
    warm = run(trial(at(0.0, 4000, 2, num_cached_tokens=3968)))
    assert warm.total.ttft_ms.max < cold / 2
    assert warm.total.num_cached_tokens == 3968


def test_a_ceiling_on_tokens_is_never_passed_and_says_so():
    arrivals = [at(index / 100, 50, 50) for index in range(200)]
    outcome = run(trial(*arrivals, policy=Policy(limits=Limits(tokens_per_minute=2000))))
    assert tokens_of(outcome) == 2000
    assert outcome.total.refused == {"tokens": 180}


def test_open_requests_are_counted_for_as_long_as_they_are_open():
    slow = msgspec.structs.replace(SMALL, weights=(1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0))
    arrivals = [at(0.0, 10, 100), at(99.0), at(100.5)]
    outcome = run(trial(*arrivals, policy=Policy(limits=Limits(concurrent_requests=1)), model=slow))
    assert outcome.total.refused == {"concurrent_requests": 1}
    assert outcome.total.num_admitted == 2


def test_money_that_runs_out_ends_the_answer_and_then_refuses():
    policy = Policy(
        budget=Budget(amount=Decimal("0.00025")), prices={"*": Price(prompt=Decimal(1), completion=Decimal(1))}
    )
    outcome = run(trial(at(0.0, 100, 1000), at(60.0, 100, 1000), policy=policy, completion_estimate=10))
    assert outcome.total.num_cut == 1
    assert outcome.total.num_completion_tokens == 150
    assert outcome.total.cost_micros == 250
    assert outcome.total.refused == {"budget": 1}


def test_a_key_is_narrowed_and_its_own_budget_is_spent_by_those_it_was_rotated_into_too():
    policy = Policy(budget=Budget(amount=Decimal(1)), prices={"*": Price(prompt=Decimal(1), completion=Decimal(1))})
    own = NarrowedKey(narrowing=Narrowing(budget=Budget(amount=Decimal("0.00035"), period="day")), purse_id="first")
    other = NarrowedKey(narrowing=Narrowing(models=("another",)))
    arrivals = [at(60.0 * n, key=key) for n, key in enumerate(("first", "second", "first", "second", "free", "other"))]
    keys = {"first": own, "second": own, "other": other}
    outcome = run(trial(*arrivals, policy=policy, keys=keys, completion_estimate=10))
    assert outcome.total.refused == {"budget": 1, "model_not_found": 1}
    assert outcome.total.num_cut == 1
    assert outcome.total.cost_micros == 350 + 120
    arrivals = [at(90_000.0 * n, key="first") for n in range(3)]
    outcome = run(trial(*arrivals, policy=policy, keys=keys, completion_estimate=10))
    assert (outcome.total.num_admitted, outcome.total.num_cut) == (3, 0), "each day begins with nothing spent"


def test_what_is_spent_goes_by_the_price_list_for_the_class_that_serves_and_by_the_engines_seconds():
    listed = (
        Listed(1, "*", "*", 0, Price(completion=Decimal(1))),
        Listed(2, "*", "batch", 0, Price(completion=Decimal("0.5"))),
        Listed(3, "m", "interactive", 0, Price(engine_second=Decimal(1))),
    )
    arrivals = [at(60.0 * index, 100, 50, service_tier=tier) for index, tier in enumerate(("auto", "flex", "priority"))]
    outcome = run(trial(*arrivals, policy=Policy(discount=Decimal("0.2")), prices=listed))
    costs = [outcome.classes[name].cost_micros for name in ("standard", "batch", "interactive")]
    assert costs == [40, 20, round(0.8e6 * outcome.classes["interactive"].engine_s)]
    own = Policy(prices={"*": Price(completion=Decimal(10))})
    assert run(trial(*arrivals, policy=own, prices=listed)).total.cost_micros == 1500


def test_a_model_that_is_not_there_or_not_allowed_is_the_same():
    outcome = run(trial(at(0.0, model="other"), at(0.0), policy=Policy(models=("other",))))
    assert outcome.total.refused == {"model_not_found": 2}


def test_what_no_worker_can_hold_is_refused():
    assert run(trial(at(0.0, 6400, 1))).total.refused == {"context_length_exceeded": 1}
    assert run(trial(at(0.0, 6399, 1))).total.num_admitted == 1


def test_who_waits_too_long_goes_and_a_full_line_takes_no_more():
    brief = {**CLASSES, "standard": msgspec.structs.replace(CLASSES["standard"], max_wait_s=0.5, max_waiting=3)}
    outcome = run(trial(*[at(0.0, 100, 1000) for _ in range(10)], classes=brief))
    assert outcome.total.refused == {"queue_full": 2, "queue_timeout": 3}
    assert outcome.total.longest_wait_ms == 500.0


def test_a_tenant_that_finds_the_line_full_of_anothers_requests_has_the_place_of_the_last_of_them():
    brief = {**CLASSES, "standard": msgspec.structs.replace(CLASSES["standard"], max_wait_s=0.5, max_waiting=3)}
    arrivals = [*[at(0.0, 100, 1000) for _ in range(10)], at(0.1, 100, 1000, tenant="late")]
    outcome = run(trial(*arrivals, classes=brief))
    assert outcome.total.refused == {"queue_full": 3, "queue_timeout": 3}
    assert outcome.tenants["late"].refused == {"queue_timeout": 1}


def test_a_first_token_that_would_come_too_late_is_not_promised():
    strict = {**CLASSES, "standard": msgspec.structs.replace(CLASSES["standard"], max_ttft_ms=2000.0)}
    outcome = run(trial(*[at(0.0, 1000, 300) for _ in range(60)], classes=strict))
    assert outcome.total.refused["slow_down"] > 20
    assert outcome.total.ttft_ms.max < 4000.0


def test_the_more_important_class_goes_first_and_the_least_one_has_its_share():
    rng = random.Random(1)
    arrivals = [
        at(rng.uniform(0.0, 60.0), 200, 100, tenant=tenant, service_tier=tier)
        for tenant, tier in (("chat", "priority"), ("tools", "default"), ("night", "flex"))
        for _ in range(400)
    ]
    outcome = run(trial(*arrivals))
    chat, tools, night = (outcome.classes[name] for name in ("interactive", "standard", "batch"))
    assert chat.ttft_ms.p95 < tools.ttft_ms.p95 < night.ttft_ms.p95
    assert night.share_while_waiting >= CLASSES["batch"].share - 0.02
    assert outcome.tenants["night"].num_admitted == night.num_admitted


def test_equal_tenants_are_served_alike_however_much_one_asks_for():
    arrivals = [at(0.0, 200, 50, tenant="flood") for _ in range(300)]
    arrivals += [at(index * 0.05, 200, 50, tenant="calm") for index in range(50)]
    outcome = run(trial(*arrivals, model=WorkerModel(max_sequences=2)))
    assert outcome.tenants["calm"].ttft_ms.p50 < outcome.tenants["flood"].ttft_ms.p50 / 2


@st.composite
def trials(draw) -> Trial:
    rng = random.Random(draw(st.integers(0, 2**32 - 1)))
    arrivals = [
        at(
            rng.uniform(0.0, 20.0),
            rng.randint(1, 1500),
            rng.randint(1, 300),
            tenant=rng.choice("abc"),
            num_cached_tokens=rng.choice((0, 0, 32, 320)),
            service_tier=rng.choice(("auto", "default", "flex", "priority")),
            max_completion_tokens=rng.choice((None, 100, 2000)),
        )
        for _ in range(rng.randint(1, 80))
    ]
    policies = {
        "a": Policy(weight=2.0),
        "b": Policy(limits=Limits(tokens_per_minute=20_000, requests_per_minute=15)),
        "c": Policy(sla_class="batch", sla_classes=("batch",), limits=Limits(concurrent_requests=4)),
    }
    model = WorkerModel(
        replicas=rng.choice((1, 2)),
        max_sequences=rng.choice((1, 3, 16)),
        num_blocks=rng.choice((60, 120, 1000)),
        max_slowdown=rng.choice((0.0, 2.0)),
    )
    return Trial(arrivals=tuple(arrivals), policies=policies, workers={"m": model})


@settings(max_examples=25, deadline=None)
@given(trials())
def test_every_request_is_admitted_or_refused_and_the_parts_add_up(asked):
    outcome = run(asked)
    total = outcome.total
    assert total.num_requests == len(asked.arrivals)
    assert total.num_admitted + sum(total.refused.values()) == total.num_requests
    assert total.num_served_tokens == tokens_of(outcome)
    assert total.num_unfinished == 0
    num_workers = asked.workers["m"].replicas
    assert total.engine_s == pytest.approx(outcome.utilisation * outcome.duration_s * num_workers)
    for parts in (outcome.classes.values(), outcome.tenants.values()):
        for field in ("num_requests", "num_admitted", "num_prompt_tokens", "num_completion_tokens", "cost_micros"):
            assert sum(getattr(part, field) for part in parts) == getattr(total, field)
    assert run(asked) == outcome, "the same trial has another outcome"


@settings(max_examples=20, deadline=None)
@given(trials())
def test_no_class_waits_longer_for_its_turn_than_the_stated_bound(asked):
    for part in run(asked).classes.values():
        assert part.longest_gap_tokens <= part.gap_bound_tokens


@settings(max_examples=20, deadline=None)
@given(trials(), st.floats(0.0, 20.0))
def test_a_trial_that_stops_leaves_the_rest_unfinished(asked, stops_at_s):
    whole, part = run(asked).total, run(msgspec.structs.replace(asked, stops_at_s=stops_at_s)).total
    assert part.num_requests == sum(arrival.at_s <= stops_at_s for arrival in asked.arrivals)
    assert part.num_admitted + part.num_unfinished + sum(part.refused.values()) == part.num_requests
    assert part.num_admitted <= whole.num_admitted
    assert part.num_served_tokens >= part.num_prompt_tokens + part.num_completion_tokens


@settings(max_examples=20, deadline=None)
@given(trials())
def test_steps_taken_at_once_change_nothing(asked):
    at_once = run(asked)
    whole, worker.MAX_STRETCH = worker.MAX_STRETCH, 1
    try:
        one_by_one = run(asked)
    finally:
        worker.MAX_STRETCH = whole
    assert one_by_one.total.num_admitted == at_once.total.num_admitted
    assert one_by_one.total.num_completion_tokens == at_once.total.num_completion_tokens
    assert one_by_one.total.ttft_ms.max == pytest.approx(at_once.total.ttft_ms.max, rel=1e-6)
    assert one_by_one.duration_s == pytest.approx(at_once.duration_s, rel=1e-6)


def test_a_trial_that_cannot_be_run_names_its_fields():
    asked = Trial(arrivals=(at(0.0, tenant="x"),), policies={"a": Policy(sla_class="gold")}, workers={})
    assert check(asked) == ["policies.a.sla_class", "arrivals.0.tenant"]
    assert check(trial()) == ["arrivals"]
    assert check(trial(at(0.0))) == []


def test_more_than_a_bounded_number_of_steps_is_not_computed(monkeypatch):
    monkeypatch.setattr(simulation, "MAX_STEPS", 100)
    with pytest.raises(TooMuch, match="100 steps"):
        run(trial(*[at(float(index)) for index in range(100)]))


def test_a_posted_trial_is_read_strictly():
    text = b'{"arrivals":[{"at_s":0,"tenant":"a","model":"m","num_prompt_tokens":1,"num_completion_tokens":1}],'
    text += b'"policies":{"a":{}},"workers":{"m":{"replicas":2}}}'
    assert run(msgspec.json.decode(text, type=Trial)).total.num_admitted == 1
    with pytest.raises(msgspec.ValidationError, match="replica"):
        msgspec.json.decode(text.replace(b"replicas", b"replica"), type=Trial)
    with pytest.raises(msgspec.ValidationError, match=r"num_prompt_tokens"):
        msgspec.json.decode(text.replace(b'prompt_tokens":1', b'prompt_tokens":0'), type=Trial)


def test_workers_that_are_told_what_was_promised_keep_more_of_it():
    classes = {
        "interactive": msgspec.structs.replace(CLASSES["interactive"], tpot_ms=12.0),
        "batch": CLASSES["batch"],
    }
    arrivals = [at(0.2 * index, 500, 100, tenant="chat") for index in range(40)]
    arrivals += [at(0.05 * index, 2000, 100, tenant="night") for index in range(160)]
    policies = {"chat": Policy(sla_class="interactive"), "night": Policy(sla_class="batch", sla_classes=("batch",))}

    def kept(promises):
        workers = {"m": WorkerModel(max_sequences=64, promises=promises)}
        outcome = run(Trial(arrivals=tuple(arrivals), policies=policies, workers=workers, classes=classes))
        return {name: part.num_kept for name, part in outcome.classes.items()}

    assert kept(True) == {"interactive": 40, "batch": 160}
    assert kept(False)["interactive"] < 20
