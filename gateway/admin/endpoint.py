"""One address of the administration: who may, what is parsed, what is done, what is answered.

Everything that a request says is parsed into the types that its endpoint names, and refused by the name of the field
that does not fit; the same types are described at /openapi.json. What changes something runs as one transaction, with
its line in the audit log (``change``).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec
from aiohttp import web
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway import head
from gateway.admin import change
from gateway.admin.problems import (
    BodyTooLong,
    Invalid,
    MatchRequired,
    NotThere,
    Stale,
    of_validation,
)
from gateway.auth import BILLING_READER, OPERATOR, OWNER, AdminCaller
from gateway.background import to_its_end
from gateway.bodies import body_of
from gateway.errors import StoreUnavailable
from gateway.house import GATEWAY, Gateway
from gateway.openai.duplicate_keys import check_keys, quotes_in
from gateway.openai.failures import Malformed
from gateway.store import is_away

Q = TypeVar("Q")
B = TypeVar("B")

READERS = (OPERATOR, BILLING_READER)
OPERATORS = (OPERATOR,)
OWNERS = (OWNER,)
"""Who may, besides the owner."""

MAX_BODY_BYTES = 1 << 20
STORE_S = 20.0
"""How long the store may take for one request."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,255}")


class Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """No parameters, or an empty body."""


class Versioned(msgspec.Struct, frozen=True, kw_only=True):
    """What several people change: its version is its ETag."""

    version: int


@dataclass(frozen=True, slots=True)
class Ask(Generic[Q, B]):
    """What is asked, and by whom."""

    gw: Gateway
    request: web.Request
    caller: AdminCaller
    query: Q
    body: B
    look_again: Callable[[], Awaitable[object]]
    """Raises GatewayError when whoever asks may not any more: for answers that take long."""

    def named(self, part: str) -> str:
        """A part of the path. Raises NotThere for what nothing can be called."""
        name: str = self.request.match_info[part]
        if not _NAME.fullmatch(name):
            raise NotThere(f"Nothing is called so: {part}.")
        return name

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """The store, for looking at it."""
        async with self.gw.store.engine.connect() as connection:
            yield connection

    def check_version(self, version: int) -> None:
        """Raises Stale unless the version that is there is one that If-Match names, or it names none. What is weak
        (W/"1") names none that a change could be held against (RFC 9110, section 13.1.1)."""
        named = matched_by(self.request)
        if named and named != ["*"] and f'"{version}"' not in named:
            what = "Read it again, and repeat the change on what it is now."
            if f'W/"{version}"' in named:
                what = "A weak ETag is none that a change is held against: send it without its W/."
            raise Stale(f'If-Match: the version is "{version}" now. {what}', etag=f'"{version}"')


def matched_by(request: web.Request) -> list[str]:
    """The ETags that If-Match names, as they are written, or "*"; no ETag of ours has a comma in it."""
    return [tag for each in ",".join(request.headers.getall("if-match", [])).split(",") if (tag := each.strip())]


Handler = Callable[..., Awaitable[msgspec.Struct | web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """``handler`` takes an ``Ask``, and a ``change.Change`` if it changes something. The first line of its docstring is
    the summary that is published."""

    method: str
    path: str
    handler: Handler
    answer: Any
    """The type of the answer's body."""
    roles: tuple[str, ...]
    query: Any = Nothing
    repeated: tuple[str, ...] = ()
    """Parameters that may be given several times, whose values its query has as a tuple."""
    body: Any = Nothing
    status: int = 200
    changes: bool = False
    needs_match: bool = False
    """Only with If-Match, since it replaces what others may have written."""
    max_body_bytes: int = MAX_BODY_BYTES
    limit_s: float = STORE_S
    """How long the answer may take."""
    around: Callable[[Ask[Any, Any]], contextlib.AbstractAsyncContextManager[Any]] | None = None
    """What a change needs that takes too long for a transaction: entered before it, left when everybody goes by what
    was changed; the handler gets what it yields."""
    files: tuple[str, ...] = ()
    """The content types of what the handler writes itself, instead of an answer."""
    tenants_scope: str | None = None
    """A tenant's own key may ask too, if it is good for this, and is answered about the tenant alone."""

    @property
    def summary(self) -> str:
        return (inspect.getdoc(self.handler) or "").partition("\n")[0].rstrip(".")

    def route(self) -> web.RouteDef:
        if self.method == "GET":
            # A handler that writes its answer itself would write the body to a HEAD, too.
            return web.get(self.path, self.serve, allow_head=not self.files)
        return web.route(self.method, self.path, self.serve)

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Answers a request. Raises GatewayError."""
        gw = request.app[GATEWAY]
        look = partial(self._caller_of, gw, request)
        try:
            caller = await look()
        except (SQLAlchemyError, OSError) as error:
            if not is_away(error):
                raise
            raise StoreUnavailable.for_operators(self.changes, is_file=gw.store.database is not None) from error
        ask = Ask(gw, request, caller, self._query_of(request), await self._body_of(gw, request), look)
        if self.needs_match and not matched_by(request):
            raise MatchRequired(
                "Send If-Match with the ETag of what you read, so that nobody's change is lost; * takes any version."
            )
        try:
            if self.changes and self.around is None:
                # Else what was done beside the store would stay where whoever asked hangs up, and its line in the audit
                # log would not.
                response = await to_its_end(asyncio.wait_for(change.made(ask, self), self.limit_s))
            else:
                async with asyncio.timeout(self.limit_s):
                    if self.around is None:
                        answer = await self.handler(ask)
                        return answer if isinstance(answer, web.StreamResponse) else self.response(request, answer)
                    async with self.around(ask) as found:
                        response = await change.made(ask, self, found)
                        await change.tell(gw)
                    return response
        except (SQLAlchemyError, OSError) as error:  # TimeoutError is an OSError
            if not is_away(error):
                raise
            raise StoreUnavailable.for_operators(self.changes, is_file=gw.store.database is not None) from error
        await change.tell(gw)
        return response

    def response(self, request: web.Request, body: msgspec.Struct) -> web.Response:
        headers = {}
        if isinstance(body, Versioned):
            headers["etag"] = f'"{body.version}"'
            if self.method == "GET" and request.headers.get("if-none-match") == headers["etag"]:
                return web.Response(status=304, headers=headers)
        return web.Response(
            status=self.status, body=msgspec.json.encode(body), content_type="application/json", headers=headers
        )

    async def _caller_of(self, gw: Gateway, request: web.Request) -> AdminCaller:
        bearer = await gw.sessions.bearer_of(request)
        if bearer is not None:
            head.also(request, {"cache-control": "no-store", "x-content-type-options": "nosniff"})
            return gw.auth.admin_by(bearer.key_hash, request, *self.roles)
        if self.tenants_scope is None:
            return gw.auth.admin_of(request, *self.roles)
        return gw.auth.reader_of(request, self.tenants_scope, *self.roles)

    def _query_of(self, request: web.Request) -> Any:
        values: dict[str, Any] = {}
        for name in request.query:
            given = request.query.getall(name)
            if len(given) > 1 and name not in self.repeated:
                raise Invalid.of([(name, "is given twice")])
            values[name] = given if name in self.repeated else given[0]
        try:
            return msgspec.convert(values, self.query, strict=False)
        except msgspec.ValidationError as error:
            raise of_validation(error, self.query) from None

    async def _body_of(self, gw: Gateway, request: web.Request) -> Any:
        if self.method == "GET" or (self.body is Nothing and not request.can_read_body):
            return Nothing()  # with no body there is nothing whose type could be wrong
        body = await body_of(gw, request)
        if len(body) > self.max_body_bytes:
            raise BodyTooLong(f"The body may have {self.max_body_bytes} bytes at most, and this one has {len(body)}.")
        if not body and self.body is Nothing:
            return Nothing()
        try:
            asked = msgspec.json.decode(body, type=self.body)
            check_keys(body, quotes_in(body))
            return asked
        except Malformed as error:
            raise Invalid.of([(error.param or "body", "is there twice")]) from None
        except msgspec.ValidationError as error:
            raise of_validation(error, self.body) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Invalid.of([("body", f"cannot be read as JSON: {error}")]) from None
        except RecursionError:
            raise Invalid.of([("body", "is nested too deeply")]) from None
