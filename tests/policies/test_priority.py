"""The order of the line, held against a slow and obvious model of the same rules, and its promises."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.priority import MIN_SWEEP, Lanes, Order
from policies.settings import SlaClass


def a_class(priority=0, share=0.3, weight=1.0):
    return SlaClass(priority=priority, ttft_ms=1000.0, tpot_ms=100.0, share=share, weight=weight)


THREE = {"interactive": a_class(0, 0.5), "standard": a_class(1, 0.3), "batch": a_class(2, 0.1)}
LEVEL = {"left": a_class(1, 0.1, 3.0), "right": a_class(1, 0.1, 1.0)}


def an_order(sla_class="standard", tenant="a", num_prompt=10, num_expected=10, deadline_at=0.0, weight=1.0):
    return Order(tenant, sla_class, weight, num_prompt, num_expected, deadline_at)


@dataclass
class SlowClass:
    terms: SlaClass
    credit: float = 0.0
    served: float = 0.0
    began_at: int = 0
    open_since: int | None = None
    floor: float = 0.0
    tenants: dict[str, float] = field(default_factory=dict)
    joined: dict[str, int] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)


class SlowLanes:
    """Lists, looked through from end to end."""

    def __init__(self, classes):
        self.classes = {name: SlowClass(terms) for name, terms in classes.items()}
        self.waiting: list[tuple[int, Order]] = []
        self.num_arrivals = self.num_taken = 0

    def of(self, name, tenant=None):
        return [
            (number, order)
            for number, order in self.waiting
            if order.sla_class == name and tenant in (None, order.tenant_id)
        ]

    def raise_floor(self, name):
        waiting = {order.tenant_id for _, order in self.of(name)}
        if waiting:
            self.classes[name].floor = min(self.classes[name].tenants[tenant] for tenant in waiting)

    def add(self, order):
        self.num_arrivals += 1
        name = order.sla_class
        mine = self.classes[name]
        if not self.of(name):
            equals = {name: one for name, one in self.classes.items() if one.terms.priority == mine.terms.priority}
            peers = [other.served for peer, other in equals.items() if self.of(peer)]
            floor = min(peers) if peers else max(other.served for other in equals.values())
            mine.served = max(mine.served, floor)
            mine.began_at = self.num_taken
        if not self.of(name, order.tenant_id):
            self.raise_floor(name)
            mine.tenants[order.tenant_id] = max(mine.tenants.get(order.tenant_id, 0.0), mine.floor)
            mine.joined[order.tenant_id] = self.num_arrivals
        mine.weights[order.tenant_id] = order.weight
        self.waiting.append((self.num_arrivals, order))
        return self.num_arrivals

    def first(self, name):
        mine = self.classes[name]
        waiting = {order.tenant_id for _, order in self.of(name)}
        tenant = min(waiting, key=lambda tenant: (mine.tenants[tenant], mine.joined[tenant]))
        self.raise_floor(name)
        return min(self.of(name, tenant), key=lambda pair: (pair[1].deadline_at, pair[0]))

    def next(self):
        ready = [name for name in sorted(self.classes, key=lambda n: self.classes[n].terms.priority) if self.of(name)]
        for name in ready:
            mine = self.classes[name]
            if mine.credit > 0 and mine.credit >= self.first(name)[1].num_tokens:
                mine.open_since = self.num_taken if mine.open_since is None else mine.open_since
            else:
                mine.open_since = None
        claims = [name for name in ready if self.classes[name].open_since is not None]
        if claims:
            return self.first(min(claims, key=lambda name: self.classes[name].open_since))[0], True
        if not ready:
            return None
        return self.first(min(ready, key=lambda n: (self.classes[n].terms.priority, self.classes[n].served)))[0], False

    def drop(self, number):
        order = dict(self.waiting)[number]
        self.waiting = [pair for pair in self.waiting if pair[0] != number]
        self.settle_up()
        return order

    def take(self, number, is_claim):
        self.num_taken += 1
        order = dict(self.waiting)[number]
        mine = self.classes[order.sla_class]
        for name, each in self.classes.items():
            each.credit += each.terms.share * order.num_tokens
            if not self.of(name):
                each.credit = min(each.credit, 0.0)
        mine.credit -= order.num_tokens if is_claim else min(order.num_tokens, max(0.0, mine.credit))
        mine.open_since = None
        mine.served += order.num_tokens / mine.terms.weight
        mine.floor = mine.tenants[order.tenant_id]
        mine.tenants[order.tenant_id] += order.num_prompt_tokens / mine.weights[order.tenant_id]
        self.drop(number)
        return order, self.num_taken, is_claim

    def settle_up(self):
        for name, each in self.classes.items():
            if not self.of(name):
                each.credit, each.open_since = min(each.credit, 0.0), None
        if not self.waiting:
            for each in self.classes.values():
                each.credit = 0.0

    def aside_for(self, name, tenant):
        """Each list that it may be."""
        counts = Counter(order.tenant_id for _, order in self.of(name))
        num_tenants = len(counts.keys() | {tenant})
        if counts[tenant] + 1 > sum(counts.values()) // num_tenants:
            return [[]]
        most = [each for each, num in counts.items() if num == max(counts.values())]
        orders = [sorted(self.of(name, each), key=lambda pair: (pair[1].deadline_at, pair[0])) for each in most]
        return [[number for number, _ in reversed(each)] for each in orders]

    def done(self, taken, num_tokens):
        order, number, was_claim = taken
        if not self.waiting:
            return
        num_more = num_tokens - order.num_expected_tokens
        mine = self.classes[order.sla_class]
        for name, each in self.classes.items():
            if self.of(name) and each.began_at < number:
                each.credit += each.terms.share * num_more
        if was_claim:
            mine.credit -= num_more
        mine.served += num_more / mine.terms.weight
        self.settle_up()

    def serve(self, name, tenant, weight, num_tokens):
        if self.of(name):
            mine = self.classes[name]
            mine.tenants[tenant] = max(mine.tenants.get(tenant, 0.0), mine.floor) + num_tokens / weight


def walk(classes, chance, num_steps, num_tenants=4):
    """Both lines go the same way; after each step the same request is next."""
    fast, slow = Lanes(classes), SlowLanes(classes)
    turns, running = {}, []
    names = list(classes)
    busy = 1.0
    for step in range(num_steps):
        if step % 97 == 0:  # now the line grows, now it runs empty
            busy = chance.choice([0.3, 0.5, 0.8])
        what = chance.random()
        if what < busy and len(turns) < 50:
            order = an_order(
                chance.choice(names),
                f"t{chance.randrange(num_tenants)}",
                chance.randint(1, 200),
                chance.randint(1, 200),
                chance.randint(0, 50),
                chance.choice([0.5, 1.0, 4.0]),
            )
            number = slow.add(order)
            turns[number] = fast.add(order, number)
        elif what < busy + 0.05 and turns:
            number = chance.choice(sorted(turns))
            slow.drop(number)
            fast.remove(turns.pop(number))
        elif what < busy + 0.1 and running:
            turn, taken = running.pop(chance.randrange(len(running)))
            num_tokens = chance.randint(0, 400)
            slow.done(taken, num_tokens)
            fast.done(turn, num_tokens)
        elif what < busy + 0.13:
            name, tenant, num_tokens = chance.choice(names), f"t{chance.randrange(num_tenants)}", chance.randint(1, 9)
            slow.serve(name, tenant, 2.0, num_tokens)
            fast[name].serve(tenant, 2.0, num_tokens)
        elif turns:
            turn, is_claim = fast.next()
            assert slow.next() == (turn.item, is_claim)
            fast.take(turn, is_claim)
            running.append((turn, slow.take(turns.pop(turn.item).item, is_claim)))
        check(fast, slow)


def check(fast, slow):
    expected = slow.next()
    found = fast.next()
    assert (found and (found[0].item, found[1])) == expected
    assert fast.num_waiting == len(slow.waiting) == sum(len(lane) for lane in fast)
    for lane in fast:
        waiting = [order for _, order in slow.of(lane.name)]
        assert lane.credit == slow.classes[lane.name].credit
        assert lane.num_tenants == len({order.tenant_id for order in waiting})
        assert lane.num_prompt_tokens == sum(order.num_prompt_tokens for order in waiting)
        assert lane.num_expected_tokens == sum(order.num_expected_tokens for order in waiting)
        assert [turn.order for turn in lane.waiting] == waiting
        for tenant in ("t0", "nobody"):
            assert [turn.item for turn in lane.aside_for(tenant)] in slow.aside_for(lane.name, tenant)


@pytest.mark.parametrize("classes", [THREE, LEVEL, {**THREE, **LEVEL, "spare": a_class(0, 0.01)}], ids=len)
@pytest.mark.parametrize("seed", range(4))
def test_a_long_walk_goes_as_the_slow_model_goes(classes, seed):
    walk(classes, random.Random(seed), 3000, num_tenants=4 if seed % 2 else 3 * MIN_SWEEP)


@settings(deadline=None, max_examples=30)
@given(st.randoms(use_true_random=False))
def test_any_short_walk_goes_as_the_slow_model_goes(chance):
    walk(THREE, chance, 40)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 400))
def test_no_class_waits_longer_for_its_turn_than_is_promised(seed, largest):
    """Whatever the others ask for: floods, gaps, all sizes. What is sent costs what was expected."""
    chance = random.Random(seed)
    classes = {"interactive": a_class(0, 0.5), "standard": a_class(1, 0.3), "batch": a_class(2, 0.2)}
    lanes = Lanes(classes)
    since = dict.fromkeys(classes, 0)
    for _ in range(200):
        for name in classes:
            if chance.random() < 0.5:
                if not len(lanes[name]):
                    since[name] = 0
                size = chance.choice([2, largest + 1])
                lanes.add(an_order(name, f"t{chance.randrange(3)}", size // 2 or 1, size - size // 2), None)
        ready = [lane.name for lane in lanes if len(lane)]
        if not ready:
            continue
        turn, is_claim = lanes.next()
        lanes.take(turn, is_claim)
        for name in ready:
            since[name] += turn.order.num_tokens
            bound = (largest + 1) / classes[name].share + len(classes) * (largest + 1)
            assert since[name] <= bound + turn.order.num_tokens * (name == turn.lane.name)
        since[turn.lane.name] = 0


def drain(lanes, num_turns):
    """Who goes, one after the other; each is over as it was expected to be."""
    gone = []
    for _ in range(num_turns):
        turn, is_claim = lanes.next()
        lanes.take(turn, is_claim)
        order = turn.order
        turn.lane.serve(order.tenant_id, order.weight, order.num_expected_tokens)
        lanes.done(turn, order.num_expected_tokens)
        gone.append(turn)
    return gone


def test_while_all_wait_each_class_gets_its_share_and_the_most_important_one_the_rest():
    lanes = Lanes(THREE)
    for name in THREE:
        for _ in range(1000):
            lanes.add(an_order(name), None)
    gone = [turn.lane.name for turn in drain(lanes, 1000)]
    assert gone.count("batch") == pytest.approx(100, abs=2)
    assert gone.count("standard") == pytest.approx(300, abs=2)
    assert gone.count("interactive") == pytest.approx(600, abs=4)


def test_a_guarantee_is_in_tokens_not_in_requests():
    lanes = Lanes(THREE)
    for _ in range(1000):
        lanes.add(an_order("interactive", num_prompt=5, num_expected=5), None)
        lanes.add(an_order("batch", num_prompt=300, num_expected=200), None)
    gone = drain(lanes, 900)
    num_tokens = sum(turn.order.num_tokens for turn in gone)
    batch = sum(turn.order.num_tokens for turn in gone if turn.lane.name == "batch")
    assert batch / num_tokens == pytest.approx(0.1, abs=0.06)
    assert batch % 500 == 0


def test_a_class_that_took_what_nobody_wanted_has_its_guarantee_at_once_when_they_come():
    lanes = Lanes(THREE)
    for _ in range(3000):
        lanes.add(an_order("batch"), None)
    drain(lanes, 1000)
    for _ in range(1000):
        lanes.add(an_order("interactive"), None)
    gone = [turn.lane.name for turn in drain(lanes, 100)]
    assert gone.count("batch") in (9, 10, 11)


def test_between_classes_of_equal_priority_weight_decides():
    lanes = Lanes({"left": a_class(1, 0.01, 3.0), "right": a_class(1, 0.01, 1.0)})
    for name in ("left", "right"):
        for _ in range(1000):
            lanes.add(an_order(name), None)
    gone = [turn.lane.name for turn in drain(lanes, 400)]
    assert gone.count("left") == pytest.approx(300, abs=4)


def test_a_class_that_took_what_its_equals_did_not_want_has_its_part_at_once_when_they_come():
    lanes = Lanes({"left": a_class(1, 0.01), "right": a_class(1, 0.01)})
    for name, num_turns in (("left", 500), ("right", 1)):
        for _ in range(num_turns):
            lanes.add(an_order(name), None)
        drain(lanes, num_turns)
    for _ in range(200):
        lanes.add(an_order("right"), None)
        lanes.add(an_order("left"), None)
    gone = [turn.lane.name for turn in drain(lanes, 100)]
    assert gone.count("left") == pytest.approx(50, abs=2)


def test_tenants_of_a_class_get_tokens_by_their_weight_however_many_requests_they_send():
    lanes = Lanes(THREE)
    for number in range(2000):
        lanes.add(an_order(tenant="flood", num_prompt=4, num_expected=4), None)
        if number < 400:
            lanes.add(an_order(tenant="plain", num_prompt=40, num_expected=40), None)
            lanes.add(an_order(tenant="double", weight=2.0), None)
    served = dict.fromkeys(("flood", "plain", "double"), 0)
    for turn in drain(lanes, 600):
        served[turn.order.tenant_id] += turn.order.num_tokens
    assert served["flood"] == pytest.approx(served["plain"], abs=160)
    assert served["double"] == pytest.approx(2 * served["plain"], abs=240)


def test_idling_earns_nothing():
    lanes = Lanes(THREE)
    for _ in range(200):
        lanes.add(an_order(tenant="steady"), None)
    drain(lanes, 100)
    for _ in range(100):
        lanes.add(an_order(tenant="late"), None)
    gone = [turn.order.tenant_id for turn in drain(lanes, 20)]
    assert gone.count("late") == 10


def test_what_a_tenant_is_given_while_others_wait_counts_though_it_was_sent_before():
    lanes = Lanes(THREE)
    for _ in range(10):
        lanes.add(an_order(tenant="patient"), None)
        lanes.add(an_order(tenant="long-winded"), None)
    lanes["standard"].serve("long-winded", 1.0, 100)
    assert [turn.order.tenant_id for turn in drain(lanes, 5)] == ["patient"] * 5


def test_a_tenants_own_requests_go_by_deadline():
    lanes = Lanes(THREE)
    for deadline_at in (3.0, 1.0, 2.0):
        lanes.add(an_order(deadline_at=deadline_at), None)
    assert [turn.order.deadline_at for turn in drain(lanes, 3)] == [1.0, 2.0, 3.0]


def test_tenants_that_came_once_are_forgotten():
    lanes = Lanes(THREE)
    for number in range(5000):
        lanes.add(an_order(tenant=f"t{number}"), None)
        lanes.add(an_order(tenant="steady"), None)
        drain(lanes, 2)
    assert len(lanes["standard"]._accounts) <= 4 * MIN_SWEEP


def test_who_leaves_without_a_turn_leaves_nothing_behind():
    lanes = Lanes(THREE)
    kept = lanes.add(an_order(deadline_at=1.0), None)
    for _ in range(5000):
        lanes.remove(lanes.add(an_order(deadline_at=2.0), None))
    assert len(kept._account.turns) < 100
    assert lanes.next()[0] is kept
