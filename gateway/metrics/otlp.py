"""The same metrics pushed to a collector by OTLP.

The library's instruments would count everything a second time, so its exporters are given the sums that are there. A
collector that is away or hangs costs one thread of its own, and what it was not told it is told the next time: all
counts are since start. Of what it takes it may refuse a part. At the end it is told once more, of the time since the
last sending.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from gateway.clock import Clock
from gateway.metrics.counts import Sample
from gateway.metrics.families import Families
from gateway.metrics.names import METRICS, Metric, version
from policies.observing import Metrics

if TYPE_CHECKING:
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
    from opentelemetry.sdk.metrics.export import MetricsData

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0
"""Of one sending."""
LAST_S = 2.0
"""For the last one, when the gateway ends."""
MAX_REASON = 200
"""Characters of why it refuses."""


class Heard(logging.Handler):
    """What the library's exporters say, for whoever tells it once rather than each time."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: deque[str] = deque(maxlen=2)
        """What came of the last try but one is often why the last one was the last."""

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


class Answers:
    """What the collector said to the last sending beside having taken it, which exporters keep to themselves: that it
    refused some of the data points (a partial success)."""

    def __init__(self) -> None:
        self.num_refused, self.reason = 0, ""

    def taken(self, response: ExportMetricsServiceResponse) -> None:
        partly = response.partial_success
        self.num_refused, self.reason = max(0, partly.rejected_data_points), partly.error_message[:MAX_REASON]

    def by_http(self, response: Any, *_: Any, **__: Any) -> None:
        """``response`` is that of requests."""
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse

        self.num_refused = 0
        with contextlib.suppress(Exception):  # whoever answers in words of their own has taken them all
            self.taken(ExportMetricsServiceResponse.FromString(response.content))

    def by_grpc(self, stub: Callable[[Any], Any], channel: Any) -> Any:
        """In place of the ``stub`` that an exporter asks."""
        client = stub(channel)
        export = client.Export

        def heard(*request: Any, **options: Any) -> Any:
            self.num_refused = 0
            response = export(*request, **options)
            self.taken(response)
            return response

        client.Export = heard
        return client


async def send_on(
    config: Metrics, clock: Clock, families: Callable[[], Awaitable[Families]], outcomes: Counter[str]
) -> None:
    """Every ``otlp_interval_s``, until it is cancelled. ``outcomes`` counts the sendings that were "taken", of which a
    part was "refused", or that "failed"."""
    answers = Answers()
    try:
        exporter = _exporter(config, answers)
    except ImportError:
        return log.error("metrics.otlp_endpoint needs OpenTelemetry: pip install 'penstock[tracing]'")
    heard, library = Heard(), logging.getLogger("opentelemetry.exporter")
    library.propagate = False  # that it is away is said here, once
    library.handlers = [heard]
    began_ns, before = time.time_ns(), "taken"
    sending: asyncio.Future[Any] | None = None

    async def send() -> None:
        nonlocal sending, before
        data = data_of(await families(), began_ns, time.time_ns())
        heard.said.clear()
        sending = _beside(lambda: exporter.export(data))
        try:
            is_taken = (await asyncio.shield(sending)).value == 0
        except Exception as error:  # some releases say so that nobody listens
            heard.said.append(f"{type(error).__name__}: {error}")
            is_taken = False
        outcome = "failed" if not is_taken else "refused" if answers.num_refused else "taken"
        outcomes[outcome] += 1
        if outcome != before:
            state = "is back" if before == "failed" else "takes all of them again"
            if outcome == "failed":
                state = f"takes nothing ({'; '.join(heard.said)})"
            elif outcome == "refused":
                state = f"refuses {answers.num_refused} data points of a sending: {answers.reason}"
            before = outcome
            log.warning("metrics: the collector at %s %s", config.otlp_endpoint, state)

    try:
        while True:
            await clock.sleep(config.otlp_interval_s)
            await send()
    except asyncio.CancelledError:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_S):
                if sending is not None:
                    await asyncio.wait([sending])
                await send()
        raise
    finally:
        exporter.shutdown(timeout_millis=0)


def _beside(work: Callable[[], Any]) -> asyncio.Future[Any]:
    """What it returns, by a thread that nobody waits for, nor the process when it ends."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def run() -> None:
        try:
            tell = partial(done.set_result, work())
        except Exception as error:
            tell = partial(done.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is gone
            loop.call_soon_threadsafe(tell)

    threading.Thread(target=run, name="otlp-metrics", daemon=True).start()
    return done


def _exporter(config: Metrics, answers: Answers) -> Any:
    """Raises ImportError. The libraries take long to import, and most houses have no collector."""
    if config.otlp_protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as Grpc

        exporter: Any = Grpc(config.otlp_endpoint, timeout=TIMEOUT_S)
        exporter._stub = partial(answers.by_grpc, exporter._stub)  # also of the connections that it makes later
        exporter._client = exporter._stub(exporter._channel)
        return exporter
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as Http

    from gateway import whole_answers

    endpoint = config.otlp_endpoint.rstrip("/")
    exporter = Http(endpoint if endpoint.endswith("/v1/metrics") else f"{endpoint}/v1/metrics", timeout=TIMEOUT_S)
    with contextlib.suppress(AttributeError):  # where another release keeps it is nowhere written
        session = getattr(exporter, "_session", None) or exporter._client._transport._session
        whole_answers.mount(session)
        session.hooks["response"].append(answers.by_http)
    return exporter


def data_of(families: Families, began_ns: int, now_ns: int) -> MetricsData:
    """As the library's exporters take it; instants are Unix nanoseconds."""
    from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    from gateway.resource import resource_of

    own = version()
    told = [
        _told(metric, series.values(), began_ns, now_ns)
        for name, metric in METRICS.items()
        if (series := families.get(name))
    ]
    scope = ScopeMetrics(InstrumentationScope("penstock", own), told, "")
    return MetricsData([ResourceMetrics(resource_of(own), [scope], "")])


def _told(metric: Metric, samples: Iterable[Sample], began_ns: int, now_ns: int) -> Any:
    from opentelemetry.sdk.metrics import export

    since_start = export.AggregationTemporality.CUMULATIVE
    data: Any
    unknown: Any = None  # the protocol has it, the library's types have not
    if metric.kind == "histogram":
        histograms = [
            export.HistogramDataPoint(
                _attributes(metric, sample),
                began_ns,
                now_ns,
                count=sum(sample.counts),
                sum=sample.value,
                bucket_counts=sample.counts,
                explicit_bounds=sample.bounds,
                min=unknown,
                max=unknown,
            )
            for sample in samples
        ]
        data = export.Histogram(histograms, since_start)
    else:
        points = [
            export.NumberDataPoint(_attributes(metric, sample), began_ns, now_ns, float(sample.value))
            for sample in samples
        ]
        data = export.Gauge(points) if metric.kind == "gauge" else export.Sum(points, since_start, is_monotonic=True)
    return export.Metric(metric.otel_name or metric.name, metric.meaning, metric.unit or "1", data)


def _attributes(metric: Metric, sample: Sample) -> dict[str, str]:
    """By OpenTelemetry's names where it has some; what is empty is absent."""
    labels = zip(metric.labels, sample.labels, strict=True)
    return {_ATTRIBUTES.get(label, label): value for label, value in labels if value}


_ATTRIBUTES = {
    "gen_ai_operation_name": "gen_ai.operation.name",
    "gen_ai_provider_name": "gen_ai.provider.name",
    "gen_ai_request_model": "gen_ai.request.model",
    "gen_ai_token_type": "gen_ai.token.type",
    "error_type": "error.type",
}
