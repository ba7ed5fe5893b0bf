"""From a prompt in tokens to its answer, the way that all endpoints share: cache, limits, queue, reply, ledger."""

from __future__ import annotations

import time

from aiohttp import web

from gateway import head, reply
from gateway.api.request import control_of, wants_receipt
from gateway.auth import Caller
from gateway.house import Gateway
from gateway.limits import metered
from policies.answers import Asked
from policies.priority import Order


async def give(
    gw: Gateway, request: web.Request, caller: Caller, answer: reply.Answer, order: Order
) -> web.StreamResponse:
    """Raises what the parts refuse with; what was set aside and begun until then is given back and ended."""
    has_receipt = wants_receipt(request, answer.call)
    call, submits = answer.call, [part.submit for part in answer.parts.values()]
    num_prompt_tokens = sum([len(submit.prompt_token_ids) for submit in submits])
    num_sequences = len(answer.choices)
    asked = Asked(call.model, answer.fingerprint, submits, answer.ends, call.seed is not None, call.cache_salt)
    rank = gw.dispatch.priority_of(order)
    noted = request[head.HEAD]
    noted.cache_at = time.monotonic()
    if noted.traceparent:
        noted.answer = answer
        if caller.policy.trace_content and gw.settings.tracing.content:
            noted.shows_content = True
            answer.remember()
    async with gw.cache.look(caller.tenant_id, caller.policy.cache, asked, control_of(request), rank) as found:
        noted.admit_at = time.monotonic()
        most, request_id = found.max_completion_tokens, noted.request_id
        async with gw.limits.admit(
            caller, call.model, num_prompt_tokens, most, request_id, num_sequences, found.outcome, order.sla_class
        ) as ticket:
            noted.also.update(answer.limit_headers(ticket.headers()))
            parts, dispatch = answer.parts, gw.dispatch
            noted.queue_at = time.monotonic()
            source = found.launch(
                lambda each, after: parts[each.request_id].launch(dispatch, call.model, each, order, after)
            )
            noted.follows = found.followed
            source = metered(source, ticket, submits)
            async with reply.Account(gw.ledger, noted, caller, answer, source, ticket, order.sla_class) as account:
                return await reply.send(request, answer, source, account, gw, has_receipt)
