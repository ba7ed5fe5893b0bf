"""The head of an answer: what is noted of a request for it, the headers that all answers have, and whole answers that
are written head and all at once.

Other headers come from the request's journey, ``also``, or from the failure that it ended with.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Mapping
from email.utils import formatdate
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import HttpVersion11, hdrs, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.web import BaseRequest
from multidict import istr

from gateway.journey import Journey
from gateway.traceparent import TAIL, TRACEPARENT, UNDECIDED, Parent, context_of, parent_in

if TYPE_CHECKING:
    from gateway.auth import Caller
    from gateway.errors import GatewayError
    from gateway.reply.account import Keeper
    from gateway.tracing.tracer import Tracing

_ids = random.Random()
"""Seeded by the system at start. An id must be unlike all others and need not be secret, so it costs no system call."""

HUNG_UP = 499
"""The status, nginx's own, of a request whose client went away; nobody sees it but the ledger and the log."""
API_VERSION = "2020-10-01"
SERVER = "penstock"
LONG_BYTES = 1 << 20
"""Of a body that is written behind its head, rather than copied to be one with it."""
_X_REQUEST_ID, _PROCESSING_MS, _VERSION = istr("x-request-id"), istr("openai-processing-ms"), istr("openai-version")
_OWN_REQUEST_ID = istr("x-penstock-request-id")
TRACE_ID = "x-trace-id"
_AN_ID = re.compile(r"[A-Za-z0-9._:~+/=@-]{1,128}")
"""What a client may call its request; anything else is not repeated."""


class Head(Journey):
    """What is noted of one request, its journey included."""

    caller: Caller | None = None
    """Whoever asks, once that is known; from the beginning, where it came by no connection."""
    keeper: Keeper | None = None
    """Who keeps its answer, where somebody does."""
    route = ""
    """Where it went, as that is written here; empty: not known yet, or nowhere."""
    left_as = HUNG_UP
    """Its status where its client goes away; another where it has had one by then."""
    is_told = False
    """There is a line of it in the log."""

    def __init__(
        self, address: str | None, shown_id: str | None, also: dict[str, str], parent: Parent | None = None
    ) -> None:
        self.request_id = new_request_id()
        """The same id is on the wire and in the ledger."""
        self.shown_id = shown_id
        """The client's own name for its request, which its answer has instead; ours is beside it."""
        self.address = address
        """Where it came from, proxies of ours aside; None on a Unix socket."""
        self.started_at = time.monotonic()
        """When it reached us, in seconds."""
        self.also = also
        """The headers that its journey adds to its answer, whatever becomes of it; ``also`` adds some."""
        self.parent = parent
        """Of its span, by its traceparent; None: it came with none that is one."""
        self.trace_id = None if parent is None else parent.trace_id
        """By which its row, its line in the log and its answer tell of its trace; None: it came with none, and has none
        here so far."""

    def failed(self, failure: GatewayError) -> None:
        """What its client hears. Not in what words: they may quote the request."""
        self.error = failure.code or failure.type
        if self.keeping is not None:
            self.keep(self.keeping.failures)

    def keep(self, why: str) -> None:
        """It has a trace, if there is a reason, and is told of by that from now on."""
        if why:
            self.kept_for, self.keeping, self.traceparent = why, None, self.context
            self.trace_id = self.also[TRACE_ID] = self.traceparent[3:35]

    @property
    def context(self) -> str:
        """W3C trace context of its own span; empty: no traces are made here."""
        return context_of(self.request_id, self.traceparent)

    @property
    def span_id(self) -> str:
        return self.context[36:52]

    def outgoing(self) -> dict[str, str]:
        """Headers for whoever it asks by HTTP."""
        said = {"traceparent": self.context, "tracestate": self.state, "baggage": self.baggage}
        return {name: value for name, value in said.items() if value}

    @property
    def trace_if_it_fails(self) -> str | None:
        """The id of the trace that it has then; None: it has none."""
        return self.trace_id or self.context[3:35] or None

    def behind(self) -> Head:
        """Of what goes on behind its answer: the same request, whose way begins anew."""
        noted = Head(self.address, self.shown_id, self.also, self.parent)
        noted.request_id, noted.trace_id, noted.started_at = self.request_id, self.trace_id, self.started_at
        noted.caller, noted.keeper = self.caller, self.keeper
        noted.route, noted.is_told = self.route, self.is_told
        return noted


HEAD = web.RequestKey("head", Head)
"""Where a request has its own."""


def begin(
    request: web.Request,
    address: str | None = None,
    headers: dict[str, str] | None = None,
    tracing: Tracing | None = None,
) -> Head:
    """Names it, and notes when and from where it came. ``headers``: what its answer has, as with ``also``. What
    ``tracing`` has to do with nearly all is done here: a call costs more than that."""
    told = request.headers
    said = told.get(_X_REQUEST_ID)
    parent = parent_in(told) if TRACEPARENT in told else None
    noted = Head(address, said if said is not None and _AN_ID.fullmatch(said) else None, headers or {}, parent)
    if parent is not None:
        noted.also[TRACE_ID] = parent.trace_id
    request[HEAD] = noted
    if tracing is not None:
        connection: Any = request._protocol
        noted.received_at = connection.received_at or noted.started_at  # 0: it came with the one before it, or by none
        connection.received_at = 0.0
        noted.keeping, noted.traceparent = tracing.keeping, UNDECIDED
        if parent is not None or noted.request_id[TAIL] < tracing.below:
            tracing.begin(noted, request)
    return noted


def new_request_id() -> str:
    """In the order of time, so that the ledger grows at its end."""
    return f"req_{time.time_ns() // 1_000_000 << 80 | _ids.getrandbits(80):032x}"


def part_ids(request_id: str, num_parts: int) -> list[str]:
    """What each prompt of a request is called to whoever answers it: as the request, or where there are several by the
    request's id and its number, from 0."""
    return [request_id] if num_parts == 1 else [f"{request_id}-{number}" for number in range(num_parts)]


def whole_id(part_id: str) -> str:
    """The request's, by one of ``part_ids``."""
    return part_id.partition("-")[0]


def _learn_names() -> None:
    """CPython keeps attributes within their object, and in no dictionary, which each object would have to be given, as
    long as they have names that those of the class's first objects had, and no more than 29 of them. When that many
    requests have begun, mostly none of them has come to its end: so the first one comes to all that many do."""
    first = Head(None, None, {})
    for name in (
        *("caller", "route", "is_told", "entry", "follows", "error"),
        *("parse_at", "render_at", "cache_at", "admit_at", "queue_at", "settle_at"),
        *("received_at", "traceparent", "parent_id", "state", "baggage", "keeping", "kept_for", "answer"),
    ):
        setattr(first, name, getattr(first, name))


_learn_names()


def also(request: web.Request, headers: Mapping[str, str]) -> None:
    """Puts headers on the answer, if its headers are not out yet. Their values are ours, never a client's."""
    if headers:
        request[HEAD].also.update(headers)


def complete(request: web.Request, response: web.StreamResponse) -> None:
    """Puts the headers of every answer on one whose head is not out yet; ``Whole`` does it by itself."""
    if not response.prepared and not isinstance(response, Whole):
        add_headers(request, response)


def add_headers(request: BaseRequest, response: web.StreamResponse) -> None:
    """The headers of every answer."""
    headers, noted = response.headers, request[HEAD]
    headers[_X_REQUEST_ID] = noted.shown_id or noted.request_id
    if noted.shown_id is not None:
        headers[_OWN_REQUEST_ID] = noted.request_id
    headers[_PROCESSING_MS] = str(_processing_ms(noted))
    headers[_VERSION] = API_VERSION
    headers[hdrs.SERVER] = SERVER
    headers.update(noted.also)
    if request.version != HttpVersion11 and response.content_length is None:
        response.force_close()  # nothing but the connection's end tells an old client that it is over


class Whole(web.StreamResponse):
    """An answer of JSON with the status 200 that nobody adds anything to.

    aiohttp's own way to the socket, through a multidict and a dozen questions that have one answer here, takes 8 us
    more. It is taken where the client is older than HTTP/1.1.
    """

    def __init__(self, body: bytes) -> None:
        super().__init__()
        self.body = body
        self._is_written = self._stays = False

    @classmethod
    def of(cls, body: object) -> Whole:
        """What msgspec makes of it."""
        return cls(msgspec.json.encode(body))

    @property
    def prepared(self) -> bool:
        return self._is_written or super().prepared

    @property
    def keep_alive(self) -> bool | None:
        return self._stays if self._is_written else super().keep_alive

    async def prepare(self, request: BaseRequest) -> AbstractStreamWriter | None:
        transport = request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client is gone")
        if request.version != HttpVersion11:
            self.content_type, self.content_length = "application/json", len(self.body)
            add_headers(request, self)
            if request.method == hdrs.METH_HEAD:
                self.body = b""
            return await super().prepare(request)
        self._stays = request.keep_alive and super().keep_alive is not False  # None: nobody has said anything
        self._is_written = True
        noted = request[HEAD]
        shown_id = (
            noted.request_id if noted.shown_id is None else f"{noted.shown_id}\r\n{_OWN_REQUEST_ID}: {noted.request_id}"
        )
        more = "".join([f"{name}: {value}\r\n" for name, value in noted.also.items()])
        if not self._stays:
            more += "Connection: close\r\n"
        head = (
            f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(self.body)}\r\n"
            f"Date: {_date(int(time.time()))}\r\nServer: {SERVER}\r\nx-request-id: {shown_id}\r\n"
            f"openai-processing-ms: {_processing_ms(noted)}\r\nopenai-version: {API_VERSION}\r\n{more}\r\n"
        )
        body = b"" if request.method == hdrs.METH_HEAD else self.body
        if len(body) > LONG_BYTES:
            transport.write(head.encode())
            transport.write(body)
        else:
            transport.write(head.encode() + body)
        if request.protocol.writing_paused:
            await request.writer.drain()
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        if not self._is_written:
            await super().write_eof(self.body)


def _processing_ms(noted: Head) -> int:
    return int(1e3 * (time.monotonic() - noted.started_at))


@lru_cache(2)
def _date(unix_s: int) -> str:
    """As HTTP writes it (RFC 9110, section 5.6.7)."""
    return formatdate(unix_s, usegmt=True)
