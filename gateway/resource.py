"""Whose spans and metrics they are, as OpenTelemetry's collectors are told."""

from __future__ import annotations

import uuid
from functools import cache

from opentelemetry.sdk.resources import OTELResourceDetector, Resource


@cache
def resource_of(version: str) -> Resource:
    """The same for as long as the process lives, and another for every process: sums of several would be one series
    otherwise. What OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say goes before what is ours."""
    ours = {"service.name": "penstock", "service.version": version, "service.instance.id": str(uuid.uuid4())}
    return Resource.create(ours).merge(OTELResourceDetector().detect())
