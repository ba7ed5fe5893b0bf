"""Who goes next: guaranteed shares between classes, served tokens between tenants, deadlines within a tenant.

**Between classes.** A request costs its prompt and what is expected of its completion. Whenever one is sent, each class
that has requests waiting earns its ``share`` of that cost as credit (a deficit counter as in Shreedhar and Varghese,
SIGCOMM '95). A class whose credit covers the cost of its first request has a claim, and claims go first, the one that
has been open longest before the others. Without a claim the smallest ``priority`` goes; among equal priorities the one
that was served least for its ``weight``, where idling earns nothing. What goes by priority uses up credit and never
leaves a debt, so a class that took what others did not want has its guarantee again as soon as they come. Where a
request turned out longer or shorter than expected, the accounts are corrected when it ends.

**Between tenants of a class.** The virtual token counter of Sheng et al. (OSDI '24): each tenant has a count of tokens
served, divided by its weight; the smallest goes first. The prompt counts when it is sent, the completion as it comes,
both only while somebody waits in the class: what nobody else wanted costs nothing later. A tenant that begins to wait
is lifted to the smallest count among those that wait already: idling earns nothing.

**Within a tenant** the earliest deadline goes first.

**A line that is full** has an equal part of its places for each tenant that waits there. Whoever comes to it with less
than that has a place of the tenant that has most of them, who gives up what would go last (the buffer stealing of
McKenney's stochastic fairness queueing, INFOCOM '90). So nobody keeps others out by asking for more.

**The longest wait.** Let K be the cost of the class's first request, s its share, L the largest cost of any request
and n the number of classes. From the moment a class has requests waiting, or had its last turn, at most
``K / s + n * L`` tokens are sent before its next turn, whatever the others ask for: K / s and a part of one request
until the claim is open, and then one turn at most of each other class. That is while requests cost what was expected;
d tokens that others fell short of it, or that a claimed one of its own went beyond it, make it d / s longer. Within a
class, two tenants that both wait all the time differ in tokens served for their weight by at most twice the larger of L
and the tokens that can be in a batch at once (the paper's theorem 4.4). No flood, priority or weight starves anybody.

Every operation takes O(log n) amortised in waiting requests and O(1) in everything else, beside one look at each class.
Nothing here is moved by time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any

import msgspec

from policies.costs import pairs
from policies.settings import SlaClass

MIN_SWEEP = 64
"""Tenants that a lane remembers before it looks for some to forget."""


class Order(msgspec.Struct, frozen=True, gc=False):
    """What the line has to know of a request."""

    tenant_id: str
    sla_class: str
    weight: float
    """Of the tenant, > 0."""
    num_prompt_tokens: int
    num_expected_tokens: int
    """Of the completion, all its sequences together."""
    deadline_at: float
    """When its first token is due; orders a tenant's own requests and nothing else."""

    @property
    def num_tokens(self) -> int:
        """What it costs the line."""
        return self.num_prompt_tokens + self.num_expected_tokens


class Turn:
    """One request's place in the line, from ``add`` until ``done`` or ``remove``."""

    __slots__ = ("_account", "arrival", "item", "lane", "number", "order", "was_claimed")

    def __init__(self, order: Order, item: Any, lane: Lane, account: Account, arrival: int) -> None:
        self.order = order
        self.item = item
        """Whatever waits; nothing here looks at it."""
        self.lane = lane
        self.arrival = arrival
        self.was_claimed = False
        """Sent on its class's guarantee: whoever computes it must not put it back for the sake of its priority."""
        self.number = 0
        """How many turns the line has given with this one; 0 until it is sent."""
        self._account = account

    def __lt__(self, other: Turn) -> bool:
        return (self.order.deadline_at, self.arrival) < (other.order.deadline_at, other.arrival)


class Account:
    """One tenant in one lane."""

    __slots__ = ("is_listed", "joined", "num_waiting", "served", "turns", "weight")

    def __init__(self, served: float) -> None:
        self.served = served
        """Tokens for its weight; never falls."""
        self.weight = 1.0
        self.joined = 0
        """Number of the arrival with which it last began to wait: decides between equals."""
        self.num_waiting = 0
        self.turns: list[Turn] = []
        """A heap; those that left without a turn stay until they come to the top or are half of it."""
        self.is_listed = False
        """In the lane's heap of accounts."""


class Lane:
    """One class: its waiting requests and its accounts."""

    def __init__(self, name: str, terms: SlaClass) -> None:
        self.name = name
        self.terms = terms
        self.credit = 0.0
        """Tokens of its guarantee that it may claim; below zero when a claim turned out longer than expected."""
        self.served = 0.0
        """Tokens for its weight, among classes of equal priority."""
        self.began_at = 0
        """How many turns the line had given when somebody began to wait here."""
        self.open_since: int | None = None
        """The same count when its claim was first seen; None: it has none."""
        self.waiting: OrderedDict[Turn, None] = OrderedDict()
        """In order of arrival."""
        self.num_prompt_tokens = 0
        """Of all that wait here, as are the next two."""
        self.num_prompt_pairs = 0
        self.num_expected_tokens = 0
        self.num_tenants = 0
        """Those that wait."""
        self._accounts: dict[str, Account] = {}
        self._listed: list[tuple[float, int, Account]] = []
        """Heap of (served, joined) as they were when the account was put in; they may have grown since, so whoever
        comes to the top is looked at again."""
        self._floor = 0.0
        """The smallest count of anybody who waits, or of the last who did."""
        self._sweep_at = MIN_SWEEP

    def __len__(self) -> int:
        return len(self.waiting)

    def first(self) -> Turn:
        """Who goes next of this lane, which must not be empty."""
        turns = self._first_account().turns
        while turns[0] not in self.waiting:
            heappop(turns)
        return turns[0]

    def waiting_of(self, tenant_id: str) -> int:
        """Requests of this tenant that wait here."""
        account = self._accounts.get(tenant_id)
        return 0 if account is None else account.num_waiting

    def aside_for(self, tenant_id: str) -> list[Turn]:
        """Those that may leave their place to one more of this tenant, where all are taken; first the one to do so."""
        num_own = self.waiting_of(tenant_id)
        if num_own >= len(self) // (self.num_tenants + (num_own == 0)):
            return []
        _, _, account = max(self._listed, key=lambda listed: listed[2].num_waiting)
        return sorted([turn for turn in account.turns if turn in self.waiting], reverse=True)

    def serve(self, tenant_id: str, weight: float, num_tokens: int) -> None:
        """So many tokens went to this tenant; nothing while nobody waits."""
        if self.waiting:
            account = self._account(tenant_id)
            account.served = max(account.served, self._floor) + num_tokens / weight

    # For Lanes

    def add(self, order: Order, item: Any, arrival: int) -> Turn:
        """Somebody waits here from now on. A tenant who comes anew begins at the least that any who waits was served,
        so that idling earns nothing. ``arrival``: grows from one to the next."""
        account = self._account(order.tenant_id)
        account.weight = order.weight
        turn = Turn(order, item, self, account, arrival)
        if not account.num_waiting:
            if self.waiting:
                self._first_account()
            account.served = max(account.served, self._floor)
            account.joined = arrival
            self.num_tenants += 1
            if not account.is_listed:
                account.is_listed = True
                heappush(self._listed, (account.served, arrival, account))
        account.num_waiting += 1
        heappush(account.turns, turn)
        self.waiting[turn] = None
        self._count(order, 1)
        return turn

    def remove(self, turn: Turn) -> None:
        """Somebody waits here no more, served or not."""
        del self.waiting[turn]
        self._count(turn.order, -1)
        account = turn._account
        account.num_waiting -= 1
        if not account.num_waiting:
            self.num_tenants -= 1
            account.turns.clear()
        elif len(account.turns) > 2 * account.num_waiting + 8:
            account.turns = [turn for turn in account.turns if turn in self.waiting]
            heapify(account.turns)

    def take(self, turn: Turn) -> None:
        """``turn`` is ``first()``."""
        account = turn._account
        self._floor = account.served
        account.served += turn.order.num_prompt_tokens / account.weight
        self.remove(turn)

    def _first_account(self) -> Account:
        """The one with the least served of those that wait; there is one."""
        listed = self._listed
        while True:
            served, joined, account = listed[0]
            if not account.num_waiting:
                heappop(listed)
                account.is_listed = False
            elif served < account.served or joined < account.joined:
                heapreplace(listed, (account.served, account.joined, account))
            else:
                self._floor = served
                return account

    def _account(self, tenant_id: str) -> Account:
        account = self._accounts.get(tenant_id)
        if account is None:
            if len(self._accounts) >= self._sweep_at:
                self._forget()
            account = self._accounts[tenant_id] = Account(self._floor)
        return account

    def _forget(self) -> None:
        """Those of whom nothing need be remembered: if they come again they begin where they would go on."""
        self._accounts = {
            tenant_id: account
            for tenant_id, account in self._accounts.items()
            if account.num_waiting or account.is_listed or account.served > self._floor
        }
        self._sweep_at = max(MIN_SWEEP, 2 * len(self._accounts))

    def _count(self, order: Order, sign: int) -> None:
        self.num_prompt_tokens += sign * order.num_prompt_tokens
        self.num_prompt_pairs += sign * pairs(order.num_prompt_tokens, 0)
        self.num_expected_tokens += sign * order.num_expected_tokens


class Lanes:
    """All that wait for one model, and what each class was given."""

    def __init__(self, classes: Mapping[str, SlaClass]) -> None:
        self.num_waiting = 0
        self._lanes = {
            name: Lane(name, terms) for name, terms in sorted(classes.items(), key=lambda pair: pair[1].priority)
        }
        self.num_taken = 0
        """Turns given."""
        self._num_arrivals = 0

    def __iter__(self) -> Iterator[Lane]:
        """The more important ones first."""
        return iter(self._lanes.values())

    def __getitem__(self, sla_class: str) -> Lane:
        return self._lanes[sla_class]

    def add(self, order: Order, item: Any) -> Turn:
        """Waits from now on."""
        self._num_arrivals += 1
        lane = self._lanes[order.sla_class]
        if not lane.waiting:
            peers = [other for other in self if other.terms.priority == lane.terms.priority]
            least = min([other.served for other in peers if other.waiting], default=None)
            lane.served = max(lane.served, max(other.served for other in peers) if least is None else least)
            lane.began_at = self.num_taken
        self.num_waiting += 1
        return lane.add(order, item, self._num_arrivals)

    def remove(self, turn: Turn) -> None:
        """Waits no longer and gets no turn."""
        turn.lane.remove(turn)
        self._left(turn.lane)

    def next(self) -> tuple[Turn, bool] | None:
        """Whose turn it is, and whether it is a claim on its class's guarantee; None when nobody waits."""
        claim: Lane | None = None
        choice: Lane | None = None
        for lane in self._lanes.values():
            if not lane.waiting:
                continue
            if choice is None or (lane.terms.priority == choice.terms.priority and lane.served < choice.served):
                choice = lane
            if lane.credit <= 0.0 or lane.credit < lane.first().order.num_tokens:
                lane.open_since = None
                continue
            if lane.open_since is None:
                lane.open_since = self.num_taken
            if claim is None or lane.open_since < (claim.open_since or 0):
                claim = lane
        if claim is not None:
            return claim.first(), True
        return None if choice is None else (choice.first(), False)

    def take(self, turn: Turn, is_claim: bool) -> None:
        """It is sent; ``turn`` and ``is_claim`` are what ``next`` returned."""
        lane, num_tokens = turn.lane, turn.order.num_tokens
        self.num_taken += 1
        turn.number, turn.was_claimed = self.num_taken, is_claim
        for each in self._lanes.values():
            self._credit(each, each.terms.share * num_tokens)
        self._credit(lane, -num_tokens if is_claim else -min(num_tokens, max(0.0, lane.credit)))
        lane.open_since = None
        lane.served += num_tokens / lane.terms.weight
        lane.take(turn)
        self._left(lane)

    def done(self, turn: Turn, num_completion_tokens: int) -> None:
        """A turn that was taken has ended, with so many tokens in all its sequences."""
        if not self.num_waiting:
            return
        lane, num_more = turn.lane, num_completion_tokens - turn.order.num_expected_tokens
        for each in self._lanes.values():
            if each.waiting and each.began_at < turn.number:  # else it earned nothing by this turn
                self._credit(each, each.terms.share * num_more)
        if turn.was_claimed:
            self._credit(lane, -num_more)
        lane.served += num_more / lane.terms.weight

    def _left(self, lane: Lane) -> None:
        self.num_waiting -= 1
        self._credit(lane, 0.0)
        if not self.num_waiting:
            for each in self:
                each.credit = 0.0

    @staticmethod
    def _credit(lane: Lane, num_tokens: float) -> None:
        """A class that nobody waits for pays its debt with what it earns, and keeps nothing."""
        lane.credit += num_tokens
        if not lane.waiting:
            lane.credit = min(0.0, lane.credit)
            lane.open_since = None
