"""The gauges that several gateways share, in Redis: each admission is one script, and so is each settlement.

An admission waits for its answer. A settlement nobody waits for: it travels by itself, and if Redis is away it is lost,
which errs on the strict side, as the tokens stay counted until they leave their window. (What was spent, the ledger
knows; ``budgets`` restores it. What it held as long as it was open is let go when Redis is back.)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from gateway.limits import script
from gateway.redis import Redis, RedisAway, Script
from gateway.telemetry import about
from policies.admission import Ask, Grant, Refusal, Rule
from policies.rate import NUM_SLOTS

log = logging.getLogger(__name__)

T = TypeVar("T")

IDS_A_CALL = 500
"""Leases renewed by one call."""
SERVERS_TIME = 0
MAX_LEFT = 10_000
"""Requests that Redis is told of when it is back; the leases of others end by themselves."""
MARK = "budgets:told"
"""Key that lies in Redis as long as it has what it was told of the ledger: one that has lost that has lost this too."""
Told = Callable[[list[int]], None]


class SharedMeters:
    """Every gauge by its rule's name, under the Redis's prefix."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._settlements: set[asyncio.Task[None]] = set()
        self.may_lack = asyncio.Event()
        """Redis has been away since this was last cleared: it may have lost gauges, or have missed a settlement."""
        self._left: dict[str, dict[str, Rule]] = {}
        """By request id, then by name: the rules under which Redis may hold something for a request that is not open
        there any more."""

    async def take(
        self, rules: Sequence[Rule], ask: Ask, now_ms: int = SERVERS_TIME, known: Sequence[int] = ()
    ) -> tuple[Grant | Refusal, list[int]]:
        """The outcome, and the readings after it. ``known``: what at least is spent of each budget among the rules,
        which Redis may have lost. Raises RedisAway."""
        arguments: list[str | int] = [now_ms, ask.request_id, ask.least_tokens, ask.most_tokens, ask.least_micros]
        arguments.append(ask.most_micros)
        answer = await self._run(script.TAKE, self._keys(rules), arguments + _words(rules, known))
        is_in, at_ms, one, other, *readings = answer
        outcome = Grant(at_ms, one, other) if is_in else Refusal(at_ms, one, other)
        return outcome, readings

    async def settle(
        self,
        rules: Sequence[Rule],
        request_id: str,
        unused: Sequence[tuple[int, int]],
        overused: int,
        cost_micros: int,
        now_ms: int = SERVERS_TIME,
        known: Sequence[int] = (),
    ) -> list[int]:
        """As ``admission.settle``, and ``known`` as above. Raises RedisAway."""
        arguments: list[str | int] = [now_ms, request_id, overused, cost_micros, len(unused)]
        for grant in unused:
            arguments += grant
        spent: list[int] = await self._run(script.SETTLE, self._keys(rules), arguments + _words(rules, known))
        return spent

    def settle_soon(
        self,
        rules: Sequence[Rule],
        request_id: str,
        unused: Sequence[tuple[int, int]],
        overused: int,
        cost_micros: int,
        told: Told,
        lost: Callable[[], None] = lambda: None,
        known: Sequence[int] = (),
    ) -> None:
        """The same by itself; ``told`` hears what is spent by then of each budget, or ``lost`` is called because Redis
        is away."""
        asked = rules, request_id, unused, overused, cost_micros

        async def settling() -> None:
            try:
                told(await self.settle(*asked, known=known))
            except RedisAway as away:
                self.left(rules, request_id)
                lost()
                log.debug("this request is not settled in Redis: %s", away, extra=about(request_id))

        settlement = asyncio.get_running_loop().create_task(settling())
        self._settlements.add(settlement)
        settlement.add_done_callback(self._ended)

    async def readings(self, rules: Sequence[Rule], now_ms: int = SERVERS_TIME) -> list[int]:
        """As ``admission.readings``. Raises RedisAway."""
        readings: list[int] = await self._run(script.READ, self._keys(rules), [now_ms, *_words(rules)])
        return readings

    async def renew(self, rule: Rule, request_ids: Iterable[str], now_ms: int = SERVERS_TIME) -> None:
        """Leases of requests that are still open. Raises RedisAway."""
        for ids in _portions(list(request_ids)):
            await self._run(script.RENEW, self._keys([rule]), [now_ms, *_words([rule]), *ids])

    async def hold(self, rule: Rule, held: Sequence[tuple[str, int]], now_ms: int = SERVERS_TIME) -> None:
        """A place, or so much money, for each of these requests, which are open and may not be known there. Raises
        RedisAway."""
        for portion in _portions(held):
            words = [word for each in portion for word in each]
            await self._run(script.HOLD, self._keys([rule]), [now_ms, *_words([rule]), *words])

    async def add(
        self, name: str, slot_ms: int, telling_id: str, amounts: Iterable[tuple[int, int]], now_ms: int = SERVERS_TIME
    ) -> None:
        """To the window of this name what was let in elsewhere: (milliseconds ago, amount). Whatever was told under the
        same id counts once. Raises RedisAway."""
        keep_ms = (NUM_SLOTS + 1) * slot_ms
        words: list[str | int] = [now_ms, telling_id, "", 0, slot_ms, keep_ms, 0]
        for each in amounts:
            words += each
        await self._run(script.ADD, [self._redis.key("limits:" + name)], words)

    async def restore(self, rule: Rule, spent_micros: int, now_ms: int = SERVERS_TIME) -> None:
        """At least so much of this budget is spent, as the ledger knows. Raises RedisAway."""
        await self._run(script.RESTORE, self._keys([rule]), [now_ms, *_words([rule], [spent_micros])])

    async def restore_window(self, rule: Rule, slots: Iterable[tuple[int, int]], now_ms: int = SERVERS_TIME) -> None:
        """At least so much was used in each of these slots (number, amount), as the ledger knows. Raises RedisAway."""
        words = [word for each in slots for word in each]
        await self._run(script.RESTORE_WINDOW, self._keys([rule]), [now_ms, *_words([rule]), *words])

    def left(self, rules: Sequence[Rule], request_id: str) -> None:
        """Redis gave no answer: it may hold something for this request, which is not open there any more."""
        if leases := {rule.name: rule for rule in rules if not rule.slot_ms}:
            self._left.setdefault(request_id, {}).update(leases)
            if len(self._left) > MAX_LEFT:
                del self._left[next(iter(self._left))]

    async def look(self) -> None:
        """Redis may have been away, or have lost everything, while nobody asked it anything; it hears what it need not
        hold any more. Raises RedisAway."""
        try:
            is_told = await self.is_told()
        except RedisAway:
            self.may_lack.set()
            raise
        if not is_told:
            self.may_lack.set()
        left, self._left = self._left, {}
        for request_id, rules in left.items():
            self.settle_soon([*rules.values()], request_id, [], 0, 0, lambda spent: None)

    async def is_told(self) -> bool:
        """It has not lost everything since ``all_told``. Raises RedisAway."""
        return bool(await self._redis.call("EXISTS", self._redis.key(MARK)))

    async def all_told(self) -> None:
        """It knows of all budgets, and of the tokens of the last day, what the ledger knows. Raises RedisAway."""
        await self._redis.call("SET", self._redis.key(MARK), 1)

    async def close(self) -> None:
        """Until what is under way has arrived, or Redis is away."""
        while self._settlements:
            await asyncio.wait(self._settlements)

    async def _run(self, script: Script, keys: Sequence[str], arguments: Sequence[str | int]) -> Any:
        try:
            return await self._redis.run(script, keys, arguments)
        except RedisAway:
            self.may_lack.set()
            raise

    def _keys(self, rules: Sequence[Rule]) -> list[str]:
        return [self._redis.key("limits:" + rule.name) for rule in rules]

    def _ended(self, settlement: asyncio.Task[None]) -> None:
        self._settlements.discard(settlement)
        if not settlement.cancelled() and (error := settlement.exception()) is not None:
            log.error("a request cannot be settled in Redis", exc_info=error)


def _words(rules: Sequence[Rule], known: Sequence[int] = ()) -> list[str | int]:
    words: list[str | int] = []
    floors = iter(known)
    for rule in rules:
        words += (rule.kind, rule.ceiling, rule.slot_ms, rule.keep_ms)
        words.append(next(floors, 0) if rule.kind == "money" else 0)
    return words


def _portions(ids: Sequence[T]) -> list[Sequence[T]]:
    return [ids[start : start + IDS_A_CALL] for start in range(0, len(ids), IDS_A_CALL)]
