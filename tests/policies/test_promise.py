from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import promise
from policies.costs import StepCosts, Work, predicted
from policies.priority import Lanes, Order
from policies.promise import NOTHING, Demand, Pace, Stream, demand_of, pace_of, prefill_s, wait_s, waits_behind
from policies.settings import CLASSES

WEIGHTS = (1e-3, 1e-5, 1e-4, 1e-8, 1e-9, 5e-4, 1e-7)
PACE = pace_of(WEIGHTS, 8, 4000, 2.0)


def an_order(sla_class="standard", tenant="a", num_prompt=100, num_expected=50):
    return Order(tenant, sla_class, 1.0, num_prompt, num_expected, 0.0)


def wait_of(lanes, order, num_workers=1, streams=None):
    streams = {name: Stream() for name in CLASSES} | (streams or {})
    return wait_s(PACE, waits_behind(lanes, order, streams, 1000.0), order, num_workers)


def stream_of(sla_class, load):
    """For the last five minutes, requests that ask for so much of one worker's time."""
    stream, order = Stream(), an_order(sla_class)
    gap_s = PACE.seconds(demand_of(order)) / load
    for number in range(int(300 / gap_s), -1, -1):
        stream.came(order, 1000.0 - gap_s * number)
    return {sla_class: stream}


def filled(*orders):
    lanes = Lanes(CLASSES)
    for order in orders:
        lanes.add(order, None)
    return lanes


def test_weights_told_predict_what_the_fit_itself_predicts():
    costs = StepCosts()
    works = [Work(n, n % 7, 50 * n, n * n, 1, 3 * n) for n in range(60)]
    for work in works:
        costs.observe(work, 1e-3 + 1e-5 * work.num_prefill_tokens + 1e-4 * work.num_decodes)
    assert StepCosts().weights == ()
    unseen = Work(100, 5, 2000, 5050, 1, 0)
    assert len(costs.weights) == 1 + len(unseen)
    assert predicted(costs.weights, unseen) == pytest.approx(costs.predict(unseen), rel=0.2)


@pytest.mark.parametrize("weights", [(), (math.nan,) * 8, (math.inf,) * 8, (-1.0,) * 8])
def test_nothing_is_promised_by_weights_that_say_nothing(weights):
    assert pace_of(weights, 1, 1, 2.0) is None


def test_a_batch_shares_its_steps():
    alone, crowded = pace_of(WEIGHTS, 1, 500, 2.0), pace_of(WEIGHTS, 16, 8000, 2.0)
    assert crowded.completion_token_s < alone.completion_token_s


def test_in_a_line_of_one_tenant_each_waits_for_all_before_it():
    orders = [an_order() for _ in range(10)]
    lanes = filled(*orders)
    work_s = PACE.seconds(promise.demand_of(an_order()))
    assert wait_of(lanes, an_order()) == pytest.approx(11 * work_s)
    assert wait_of(lanes, an_order(), num_workers=2) == pytest.approx(11 * work_s / 2)


def test_a_flood_of_another_tenant_is_not_waited_for():
    lanes = filled(*[an_order(tenant="flood") for _ in range(100)])
    work_s = PACE.seconds(promise.demand_of(an_order()))
    assert wait_of(lanes, an_order(tenant="b")) == pytest.approx(2 * work_s)


def test_less_important_ones_take_their_guarantee_and_no_more():
    lanes = filled(*[an_order("batch") for _ in range(100)])
    work_s = PACE.seconds(promise.demand_of(an_order()))
    assert wait_of(lanes, an_order("interactive")) == pytest.approx(work_s / 0.9)


def test_more_important_ones_are_waited_for_only_as_far_as_the_own_guarantee_does_not_reach():
    lanes = filled(*[an_order("interactive") for _ in range(1000)])
    work_s = PACE.seconds(promise.demand_of(an_order()))
    assert wait_of(lanes, an_order("batch")) == pytest.approx(work_s / 0.1)
    lanes = filled(*[an_order("interactive") for _ in range(2)])
    assert wait_of(lanes, an_order("batch")) == pytest.approx(3 * work_s)


def test_those_of_an_equal_class_are_waited_for():
    lanes = Lanes({"standard": CLASSES["standard"], "other": CLASSES["standard"]})
    for _ in range(2):
        lanes.add(an_order("other"), None)
    behind = waits_behind(lanes, an_order("standard"), {}, 1000.0)
    work_s = PACE.seconds(promise.demand_of(an_order()))
    assert wait_s(PACE, behind, an_order("standard"), 1) == pytest.approx(3 * work_s)


@given(st.lists(st.sampled_from(list(CLASSES)), max_size=30), st.sampled_from(list(CLASSES)), st.booleans())
def test_more_of_the_same_is_never_a_shorter_wait(line, sla_class, own):
    lanes, before = Lanes(CLASSES), 0.0
    for name in line:
        lanes.add(an_order(name, "a" if own else "b"), None)
        after = wait_of(lanes, an_order(sla_class))
        assert before <= after * (1 + 1e-9)
        assert math.isfinite(after)
        before = after


def test_prompts_before_it_and_answers_beside_it_make_a_prompt_later():
    pace = Pace(0.0, 1e-3, 0.0, 0.0, 0.5)
    assert prefill_s(pace, Demand(), 100, is_beside_answers=False) == pytest.approx(0.1)
    assert prefill_s(pace, Demand(1, 200), 100, is_beside_answers=False) == pytest.approx(0.3)
    assert prefill_s(pace, Demand(1, 200), 100, is_beside_answers=True) == pytest.approx(0.6)


@pytest.mark.parametrize("load", [0.1, 0.5, 0.8])
def test_a_stream_is_known_by_what_came_lately_and_forgotten(load):
    (stream,) = stream_of("interactive", load).values()
    assert PACE.seconds(stream.per_second(1000.0)) == pytest.approx(load, rel=0.05)
    assert PACE.seconds(stream.per_second(1000.0 + 3 * promise.LATELY_S)) < 0.06 * load
    assert Stream().per_second(1000.0) == NOTHING


def test_the_first_requests_of_a_class_are_no_flood():
    stream, order = Stream(), an_order("interactive")
    stream.came(order, 1000.0)
    assert stream.per_second(1000.0).num_requests <= 1.1 / promise.MIN_SEEN_S


def test_what_comes_later_and_goes_first_leaves_so_much_less():
    lanes = filled(*[an_order() for _ in range(10)])
    alone = wait_of(lanes, an_order())
    assert wait_of(lanes, an_order(), streams=stream_of("interactive", 0.5)) == pytest.approx(2 * alone, rel=0.05)
    assert wait_of(lanes, an_order(), streams=stream_of("standard", 0.5)) == alone  # goes behind it
    assert wait_of(lanes, an_order(), streams=stream_of("batch", 0.5)) == alone


def test_no_stream_takes_what_a_class_is_guaranteed():
    lanes = filled(*[an_order() for _ in range(10)])
    guaranteed = wait_of(lanes, an_order()) / CLASSES["standard"].share
    for load in (0.9, 1.0, 5.0):
        assert wait_of(lanes, an_order(), streams=stream_of("interactive", load)) == pytest.approx(guaranteed)
