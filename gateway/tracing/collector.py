"""In a process of its own: requests that are over come in, spans go out to the collector by OTLP.

Two threads. One reads what the gateway sends, so that it never waits, and makes the spans; one exports them and may
hang as long as the collector does. Between them is a queue with a bound: what finds it full is dropped and counted. The
gateway is told the counts.

OpenTelemetry's exporters bring spans to the collector, with its variables, certificates and retries. How spans become
bytes is ours (``protobuf``): its way through objects takes nine times as long.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import msgspec
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from gateway.resource import resource_of
from gateway.tracing import names
from gateway.tracing.kept import LENGTH, SHUTDOWN_S, Count, Kept
from gateway.tracing.order import Order
from gateway.tracing.protobuf import Encoder
from gateway.tracing.spans import spans_of

RECEIVE_BYTES = 1 << 18
MAX_BATCH_SPANS, MAX_BATCH_BYTES = 2048, 1 << 20
"""Of one export, if not its first request alone has more: a collector takes 4 MiB by gRPC unless it is told to take
more."""
DELAY_S = 0.5
"""So long spans wait for others before they are exported together."""
SCOPE = "penstock"
MAX_TROUBLE = 200


class Made(NamedTuple):
    """A request's spans."""

    num_spans: int
    body: bytes
    """As ``Encoder.spans`` has them."""


class Batch:
    """What an exporter is given in place of spans, and takes for a message of them."""

    def __init__(self, made: list[Made], encoder: Encoder) -> None:
        self._num_spans = sum([each.num_spans for each in made])
        self._body = encoder.request([each.body for each in made])

    def __len__(self) -> int:
        return self._num_spans

    def SerializePartialToString(self) -> bytes:
        """As a message has it."""
        return self._body


class Said:
    """What the collector said to the last export, beside an exporter, which keeps it to itself: why it takes nothing,
    or that of what it took some spans are refused (a partial success, which is no failure to an exporter)."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.trouble, self.num_refused = "", 0

    def taken(self, response: ExportTraceServiceResponse) -> None:
        partly = response.partial_success
        self.num_refused = max(0, partly.rejected_spans)
        self.trouble = f"the collector refused {self.num_refused} of them: {partly.error_message}"[:MAX_TROUBLE]

    def answered(self, response: Any, *_: Any, **__: Any) -> None:
        """By HTTP; ``response`` is that of requests."""
        self.forget()
        if response.ok:
            with suppress(Exception):  # whoever answers in words of their own has taken them all
                self.taken(ExportTraceServiceResponse.FromString(response.content))
        else:
            self.trouble = f"the collector answered {response.status_code} {response.reason}"[:MAX_TROUBLE]


class Stub:
    """What an exporter by gRPC asks in place of the generated one, whose serializer knows messages only."""

    def __init__(self, channel: Any, said: Said) -> None:
        self._said = said
        self._export = channel.unary_unary(
            "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
            request_serializer=Batch.SerializePartialToString,
            response_deserializer=ExportTraceServiceResponse.FromString,
        )

    def Export(self, request: Batch, **options: Any) -> Any:
        """As the generated one has it."""
        self._said.forget()
        try:
            response = self._export(request, **options)
        except Exception as error:
            code, details = getattr(error, "code", None), getattr(error, "details", None)
            if code and details:
                self._said.trouble = f"the collector answered {code().name}: {details()}"[:MAX_TROUBLE]
            raise
        self._said.taken(response)
        return response


class Collector:
    """Of one gateway."""

    def __init__(self, order: Order, connection: socket.socket) -> None:
        """``connection``: the gateway is at its other end."""
        self._order = order
        self._connection = connection
        self._gen_ai = names.gen_ai(order.is_latest)
        self._encoder = Encoder(resource_of(order.version).attributes, SCOPE, order.version)
        self._waiting: deque[Made] = deque()
        self._num_waiting = 0
        self._changed = threading.Condition()
        self._is_closing = False
        self._is_gathering = False
        """Some wait for others: one more is no news to whoever exports."""
        self._count = Count()
        self._told = Count()

    def run(self) -> None:
        """Until the gateway is gone."""
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # what it would say is counted, and told
        said = Said()
        exporter = exporter_of(self._order, said)
        gc.collect()
        gc.freeze()  # what is loaded by now stays, and spans refer to nothing that refers back
        gc.set_threshold(20_000, 20, 50)
        stand_back()
        exporting = threading.Thread(target=self._export_forever, args=(exporter, said), daemon=True)
        exporting.start()
        decoder, buffer = msgspec.msgpack.Decoder(Kept), bytearray()
        while data := self._receive():
            buffer += data
            start = 0
            while len(buffer) - start >= LENGTH.size:
                (num_bytes,) = LENGTH.unpack_from(buffer, start)
                end = start + LENGTH.size + num_bytes
                if end > len(buffer):
                    break
                self._add(decoder.decode(buffer[start + LENGTH.size : end]))
                start = end
            del buffer[:start]
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        exporting.join(SHUTDOWN_S)

    def _receive(self) -> bytes:
        try:
            return self._connection.recv(RECEIVE_BYTES)
        except OSError:
            return b""

    def _add(self, kept: Kept) -> None:
        spans = spans_of(kept, self._gen_ai)
        num_spans = len(spans)
        body = self._encoder.spans(spans, kept.trace_id, int(kept.span_id, 16), kept.state, kept.error)
        with self._changed:
            if self._num_waiting + num_spans > self._order.max_queued_spans:
                self._counted(num_dropped=num_spans)
            else:
                self._waiting.append(Made(num_spans, body))
                self._num_waiting += num_spans
                if not self._is_gathering or self._num_waiting >= MAX_BATCH_SPANS:
                    self._changed.notify()

    def _export_forever(self, exporter: SpanExporter, said: Said) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    if self._is_closing:
                        return
                    self._tell()
                    self._changed.wait()
                if not self._is_closing and self._num_waiting < MAX_BATCH_SPANS:
                    self._is_gathering = True
                    self._changed.wait_for(
                        lambda: self._is_closing or self._num_waiting >= MAX_BATCH_SPANS, timeout=DELAY_S
                    )
                    self._is_gathering = False
                batch = Batch(self._taken(), self._encoder)
            num_spans = len(batch)
            num_exported, trouble = _exported(exporter, batch, said)
            with self._changed:
                # Until now they took up room: an export that hangs holds what it has.
                self._num_waiting -= num_spans
                self._counted(num_exported, num_failed=num_spans - num_exported, trouble=trouble)
                self._tell()

    def _taken(self) -> list[Made]:
        """The first of those that wait, for one export."""
        taken: list[Made] = []
        num_spans = num_bytes = 0
        while self._waiting:
            first = self._waiting[0]
            num_spans, num_bytes = num_spans + first.num_spans, num_bytes + len(first.body)
            if taken and (num_spans > MAX_BATCH_SPANS or num_bytes > MAX_BATCH_BYTES):
                break
            taken.append(self._waiting.popleft())
        return taken

    def _counted(self, num_exported: int = 0, num_dropped: int = 0, num_failed: int = 0, trouble: str = "") -> None:
        count = self._count
        if num_dropped and not trouble:
            trouble = count.trouble
        self._count = Count(
            count.num_exported + num_exported, count.num_dropped + num_dropped, count.num_failed + num_failed, trouble
        )
        if num_dropped:
            self._tell()

    def _tell(self) -> None:
        if self._count != self._told:
            self._told = self._count
            with suppress(OSError):  # it has no time to read, or is gone: the next one says all of it
                body = msgspec.msgpack.encode(self._count)
                self._connection.send(LENGTH.pack(len(body)) + body, socket.MSG_DONTWAIT)


def stand_back() -> None:
    """Requests come before what is told of them: from now on this thread, and those that it starts, have what nobody
    else wants of the processors, and leave at once when somebody does. The lowest priority alone is not that: once such
    a thread has a processor, it may keep it for some milliseconds from one that has work for a request."""
    with suppress(OSError, AttributeError):  # Linux has it, and lets everybody be modest
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def exporter_of(order: Order, said: Said) -> SpanExporter:
    """OpenTelemetry's own, which reads the variables for what the order leaves open. It takes a ``Batch``, and what it
    is answered is ``said``."""
    headers: Any = order.headers or None
    if order.protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as by_grpc

        by_grpc.encode_spans = as_it_is  # type: ignore[attr-defined,assignment]
        exporter: Any = by_grpc.OTLPSpanExporter(
            endpoint=order.endpoint or None, headers=headers, timeout=order.timeout_s
        )
        exporter._stub = partial(Stub, said=said)  # also of the connections that it makes later
        exporter._client = exporter._stub(exporter._channel)
        return exporter  # type: ignore[no-any-return]
    from opentelemetry.exporter.otlp.proto.http import trace_exporter as by_http

    from gateway import whole_answers

    by_http.encode_spans = as_it_is  # type: ignore[attr-defined,assignment]
    endpoint = order.endpoint.rstrip("/")
    if endpoint and not endpoint.endswith("/v1/traces"):
        endpoint += "/v1/traces"
    exporter = by_http.OTLPSpanExporter(endpoint=endpoint or None, headers=headers, timeout=order.timeout_s)
    with suppress(AttributeError):  # where another release keeps it is nowhere written
        session = getattr(exporter, "_session", None) or exporter._client._transport._session
        whole_answers.mount(session)
        session.hooks["response"].append(said.answered)
    return exporter  # type: ignore[no-any-return]


def as_it_is(batch: Batch) -> Batch:
    """It is a message already."""
    return batch


def _exported(exporter: SpanExporter, batch: Any, said: Said) -> tuple[int, str]:
    """How many of its spans were taken, and why the others were not; empty: all were."""
    began_at = time.monotonic()
    said.forget()
    try:
        if exporter.export(batch) is SpanExportResult.SUCCESS:
            num_refused = min(said.num_refused, len(batch))
            return len(batch) - num_refused, said.trouble if num_refused else ""
    except Exception as error:
        return 0, f"{type(error).__name__}: {error}"[:MAX_TROUBLE]
    return 0, said.trouble or f"the collector took nothing within {time.monotonic() - began_at:.1f} s"
