"""The live queues: who waits where, at each of the gateways that share a Redis."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from gateway.admin.endpoint import OPERATORS, Ask, Endpoint, Nothing
from gateway.admin.pages import Page
from gateway.gateways import Report
from policies.policy import Name


class QueueQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    model: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    sla_class: Name | None = None


async def every(ask: Ask[QueueQuery, Nothing]) -> Page[Report]:
    """List the gateways, each with its queues: this one's as of now, the others' as they last said."""
    query = ask.query
    reports = [
        Report(
            report.name,
            [
                queue
                for queue in report.queues
                if query.model in (None, queue.model) and query.sla_class in (None, queue.sla_class)
            ],
        )
        for report in await ask.gw.gateways.reports()
    ]
    return Page(reports, False, None)


ENDPOINTS = [Endpoint("GET", "/admin/v1/queues", every, Page[Report], OPERATORS, query=QueueQuery)]
