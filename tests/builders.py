"""What tests need and seldom care about: sensible unless you say otherwise."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa

from gateway import store
from gateway.auth import Caller
from gateway.clock import Clock
from gateway.dispatch import Dispatch
from gateway.flight import Flight
from gateway.launcher import Launcher
from gateway.ledger import Entry
from gateway.store import Store
from policies import settings, terms, wire
from policies.policy import Policy
from policies.priority import Order

T = TypeVar("T")

ROOT = Path(__file__).parents[1]
PATIENCE_S = 120.0
"""How long a test waits for what must happen before it fails: longer than a process that imports torch takes to start
where there are more of them than cores."""
NO_TEXT = object()
"""Where nothing is rendered or read."""

_request_numbers = itertools.count(1)


class HandClock(Clock):
    """Stands still until ``advance``."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._due: list[tuple[float, int, HandTimer]] = []
        self._order = itertools.count()

    def now(self) -> float:
        return self._now

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> HandTimer:
        timer = HandTimer(callback)
        heapq.heappush(self._due, (self._now + delay_s, next(self._order), timer))
        return timer

    def advance(self, seconds: float) -> None:
        """Calls what comes due meanwhile, in order, each at its own instant."""
        until = self._now + seconds
        while self._due and self._due[0][0] <= until:
            self._now, _, timer = heapq.heappop(self._due)
            timer.fire()
        self._now = until

    def stand_still(self, seconds: float) -> None:
        """Calls what came due meanwhile at the end of it, as in a process that was stopped for so long."""
        self._now += seconds
        due = [entry for entry in self._due if entry[0] <= self._now]
        self._due = [entry for entry in self._due if entry[0] > self._now]
        heapq.heapify(self._due)
        for _, _, timer in sorted(due):
            timer.fire()

    def waits(self) -> list[float]:
        """Seconds until each call that is due, soonest first."""
        return sorted(round(at - self._now, 9) for at, _, timer in self._due if not timer.cancelled)


class HandTimer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    def fire(self) -> None:
        if not self.cancelled:
            self.cancelled = True
            self._callback()


def a_submit(
    num_prompt_tokens: int = 4, max_tokens: int = 8, num_sequences: int = 1, **sampling: object
) -> wire.Submit:
    """A request with an id of its own."""
    return wire.Submit(
        request_id=f"req_{next(_request_numbers):032x}",
        prompt_token_ids=list(range(1, num_prompt_tokens + 1)),
        sampling=terms.Sampling(max_tokens=max_tokens, **sampling),  # type: ignore[arg-type]
        num_sequences=num_sequences,
    )


def an_order(submit: wire.Submit, sla_class: str = "standard", tenant_id: str = "ten_1", weight: float = 1.0) -> Order:
    """What the line knows of it."""
    num_expected_tokens = submit.num_sequences * min(submit.sampling.max_tokens, 256)
    return Order(tenant_id, sla_class, weight, len(submit.prompt_token_ids), num_expected_tokens, 0.0)


def send(dispatch: Dispatch, submit: wire.Submit, model: str = "scripted", **order: Any) -> Flight:
    """On its way; ``order`` as for ``an_order``."""
    return dispatch.submit(model, submit, an_order(submit, **order))


def classes(**standard: object) -> dict[str, settings.SlaClass]:
    """The usual three, with changes to the one that is asked for by nobody in particular."""
    return {**settings.CLASSES, "standard": msgspec.structs.replace(settings.CLASSES["standard"], **standard)}


def worker_settings(listen: str, name: str = "scripted-0", **others: object) -> settings.WorkerSettings:
    return settings.WorkerSettings(name=name, model="scripted", source="demo", listen=listen, **others)  # type: ignore[arg-type]


def scripted(*options: object) -> tuple[str, ...]:
    """The command that starts a scripted worker, as ``Launcher`` takes it: the settings follow."""
    return (sys.executable, "-m", "tests.scripted_worker", *map(str, options))


async def until(condition: Callable[[], object]) -> None:
    """Looks again and again, for as long as a test's patience lasts."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def when(
    look: Callable[[], Awaitable[T]], wanted: Callable[[T], object] = bool, patience_s: float = PATIENCE_S
) -> T:
    """What ``look`` sees, as soon as it is ``wanted``: of a database or a server, which tells nobody."""
    async with asyncio.timeout(patience_s):
        while not wanted(seen := await look()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return seen


@contextlib.asynccontextmanager
async def dispatching(
    *addresses: str, clock: Clock | None = None, command: tuple[str, ...] = (), replicas: int = 0, **sections: object
) -> AsyncIterator[Dispatch]:
    """A dispatch with one model, "scripted", whose workers are ready."""
    model = settings.Model(replicas=replicas, addresses=addresses)
    config = settings.Settings(models={"scripted": model}, **sections)
    dispatch = Dispatch(config, clock or Clock(), Launcher(command))
    dispatch.serve("scripted", NO_TEXT)  # type: ignore[arg-type]
    try:
        async with asyncio.timeout(PATIENCE_S):
            await dispatch.until_ready()
            await until(lambda: all(worker.facts for worker in dispatch.workers()))
            yield dispatch
    finally:
        await dispatch.close(drain_s=0)


async def answer(flight: Flight) -> list[wire.Delta]:
    """All of it."""
    deltas: list[wire.Delta] = []
    async with flight:
        num_open = flight.num_sequences
        while num_open:
            arrived = await flight.deltas()
            num_open -= sum(delta.finish is not None for delta in arrived)
            deltas += arrived
    return deltas


def tokens(deltas: list[wire.Delta], index: int = 0) -> list[int]:
    return [token for delta in deltas if delta.index == index for token in delta.token_ids]


async def quiet(dispatch: Dispatch) -> None:
    """Until the workers have let go of all that they were given, and then report that they hold nothing."""
    await until(lambda: not any(flights for *_, flights in dispatch.seated()))
    before = [worker.stats for worker in dispatch.workers()]

    def all_report() -> bool:
        reports = [worker.stats for worker in dispatch.workers()]
        return all(
            report is not None and report is not old and not report.num_running and not report.num_waiting
            for report, old in zip(reports, before, strict=True)
        )

    await until(all_report)


def a_caller(policy: Policy | None = None, tenant_id: str = "ten_1", key_id: str = "key_1") -> Caller:
    """Whoever asks."""
    return Caller("org_1", tenant_id, "a tenant", key_id, policy or Policy(), "default", 1)


def an_entry(**others: object) -> Entry:
    """A ledger row with a request id of its own."""
    return msgspec.structs.replace(
        Entry(
            request_id=f"req_{next(_request_numbers):032x}",
            tenant_id="ten_1",
            key_id="key_1",
            model="demo",
            endpoint="/v1/chat/completions",
            status=200,
            finish_reason="stop",
            num_prompt_tokens=12,
            num_cached_tokens=4,
            num_completion_tokens=34,
            num_sequences=1,
            created_at=1_795_000_000,
            queue_ms=0.25,
            ttft_ms=12.5,
            duration_ms=321.125,
            sla_class="standard",
            service_tier="default",
            cache="miss",
            policy_name="default",
            policy_version=1,
            cost_micros=0,
        ),
        **others,
    )


async def write_chain(rooms: Store, *entries: Entry, chain: int = 1, first_position: int = 1) -> list[Entry]:
    """Into the ledger as rows of a chain, one behind the other."""
    placed = [
        msgspec.structs.replace(entry, chain=chain, position=position)
        for position, entry in enumerate(entries, first_position)
    ]
    async with rooms.engine.connect() as connection:
        known = sa.select(store.ledger_chains.c.id).where(store.ledger_chains.c.id == chain)
        is_known = (await connection.execute(known)).first() is not None
    async with rooms.engine.begin() as connection:
        if not is_known:
            row = {"id": chain, "opened_at": 1_795_000_000, "gateway": "a gateway"}
            await connection.execute(sa.insert(store.ledger_chains), row)
        await connection.execute(sa.insert(store.ledger), [msgspec.structs.asdict(entry) for entry in placed])
    return placed
