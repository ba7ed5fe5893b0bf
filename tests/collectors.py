"""Where spans go in tests: a collector that takes OTLP over gRPC or HTTP, on OpenTelemetry's own messages."""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as services

from tests.builders import PATIENCE_S, until


@dataclass
class Seen:
    """One span as it arrived."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    kind: int
    attributes: dict[str, Any]
    events: list[tuple[str, int, dict[str, Any]]]
    is_error: bool
    state: str
    resource: dict[str, Any]
    links: list[tuple[str, str]]
    """Trace and span."""

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


@dataclass
class Collector:
    """What came, and how it behaves."""

    endpoint: str = ""
    spans: list[Seen] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    num_asked: int = 0
    num_refused: int = 0
    """Of each export, said to be so many spans."""
    turns_away: bool = False
    """Takes nothing, for want of a key."""
    _lets_go: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._lets_go.set()

    def hang(self) -> None:
        """Answers nobody until ``go_on``."""
        self._lets_go.clear()

    def go_on(self) -> None:
        self._lets_go.set()

    def take(self, request: Any, headers: dict[str, str]) -> None:
        self.num_asked += 1
        self.headers.append(headers)
        self._lets_go.wait(PATIENCE_S)
        for of_resource in request.resource_spans:
            resource = _attributes(of_resource.resource.attributes)
            for of_scope in of_resource.scope_spans:
                self.spans += [_seen(span, resource) for span in of_scope.spans]

    def answer(self) -> Any:
        partly = messages.ExportTracePartialSuccess(rejected_spans=self.num_refused, error_message="too old")
        return messages.ExportTraceServiceResponse(partial_success=partly if self.num_refused else None)

    async def trace(self, trace_id: str, num_wholes: int = 1) -> list[Seen]:
        """Its spans, once there are so many of requests among them; in the order of their beginnings."""
        await until(lambda: sum(span.kind == 2 for span in self.of(trace_id)) >= num_wholes)
        return self.of(trace_id)

    def of(self, trace_id: str) -> list[Seen]:
        return sorted((span for span in list(self.spans) if span.trace_id == trace_id), key=lambda span: span.start_ns)


@contextlib.contextmanager
def by_grpc() -> Iterator[Collector]:
    collector = Collector()

    class Service(services.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            collector.take(request, {key: str(value) for key, value in context.invocation_metadata()})
            if collector.turns_away:
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "no key")
            return collector.answer()

    server = grpc.server(ThreadPoolExecutor(2))
    services.add_TraceServiceServicer_to_server(Service(), server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        collector.go_on()
        server.stop(None)


@contextlib.contextmanager
def by_http() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            if self.path == "/v1/traces":
                request = messages.ExportTraceServiceRequest.FromString(body)
                collector.take(request, {key.lower(): value for key, value in self.headers.items()})
            self.send_response(401 if collector.turns_away else 200 if self.path == "/v1/traces" else 404)
            self.end_headers()
            self.wfile.write(b"" if collector.turns_away else collector.answer().SerializeToString())

        def log_message(self, *_: Any) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    collector.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield collector
    finally:
        collector.go_on()
        server.shutdown()
        thread.join()
        server.server_close()


def _seen(span: Any, resource: dict[str, Any]) -> Seen:
    return Seen(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.kind,
        _attributes(span.attributes),
        [(event.name, event.time_unix_nano, _attributes(event.attributes)) for event in span.events],
        span.status.code == 2,
        span.trace_state,
        resource,
        [(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)
