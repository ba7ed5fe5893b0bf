"""/v1/batches: requests in a file, answered when there is room."""

from __future__ import annotations

import msgspec
from aiohttp import web

from gateway import head, openai
from gateway.api.request import query_of
from gateway.batches.book import Batch
from gateway.bodies import body_of
from gateway.errors import InvalidRequest
from gateway.house import GATEWAY
from gateway.openai.pages import ends_of

SCOPE = "batches"
"""The scope."""

_request = msgspec.json.Decoder(openai.BatchRequest)
_errors = msgspec.json.Decoder(list[openai.BatchError])
_metadata = msgspec.json.Decoder(dict[str, str])


async def create(request: web.Request) -> web.StreamResponse:
    gw = request.app[GATEWAY]
    caller = gw.auth.caller_for(SCOPE, request)
    asked = openai.decoded(_request, await body_of(gw, request))
    if asked.endpoint not in gw.batches.endpoints:
        raise InvalidRequest(
            f"Invalid 'endpoint': {asked.endpoint} is not served here in batches.",
            param="endpoint",
            code="invalid_value",
        )
    return head.Whole.of(shaped(await gw.batches.create(caller.tenant_id, caller.key_id, asked)))


async def every(request: web.Request) -> web.StreamResponse:
    gw = request.app[GATEWAY]
    caller = gw.auth.caller_for(SCOPE, request)
    query = openai.BatchQuery() if not request.query else query_of(request, openai.BatchQuery)
    batches, has_more = await gw.batches.page(caller.tenant_id, query.after, query.limit)
    data = [shaped(batch) for batch in batches]
    first, last = ends_of(data)
    return head.Whole.of(openai.BatchList(data=data, first_id=first, last_id=last, has_more=has_more))


async def one(request: web.Request) -> web.StreamResponse:
    gw = request.app[GATEWAY]
    tenant_id = gw.auth.caller_for(SCOPE, request).tenant_id
    return head.Whole.of(shaped(await gw.batches.find(tenant_id, request.match_info["batch"])))


async def cancel(request: web.Request) -> web.StreamResponse:
    gw = request.app[GATEWAY]
    tenant_id = gw.auth.caller_for(SCOPE, request).tenant_id
    return head.Whole.of(shaped(await gw.batches.cancel(tenant_id, request.match_info["batch"])))


def shaped(batch: Batch) -> openai.BatchBody:
    """A row as its client sees it."""
    num_input, num_output = batch.num_prompt_tokens, batch.num_completion_tokens
    return openai.BatchBody(
        id=batch.id,
        endpoint=batch.endpoint,
        model=batch.model,
        errors=None if batch.errors is None else openai.BatchErrors(data=_errors.decode(batch.errors)),
        input_file_id=batch.input_file_id,
        completion_window=batch.completion_window,
        status=batch.status,
        output_file_id=batch.output_file_id,
        error_file_id=batch.error_file_id,
        created_at=batch.created_at,
        in_progress_at=batch.in_progress_at,
        expires_at=batch.expires_at,
        finalizing_at=batch.finalizing_at,
        completed_at=batch.completed_at,
        failed_at=batch.failed_at,
        expired_at=batch.expired_at,
        cancelling_at=batch.cancelling_at,
        cancelled_at=batch.cancelled_at,
        request_counts=openai.BatchCounts(
            total=batch.num_lines, completed=batch.num_completed, failed=batch.num_failed
        ),
        usage=openai.BatchUsage(
            input_tokens=num_input,
            input_tokens_details=openai.InputTokensDetails(batch.num_cached_tokens),
            output_tokens=num_output,
            output_tokens_details=openai.OutputTokensDetails(batch.num_reasoning_tokens),
            total_tokens=num_input + num_output,
        ),
        metadata=None if batch.metadata is None else _metadata.decode(batch.metadata),
    )
