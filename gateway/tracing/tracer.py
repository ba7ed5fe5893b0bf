"""Of every request when it begins and ends: whether it is worth a trace, and what is told of it then."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from gateway.clock import Clock, Timer
from gateway.flight import Flight
from gateway.head import Head
from gateway.ledger.entry import Entry
from gateway.ledger.recent import Recent
from gateway.traceparent import Parent, baggage_of, below, state_of, traceparent
from gateway.tracing.content import asked_of, completion_of, prompt_of
from gateway.tracing.keeping import TAIL, Keeping, SamplerUnknown
from gateway.tracing.kept import Kept, Noted, OfJourney, Row
from gateway.tracing.lag import Lag
from gateway.tracing.order import Order, TracingInvalid
from gateway.tracing.rides import MAX_RIDES, flights_of, ride_of
from gateway.tracing.sender import Sender
from policies.settings import Settings

TRACE_RESPONSE = "traceresponse"
"""Trace Context level 2: what the span is called that a kept request has here."""
GATHER_S, AT_ONCE = 0.05, 16
"""Those that are worth a trace wait so long for others, and are told together: the first of them finds nothing of what
that takes in the processor's caches. More at once would keep what they were answered from being used again while it is
there."""
TRACE, SPAN = slice(4, None), slice(20, None)
"""Of a request's id, what is that of a trace that begins with it, and of its span."""
_of_journey: Callable[[Head], Noted] = attrgetter(*OfJourney.__struct_fields__)
_of_entry: Callable[[Entry], Any] = attrgetter(*Row.__struct_fields__)


class Over(NamedTuple):
    """A request that is over and worth a trace."""

    noted: Head
    method: str
    status: int
    ended_at: float


class Tracing:
    """Of one gateway."""

    def __init__(
        self, config: Settings, order: Order, environ: Mapping[str, str], clock: Clock, recent: Recent
    ) -> None:
        """``recent`` holds on to what is kept. Raises TracingInvalid."""
        self._config = config.tracing
        try:
            self._keeping = Keeping(config.tracing, config.classes, environ)
        except SamplerUnknown as error:
            raise TracingInvalid(str(error)) from None
        self._below = self._keeping.below
        self.keeps_slow = self._keeping.slower_s > 0
        """Whoever has no trace when it is over may still come to have one."""
        self.sender = Sender(order, environ, clock)
        self._clock = clock
        self._recent = recent
        self._encoder = msgspec.msgpack.Encoder()
        self._lag = Lag(clock)
        self._over: list[Over] = []
        self._timer: Timer | None = None
        """They are told then."""
        self.num_kept = 0
        """Requests that were worth a trace."""

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        async with self.sender.opened():
            with self._lag.measured():
                try:
                    yield
                finally:
                    self.flush()

    # A request's beginning and its end

    def begin(self, noted: Head, request: web.Request) -> None:
        """Its handler runs."""
        connection: Any = request.protocol
        noted.received_at = connection.received_at or noted.started_at  # 0: it came with the one before it, or by none
        connection.received_at = 0.0
        noted.keeping = self._keeping
        if noted.parent is not None:
            self._go_on(noted, noted.parent, request)
            return
        # A request's id is random where a trace's and a span's have to be: whoever has the one has the others.
        request_id = noted.request_id
        if request_id[TAIL] >= self._below:
            noted.traceparent = f"00-{request_id[TRACE]}-{request_id[SPAN]}-00"  # as ``traceparent``, without a call
            return
        noted.traceparent = noted.also[TRACE_RESPONSE] = traceparent(request_id[TRACE], request_id[SPAN], True)
        noted.keep("sampled")

    def _go_on(self, noted: Head, parent: Parent, request: web.Request) -> None:
        """With a trace that has begun elsewhere."""
        is_sampled = self._keeping.is_sampled(parent.trace_id, parent.is_sampled)
        noted.traceparent = traceparent(parent.trace_id, noted.request_id[SPAN], is_sampled)
        noted.parent_id = parent.span_id
        noted.state, noted.baggage = state_of(request.headers), baggage_of(request.headers)
        if is_sampled:
            noted.also[TRACE_RESPONSE] = noted.traceparent
            noted.keep("parent")

    def beside(self, before: Head, kind: str) -> Head:
        """What goes on behind a request has a span of its own below that request's, in the same trace."""
        noted = before.behind()
        span_id = f"{int(before.span_id, 16) ^ (1 << 63):016x}"
        noted.traceparent = below(before.traceparent, span_id)
        noted.received_at, noted.keeping = time.monotonic(), self._keeping
        if before.kept_for:
            noted.keep("sampled")
        noted.parent_id, noted.state, noted.kind = before.span_id, before.state, kind
        return noted

    def end(self, noted: Head, request: web.Request, status: int) -> None:
        """Its answer's last byte was written, or nobody waits for it any more."""
        if not noted.kept_for:
            noted.keep(self._keeping.at_last(noted, status))
            if not noted.kept_for:
                # A request lives as long as its connection waits for the next one; what it was answered need not.
                noted.answer = None
                return
        self.num_kept += 1
        over = self._over
        over.append(Over(noted, request.method, status, time.monotonic()))
        if len(over) == AT_ONCE:
            self.flush()
        elif len(over) == 1:
            self._timer = self._clock.call_later(GATHER_S, self.flush)

    def flush(self) -> None:
        """Those that are over are told, before anybody looks for one of them."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        over, self._over = self._over, []
        unix_s = time.time() - time.monotonic()
        self.sender.send([self._told(*each, unix_s) for each in over])

    def _told(self, noted: Head, method: str, status: int, ended_at: float, unix_s: float) -> bytes:
        """As it is sent; ``recent`` has it by then."""
        entry, answer, caller = noted.entry, noted.answer, noted.caller
        noted.answer = None  # as in ``end``
        prompt = completion = fingerprint = response_id = ""
        sampling, asked = None, None
        flights: list[Flight] = []
        if answer is not None:
            asked, flights = asked_of(answer.call), flights_of(answer)
            fingerprint, response_id = answer.fingerprint, answer.id
            sampling = next(iter(answer.parts.values())).submit.sampling
            if noted.shows_content and self._config.content:
                most = self._config.max_content_bytes
                prompt, completion = prompt_of(answer.call, most), completion_of(answer, most)
        kept = Kept(  # by place: by name it takes twice as long
            *_of_journey(noted),
            unix_s,
            ended_at,
            method,
            noted.route,
            status,
            noted.request_id,
            self._lag.ms,
            len(flights),
            [ride_of(flight) for flight in flights[:MAX_RIDES]],
            "" if caller is None else caller.tenant_id,
            "" if caller is None else caller.key_id,
            asked,
            sampling,
            None if entry is None else Row(*_of_entry(entry)),
            response_id,
            fingerprint,
            prompt,
            completion,
        )
        body = held = self._encoder.encode(kept)
        if entry is not None:
            if prompt or completion:
                held = self._encoder.encode(msgspec.structs.replace(kept, prompt="", completion=""))
            self._recent.keep(noted.request_id, held)
        return body
