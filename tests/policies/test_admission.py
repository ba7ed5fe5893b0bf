import copy
import itertools
import random
from datetime import UTC, datetime
from decimal import Decimal

import msgspec
import pytest

from policies import admission
from policies.admission import BUSY_RETRY_MS, NO_CEILING, Ask, Grant, Refusal, Running
from policies.policy import Budget, Limits, Narrowing, Policy, narrowed
from policies.rate import DAY_MS, MINUTE_MS, Window

POLICY = Policy(
    limits=Limits(requests_per_minute=30, tokens_per_minute=1000, tokens_per_day=5000, concurrent_requests=5),
    key_limits=Limits(tokens_per_minute=600),
    model_limits={"*": Limits(concurrent_requests=4)},
    budget=Budget(Decimal("0.02"), "day"),
)
PERIOD = admission.period_of("day", 1_795_000_000)


def gauges_of(rules):
    return [admission.gauge_for(rule) for rule in rules]


def every_rule(policy=POLICY):
    return (
        *admission.rules_for(policy, "ten_1", "key_1", "demo"),
        admission.budget_rule(policy.budget, "ten_1", PERIOD),
    )


def test_a_policy_without_ceilings_has_no_rules():
    assert admission.rules_for(Policy(), "ten_1", "key_1", "demo") == ()


def test_every_ceiling_is_a_rule_with_a_gauge_of_its_own():
    rules = every_rule()
    assert [(rule.scope, rule.limit, rule.ceiling) for rule in rules] == [
        ("tenant", "requests_per_minute", 30),
        ("tenant", "tokens_per_minute", 1000),
        ("tenant", "tokens_per_day", 5000),
        ("tenant", "concurrent_requests", 5),
        ("key", "tokens_per_minute", 600),
        ("model", "concurrent_requests", 4),
        ("tenant", "budget", 20_000),
    ]
    assert len({rule.name for rule in rules}) == len(rules)
    assert all(rule.name.startswith("{ten_1}") for rule in rules)


def test_models_are_counted_apart_and_so_are_keys():
    names = [
        {rule.name for rule in admission.rules_for(POLICY, "ten_1", key, model) if rule.scope != "tenant"}
        for key, model in [("key_1", "a"), ("key_2", "b")]
    ]
    assert not names[0] & names[1]


def test_a_request_gets_what_there_is_room_for_and_no_less_than_it_needs():
    rules = every_rule()
    gauges = gauges_of(rules)
    assert admission.take(rules, gauges, Ask("a", 100, 400, 1, 9_000), 0) == Grant(0, 400, 9_000)
    assert admission.take(rules, gauges, Ask("b", 100, 400, 1, 9_000), 0) == Grant(0, 200, 9_000)
    before = copy.deepcopy(gauges)
    refusal = admission.take(rules, gauges, Ask("c", 100, 400, 1, 9_000), 500)
    assert isinstance(refusal, Refusal)
    assert (rules[refusal.rule].scope, rules[refusal.rule].limit, refusal.wait_ms) == (
        "key",
        "tokens_per_minute",
        60_500,
    )
    assert gauges == before


def test_a_spent_budget_comes_before_every_ceiling_that_waiting_helps_with():
    rules = every_rule()
    gauges = gauges_of(rules)
    assert isinstance(admission.take(rules, gauges, Ask("a", 600, 600, 20_000, 20_000), 0), Grant)
    admission.settle(rules, gauges, "a", [], 0, 20_000, 0)
    refusal = admission.take(rules, gauges, Ask("b", 1, 1, 1, 1), 0)
    assert isinstance(refusal, Refusal)
    assert (rules[refusal.rule].kind, refusal.wait_ms) == ("money", 0)


def test_money_that_open_requests_hold_may_come_back_and_comes_behind_ceilings_that_take_longer():
    rules = every_rule()
    gauges = gauges_of(rules)
    assert isinstance(admission.take(rules, gauges, Ask("a", 100, 100, 20_000, 20_000), 0), Grant)
    refusal = admission.take(rules, gauges, Ask("b", 0, 0, 1, 1), 0)
    assert isinstance(refusal, Refusal)
    assert (rules[refusal.rule].kind, refusal.wait_ms) == ("money", BUSY_RETRY_MS)
    refusal = admission.take(rules, gauges, Ask("b", 550, 550, 1, 1), 0)
    assert isinstance(refusal, Refusal)
    assert (rules[refusal.rule].kind, refusal.wait_ms) == ("tokens", 61_000)
    admission.settle(rules, gauges, "a", [], 0, 19_999, 0)
    assert isinstance(admission.take(rules, gauges, Ask("b", 0, 0, 1, 1), 0), Grant)


def test_settling_gives_back_what_was_not_used_and_charges_what_was_used_more():
    rules = every_rule()
    gauges = gauges_of(rules)
    admission.take(rules, gauges, Ask("a", 100, 400, 1, 9_000), 0)
    spent = admission.settle(rules, gauges, "a", [(0, 250)], 0, 1_234, 100)
    assert spent == [1_234]
    assert [gauge.total_at(100) for gauge in gauges] == [1, 150, 150, 0, 150, 0, 1_234]
    admission.settle(rules, gauges, "a", [], 10, 0, 200)
    assert [gauge.total_at(200) for gauge in gauges] == [1, 160, 160, 0, 160, 0, 1_234]


def test_gateways_that_cannot_count_together_share_a_ceiling_and_none_is_left_without():
    parts = [admission.divided(rule, 3, spent_micros=14_000).ceiling for rule in every_rule()]
    assert parts == [10, 333, 1666, 1, 200, 1, 2_000]
    assert admission.divided(every_rule()[-1], 3, spent_micros=30_000).ceiling == 0


@pytest.mark.parametrize("seed", range(10))
def test_a_long_walk_never_has_more_than_a_ceiling_in_any_window_and_every_wait_is_true(seed):
    rng, now_ms = random.Random(seed), 0
    rules = every_rule()
    gauges = gauges_of(rules)
    open_requests: dict[str, Grant] = {}
    charged: list[tuple[int, int]] = []
    num_refused = 0
    for number in range(3000):
        now_ms += rng.choice([0, 1, 50, 500, 2000, 20_000, 200_000])
        for request_id in list(open_requests):
            if rng.random() < 0.4:
                grant = open_requests.pop(request_id)
                used = rng.randrange(grant.tokens + 1)
                unused = [(grant.at_ms, grant.tokens - used)]
                charged.remove((grant.at_ms, grant.tokens))
                charged.append((grant.at_ms, used))
                admission.settle(rules, gauges, request_id, unused, 0, 0, now_ms)
        least = rng.randrange(1, 200)
        ask = Ask(f"{seed}.{number}", least, least + rng.randrange(200), 1, rng.randrange(1, 500))
        before = copy.deepcopy(gauges)
        outcome = admission.take(rules, gauges, ask, now_ms)
        if isinstance(outcome, Grant):
            assert ask.least_tokens <= outcome.tokens <= ask.most_tokens
            open_requests[ask.request_id] = outcome
            charged.append((now_ms, outcome.tokens))
        else:
            num_refused += 1
            for was, gauge in zip(before, gauges, strict=True):
                assert was.total_at(now_ms) == gauge.total_at(now_ms), seed
            if rules[outcome.rule].kind == "tokens":
                later = copy.deepcopy(gauges)
                again = admission.take(rules, later, ask, now_ms + outcome.wait_ms)
                if not isinstance(again, Grant):  # leases do not say when they end
                    assert rules[again.rule].kind in ("concurrent", "money"), seed
                soon = copy.deepcopy(gauges)
                assert isinstance(admission.take(rules, soon, ask, now_ms + outcome.wait_ms - 1), Refusal), seed
        for window_ms, ceiling in ((MINUTE_MS, 600), (DAY_MS, 5000)):
            assert sum(tokens for at_ms, tokens in charged if at_ms > now_ms - window_ms) <= ceiling, seed
        for rule, gauge in zip(rules, gauges, strict=True):
            assert gauge.total_at(now_ms) <= rule.ceiling, seed
            if isinstance(gauge, Window):
                assert gauge.total == sum(gauge.slots[1::2]), seed
    assert num_refused > 100


@pytest.mark.parametrize(
    ("kind", "at", "starts", "ends"),
    [
        ("day", (2026, 2, 28, 23), (2026, 2, 28), (2026, 3, 1)),
        ("week", (2026, 11, 22, 23), (2026, 11, 16), (2026, 11, 23)),
        ("month", (2026, 12, 31, 23), (2026, 12, 1), (2027, 1, 1)),
        ("month", (2028, 2, 29, 0), (2028, 2, 1), (2028, 3, 1)),
    ],
)
def test_a_period_is_of_the_calendar_in_utc(kind, at, starts, ends):
    period = admission.period_of(kind, datetime(*at, tzinfo=UTC).timestamp())
    assert period.starts_at == datetime(*starts, tzinfo=UTC).timestamp()
    assert period.ends_at == datetime(*ends, tzinfo=UTC).timestamp()


def test_a_purse_with_nothing_set_aside_is_idle_and_means_something_for_a_day_longer_than_its_period():
    rule = admission.budget_rule(POLICY.budget, "ten_1", PERIOD)
    purse = admission.gauge_for(rule)
    assert admission.is_idle(purse, 0)
    assert isinstance(admission.take([rule], [purse], Ask("a", 0, 0, 1, 9_000), 0), Grant)
    assert not admission.is_idle(purse, 0)
    assert admission.settle([rule], [purse], "a", [], 0, 5_000, 10) == [5_000]
    assert admission.is_idle(purse, 10)
    assert rule.keep_ms == 1000 * (PERIOD.ends_at - PERIOD.starts_at) + DAY_MS


OWN = Narrowing(budget=Budget(Decimal("0.005"), "week"))
KEPT = narrowed(POLICY, OWN)
"""As a key with a budget of its own has it."""


def budgets_of(policy=KEPT, key_id="key_1", purse_id="key_1"):
    return admission.running(policy, "ten_1", key_id, purse_id, PERIOD.starts_at)


def test_a_key_with_a_budget_is_held_against_its_own_and_the_tenants():
    budgets = budgets_of()
    assert [(each.rule.scope, each.rule.limit, each.rule.ceiling, each.budget.period) for each in budgets] == [
        ("tenant", "budget", 20_000, "day"),
        ("key", "budget", 5_000, "week"),
    ]
    assert [(each.key_id, each.purse_id) for each in budgets] == [("", "ten_1"), ("key_1", "key_1")]
    assert all(each.rule.name.startswith("{ten_1}") for each in budgets)
    others = [budgets_of(key_id="key_2", purse_id="key_2"), budgets_of(key_id="key_3")]
    assert [each[0].rule.name == budgets[0].rule.name for each in others] == [True, True]
    assert [each[1].rule.name == budgets[1].rule.name for each in others] == [False, True]  # it was rotated into key_3
    assert budgets_of(POLICY) == budgets[:1]
    assert budgets_of(narrowed(Policy(), Narrowing())) == ()


def test_a_policys_budget_for_each_key_is_that_of_keys_without_one_of_their_own():
    policy = msgspec.structs.replace(POLICY, key_budget=Budget(Decimal("0.003"), "week"))
    for kept, micros in ((policy, 3_000), (narrowed(policy, Narrowing()), 3_000), (narrowed(policy, OWN), 5_000)):
        tenants, keys = budgets_of(kept)
        assert (tenants, keys.rule.ceiling, keys.key_id) == (budgets_of()[0], micros, "key_1")
        assert keys.rule.name == budgets_of()[1].rule.name  # the period's spend counts, whichever of them it is
    assert budgets_of(policy, key_id="") == budgets_of()[:1]


def test_a_budget_of_a_key_changes_nothing_else_of_its_policy():
    assert msgspec.structs.replace(KEPT, key_budget=None) == POLICY


@pytest.mark.parametrize("seed", range(10))
def test_requests_of_many_keys_overspend_no_budget_of_a_key_nor_that_of_their_tenant(seed):
    """Against sums of what is spent and what is held, which is all that a budget is."""
    rng, now_ms = random.Random(seed), 0
    keys = [f"key_{number}" for number in range(4)]
    budgets = {key_id: budgets_of(key_id=key_id, purse_id=key_id) for key_id in keys}
    gauges = {each.rule.name: admission.gauge_for(each.rule) for both in budgets.values() for each in both}
    spent, held = dict.fromkeys(gauges, 0), {name: {} for name in gauges}
    open_requests: dict[str, str] = {}
    outcomes = {"in": 0, "tenant": 0, "key": 0}

    def of(key_id):
        rules = [each.rule for each in budgets[key_id]]
        return rules, [gauges[rule.name] for rule in rules]

    for number in range(2000):
        now_ms += rng.choice([0, 1, 50, 500])
        if open_requests and rng.random() < 0.5:
            request_id = rng.choice(list(open_requests))
            key_id = open_requests[request_id]
            if rng.random() < 0.3:  # it grows
                ask = Ask(request_id, 0, 0, rng.randrange(20), rng.randrange(20, 200))
            else:
                rules, found = of(key_id)
                most = held[rules[0].name][request_id]
                cost = rng.choice([0, rng.randrange(most // 10 + 1)])
                for rule in rules:
                    spent[rule.name] += cost
                    del held[rule.name][request_id]
                del open_requests[request_id]
                expected = [spent[rule.name] for rule in rules]
                assert admission.settle(rules, found, request_id, [], 0, cost, now_ms) == expected, seed
                continue
        else:
            request_id, key_id = f"r{number}", rng.choice(keys)
            least = rng.randrange(1, 300)
            ask = Ask(request_id, 0, 0, least, least + rng.randrange(1500))
        rules, found = of(key_id)
        rooms = [rule.ceiling - spent[rule.name] - sum(held[rule.name].values()) for rule in rules]
        outcome = admission.take(rules, found, ask, now_ms)
        if min(rooms) < ask.least_micros:
            assert isinstance(outcome, Refusal), seed
            rule = rules[outcome.rule]
            assert rooms[outcome.rule] < ask.least_micros, seed
            assert (outcome.wait_ms == 0) == (spent[rule.name] + ask.least_micros > rule.ceiling), seed
            outcomes[rule.scope] += 1
        else:
            assert outcome == Grant(now_ms, 0, min(ask.most_micros, *rooms)), seed
            open_requests[request_id] = key_id
            outcomes["in"] += 1
            for rule in rules:
                held[rule.name][request_id] = held[rule.name].get(request_id, 0) + outcome.micros
        for request_id in open_requests:
            now_held = [name for name in gauges if request_id in held[name]]
            for name in now_held:
                gauges[name].leases.renew(request_id, now_ms)
        for name, gauge in gauges.items():
            assert gauge.total_at(now_ms) == spent[name] + sum(held[name].values()), seed
    assert min(outcomes.values()) > 5, outcomes


def test_a_soft_budget_beside_a_hard_one_counts_what_is_spent_and_holds_nothing():
    policy = narrowed(POLICY, Narrowing(budget=Budget(Decimal("0.005"), "week", hard=False)))
    rules = [each.rule for each in budgets_of(policy)]
    gauges = gauges_of(rules)
    assert admission.take(rules, gauges, Ask("a", 0, 0, 1, 9_000), 0) == Grant(0, 0, 9_000)
    assert [gauge.total_at(0) for gauge in gauges] == [9_000, 0]
    assert admission.settle(rules, gauges, "a", [], 0, 8_000, 0) == [8_000, 8_000]
    assert [admission.divided(rule, 3, 8_000).ceiling for rule in rules] == [4_000, NO_CEILING]


def test_who_needs_no_money_is_not_told_that_it_is_spent():
    rules = every_rule()
    gauges = gauges_of(rules)
    gauges[-1].spent = 30_000
    for number in range(4):
        assert isinstance(admission.take(rules, gauges, Ask(f"{number}", 1, 1, 0, 0), 0), Grant)
    assert rules[admission.take(rules, gauges, Ask("one too many", 1, 1, 0, 0), 0).rule].limit == "concurrent_requests"


def test_each_share_of_a_budget_is_told_by_the_step_that_crosses_it():
    budget = Budget(Decimal("1"), "day", alerts_at=(1.0, 0.5, 0.8))
    steps = [0, 499_999, 500_000, 500_000, 900_000, 2_000_000]
    told = [
        [alert.share for alert in admission.alerts(Running.of(budget, PERIOD, "ten_1"), before, after)]
        for before, after in itertools.pairwise(steps)
    ]
    assert told == [[], [0.5], [], [0.8], [1.0]]


def test_an_alert_told_twice_has_the_same_id_and_no_other_has_it():
    budget = Budget(Decimal("1"), "day", alerts_at=(0.5, 1.0))
    next_day = admission.period_of("day", PERIOD.ends_at)
    budgets = [
        Running.of(budget, PERIOD, "ten_1"),
        Running.of(budget, PERIOD, "ten_1"),
        Running.of(budget, PERIOD, "ten_2"),
        Running.of(budget, next_day, "ten_1"),
        Running.of(budget, PERIOD, "ten_1", "key_1", "key_1"),
        Running.of(budget, PERIOD, "ten_1", "key_2", "key_1"),  # into which that one was rotated
    ]
    ids = [alert.id for each in budgets for alert in admission.alerts(each, 0, 1_000_000)]
    assert len(ids) == 12
    assert len(set(ids)) == 8
    larger = Budget(Decimal("2"), "day", alerts_at=(0.5, 1.0))
    assert not {alert.id for alert in admission.alerts(Running.of(larger, PERIOD, "ten_1"), 0, 2_000_000)} & set(ids)
