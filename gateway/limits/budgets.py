"""What is spent already: the ledger knows, and tells the gauges at start, when a tenant or a key gets a budget, when
what was under way at that time has ended, when rows have come late, and when Redis has been away, which may have lost
some of it and has missed what gateways spent meanwhile by themselves. One that has lost everything is told of the
tokens of the last day as well (``days``). Whatever shares of a budget the ledger knows to
be spent, and the webhook has not taken, are told then as well.

None of this is on the way of a request. Until it is done the gauges have what they have.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from gateway import rotations, store
from gateway.background import alongside
from gateway.clock import Clock
from gateway.directory import Directory
from gateway.limits import Limits, days
from gateway.limits.days import AT_ONCE, is_since
from gateway.posted import Posted
from gateway.redis import RedisAway
from gateway.store import Store
from policies import admission
from policies.admission import Alert, Running
from policies.policy import Budget

log = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_S = 1.0


class Budgets:
    """Keeps the gauges of money no lower than the ledger."""

    def __init__(
        self,
        rooms: Store,
        directory: Directory,
        limits: Limits,
        clock: Clock,
        came_late: asyncio.Event,
        alert: Callable[[Alert], None],
        wall: Callable[[], float] = time.time,
    ) -> None:
        """``came_late`` is the ledger's, ``alert`` as that of ``Limits``."""
        self._rooms = rooms
        self._posted = Posted(rooms)
        self._alert = alert
        self._directory = directory
        self._limits = limits
        self._clock = clock
        self._came_late = came_late
        self._wall = wall
        self._restored: set[tuple[str, Budget]] = set()
        """Names of the rules whose gauges know what was spent before, under these budgets."""
        self._ended: set[tuple[str, Budget]] = set()
        """Those of which it was told that they refuse."""
        self._seen_revision = -1
        self._failure: str | None = None

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """On entering, all gauges know; while this lasts they are told again whenever they may not. Raises what the
        database raises."""
        if self._limits.shared is None:
            await days.restore(self._rooms, self._directory, self._limits, self._wall)
        with contextlib.suppress(RedisAway):  # told when it is back
            await self.restore()
        async with alongside(self._watch()):
            yield

    async def restore(self) -> None:
        """Raises what the database raises, and RedisAway."""
        shared = self._limits.shared
        if self._lack:
            self._restored.clear()
            self._seen_revision = -1  # until all of it is done, whatever goes wrong in the database
            self._came_late.clear()
            if shared is not None:
                shared.may_lack.clear()  # whatever goes wrong with Redis from now on sets it again
        revision = self._directory.revision
        running, counting = await self._running()
        if late := self._limits.late:
            self._limits.late = set()
            self._restored -= {(each.rule.name, each.budget) for each in running if each.purse_id in late}
            self._seen_revision = -1
        news = [each async for each in _with_pauses(running) if (each.rule.name, each.budget) not in self._restored]
        for period in {each.period for each in news}:
            of_period = [each for each in news if each.period == period]
            spent = await self._spent_since(period.starts_at, of_period)
            of_period = [each for each in of_period if each.purse_id in spent or not each.key_id]
            for portion in _portions(of_period):
                await asyncio.gather(*(self._limits.restore(each, spent.get(each.purse_id, 0)) for each in portion))
                await self._tell(portion, spent)
        if shared is not None and not await shared.is_told():
            await days.restore(self._rooms, self._directory, self._limits, self._wall)
            await shared.all_told()
        self._restored = {(each.rule.name, each.budget) async for each in _with_pauses(running)}
        self._ended &= self._restored
        self._limits.periods = counting
        self._seen_revision = revision

    async def tell_refused(self) -> None:
        """That a hard budget is spent: once it refuses what is asked. Raises what the database raises."""
        refused = {*self._limits.refused}
        for each in refused:
            if (each.rule.name, each.budget) not in self._ended:
                spent = await self._spent_since(each.period.starts_at, [each])
                await self._tell([each], spent, refuses=True)
                self._ended.add((each.rule.name, each.budget))
        self._limits.refused -= refused

    @property
    def _lack(self) -> bool:
        """The gauges may, of what the ledger has."""
        shared = self._limits.shared
        return self._came_late.is_set() or (shared is not None and shared.may_lack.is_set())

    async def _running(self) -> tuple[list[Running], dict[str, set[tuple[str, str]]]]:
        """And, as ``Limits.periods``, whose requests they count."""
        now, periods, running = self._wall(), {}, []
        counting: dict[str, set[tuple[str, str]]] = {}

        def add(tenant_id: str, budget: Budget, line: Sequence[str] = ()) -> None:
            if budget.period not in periods:
                periods[budget.period] = admission.period_of(budget.period, now)
            period = periods[budget.period]
            running.append(Running.of(budget, period, tenant_id, *((line[0], line[-1]) if line else ())))
            for owner in line or (tenant_id,):
                counting.setdefault(owner, set()).add((running[-1].purse_id, budget.period))

        for tenant in self._directory.tenants():
            version = self._directory.policy(tenant.policy_name)
            if version is not None and (budget := version.policy.budget) is not None:
                add(tenant.id, budget)
        async for key in _with_pauses([*self._directory.budgeted_keys()]):
            if key.tenant_id is not None and (budget := self._directory.budget_of(key)) is not None:
                add(key.tenant_id, budget, self._directory.line_of(key))
        return running, counting

    async def _tell(self, budgets: Sequence[Running], spent: Mapping[str, int], refuses: bool = False) -> None:
        """Shares that are spent and that nobody was told of: a gateway stopped before it could, the budget is new or
        less than it was, or it ``refuses``. ``spent``: as ``_spent_since`` has it. Raises what the database raises."""
        alerts = [
            alert for each in budgets for alert in admission.alerts(each, 0, spent.get(each.purse_id, 0), refuses)
        ]
        posted = await self._posted.among([alert.id for alert in alerts])
        for alert in alerts:
            if alert.id not in posted:
                self._alert(alert)

    async def _spent_since(self, unix_s: int, budgets: Sequence[Running]) -> dict[str, int]:
        """By purse. Raises what the database raises."""
        tenant_ids = [each.tenant_id for each in budgets if not each.key_id]
        owner_ids = sorted({each.tenant_id for each in budgets if each.key_id})
        spent: dict[str, int] = {}
        async with self._rooms.engine.connect() as connection:
            for ids in _portions(tenant_ids):
                query = _costs(store.ledger.c.tenant_id, unix_s, ids)
                spent.update((tenant_id, int(micros)) for tenant_id, micros in await connection.execute(query))
            for ids in _portions(owner_ids):
                known = await rotations.predecessors(connection, ids)
                rows = await connection.stream(_costs(store.ledger.c.key_id, unix_s, ids))
                async for key_id, micros in rows:
                    purse_id = rotations.first(key_id, known)
                    spent[purse_id] = spent.get(purse_id, 0) + int(micros)
        return spent

    async def _watch(self) -> None:
        while True:
            await self._clock.sleep(LOOK_S)
            try:
                await self._limits.look()
                if self._lack or self._limits.late or self._directory.revision != self._seen_revision:
                    await self.restore()
                if self._limits.refused:
                    await self.tell_refused()
            except RedisAway:
                continue
            except (SQLAlchemyError, OSError) as error:
                self._say(store.cause_of(error))
            except Exception:
                log.exception("what is spent of the budgets cannot be read from the ledger")
            else:
                self._say(None)

    def _say(self, failure: str | None) -> None:
        """Once when it begins."""
        if failure is not None and self._failure is None:
            log.error("what is spent of the budgets cannot be read from the ledger: %s", failure)
        self._failure = failure


def _costs(owner: sa.ColumnElement[str], unix_s: int, tenant_ids: Sequence[str]) -> sa.Select[str, int]:
    """Of these tenants since then, of each tenant or of each key: the column ``owner``."""
    rows = store.ledger.c
    return (
        sa.select(owner, sa.func.sum(rows.cost_micros))
        .where(is_since(unix_s), rows.tenant_id.in_(tenant_ids))
        .group_by(owner)
    )


async def _with_pauses(each: Iterable[T]) -> AsyncIterator[T]:
    """The loop is given to others now and then: every key may have a budget."""
    for number, one in enumerate(each):
        if number % AT_ONCE == 0:
            await asyncio.sleep(0)
        yield one


def _portions(each: Sequence[T]) -> Iterable[Sequence[T]]:
    for start in range(0, len(each), AT_ONCE):
        yield each[start : start + AT_ONCE]
