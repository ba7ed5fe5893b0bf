"""Metrics by OTLP: the same as at /metrics, from whoever the operator says, and nobody waits for a collector."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import aiohttp
import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as services
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsPartialSuccess,
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)

from gateway.metrics import otlp
from gateway.metrics.counts import Sample
from gateway.metrics.families import gathered
from policies.observing import Metrics
from policies.policy import Limits as Ceilings
from policies.policy import Policy
from tests.builders import PATIENCE_S, until


async def test_a_collector_is_told_the_same(open_front):
    received: asyncio.Queue[bytes] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            loop.call_soon_threadsafe(received.put_nowait, body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    collector = HTTPServer(("127.0.0.1", 0), Collector)
    Thread(target=collector.serve_forever, daemon=True).start()
    try:
        config = Metrics(otlp_endpoint=f"http://127.0.0.1:{collector.server_port}", otlp_interval_s=0.05)
        limited = {"default": Policy(limits=Ceilings(requests_per_minute=10))}
        async with open_front(metrics=config, policies=limited) as front:
            await front.answered()
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    told = ExportMetricsServiceRequest.FromString(await received.get())
                    by_name = {
                        metric.name: metric
                        for resource in told.resource_metrics
                        for scope in resource.scope_metrics
                        for metric in scope.metrics
                    }
                    if "gen_ai.server.request.duration" in by_name:
                        break
    finally:
        collector.shutdown()
        collector.server_close()
    (point,) = by_name["gen_ai.server.request.duration"].histogram.data_points
    assert (point.count, sum(point.bucket_counts)) == (1, 1)
    assert {pair.key for pair in point.attributes} >= {"gen_ai.operation.name", "gen_ai.provider.name"}
    assert by_name["penstock_requests_total"].sum.is_monotonic
    assert by_name["gen_ai.server.request.duration"].unit == "s"
    assert [point.as_double for point in by_name["penstock_limit_used_ratio"].gauge.data_points] == [0.1]


@contextlib.contextmanager
def collecting(
    meanwhile: Callable[[], object] = lambda: None,
    answer: Callable[[], ExportMetricsServiceResponse] = ExportMetricsServiceResponse,
) -> Iterator[tuple[str, queue.Queue[ExportMetricsServiceRequest]]]:
    """A collector's address, and what it is told; ``meanwhile``: before it answers."""
    told: queue.Queue[ExportMetricsServiceRequest] = queue.Queue()

    class Service(services.MetricsServiceServicer):
        def Export(self, request, context):
            told.put(request)
            meanwhile()
            return answer()

    server = grpc.server(ThreadPoolExecutor(1))
    services.add_MetricsServiceServicer_to_server(Service(), server)
    endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield endpoint, told
    finally:
        server.stop(None)


async def test_what_was_counted_since_the_last_sending_is_told_at_the_end(open_front):
    with collecting() as (endpoint, told):
        config = Metrics(otlp_endpoint=endpoint, otlp_protocol="grpc", otlp_interval_s=3600.0)
        async with open_front(metrics=config) as front:
            await front.answered()
        (last,) = list(told.queue)
    counts = [metric for of in last.resource_metrics[0].scope_metrics for metric in of.metrics]
    (requests,) = [metric for metric in counts if metric.name == "penstock_requests_total"]
    assert [point.as_double for point in requests.sum.data_points] == [1.0]


async def test_a_collector_is_told_by_grpc_and_one_that_hangs_costs_no_request(open_front):
    lets_go = threading.Event()
    with collecting(lambda: lets_go.wait(PATIENCE_S)) as (endpoint, told):
        config = Metrics(otlp_endpoint=endpoint, otlp_protocol="grpc", otlp_interval_s=0.05)
        async with open_front(metrics=config) as front:
            await front.answered()
            first = await asyncio.to_thread(told.get, timeout=PATIENCE_S)
            await front.answered()  # while it hangs
            assert told.empty()  # nothing piles up behind it
            senders = [thread for thread in threading.enumerate() if thread.name.startswith("otlp-metrics")]
            assert [thread.daemon for thread in senders] == [True]  # the process may end meanwhile
            began_at = time.monotonic()
        assert time.monotonic() - began_at < otlp.TIMEOUT_S  # nor is it waited for
        lets_go.set()
    names_told = {metric.name for each in first.resource_metrics for of in each.scope_metrics for metric in of.metrics}
    assert "penstock_build_info" in names_told


async def test_a_collector_that_refuses_is_not_called_away(open_front, caplog):
    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(401)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        Thread(target=collector.serve_forever, daemon=True).start()
        config = Metrics(otlp_endpoint=f"http://127.0.0.1:{collector.server_port}", otlp_interval_s=0.05)
        async with open_front(metrics=config):
            await until(lambda: "takes nothing" in caplog.text)
        collector.shutdown()
    assert "401" in caplog.text


def refusing(refuses: Callable[[], bool]) -> ExportMetricsServiceResponse:
    partly = ExportMetricsPartialSuccess(rejected_data_points=7, error_message="too many series")
    return ExportMetricsServiceResponse(partial_success=partly if refuses() else None)


@contextlib.contextmanager
def collecting_by_http(refuses: Callable[[], bool]) -> Iterator[str]:
    """A collector's address; while ``refuses``, of each sending a part."""

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(refusing(refuses).SerializeToString())

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        Thread(target=collector.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{collector.server_port}"
        collector.shutdown()


@contextlib.contextmanager
def collecting_by_grpc(refuses: Callable[[], bool]) -> Iterator[str]:
    with collecting(answer=lambda: refusing(refuses)) as (endpoint, _):
        yield endpoint


@pytest.mark.parametrize(("protocol", "collector"), [("http", collecting_by_http), ("grpc", collecting_by_grpc)])
async def test_what_a_collector_refuses_of_what_it_takes_is_said_once_and_counted(
    open_front, caplog, protocol, collector
):
    refusals = iter([True] * 3)
    with collector(lambda: next(refusals, False)) as endpoint:
        config = Metrics(otlp_endpoint=endpoint, otlp_protocol=protocol, otlp_interval_s=0.05)
        async with open_front(metrics=config) as front, aiohttp.ClientSession() as http:
            await until(lambda: "takes all of them again" in caplog.text)
            async with http.get(front.url + "/metrics") as response:
                counted = await response.text()
    said = f"metrics: the collector at {endpoint} refuses 7 data points of a sending: too many series"
    assert [record.getMessage() for record in caplog.records].count(said) == 1
    assert 'penstock_otlp_sendings_total{outcome="refused"} 3' in counted


async def test_a_collector_that_a_library_fails_at_is_told_when_it_is_back(open_front, caplog, monkeypatch):
    class Failing:
        """As release 1.38 does where nobody listens."""

        num_tried = 0

        def __init__(self, exporter: Any) -> None:
            self._exporter = exporter

        def __getattr__(self, name: str) -> Any:
            return getattr(self._exporter, name)

        def export(self, data: Any) -> Any:
            self.num_tried += 1
            if self.num_tried < 3:
                raise ConnectionError("nobody listens")
            return self._exporter.export(data)

    made = otlp._exporter
    monkeypatch.setattr(otlp, "_exporter", lambda *given: Failing(made(*given)))
    with collecting() as (endpoint, told):
        config = Metrics(otlp_endpoint=endpoint, otlp_protocol="grpc", otlp_interval_s=0.05)
        async with open_front(metrics=config):
            await asyncio.to_thread(told.get, timeout=PATIENCE_S)
            await until(lambda: "is back" in caplog.text)
    assert caplog.text.count("takes nothing (ConnectionError: nobody listens)") == 1


def test_whoever_sends_is_told_apart_and_named_as_the_operator_says():
    def told(**environ: str) -> dict[str, str]:
        program = "import json; from gateway.resource import resource_of as of; assert of('1') is of('1'); print(json"
        command = [sys.executable, "-c", f"{program}.dumps(dict(of('1').attributes)))"]
        done = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    one, other = told(), told(OTEL_SERVICE_NAME="ours", OTEL_RESOURCE_ATTRIBUTES="service.version=9,zone=a")
    assert (one["service.name"], one["service.version"]) == ("penstock", "1")
    assert (other["service.name"], other["service.version"], other["zone"]) == ("ours", "9", "a")
    assert one["service.instance.id"] != other["service.instance.id"]


def test_what_is_sent_has_every_kind():
    families = gathered([Sample("penstock_workers", ("m", "ready"), 1), Sample("penstock_ledger_up", (), 1)])
    ((scope,),) = [each.scope_metrics for each in otlp.data_of(families, 1, 2).resource_metrics]
    assert [metric.name for metric in scope.metrics] == ["penstock_ledger_up", "penstock_workers"]
