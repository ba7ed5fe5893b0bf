"""The answer on its way out: one JSON body or a stream of events, and the ledger row before its last byte."""

from __future__ import annotations

import asyncio

from aiohttp import web

from gateway import errors, openai
from gateway.house import Gateway
from gateway.reply.account import HUNG_UP, Account
from gateway.reply.answers import Answer, ChatAnswer, Part, TextAnswer
from gateway.reply.events import EventStream
from gateway.reply.flights import Flights
from policies import wire

__all__ = ["Account", "Answer", "ChatAnswer", "Flights", "Part", "TextAnswer", "send"]

HEADERS_AFTER_S = 1.0
"""So long a stream's headers wait for the first token, as a refusal until then has a status of its own."""


async def send(
    request: web.Request,
    answer: Answer,
    flights: Flights,
    account: Account,
    gw: Gateway,
) -> web.StreamResponse:
    """Reads the flights to their end and answers the client.

    Raises GatewayError while nothing has been sent; afterwards the failure is the stream's last event.
    """
    if not answer.call.stream:
        return await _send_body(answer, flights, account)
    async with EventStream(request, gw.settings.server, gw.clock) as stream:
        try:
            return await _send_events(stream, answer, flights, account)
        except ConnectionResetError:
            await flights.close()
            await account.settle(HUNG_UP)
            return stream.response or web.Response(status=HUNG_UP)
        except Exception as error:
            if stream.response is None:
                raise
            await flights.close()
            failure = errors.described(error, account.request_id)
            await account.settle(failure.status)
            return await stream.end(errors.event(failure))


async def _send_body(answer: Answer, flights: Flights, account: Account) -> web.StreamResponse:
    texts = [answer.preamble(i) for i in range(len(answer.choices))]
    while answer.num_open:
        for delta in await _deltas(answer, flights):
            index, text = _take(answer, flights, delta)
            texts[index] += text
    body = answer.body(texts)
    await account.settle(200)
    return web.Response(body=body, content_type="application/json")


async def _send_events(stream: EventStream, answer: Answer, flights: Flights, account: Account) -> web.StreamResponse:
    """Everything that arrived since the last write goes out as one, a choice's tokens as one chunk."""
    chunks = answer.chunks()
    try:
        async with asyncio.timeout(HEADERS_AFTER_S):
            deltas = await flights.deltas()
    except TimeoutError:
        await stream.open()
        deltas = await flights.deltas()
    while True:
        texts: dict[int, str] = {}
        finished: list[int] = []
        for delta in deltas:
            num_unfinished = answer.num_unfinished
            index, text = _take(answer, flights, delta)
            texts[index] = texts[index] + text if index in texts else text
            if answer.num_unfinished < num_unfinished:
                finished.append(index)
        events = []
        for index, text in texts.items():
            choice = answer.choices[index]
            if not choice.opened:
                choice.opened = True
                events.append(chunks.opening(index))
                if preamble := answer.preamble(index):
                    events.append(chunks.text(index, preamble))
            logprobs = choice.take_logprobs()
            if logprobs is not None:
                events.append(chunks.text_with_logprobs(index, text, logprobs))
            elif text:
                events.append(chunks.text(index, text))
        events += [chunks.finish(index, answer.choices[index].finish_reason or "stop") for index in finished]
        if not answer.num_unfinished:
            break
        if events:
            await stream.write(b"".join(events))
        deltas = await _deltas(answer, flights)
    while answer.num_open:
        for delta in await _deltas(answer, flights):
            answer.take(delta)
    if answer.call.includes_usage:
        events.append(chunks.usage(answer.usage()))
    events.append(openai.DONE)
    await account.settle(200)
    return await stream.end(b"".join(events))


def _take(answer: Answer, flights: Flights, delta: wire.Delta) -> tuple[int, str]:
    """Takes a delta in; a sequence whose stop string it completed leaves the batch."""
    num_unfinished = answer.num_unfinished
    index, text = answer.take(delta)
    if answer.num_unfinished < num_unfinished and delta.finish is None:
        flights.cancel(delta)
    return index, text


async def _deltas(answer: Answer, flights: Flights) -> list[wire.Delta]:
    """The next deltas. When every text is complete, what is waited for is only the worker's word that it has stopped;
    losing the worker then loses nothing."""
    try:
        return await flights.deltas()
    except errors.GatewayError:
        if answer.num_unfinished:
            raise
        answer.num_open = 0
        return []
