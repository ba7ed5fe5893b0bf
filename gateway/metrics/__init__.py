"""What operators measure: /metrics for Prometheus, and the same by OTLP.

Nothing here stands in a request's way. Rows are counted when they are written, all else is read when somebody asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

from aiohttp import hdrs, web

from gateway import telemetry
from gateway.background import alongside
from gateway.clock import Clock
from gateway.doors import Doors
from gateway.house import GATEWAY, Gateway
from gateway.ledger import Ledger
from gateway.ledger.spool import SpooledWriter
from gateway.metrics import limits, names, otlp, state
from gateway.metrics.counts import TICK_S, Counts, Sample, Spread
from gateway.metrics.exposition import Exposition
from gateway.metrics.families import Families, gathered, merged
from gateway.metrics.names import reference
from gateway.metrics.shared import WRITE_S, Files
from policies.settings import Settings

__all__ = ["PATH", "Metrics", "reference", "serve"]

PATH = "/metrics"
LAG_TICK_S = 0.25

log = logging.getLogger(__name__)


class Metrics:
    """Those of this process, and through its files those of the others on this port."""

    def __init__(
        self,
        config: Settings,
        ledger: Ledger,
        clock: Clock,
        doors: Doors,
        spool: SpooledWriter | None,
        directory: Path,
    ) -> None:
        """``directory``: where processes of one port tell each other."""
        self._config = config
        self._clock = clock
        self._doors = doors
        self._spool = spool
        self._tally = ledger.tally
        self._ended = Counts(config.classes, config.metrics.max_models, config.metrics.max_tenants)
        self._lag = Spread(names.LAG_S)
        self._sendings: Counter[str] = Counter()
        self.exposition = Exposition()
        self._files = Files(directory) if config.server.processes > 1 else None
        self._tally.watchers.append(self._ended.take)

    async def families(self, gw: Gateway) -> Families:
        """Of all processes."""
        own = await self._own(gw)
        if self._files is None:
            return own
        return merged([own, *await asyncio.to_thread(self._files.others)])

    @contextlib.asynccontextmanager
    async def watched(self, gw: Gateway) -> AsyncIterator[None]:
        """While this lasts, time is measured, and whoever wants to be told is told."""
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(alongside(self._look_at_clock()))
            await stack.enter_async_context(alongside(self._tick_on()))
            if self._files is not None:
                await stack.enter_async_context(alongside(self._write_on(gw, self._files)))
            if self._config.metrics.otlp_endpoint:
                sending = otlp.send_on(self._config.metrics, self._clock, lambda: self._own(gw), self._sendings)
                await stack.enter_async_context(alongside(sending))
            yield

    async def _own(self, gw: Gateway) -> Families:
        config, doors = self._config, self._doors
        self._tally.flush()
        samples = await state.samples(gw, self._spool, doors.num_inside)
        samples += self._ended.samples(config.billing.currency, config.metrics.sla_objective)
        samples += limits.samples(gw, self._ended.tenants, config.metrics.max_tenants)
        samples += [
            Sample("penstock_http_responses_total", (str(status),), num) for status, num in doors.answered.items()
        ]
        samples += [Sample("penstock_refusals_total", (code,), num) for code, num in doors.refused.items()]
        samples += [Sample("penstock_otlp_sendings_total", (outcome,), num) for outcome, num in self._sendings.items()]
        samples.append(Sample("penstock_log_lines_lost_total", (), telemetry.num_lost_lines()))
        lag = self._lag
        samples.append(Sample("penstock_event_loop_lag_seconds", (), lag.sum, tuple(lag.counts), lag.bounds))
        return gathered(samples)

    async def _tick_on(self) -> None:
        while True:
            await self._clock.sleep(TICK_S)
            self._tally.flush()
            self._ended.tick()

    async def _look_at_clock(self) -> None:
        due_at = self._clock.now()
        while True:
            due_at = max(due_at, self._clock.now()) + LAG_TICK_S
            await self._clock.sleep(due_at - self._clock.now())
            self._lag.add(max(0.0, self._clock.now() - due_at))

    async def _write_on(self, gw: Gateway, files: Files) -> None:
        while True:
            await self._clock.sleep(WRITE_S)
            try:
                await asyncio.to_thread(files.write, await self._own(gw))
            except Exception:  # a second that is not told is no reason to tell none any more
                log.exception("the other gateways are not told this second's metrics")


async def serve(request: web.Request) -> web.Response:
    """GET /metrics."""
    gw = request.app[GATEWAY]
    assert gw.metrics is not None
    _check(gw, request)
    families = await gw.metrics.families(gw)
    body, content_type = gw.metrics.exposition.text(families, request.headers.get(hdrs.ACCEPT, ""))
    return web.Response(body=body, headers={hdrs.CONTENT_TYPE: content_type})


def _check(gw: Gateway, request: web.Request) -> None:
    """Raises InvalidApiKey where a key of the administration is needed."""
    access = gw.settings.metrics.access
    if access == "open" or (access == "loopback" and gw.auth.is_local(request)):
        return
    gw.auth.admin_of(request)
