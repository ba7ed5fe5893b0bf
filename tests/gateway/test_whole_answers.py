"""A collector that says a byte now and then, and never all: whoever tells it something is let go in time."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SpanExportResult

from gateway.metrics import otlp
from gateway.metrics.families import gathered
from gateway.tracing.collector import Batch, Said, exporter_of
from gateway.tracing.order import Order
from gateway.tracing.protobuf import Encoder
from policies.observing import Metrics

BEGINNINGS = {
    "body": b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n",
    "body without an end": b"HTTP/1.1 200 OK\r\n\r\n",
    "headers": b"HTTP/1.1 200 OK\r\nX: ",
}
LIMIT_S = 0.3


@contextlib.contextmanager
def trickling(beginning: bytes) -> Iterator[str]:
    """Its address; each that asks is answered until it hangs up."""
    over = threading.Event()

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.recv(1 << 16)
            connection.sendall(beginning)
            while not over.wait(LIMIT_S / 10):
                connection.sendall(b"a")

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listening.accept()[0],)).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        over.set()


@pytest.mark.parametrize("beginning", BEGINNINGS.values(), ids=BEGINNINGS)
def test_whoever_sends_metrics_or_spans_is_let_go(beginning: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "TIMEOUT_S", LIMIT_S)
    with trickling(beginning) as endpoint:
        metrics = otlp._exporter(Metrics(otlp_endpoint=endpoint), otlp.Answers())
        assert metrics.export(otlp.data_of(gathered([]), 0, 1)).value != 0
        order = Order(endpoint, "http/protobuf", {}, LIMIT_S, 8, False, "1")
        spans: Any = exporter_of(order, Said())
        assert spans.export(Batch([], Encoder({}, "penstock", "1"))) is SpanExportResult.FAILURE
