"""Where every request comes in and every answer leaves: it is counted, named and led to whoever answers it; what fails
becomes the error object, and the headers that all answers have are put on.

The addresses of inference are looked up here. All others are the aiohttp application's, whose way through its resolver
takes several microseconds more, which is nothing to whoever administers and a part of what a short completion costs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from gateway import failures, head
from gateway.doors import Doors
from gateway.errors import GatewayError, InvalidApiKey
from gateway.failures import Shape
from gateway.head import Head
from gateway.house import Gateway
from gateway.origins import Origins
from gateway.proxies import Proxies
from gateway.telemetry import Ended, tell

Endpoint = Callable[[Gateway, web.Request], Awaitable[web.StreamResponse]]

QUIET = frozenset(("/healthz", "/readyz", "/health", "/metrics"))
"""Asked every few seconds by machines; they are in the log when they fail."""
PREFLIGHT = "preflight"
"""In the log and in traces: it is answered before anybody asks what the address is."""
EXPECTATION = "expectation"
"""Likewise: one that is no text."""


class Entrance:
    """The one handler of the server."""

    def __init__(
        self,
        gw: Gateway,
        doors: Doors,
        endpoints: Mapping[str, Endpoint],
        application: Handler,
        shapes: Mapping[str, Shape],
    ) -> None:
        """``endpoints`` by path, for POST; ``application`` answers everything else. ``shapes`` of the failures of
        addresses that begin so; those of all others are in OpenAI's."""
        self._gw = gw
        self._doors = doors
        self._endpoints = endpoints
        self._application = application
        self._shapes = shapes
        self._proxies = Proxies(gw.settings.server)
        self._origins = Origins(gw.settings.server.cors_origins)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Raises nothing but what redirects."""
        doors = self._doors
        is_counted = doors.enter()
        tracing = self._gw.tracing
        noted = head.begin(request, self._proxies.address_of(request), self._origins.headers(request), tracing)
        try:
            try:
                response = await self._led(request, noted)
            except InvalidApiKey:
                if not await self._gw.auth.knows_by_now(request):
                    raise
                response = await self._led(request, noted)
        except asyncio.CancelledError:
            self._ended(request, noted, noted.left_as)
            if tracing is not None:
                tracing.end(noted, request, noted.left_as)
            raise
        except web.HTTPException as error:
            if error.status < 400:
                raise
            response = _said(request, error) or self._refusal(request, failures.of_http(error, request))
        except Exception as error:
            known = request[head.HEAD]
            response = self._refusal(request, failures.described(error, known.request_id, known.trace_if_it_fails))
        finally:
            if is_counted:
                doors.leave()
        head.complete(request, response)
        answered, status = doors.answered, response.status
        answered[status] = answered.get(status, 0) + 1
        if doors.are_closed:
            response.force_close()
        if not noted.is_told or not noted.route:
            self._ended(request, noted, status)
        if tracing is not None:
            if noted.keeping is None or tracing.keeps_slow:
                tracing.end(noted, request, status)
            else:  # as ``end``, without a call
                noted.answer = None
        return response

    async def _led(self, request: web.Request, noted: Head) -> web.StreamResponse:
        """To whoever answers it. Raises what it fails by."""
        endpoint = self._endpoints.get(request.raw_path)
        # Who expects "100 Continue" before the body is told so by the application.
        if endpoint is not None and request.method == hdrs.METH_POST and hdrs.EXPECT not in request.headers:
            noted.route = request.raw_path
            return await endpoint(self._gw, request)
        elif (asked := self._origins.preflight(request)) is not None:
            noted.route = PREFLIGHT
            return web.Response(status=204, headers=asked)
        elif not request.headers.get(hdrs.EXPECT, "").isascii():
            noted.route = EXPECTATION
            # aiohttp would repeat it, and cannot.
            raise web.HTTPExpectationFailed
        else:
            return await self._application(request)

    def _ended(self, request: web.Request, noted: Head, status: int) -> None:
        """Its answer is written, but for what is written at once behind this. What has no row in the ledger has its
        line in the log from here."""
        if not noted.route and (match := request.match_info) is not None and match.route.resource is not None:
            noted.route = match.route.resource.canonical
        if status >= 400 and noted.keeping is not None:
            noted.keep(noted.keeping.failures)
        if not noted.is_told and (status >= 400 or noted.route not in QUIET):
            duration_ms = 1e3 * (time.monotonic() - noted.started_at)
            caller = noted.caller
            tell(
                Ended(
                    noted.request_id,
                    None if caller is None else caller.tenant_id,
                    None if caller is None else caller.key_id,
                    request.method,
                    noted.route or None,
                    status,
                    duration_ms,
                    noted.trace_id,
                )
            )

    def _refusal(self, request: web.Request, failure: GatewayError) -> web.Response:
        path, shapes = request.path, self._shapes
        self._doors.refuse(failure.code or failure.type)
        noted = request[head.HEAD]
        noted.failed(failure)
        shape = next((shapes[root] for root in shapes if path.startswith(root)), failures.shaped)
        response = shape(failure, noted.request_id)
        if request.content.exception() is not None:  # the rest of what was sent cannot be told from a next request
            response.force_close()
            request.content.feed_eof()  # nor is it waited for
        return response


def _said(request: web.Request, error: web.HTTPException) -> web.Response | None:
    """The answer to OPTIONS where nobody has one of their own: what else is taken there (RFC 9110, section 9.3.7)."""
    if request.method != hdrs.METH_OPTIONS or not isinstance(error, web.HTTPMethodNotAllowed):
        return None
    return web.Response(status=204, headers={"allow": ", ".join(sorted({*error.allowed_methods, hdrs.METH_OPTIONS}))})
