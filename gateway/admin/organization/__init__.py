"""/v1/organization: OpenAI's Admin API over the same tenants, keys and policies as /admin/v1, so that its own client
administers this house. Refusals are OpenAI's error object."""

from __future__ import annotations

from gateway.admin.organization import (
    admin_api_keys,
    api_keys,
    audit_logs,
    projects,
    rate_limits,
    service_accounts,
    usage,
)

ENDPOINTS = [
    endpoint
    for resource in (projects, api_keys, service_accounts, rate_limits, admin_api_keys, audit_logs, usage)
    for endpoint in resource.ENDPOINTS
]
