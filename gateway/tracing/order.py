"""Whether there are traces, and where they go: by the settings, and by OpenTelemetry's own variables."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

import msgspec

from gateway.tracing import names
from policies.settings import Settings

NEEDED = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http", "opentelemetry.exporter.otlp.proto.grpc")


class TracingInvalid(Exception):
    """Traces were asked for and cannot be; the message is one sentence for the operator."""


class Order(msgspec.Struct, frozen=True):
    """What the process is told; what is empty is for the variables of OpenTelemetry to say."""

    endpoint: str
    protocol: str
    """grpc or http/protobuf."""
    headers: dict[str, str]
    timeout_s: float
    max_queued_spans: int
    is_latest: bool
    """As ``names.is_latest``."""
    version: str


def order_of(config: Settings, environ: Mapping[str, str]) -> Order | None:
    """Where spans go, by the settings and OpenTelemetry's variables; None: nowhere. Raises TracingInvalid."""
    asked = config.tracing

    def variable(name: str) -> str:
        own = environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}", "").strip()
        return own or environ.get(f"OTEL_EXPORTER_OTLP_{name}", "").strip()

    is_off = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    exporter = environ.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    if is_off or exporter == "none" or not (asked.endpoint or variable("ENDPOINT")):
        return None
    if exporter != "otlp":
        raise TracingInvalid(f"OTEL_TRACES_EXPORTER: {exporter} is not served here, which is otlp or none")
    protocol = asked.protocol or variable("PROTOCOL") or "grpc"
    if protocol not in ("grpc", "http/protobuf"):
        raise TracingInvalid(f"traces are sent by grpc or http/protobuf, and not by {protocol}")
    for module in NEEDED:
        if not _is_there(module):
            raise TracingInvalid("traces need packages that are not installed: pip install 'penstock[tracing]'")
    try:
        own = version("penstock")
    except PackageNotFoundError:
        own = ""
    return Order(
        endpoint=asked.endpoint,
        protocol=protocol,
        headers=asked.headers,
        timeout_s=asked.export_timeout_s,
        max_queued_spans=asked.max_queued_spans,
        is_latest=names.is_latest(environ.get(names.OPT_IN, "")),
        version=own,
    )


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
