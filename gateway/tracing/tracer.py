"""Of every request when it begins and ends: whether it is worth a trace, and what is told of it then."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from gateway.clock import Clock, Timer
from gateway.head import TRACE_ID, Head
from gateway.ledger.recent import Recent
from gateway.traceparent import SPAN, TRACE, Parent, baggage_of, below, state_of, traceparent
from gateway.tracing.content import asked_of, completion_of, prompt_of
from gateway.tracing.keeping import Keeping, SamplerUnknown
from gateway.tracing.kept import Asked, Kept, Ride, Row
from gateway.tracing.lag import Lag
from gateway.tracing.order import Order, TracingInvalid
from gateway.tracing.rides import rides_of
from gateway.tracing.sender import Sender
from policies.settings import Settings
from policies.terms import Sampling

if TYPE_CHECKING:
    from gateway.reply import Answer

TRACE_RESPONSE = "traceresponse"
"""Trace Context level 2: what the span is called that a kept request has here."""
GATHER_S, AT_ONCE = 0.05, 16
"""Those that are worth a trace wait so long for others, and are put into words and sent together."""


ToldOf = tuple[int, list[Ride], Asked | None, Sampling | None, str, str, str, str]
"""Flights, those that are told of, what was asked and how it was sampled, the answer's id and the engine's fingerprint,
and what was said, as ``Kept`` has them."""
NO_ANSWER: ToldOf = (0, [], None, None, "", "", "", "")

_of_journey = attrgetter(*Kept.__struct_fields__[: Kept.__struct_fields__.index("unix_s")])
_of_row = attrgetter(*Row.__struct_fields__)


class Tracing:
    """Of one gateway."""

    def __init__(
        self, config: Settings, order: Order, environ: Mapping[str, str], clock: Clock, recent: Recent
    ) -> None:
        """``recent`` holds on to what is kept. Raises TracingInvalid."""
        self._config = config.tracing
        try:
            self.keeping = Keeping(config.tracing, config.classes, environ)
        except SamplerUnknown as error:
            raise TracingInvalid(str(error)) from None
        self.below = self.keeping.below
        self.keeps_slow = self.keeping.slower_s > 0
        """Whoever has no trace when it is over may still come to have one."""
        self.sender = Sender(order, environ, clock)
        self._clock = clock
        self._recent = recent
        self._encode = msgspec.msgpack.Encoder().encode
        self._lag = Lag(clock)
        self._kept: list[tuple[Any, ...]] = []
        """Those that are to be sent, as ``_told`` takes them."""
        self._timer: Timer | None = None
        """They are then."""
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
        """It was chosen by its id, or goes on with a trace that has begun elsewhere."""
        if noted.parent is not None:
            self._go_on(noted, noted.parent, request)
            return
        request_id, also = noted.request_id, noted.also
        trace_id = noted.trace_id = also[TRACE_ID] = request_id[TRACE]
        noted.traceparent = also[TRACE_RESPONSE] = f"00-{trace_id}-{request_id[SPAN]}-01"
        noted.kept_for, noted.keeping = "sampled", None

    def _go_on(self, noted: Head, parent: Parent, request: web.Request) -> None:
        """With a trace that has begun elsewhere."""
        is_sampled = self.keeping.is_sampled(parent.trace_id, parent.is_sampled)
        noted.traceparent = traceparent(parent.trace_id, noted.request_id[SPAN], is_sampled, parent.is_random)
        noted.parent_id = parent.span_id
        noted.state, noted.baggage = state_of(request.headers), baggage_of(request.headers)
        if is_sampled:
            noted.also[TRACE_RESPONSE] = noted.traceparent
            noted.keep("parent")

    def beside(self, before: Head, kind: str) -> Head:
        """What goes on behind a request has a span of its own below that request's, in the same trace."""
        noted = before.behind()
        span_id = f"{int(before.span_id, 16) ^ (1 << 63):016x}"
        noted.traceparent = below(before.context, span_id)
        noted.received_at, noted.keeping = time.monotonic(), self.keeping
        if before.kept_for:
            noted.keep("sampled")
        noted.parent_id, noted.state, noted.kind = before.span_id, before.state, kind
        return noted

    def end(self, noted: Head, request: web.Request, status: int) -> None:
        """Its answer's last byte was written, or nobody waits for it any more.

        One in ten comes here, and finds none of this code in the processor's caches: so it only takes together what is
        lost with the answer, which is not held on to, since that would drive out what the next requests need.
        """
        if not noted.kept_for:
            noted.keep(self.keeping.at_last(noted, status))
        # A request lives as long as its connection waits for the next one; what it was answered need not.
        answer, noted.answer = noted.answer, None
        if not noted.kept_for:
            return
        self.num_kept += 1
        ended_at = time.monotonic()
        told_of = NO_ANSWER if answer is None else self._told_of(noted, answer)
        self._kept.append((noted, request.method, status, ended_at, time.time() - ended_at, self._lag.ms, *told_of))
        if len(self._kept) == AT_ONCE:
            self.flush()
        elif len(self._kept) == 1:
            self._timer = self._clock.call_later(GATHER_S, self.flush)

    def _told_of(self, noted: Head, answer: Answer) -> ToldOf:
        prompt = completion = ""
        if noted.shows_content and self._config.content:
            most = self._config.max_content_bytes
            prompt, completion = prompt_of(answer.call, most), completion_of(answer, most)
        sampling = next(iter(answer.parts.values())).submit.sampling
        asked, rides = asked_of(answer.call), rides_of(answer)
        return *rides, asked, sampling, answer.id, answer.fingerprint, prompt, completion

    def flush(self) -> None:
        """Those that have come together are put into words, and sent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        kept, self._kept = self._kept, []
        self.sender.send([self._told(*each) for each in kept])

    def _told(
        self, noted: Head, method: str, status: int, ended_at: float, unix_s: float, lag_ms: float, *told_of: Any
    ) -> bytes:
        """As ``Kept`` has it; ``recent`` has it from now on."""
        entry, caller = noted.entry, noted.caller
        num_flights, rides, asked, sampling, response_id, fingerprint, prompt, completion = told_of
        kept = (
            *_of_journey(noted),
            unix_s,
            ended_at,
            method,
            noted.route,
            status,
            noted.request_id,
            lag_ms,
            num_flights,
            rides,
            "" if caller is None else caller.tenant_id,
            "" if caller is None else caller.key_id,
            asked,
            sampling,
            None if entry is None else _of_row(entry),
            response_id,
            fingerprint,
            prompt,
            completion,
        )
        body = held = self._encode(kept)
        if entry is not None:
            if prompt or completion:
                held = self._encode((*kept[:-2], "", ""))
            self._recent.keep(noted.request_id, held)
        return body
