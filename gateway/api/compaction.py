"""POST /v1/responses/compact: a response's journey, to a summary of what was said. A response that asks for it has one
made on its way, where its prompt is long."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, cast

from aiohttp import web
from multidict import CIMultiDict

from gateway import errors, failures, head, unconnected
from gateway.api import items
from gateway.api.answer import give
from gateway.api.chat import prompt_of
from gateway.api.turn import Question
from gateway.auth import Caller
from gateway.bodies import parsed, taken_body_of
from gateway.head import HEAD
from gateway.house import Gateway
from gateway.openai import Malformed
from gateway.responses import compaction, requests
from gateway.responses.compaction import CompactRequest
from gateway.responses.context import most_tokens
from gateway.responses.items import AnyItem, CompactionItem, MessageItem, named, said_by_user
from gateway.responses.requests import ResponseRequest
from policies import terms

SCOPE = "responses"
PATH = "/v1/responses/compact"


class Short(NamedTuple):
    """A conversation that was made short."""

    items: list[AnyItem]
    """What it goes on from."""
    stands_for_them: CompactionItem
    usage: terms.Usage
    """Of making it."""


async def compact(gw: Gateway, request: web.Request) -> web.StreamResponse:
    caller = gw.auth.caller_of(request)
    body = await taken_body_of(gw, request)
    call = (await parsed(compaction.parse, body)).response()
    caller.check(call.model, SCOPE)
    return await gw.idempotency.once(request, caller, body, lambda: _compacted(gw, request, caller, call))


async def _compacted(gw: Gateway, request: web.Request, caller: Caller, call: ResponseRequest) -> web.StreamResponse:
    given = named(await items.given(gw, caller, call.input or []), request[HEAD].request_id)
    before = await items.before(gw, caller, call)
    said = compaction.expanded(gw.directory.secret, caller.tenant_id, [*before, *given])
    return await _summed_up(gw, request, caller, call, said)


async def _summed_up(
    gw: Gateway, request: web.Request, caller: Caller, call: ResponseRequest, said: Sequence[AnyItem]
) -> web.StreamResponse:
    messages = items.messages(gw, caller, call, [*said, said_by_user(compaction.ASKING)])
    question = Question(gw, request, caller, call, requests.chat_of(call, messages), messages)
    users = [item for item in said if isinstance(item, MessageItem) and item.role == "user"]
    shaped = partial(compaction.CompactedAnswer, gw.directory.secret, caller.tenant_id, users)
    answer, order = await question.prepared(shaped)
    return await give(gw, request, caller, answer, order)


async def shortened(
    gw: Gateway, request: web.Request, caller: Caller, call: ResponseRequest, said: Sequence[AnyItem]
) -> Short | None:
    """``said``, which ``call`` is about, where it is longer than that allows and can be made short: by a request of its
    own, with its own limits, row and trace. Raises what that is refused with."""
    facts = gw.dispatch.ready(call.model) if gw.upstreams.of(call.model) is None else None
    most = most_tokens(call.context_management or (), None if facts is None else facts.max_model_tokens)
    parts = compaction.split(said)
    if most is None or parts is None:
        return None
    chat = requests.chat_of(call, items.messages(gw, caller, call, said))
    if len(await prompt_of(gw, caller, chat)) <= most:
        return None
    if request[HEAD].keeper is not None:
        raise errors.InvalidRequest(
            "A line of a batch has no 'context_management': it is one request", param="context_management"
        )
    longest, just_said = parts
    asked = CompactRequest(
        model=call.model,
        instructions=call.instructions,
        prompt_cache_key=call.prompt_cache_key,
        service_tier=call.service_tier,
        cache_salt=call.cache_salt,
    )
    body = compaction.compacted(await _beside(gw, request, caller, asked.response(), longest))
    used = body.usage
    usage = terms.Usage(
        used.input_tokens,
        used.input_tokens_details.cached_tokens,
        used.output_tokens,
        used.output_tokens_details.reasoning_tokens,
    )
    short = [*body.output, *just_said]
    return Short(short, compaction.whole(gw.directory.secret, caller.tenant_id, short), usage)


async def _beside(
    gw: Gateway, request: web.Request, caller: Caller, call: ResponseRequest, said: Sequence[AnyItem]
) -> bytes:
    """The answer to a request of the same caller, whose trace goes on from this one's."""
    headers = CIMultiDict({"content-type": "application/json", **request[HEAD].outgoing()})
    made = unconnected.post(PATH, b"", headers, 0, request.remote or "")
    noted = head.begin(made, request[HEAD].address, tracing=gw.tracing)
    noted.caller, noted.route = caller, PATH
    status = head.HUNG_UP
    try:
        response = cast(head.Whole, await _summed_up(gw, made, caller, call, said))
        status = response.status
        return response.body
    except (errors.GatewayError, Malformed) as error:
        failure = failures.described(error, noted.request_id)
        noted.failed(failure)
        status = failure.status
        raise
    finally:
        if gw.tracing is not None:
            gw.tracing.end(noted, made, status)
