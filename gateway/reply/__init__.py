"""The answer on its way out: one JSON body or a stream of events, and the ledger row before its last byte."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from aiohttp import web

from gateway import errors, failures, head
from gateway.flights import Source
from gateway.head import HUNG_UP
from gateway.house import Gateway
from gateway.pressure import Pressure
from gateway.reply import long
from gateway.reply.account import Account, Keeper
from gateway.reply.answers import Answer, ChatAnswer, Part, TextAnswer
from gateway.reply.choices import ChatLogprobs, Choice
from gateway.reply.events import OUTLET, EventStream, Outlet
from gateway.reply.shapers import Shaper
from gateway.reply.vectors import EmbeddingAnswer, RerankAnswer, ScoreAnswer, Scored, VectorAnswer
from policies import wire

__all__ = [
    "Account",
    "Answer",
    "ChatAnswer",
    "ChatLogprobs",
    "Choice",
    "EmbeddingAnswer",
    "Keeper",
    "Part",
    "RerankAnswer",
    "ScoreAnswer",
    "Scored",
    "Shaper",
    "TextAnswer",
    "VectorAnswer",
    "awaited",
    "send",
]

T = TypeVar("T")

HEADERS_AFTER_S = 1.0
"""So long a stream's headers wait for the first token, as a refusal until then has a status of its own."""


def send(
    request: web.Request,
    answer: Answer,
    flights: Source,
    account: Account,
    gw: Gateway,
    has_receipt: bool = False,
) -> Awaitable[web.StreamResponse]:
    """Reads the flights to their end and answers the client, with a receipt if it asked for one.

    Raises GatewayError while nothing has been sent; afterwards the failure is the stream's last event.
    """
    request[head.HEAD].also["x-penstock-cache"] = flights.outcome
    currency = gw.settings.billing.currency if has_receipt else None
    if not answer.call.stream:
        return _send_body(answer, flights, account, currency)
    stream = request.get(OUTLET) or EventStream(request, gw.settings.server, gw.clock)
    return _send_stream(stream, answer, flights, account, currency, gw.pressure)


async def awaited(stream: Outlet, work: Coroutine[Any, Any, T], after_s: float | None = None) -> T:
    """What ``work`` returns, which has to be done before there is anything to send. Where that takes longer than
    ``after_s`` (None: than for a first token) the stream is opened, so that its client is kept waiting and not in
    doubt."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task], timeout=HEADERS_AFTER_S if after_s is None else after_s)
        if not task.done():
            await stream.open()
        return await task
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])


async def _send_stream(
    stream: Outlet, answer: Answer, flights: Source, account: Account, currency: str | None, pressure: Pressure
) -> web.StreamResponse:
    """``currency`` as for ``_send_body``. Settles however it ends."""
    shaper = answer.shaper()
    async with stream:
        try:
            with pressure.streaming():
                return await _send_events(stream, shaper, answer, flights, account, currency, pressure)
        except ConnectionResetError:
            flights.close()
            await account.settle(HUNG_UP)
            return stream.response or web.Response(status=HUNG_UP)
        except Exception as error:
            if stream.response is None:
                raise
            flights.close()
            failure = failures.described(error, account.request_id, account.noted.trace_if_it_fails)
            await account.settle_failure(failure)
            return await stream.fail(shaper.failed(failure))


async def _send_body(answer: Answer, flights: Source, account: Account, currency: str | None) -> web.StreamResponse:
    """``currency``: of the receipt; None: there is none."""
    while answer.num_open:
        try:
            deltas = await flights.deltas()
        except errors.GatewayError:
            if answer.num_unfinished:
                raise
            answer.num_open = 0  # as in ``_deltas``, without another coroutine
            break
        for delta in deltas:
            _take(answer, flights, delta)
    if currency is None or account.keeper is not None:  # what is kept before its row is written has no receipt of it
        body = await long.body_of(answer) if answer.is_long else answer.body()
        await account.settle(200, body)
    else:
        await account.settle(200)
        extras = account.receipt(currency)
        body = await long.body_of(answer, extras) if answer.is_long else answer.body(extras)
    return head.Whole(body)


async def _send_events(
    stream: Outlet,
    shaper: Shaper,
    answer: Answer,
    flights: Source,
    account: Account,
    currency: str | None,
    pressure: Pressure,
) -> web.StreamResponse:
    """Everything that arrived since the last write goes out as one, a choice's tokens as one chunk; of more tokens than
    the marks allow only so many."""
    mark = account.open_mark()
    try:
        async with asyncio.timeout(HEADERS_AFTER_S):
            deltas = await flights.deltas()
    except TimeoutError:
        await stream.open()
        deltas = await flights.deltas()
    lags = False  # what was written last could not leave at once
    while True:
        later: list[wire.Delta] = []
        if mark is not None and (len(deltas) > 1 or len(deltas[0].token_ids) > mark.most):
            deltas, later = mark.portion(deltas)
        if len(deltas) == 1:
            moved = [_take(answer, flights, deltas[0])]
        else:  # in order and each once
            moved = list(dict.fromkeys([_take(answer, flights, delta) for delta in deltas]))
        num_tokens = answer.num_tokens
        if mark is not None and num_tokens > mark.allowed and answer.num_unfinished:
            # Before anything is said of them: who is cancelled meanwhile has said nothing that is not delivered.
            await stream.flush()
            mark.reached(account.num_delivered)
            await mark.room(num_tokens)
        events = b"".join([shaper.moved(choice) for choice in moved])
        if not answer.num_unfinished:
            break
        if events:
            if mark is None:
                await stream.write(events)
            else:
                if lags and stream.is_flushed:
                    mark.reached(account.num_delivered)
                lags = not await stream.write(events)
                if not lags:
                    mark.reached(num_tokens)
            account.num_delivered = num_tokens
        if pressure.hold_s and not later:
            await asyncio.sleep(pressure.hold_s)
        deltas = later or await flights.deltas()
    while answer.num_open:
        for delta in later or await _deltas(answer, flights):
            answer.take(delta)
        later = []
    await account.settle(200)
    last = shaper.last(None if currency is None else account.receipt(currency))
    return await stream.end(events + last)


def _take(answer: Answer, flights: Source, delta: wire.Delta) -> Choice:
    """The choice that moved; once it has its stop string the worker need not go on."""
    num_unfinished = answer.num_unfinished
    choice = answer.take(delta)
    if answer.num_unfinished < num_unfinished and choice.finish is None:
        flights.cancel(delta.request_id, delta.index)
    return choice


async def _deltas(answer: Answer, flights: Source) -> list[wire.Delta]:
    """The next deltas. When every text is complete, all that is waited for is the worker's word that it has stopped; a
    worker that is lost meanwhile takes nothing along."""
    try:
        return await flights.deltas()
    except errors.GatewayError:
        if answer.num_unfinished:
            raise
        answer.num_open = 0
        return []
