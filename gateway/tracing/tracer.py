"""Of every request when it begins and ends: whether it is worth a trace, and what is told of it then."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from operator import attrgetter
from typing import Any

import msgspec
from aiohttp import web

from gateway import head
from gateway.clock import Clock
from gateway.head import Head
from gateway.ledger.entry import Entry
from gateway.ledger.recent import Recent
from gateway.protocol import Timed
from gateway.traceparent import baggage_of, state_of, traceparent
from gateway.tracing.content import asked_of, completion_of, prompt_of
from gateway.tracing.journey import Journey
from gateway.tracing.keeping import TAIL, Keeping, SamplerUnknown
from gateway.tracing.kept import Kept, Noted, OfJourney, Row
from gateway.tracing.lag import Lag
from gateway.tracing.order import Order, TracingInvalid
from gateway.tracing.rides import rides_of
from gateway.tracing.sender import Sender
from policies.settings import Settings

TRACE_RESPONSE = "traceresponse"
"""Trace Context level 2: what the span is called that a kept request has here."""
_of_journey: Callable[[Journey], Noted] = attrgetter(*OfJourney.__struct_fields__)
_of_entry: Callable[[Entry], Any] = attrgetter(*Row.__struct_fields__)


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
        self._below, self._kept_for = self._keeping.below, self._keeping.kept_for
        self.sender = Sender(order, environ, clock)
        self._recent = recent
        self._encoder = msgspec.msgpack.Encoder()
        self._lag = Lag(clock)
        self.num_kept = 0
        """Requests that were worth a trace."""

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        async with self.sender.opened():
            with self._lag.measured():
                yield

    # A request's beginning and its end

    def begin(self, noted: Head, request: web.Request) -> Journey:
        """Its handler runs."""
        request_id, parent = noted.request_id, noted.parent
        received_at = started_at = noted.started_at
        connection = request.protocol
        if connection.__class__ is Timed and connection.received_at:  # else it came by no connection, or with another
            received_at, connection.received_at = connection.received_at, 0.0
        # A request's id is random where those of a trace and a span have to be, so whoever has the one has the others.
        if parent is None:
            noted.trace_id = trace_id = request_id[4:]
            is_sampled = trace_id[TAIL:] < self._below
            journey = Journey(traceparent(trace_id, trace_id[16:], is_sampled), received_at, started_at, is_sampled)
        else:
            is_sampled = self._keeping.is_sampled(parent.trace_id, parent.is_sampled)
            own = traceparent(parent.trace_id, request_id[20:], is_sampled)
            journey = Journey(own, received_at, started_at, is_sampled)
            journey.parent_id = parent.span_id
            journey.state, journey.baggage = state_of(request.headers), baggage_of(request.headers)
        # Of all others the trace's id is told only if they fail: who has the request's id has it, too.
        if is_sampled:
            also = noted.also
            also[head.TRACE_ID] = journey.trace_id
            also[TRACE_RESPONSE] = journey.traceparent
        noted.journey = journey
        return journey

    def beside(self, noted: Head, kind: str) -> Journey:
        """What goes on behind a request has a span of its own below that request's, in the same trace."""
        before, now = noted.journey, time.monotonic()
        assert before is not None
        span_id = f"{int(before.span_id, 16) ^ (1 << 63):016x}"
        journey = Journey(traceparent(before.trace_id, span_id, before.is_sampled), now, now, before.is_sampled)
        journey.parent_id, journey.state, journey.kind = before.span_id, before.state, kind
        noted.journey = journey
        return journey

    def end(self, journey: Journey, noted: Head, request: web.Request, status: int) -> None:
        """Its answer's last byte was written, or nobody waits for it any more."""
        ended_at = time.monotonic()
        if journey.is_sampled:
            why = "parent" if journey.parent_id and journey.kind == "request" else "sampled"
        else:
            why = self._kept_for(status, journey.error, journey.entry, ended_at - journey.received_at)
        if why:
            self._tell(journey, noted, request, status, ended_at, why)
        # A request lives as long as its connection waits for the next one; what it was answered need not.
        journey.entry = journey.answer = journey.flights = None

    def _tell(
        self, journey: Journey, noted: Head, request: web.Request, status: int, ended_at: float, why: str
    ) -> None:
        """It is worth a trace."""
        entry, answer, flights = journey.entry, journey.answer, journey.flights
        self.num_kept += 1
        prompt = completion = fingerprint = response_id = ""
        caller, sampling, asked = noted.caller, None, None
        if answer is not None:
            asked = asked_of(answer.call)
            fingerprint, response_id = answer.fingerprint, answer.id
            sampling = next(iter(answer.parts.values())).submit.sampling
            if journey.shows_content and self._config.content:
                most = self._config.max_content_bytes
                prompt, completion = prompt_of(answer.call, most), completion_of(answer, most)
        kept = Kept(
            *_of_journey(journey),
            kept_for=why,
            unix_s=time.time() - time.monotonic(),
            ended_at=ended_at,
            method=request.method,
            route=noted.route,
            status=status,
            request_id=noted.request_id,
            lag_ms=self._lag.ms,
            num_flights=0 if flights is None else len(flights),
            rides=rides_of(flights),
            tenant_id="" if caller is None else caller.tenant_id,
            key_id="" if caller is None else caller.key_id,
            asked=asked,
            sampling=sampling,
            row=None if entry is None else Row(*_of_entry(entry)),
            response_id=response_id,
            fingerprint=fingerprint,
            prompt=prompt,
            completion=completion,
        )
        body = self._encoder.encode(kept)
        self.sender.send(body)
        if entry is not None:
            if prompt or completion:
                body = self._encoder.encode(msgspec.structs.replace(kept, prompt="", completion=""))
            self._recent.keep(noted.request_id, body)
