"""What happens at the moment, told once a second to everybody who watches.

Rows are counted as they are written (``Ledger.tally``). Once a second what workers last reported is read, and one
snapshot is written for all watchers: whoever is slow misses some. Gateways that
share a Redis tell each other what they have with their beats, so each of them can tell of all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from gateway.background import alongside
from gateway.clock import Clock
from gateway.dispatch import Dispatch
from gateway.errors import ServiceUnavailable
from gateway.ledger import Ledger
from gateway.ledger.tally import Columns
from gateway.live.counts import Counts, Percentiles, percentiles
from gateway.live.streams import StreamLive, of_all, oldest
from policies.settings import SlaClass

if TYPE_CHECKING:
    from gateway.directory import Directory
    from gateway.gateways import Gateways, Report
    from gateway.upstreams.registry import Upstreams

log = logging.getLogger(__name__)

TICK_S = 1.0
WINDOW_S = 60
"""Percentiles and shares are those of what ended in so many seconds."""
HISTORY_S = 300
"""So many past snapshots a new watcher may have first."""
MAX_WATCHERS = 64
MAX_TENANTS = 50
"""Of which a snapshot tells: those with most open, then most tokens."""

REPORTED = (
    *("num_running", "num_waiting", "num_paused", "num_blocks", "num_used_blocks", "num_cached_blocks"),
    *("num_free_blocks", "step_ms"),
)
"""By workers, and told on as it is."""


class WorkerLive(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as it reported last; rates over the last second, by what it has computed for anybody."""

    name: str
    model: str
    gateway: str
    state: str
    """starting, ready or resting."""
    num_running: int = 0
    num_waiting: int = 0
    num_paused: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0
    num_cached_blocks: int = 0
    """Kept for prompts that begin alike, held by nobody."""
    num_free_blocks: int = 0
    step_ms: float = 0.0
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0


class GatewayLive(msgspec.Struct, frozen=True, kw_only=True):
    """What one gateway tells the others of itself."""

    second: Counts
    minute: Counts
    workers: list[WorkerLive]
    num_open: dict[str, int]
    """Requests that have not ended, by tenant."""
    streams: list[StreamLive] = []
    """Those of them that have been open for longest."""


class ClassLive(msgspec.Struct, frozen=True, kw_only=True):
    """One class of all models."""

    sla_class: str
    num_waiting: int
    oldest_wait_s: float
    num_ended: int
    """In the last minute, those that a client broke off not counted."""
    num_kept: int
    """Of those, first token and tokens came as the class promises."""
    attainment: float | None
    """Their share; null: none ended."""


class TenantLive(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant."""

    tenant_id: str
    name: str
    num_open: int
    num_ended: int
    """In the last minute, as are the tokens."""
    num_completion_tokens: int


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One second. What ended is told by the ledger's rows, what engines compute by their own reports."""

    at: float
    """Unix seconds."""
    num_gateways: int
    num_open: int
    """Requests that wait or are being answered."""
    requests_per_s: float
    failures_per_s: float
    prompt_tokens_per_s: float
    completion_tokens_per_s: float
    """Of what ended in this second, as are the three before."""
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    """Of all workers."""
    ttft_ms: Percentiles
    """Of what ended in the last minute, as is the next one."""
    tpot_ms: Percentiles
    classes: list[ClassLive]
    workers: list[WorkerLive]
    tenants: list[TenantLive]
    """The busiest ones."""
    streams: list[StreamLive]
    """The requests that have been open for longest, the oldest first."""


class Live:
    """This gateway's present, and that of the others as far as they tell."""

    def __init__(
        self,
        dispatch: Dispatch,
        directory: Directory,
        ledger: Ledger,
        classes: Mapping[str, SlaClass],
        clock: Clock,
        upstreams: Upstreams,
        aside: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """``aside``: while this lasts, nobody waits for the request that is being answered."""
        self._dispatch = dispatch
        self._upstreams = upstreams
        self._directory = directory
        self._classes = classes
        self._clock = clock
        self._aside = aside
        self._present = Counts()
        """The second that is not over."""
        self._seconds: deque[Counts] = deque()
        self._minute = Counts()
        self._workers: list[WorkerLive] = []
        self._computed: dict[str, tuple[float, int, int]] = {}
        """By worker: when it was looked at, and what it had computed then."""
        self._history: deque[bytes] = deque(maxlen=HISTORY_S)
        self._told = asyncio.Event()
        self.num_told = 0
        """Snapshots since start."""
        self.num_alone = 0
        """By then: the latest of them that is of this gateway alone, as nobody watched."""
        self.num_watchers = 0
        self._tally = ledger.tally
        self._tally.watchers.append(self._take)

    @contextlib.asynccontextmanager
    async def watched(self, gateways: Gateways) -> AsyncIterator[Live]:
        """While this lasts, there is a snapshot each second."""
        async with alongside(self._go_on(gateways)):
            yield self

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """One more watcher. Raises ServiceUnavailable when there are as many as may be."""
        if self.num_watchers >= MAX_WATCHERS:
            raise ServiceUnavailable(f"{MAX_WATCHERS} others watch already. Please try again.", retry_after_s=5.0)
        self.num_watchers += 1
        try:
            with self._aside():
                yield
        finally:
            self.num_watchers -= 1

    async def next(self, num_seen: int) -> tuple[int, bytes]:
        """The latest snapshot as JSON and its number, once it is another than ``num_seen``."""
        while self.num_told == num_seen:
            await self._told.wait()
        return self.num_told, self._history[-1]

    def past(self, num_seconds: int) -> list[bytes]:
        """The last so many snapshots, as far as there are, the latest left out."""
        told = list(self._history)[:-1]
        return told[-num_seconds:] if num_seconds else []

    def own(self) -> GatewayLive:
        """This gateway alone, as of the last tick."""
        second = self._seconds[-1] if self._seconds else Counts()
        open_by_tenant: dict[str, int] = {}
        flights = [*self._dispatch.flights(), *self._upstreams.flights()]
        for _, flight in flights:
            tenant_id = flight.order.tenant_id
            open_by_tenant[tenant_id] = open_by_tenant.get(tenant_id, 0) + 1
        for waiter in self._dispatch.residence.waiters():
            open_by_tenant[waiter.tenant_id] = open_by_tenant.get(waiter.tenant_id, 0) + 1
        return GatewayLive(
            second=second,
            minute=self._minute,
            workers=self._workers,
            num_open=open_by_tenant,
            streams=oldest(flights, self._clock.now()),
        )

    def tick(self, gateway: str, resting: Collection[str]) -> None:
        """A second is over: counts what ended in it, and reads what the workers have told. ``gateway`` is this one's
        name, ``resting`` those of the workers that are given nothing new."""
        self._tally.flush()
        second, self._present = self._present, Counts()
        self._seconds.append(second)
        self._minute.add(second)
        if len(self._seconds) > WINDOW_S:
            self._minute.add(self._seconds.popleft(), -1)
        self._workers = list(self._look_at_workers(gateway, resting))

    def _take(self, ended: Columns) -> None:
        self._present.take(ended)

    def tell(self, reports: Sequence[Report]) -> None:
        """One snapshot for all watchers, of what these gateways report."""
        self._history.append(msgspec.json.encode(self.snapshot(reports)))
        self.num_told += 1
        self._told.set()
        self._told = asyncio.Event()

    def snapshot(self, reports: Sequence[Report]) -> Snapshot:
        """Of these gateways together."""
        second, minute, open_by_tenant = Counts(), Counts(), dict[str, int]()
        workers: dict[str, WorkerLive] = {}
        gateways = [report.live for report in reports if report.live is not None]
        for gateway in gateways:
            second.add(gateway.second)
            minute.add(gateway.minute)
            for tenant_id, num in gateway.num_open.items():
                open_by_tenant[tenant_id] = open_by_tenant.get(tenant_id, 0) + num
            for worker in gateway.workers:
                # One at an address is seen by each gateway that uses it.
                known = worker.name if "@" in worker.name else f"{worker.gateway} {worker.name}"
                workers.setdefault(known, worker)
        return Snapshot(
            at=round(time.time(), 3),
            num_gateways=len(reports),
            num_open=sum(open_by_tenant.values()),
            requests_per_s=second.num_requests / TICK_S,
            failures_per_s=second.num_failed / TICK_S,
            prompt_tokens_per_s=second.num_prompt_tokens / TICK_S,
            completion_tokens_per_s=second.num_completion_tokens / TICK_S,
            prefill_tokens_per_s=sum(worker.prefill_tokens_per_s for worker in workers.values()),
            decode_tokens_per_s=sum(worker.decode_tokens_per_s for worker in workers.values()),
            ttft_ms=percentiles(minute.ttft),
            tpot_ms=percentiles(minute.tpot),
            classes=self._class_views(minute, reports),
            workers=list(workers.values()),
            tenants=self._tenant_views(minute, open_by_tenant),
            streams=of_all(gateway.streams for gateway in gateways),
        )

    def _class_views(self, minute: Counts, reports: Sequence[Report]) -> list[ClassLive]:
        waiting: dict[str, tuple[int, float]] = {}
        for view in [queue for report in reports for queue in report.queues]:
            num, oldest_s = waiting.get(view.sla_class, (0, 0.0))
            waiting[view.sla_class] = (num + view.num_waiting, max(oldest_s, view.oldest_wait_s))
        views = []
        for name in self._classes:
            num_waiting, oldest_s = waiting.get(name, (0, 0.0))
            num_ended, num_kept = minute.classes.get(name, (0, 0))
            views.append(
                ClassLive(
                    sla_class=name,
                    num_waiting=num_waiting,
                    oldest_wait_s=round(oldest_s, 3),
                    num_ended=num_ended,
                    num_kept=num_kept,
                    attainment=num_kept / num_ended if num_ended else None,
                )
            )
        return views

    def _tenant_views(self, minute: Counts, open_by_tenant: dict[str, int]) -> list[TenantLive]:
        none = (0, 0)
        busiest = sorted(
            {*minute.tenants, *open_by_tenant},
            key=lambda each: (-open_by_tenant.get(each, 0), -minute.tenants.get(each, none)[1], each),
        )
        return [
            TenantLive(
                tenant_id=each,
                name=self._name_of(each),
                num_open=open_by_tenant.get(each, 0),
                num_ended=minute.tenants.get(each, none)[0],
                num_completion_tokens=minute.tenants.get(each, none)[1],
            )
            for each in busiest[:MAX_TENANTS]
        ]

    def _name_of(self, tenant_id: str) -> str:
        try:
            return self._directory.tenant(tenant_id).name
        except KeyError:  # another gateway has heard of it sooner
            return tenant_id

    def _look_at_workers(self, gateway: str, resting: Collection[str]) -> Iterator[WorkerLive]:
        now, before, self._computed = self._clock.now(), self._computed, {}
        for model, worker, _ in self._dispatch.seated():
            stats, is_ready = worker.stats, worker.facts is not None
            state = "starting" if not is_ready else "resting" if worker.name in resting else "ready"
            if stats is None or not is_ready:
                yield WorkerLive(name=worker.name, model=model, gateway=gateway, state=state)
                continue
            self._computed[worker.name] = now, stats.num_prefill_tokens, stats.num_decode_tokens
            then, num_prefill, num_decode = before.get(worker.name, self._computed[worker.name])
            seconds = max(now - then, TICK_S / 2)
            # Below zero: another process has begun to count anew.
            prefill, decode = (
                max(0, stats.num_prefill_tokens - num_prefill),
                max(0, stats.num_decode_tokens - num_decode),
            )
            yield WorkerLive(
                name=worker.name,
                model=model,
                gateway=gateway,
                state=state,
                prefill_tokens_per_s=round(prefill / seconds, 1),
                decode_tokens_per_s=round(decode / seconds, 1),
                **{name: getattr(stats, name) for name in REPORTED},
            )

    async def _go_on(self, gateways: Gateways) -> None:
        due_at = self._clock.now()
        while True:
            due_at = max(due_at + TICK_S, self._clock.now())
            await self._clock.sleep(due_at - self._clock.now())
            try:
                self.tick(gateways.name, gateways.resting)
                if self.num_watchers:
                    self.tell(await gateways.reports())
                else:
                    self.tell([gateways.report()])
                    self.num_alone = self.num_told
            except Exception:  # a second without a snapshot is no reason to have none any more
                log.exception("there is no snapshot of this second")
