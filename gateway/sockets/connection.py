"""One WebSocket: what it is asked, in which order that is answered, and when it ends.

What has the same ``stream_id`` is answered one behind the other, lanes of different ones side by side. Every response
is a request that goes the way of all others, with the headers of the one that opened the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple, cast

import msgspec
from aiohttp import WSCloseCode, WSMsgType, hdrs, web
from multidict import CIMultiDict

from gateway import errors, failures, head, openai, unconnected
from gateway.bodies import parsed
from gateway.head import HEAD, Head
from gateway.house import Gateway
from gateway.openai import Malformed
from gateway.reply.events import OUTLET
from gateway.responses.nearby import NEAR, Near, Nearby
from gateway.sockets import events
from gateway.sockets.events import Create, Steer
from gateway.sockets.outlet import Lane, Way

PATH = "/v1/responses"
MAX_RUNNING, MAX_NAMED = 16, 32
"""Responses at once, and lanes with names: OpenAI's."""
MAX_WAITING = 64
"""Behind those; their bodies together are no longer than one may be."""
NOT_OF_REQUESTS = frozenset(
    (
        *("connection", "upgrade", "host", "content-length", "content-encoding", "transfer-encoding", "expect"),
        *("x-request-id", "idempotency-key"),
    )
)
"""Headers of the one that opens it that are not those of what is asked over it; nor are the handshake's."""
NOT_OF_ERRORS = frozenset(("content-type", "content-length", "server", "date"))
_error_body = msgspec.json.Decoder(openai.ErrorBody)

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Ending(NamedTuple):
    """Why it is closed: a code of RFC 6455, section 7.4.1, and words for whoever looks for it."""

    code: int
    why: str


LOST = Ending(WSCloseCode.ABNORMAL_CLOSURE, "")
"""Nobody is there who could be told."""
BROKEN = Ending(WSCloseCode.INTERNAL_ERROR, "something failed unexpectedly")


class Connection:
    """It ends with ``run``."""

    def __init__(self, gw: Gateway, request: web.Request, socket: web.WebSocketResponse, answer: Answer) -> None:
        """``answer``: whoever answers all requests."""
        self._gw = gw
        self._socket = socket
        self._answer = answer
        self._noted = request[HEAD]
        self._way = Way(request, socket, gw.settings.server)
        self._remote = request.remote or ""
        self._headers = _headers_of(request.headers)
        self._nearby = Nearby(gw.settings.server.max_body_bytes)
        self._named: set[str] = set()
        self._waiting: list[Create] = []
        self._running: dict[asyncio.Task[None], str | None] = {}
        """With their lanes."""
        now = gw.clock.now()
        self._asked_at = self._heard_at = self._pinged_at = now
        self._ends_at = now + gw.settings.responses.socket_max_s
        self._ending: Ending | None = None
        """As soon as nothing is being answered."""
        self._moved = asyncio.Event()

    async def run(self) -> None:
        """Until either side has ended it; what is still being answered then is broken off. Raises what of its own has
        failed."""
        reading, ending = asyncio.create_task(self._read()), asyncio.create_task(self._until_over())
        try:
            done, _ = await asyncio.wait([reading, ending], return_when=asyncio.FIRST_COMPLETED)
            if ending in done:
                code, why = ending.result()
                if code != LOST.code and reading not in done:
                    await self._socket.close(code=code, message=why.encode())
        finally:
            self._waiting.clear()  # else each that is broken off would begin the next
            tasks = [reading, ending, *self._running]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if not reading.cancelled():
            reading.result()

    def look(self) -> None:
        """Something may have changed that ends it."""
        self._moved.set()

    # What is asked

    async def _read(self) -> None:
        while True:
            message = await self._socket.receive()
            self._heard_at = self._gw.clock.now()
            try:
                match message.type:
                    case WSMsgType.TEXT:
                        await self._take(cast(bytes, message.data))
                    case WSMsgType.BINARY:
                        wrong = errors.InvalidRequest("Events are sent as text.", code="invalid_message_type")
                        await self._way.send(events.refused(wrong))
                    case WSMsgType.PING:
                        await self._socket.pong(message.data)
                    case WSMsgType.PONG:
                        pass
                    case _:
                        return
            except ConnectionResetError:
                return

    async def _take(self, message: bytes) -> None:
        self._asked_at = self._heard_at
        stream_id = None
        try:
            asked = await parsed(events.parse, message)
            if isinstance(asked, Steer):
                await self._way.send(events.not_steered(asked))
                return
            stream_id = asked.stream_id
            self._check(asked)
        except (Malformed, errors.GatewayError) as error:
            await self._way.send(events.refused(failures.described(error, ""), stream_id))
            return
        self._waiting.append(asked)
        self._go_on()

    def _check(self, asked: Create) -> None:
        """Raises Malformed, RequestsLimited and ServiceUnavailable."""
        if self._ending is BROKEN:
            raise errors.ServiceUnavailable("This connection is about to be closed. Open another one to go on.")
        most_s = self._gw.settings.responses.socket_max_s
        if self._heard_at >= self._ends_at:
            raise Malformed(*_over(most_s))
        if asked.is_background:
            raise Malformed(
                "'background' is not supported over a WebSocket: ask for it by POST",
                "background",
                "unsupported_parameter",
            )
        if asked.stream_id is not None and asked.stream_id not in self._named:
            if len(self._named) >= MAX_NAMED:
                raise Malformed(
                    f"This connection has {MAX_NAMED} values of stream_id already: use one of them, or open another.",
                    "stream_id",
                    "websocket_stream_limit_reached",
                )
            self._named.add(asked.stream_id)
        num_bytes = len(asked.body) + sum([len(each.body) for each in self._waiting])
        is_long = bool(self._waiting) and num_bytes > self._gw.settings.server.max_body_bytes
        if len(self._waiting) >= MAX_WAITING or is_long:
            raise errors.RequestsLimited(
                f"{len(self._waiting)} responses wait on this connection already.", headers={}, retry_after_s=1.0
            )

    # What is answered

    def _go_on(self) -> None:
        """Those begin whose turn it is."""
        busy, waiting = set(self._running.values()), []
        for asked in self._waiting:
            if asked.stream_id in busy or len(self._running) >= MAX_RUNNING:
                waiting.append(asked)
            else:
                self._running[asyncio.create_task(self._respond(asked))] = asked.stream_id
            busy.add(asked.stream_id)
        self._waiting = waiting

    async def _respond(self, asked: Create) -> None:
        task = cast("asyncio.Task[None]", asyncio.current_task())
        request: web.Request | None = None
        try:
            request = self._request_of(asked)
            with contextlib.suppress(ConnectionResetError):
                await self._tell(await self._answer(request), asked)
        except Exception as error:
            noted = None if request is None else request.get(HEAD)
            await self._broke(error, noted or self._noted, asked)
        finally:
            del self._running[task]
            self._asked_at = self._gw.clock.now()
            self._go_on()
            self._moved.set()

    def _request_of(self, asked: Create) -> web.Request:
        max_bytes = self._gw.settings.server.max_body_bytes
        request = unconnected.post(PATH, asked.body, self._headers, max_bytes, self._remote)
        request[OUTLET] = Lane(self._way, asked.stream_id)
        request[NEAR] = Near(self._nearby, asked.stream_id, asked.generates)
        return request

    async def _tell(self, response: web.StreamResponse, asked: Create) -> None:
        """What came of it, where it was refused; otherwise all of it is told."""
        if not isinstance(response, web.Response) or response.status == head.HUNG_UP:
            return
        body = _error_body.decode(cast(bytes, response.body))
        headers = {name.lower(): value for name, value in response.headers.items()}
        kept = {name: value for name, value in headers.items() if name not in NOT_OF_ERRORS}
        await self._way.send(events.error(body.error, response.status, kept, asked.stream_id))
        if response.status == errors.InvalidApiKey.status:
            self._ending = Ending(WSCloseCode.POLICY_VIOLATION, "the key is no longer valid")

    async def _broke(self, error: Exception, noted: Head, asked: Create) -> None:
        """Nobody has foreseen ``error``, so what its client has heard is not known: it hears of that. Neither those
        that wait nor others are begun, and when all that are being answered have ended, so has the connection."""
        self._ending = BROKEN
        failure = failures.described(error, noted.request_id, noted.trace_if_it_fails)
        headers = {"x-request-id": noted.request_id, **failure.headers()}
        lost, self._waiting = [asked, *self._waiting], []
        told = [events.error(failures.detail(failure), failure.status, headers, each.stream_id) for each in lost]
        with contextlib.suppress(ConnectionResetError):
            await self._way.send(*told)

    # When it ends

    async def _until_over(self) -> Ending:
        clock, server = self._gw.clock, self._gw.settings.server
        while True:
            self._moved.clear()
            now = clock.now()
            if not self._running and (ending := await self._over_at(now)) is not None:
                return ending
            if now >= self._heard_at + server.heartbeat_s + server.stall_s:
                self._way.cut()
                return LOST
            if now >= self._pinged_at + server.heartbeat_s:
                self._pinged_at = now
                with contextlib.suppress(ConnectionResetError):
                    await self._socket.ping()
            due_at = self._pinged_at + server.heartbeat_s
            if not self._running:
                due_at = min(due_at, *self._limits_at())
            timer = clock.call_later(max(0.0, due_at - clock.now()), self._moved.set)
            try:
                await self._moved.wait()
            finally:
                timer.cancel()

    def _limits_at(self) -> tuple[float, float]:
        """When it has lasted, and when it has been idle, for as long as it may."""
        return self._ends_at, self._asked_at + self._gw.settings.responses.socket_idle_s

    async def _over_at(self, now: float) -> Ending | None:
        """Whether, with nothing to answer, it is to end at this instant."""
        ends_at, idle_at = self._limits_at()
        if self._ending is not None:
            return self._ending
        if self._gw.dispatch.draining:
            return Ending(WSCloseCode.GOING_AWAY, "the server is shutting down")
        if now >= ends_at:
            wrong = failures.described(Malformed(*_over(self._gw.settings.responses.socket_max_s)), "")
            with contextlib.suppress(ConnectionResetError):
                await self._way.send(events.refused(wrong))
            return Ending(WSCloseCode.GOING_AWAY, "the connection has lasted for as long as it may")
        if now >= idle_at:
            return Ending(WSCloseCode.OK, "nothing was asked for a while")
        return None


def _over(most_s: float) -> tuple[str, None, str]:
    message = f"This connection has reached its limit of {most_s / 60:g} minutes. Open another one to go on."
    return message, None, "websocket_connection_limit_reached"


def _headers_of(opening: Mapping[str, str]) -> CIMultiDict[str]:
    """Those of each request that comes over a connection that was opened with these."""
    headers = CIMultiDict(
        [
            (name, value)
            for name, value in opening.items()
            if (lower := name.lower()) not in NOT_OF_REQUESTS and not lower.startswith("sec-websocket-")
        ]
    )
    headers[hdrs.CONTENT_TYPE] = "application/json"
    return headers
