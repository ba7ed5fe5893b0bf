"""Spans as bytes: what we write is what OpenTelemetry's own encoder would have written."""

from __future__ import annotations

import socket

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event as SdkEvent
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link as SdkLink
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags, TraceState
from opentelemetry.trace.status import Status, StatusCode

from gateway.tracing.collector import MAX_BATCH_BYTES, MAX_BATCH_SPANS, Collector, Made
from gateway.tracing.order import Order
from gateway.tracing.protobuf import Encoder
from gateway.tracing.spans import Event, Span

WHOLE_ID = 0x00F067AA0BA902B7
INSTANTS = st.integers(0, 2**63 - 1)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)
VALUES = st.one_of(
    TEXTS, st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.lists(TEXTS, max_size=3)
)
ATTRIBUTES = st.dictionaries(TEXTS.filter(bool), VALUES, max_size=6)
SPANS = st.lists(
    st.builds(
        Span,
        TEXTS | st.just("upstream"),
        st.sampled_from([WHOLE_ID, 1, 2**64 - 1]),
        st.sampled_from([0, WHOLE_ID, 2**63]),
        INSTANTS,
        INSTANTS,
        ATTRIBUTES,
        st.lists(st.builds(Event, TEXTS, INSTANTS, ATTRIBUTES), max_size=3).map(tuple),
        st.booleans(),
        st.booleans(),
        st.sampled_from(["", f"00-{'7c' * 16}-{'0d' * 8}-01"]),
    ).map(lambda span: span._replace(is_remote=span.is_remote and span.parent_id != 0)),
    max_size=4,
)


TRACE, STATE, ERROR = "4bf92f3577b34da6a3ce929d0e0e4736", "congo=t61,rojo=1", "rate_limit_exceeded"


def kind_of(span: Span) -> SpanKind:
    if span.span_id == WHOLE_ID:
        return SpanKind.SERVER
    return SpanKind.CLIENT if span.name == "upstream" else SpanKind.INTERNAL


def by_opentelemetry(spans: list[Span]) -> ExportTraceServiceRequest:
    """The same, its own way."""
    state = TraceState.from_header([STATE])

    def context(span_id: int, is_remote: bool = False) -> SpanContext:
        return SpanContext(int(TRACE, 16), span_id, is_remote, TraceFlags(1), state)

    return encode_spans(
        [
            ReadableSpan(
                span.name,
                context(span.span_id),
                context(span.parent_id, span.is_remote) if span.parent_id else None,
                Resource({"service.name": "penstock", "service.version": "1"}),
                dict(span.attributes),
                [SdkEvent(event.name, dict(event.attributes), event.at_ns) for event in span.events],
                links=[SdkLink(SpanContext(int("7c" * 16, 16), int("0d" * 8, 16), False))] if span.link else [],
                kind=kind_of(span),
                status=Status(StatusCode.ERROR, ERROR) if span.failed else None,
                start_time=span.start_ns,
                end_time=span.end_ns,
                instrumentation_scope=InstrumentationScope("penstock", "1"),
            )
            for span in spans
        ]
    )


@given(SPANS.filter(bool))
def test_what_is_written_is_what_opentelemetry_writes(spans):
    encoder = Encoder({"service.name": "penstock", "service.version": "1"}, "penstock", "1")
    body = encoder.request([encoder.spans(spans, TRACE, WHOLE_ID, STATE, ERROR)])
    theirs = by_opentelemetry(spans)
    for span in theirs.resource_spans[0].scope_spans[0].spans:
        if not span.status.code:
            span.ClearField("status")  # nothing said of it, and not said, are the same
    assert ExportTraceServiceRequest.FromString(body) == theirs


def test_one_export_has_no_more_than_a_collector_takes():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        order = Order("", "grpc", {}, 1.0, 100_000, False, "1")
        collector = Collector(order, ours)
        large = Made(1, bytes(MAX_BATCH_BYTES - 10))
        collector._waiting += [large, Made(1, bytes(11)), Made(MAX_BATCH_SPANS, b""), Made(1, b""), Made(9999, b"")]
        taken = []
        while collector._waiting:
            taken.append([made.num_spans for made in collector._taken()])
        assert taken == [[1], [1], [MAX_BATCH_SPANS], [1], [9999]]
