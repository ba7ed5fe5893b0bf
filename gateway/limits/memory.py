"""The gauges of a gateway in its own memory: of one that counts alone, or may have to.

A gauge is made when it is first needed and dropped when nothing would change if it were made anew. Dropping has no task
of its own: each request looks at the two gauges that have waited longest for it, so the memory in use is that of the
keys that were active during the longest of their windows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from gateway.clock import Clock
from policies import admission
from policies.admission import Ask, Grant, Refusal, Rule
from policies.rate import Gauge, Leases, Purse, Window

LOOKS = 2
"""Gauges looked at for each request. One would do to keep up: a request makes no more than it looks at in the long
run, since each is looked at once in its life and once for each time that it is found in use."""


class Meters:
    """Every gauge by its rule's name."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._gauges: dict[str, Gauge] = {}
        self._due: dict[int, deque[tuple[int, str]]] = {}
        """By how long a gauge is kept, soonest first: (instant at which to look whether it is still needed, name)."""

    def take(self, rules: Sequence[Rule], ask: Ask) -> Grant | Refusal:
        """All of it or nothing."""
        now_ms = self._now_ms()
        taken = admission.take(rules, self._found(rules, now_ms), ask, now_ms)
        self._look(now_ms)
        return taken

    def note(self, rules: Sequence[Rule], request_id: str, grant: Grant) -> Grant:
        """What was granted elsewhere counts here, too; the grant as it is to be settled in both places."""
        now_ms = self._now_ms()
        admission.note(rules, self._found(rules, now_ms), request_id, grant, now_ms)
        self._look(now_ms)
        return msgspec.structs.replace(grant, noted_at_ms=now_ms)

    def settle(
        self,
        rules: Sequence[Rule],
        request_id: str,
        unused: Sequence[tuple[int, int]],
        overused: int,
        cost_micros: int,
    ) -> list[int]:
        """As ``admission.settle``."""
        now_ms = self._now_ms()
        found = self._found(rules, now_ms)
        return admission.settle(rules, found, request_id, unused, overused, cost_micros, now_ms)

    def readings(self, rules: Sequence[Rule]) -> list[int]:
        """As ``admission.readings``; asking makes no gauge."""
        found = [self._gauges.get(rule.name) or admission.gauge_for(rule) for rule in rules]
        return admission.readings(found, self._now_ms())

    def renew(self, name: str, request_ids: Iterable[str]) -> None:
        """Leases of requests that are still open."""
        now_ms = self._now_ms()
        gauge = self._gauges.get(name)
        leases = gauge.leases if isinstance(gauge, Purse) else gauge
        if isinstance(leases, Leases):
            for request_id in request_ids:
                leases.renew(request_id, now_ms)

    def restore(self, rule: Rule, spent_micros: int) -> None:
        """At least so much of this budget is spent, as the ledger knows."""
        purse = self._gauges.get(rule.name) or self._make(rule, self._now_ms())
        assert isinstance(purse, Purse)
        purse.spent = max(purse.spent, spent_micros)

    def used(self, rule: Rule, num_tokens: int, ago_ms: int) -> None:
        """So many tokens were used so long ago, as the ledger knows; the oldest are told first."""
        now_ms = self._now_ms()
        window = self._gauges.get(rule.name) or self._make(rule, now_ms)
        assert isinstance(window, Window)
        window.add(num_tokens, now_ms - ago_ms)

    def forget(self, rule: Rule) -> None:
        """It begins anew."""
        self._gauges.pop(rule.name, None)

    @property
    def num_gauges(self) -> int:
        return len(self._gauges)

    def _found(self, rules: Sequence[Rule], now_ms: int) -> list[Gauge]:
        gauges = self._gauges
        return [gauges.get(rule.name) or self._make(rule, now_ms) for rule in rules]

    def _make(self, rule: Rule, now_ms: int) -> Gauge:
        gauge = self._gauges[rule.name] = admission.gauge_for(rule)
        due = self._due.get(rule.keep_ms)
        if due is None:
            due = self._due[rule.keep_ms] = deque()
        due.append((now_ms + rule.keep_ms, rule.name))
        return gauge

    def _look(self, now_ms: int) -> None:
        for keep_ms, due in self._due.items():
            for _ in range(LOOKS):
                if not due or due[0][0] > now_ms:
                    break
                _, name = due.popleft()
                gauge = self._gauges.get(name)
                if gauge is None:
                    continue
                if admission.is_idle(gauge, now_ms):
                    del self._gauges[name]
                else:
                    due.append((now_ms + keep_ms, name))

    def _now_ms(self) -> int:
        return int(1e3 * self._clock.now())
