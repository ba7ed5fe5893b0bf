"""The tables of config.toml by which operators see what happens: the log, traces and metrics."""

from __future__ import annotations

import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from policies.section import NonNegative, Positive, Seconds, SecondsOrNone, Section


class Log(Section, frozen=True):
    """Logs on stderr. While it runs, SIGUSR1 switches to debug and back, and /admin/v1/logging asks for any level."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["console", "json"] = "console"


class Tracing(Section, frozen=True):
    """Spans of requests, sent to a collector by OTLP. Needs the extra ``tracing``."""

    endpoint: str = ""
    """Of the collector: "http://localhost:4317" for gRPC, "http://localhost:4318" for HTTP. Empty: the one that
    OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT names, and without them there are no traces."""
    protocol: Literal["", "grpc", "http/protobuf"] = ""
    """Empty: as OTEL_EXPORTER_OTLP_TRACES_PROTOCOL or OTEL_EXPORTER_OTLP_PROTOCOL says, else gRPC."""
    headers: dict[str, str] = msgspec.field(default_factory=dict)
    """Sent with each export, beside those of OTEL_EXPORTER_OTLP_HEADERS, which is the place for secrets."""
    sample_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.1
    """Of the requests that nobody upstream has decided about, those that are kept, by their trace id.
    OTEL_TRACES_SAMPLER goes before it."""
    follow_parent: bool = True
    """A request that comes with a traceparent is kept if that says so, and is left to the rules below if not; false:
    the ratio decides on all."""
    keep_errors: bool = True
    """Whatever ends in a refusal or a failure is kept, sampled or not."""
    keep_missed: bool = True
    """So is what missed its class's ttft_ms or tpot_ms."""
    keep_slower_s: SecondsOrNone = 0.0
    """So is what took longer than this; 0: no such rule."""
    max_queued_spans: Positive = 8192
    """Waiting to be exported; what comes while so many wait is dropped and counted."""
    export_timeout_s: Seconds = 10.0
    """Of one export; then its spans are dropped and counted."""
    content: bool = False
    """Prompts and answers are in the traces of tenants whose policy says so, too (``trace_content``)."""
    max_content_bytes: Positive = 32_768
    """Of one request's prompt, and of its answer; what is longer is cut."""


class Metrics(Section, frozen=True):
    """What is measured, at /metrics and by OTLP."""

    enabled: bool = True
    access: Literal["loopback", "admin", "open"] = "loopback"
    """Who may read /metrics: "admin" whoever has a key of the administration, "loopback" programs on this machine
    besides, "open" everybody."""
    max_tenants: NonNegative = 50
    """Tenants with series of their own; those that come later are "other" together."""
    max_models: Positive = 100
    """The same for models."""
    sla_objective: Annotated[float, Meta(gt=0, lt=1)] = 0.99
    """Of promises, how many are to be kept; burn rates are told by it."""
    otlp_endpoint: str = ""
    """Of a collector: "http://127.0.0.1:4318"; empty: nothing is sent."""
    otlp_protocol: Literal["http", "grpc"] = "http"
    otlp_interval_s: Seconds = 15.0


def is_collector(endpoint: str, by_grpc: bool) -> bool:
    """It can be the address of one: that of an HTTP server, or by gRPC also a target of its own, such as
    "collector:4317", "unix:/path" or "dns:///collector:4317"."""
    if re.search(r"\s", endpoint):
        return False
    scheme, separator, _ = endpoint.partition("://")
    if by_grpc and (not separator or scheme in ("dns", "unix")):
        return True
    try:
        parts = urlsplit(endpoint)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # half a bracket, or a port that is none
        return False
