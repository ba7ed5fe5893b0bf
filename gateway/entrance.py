"""Where every request comes in and every answer leaves: it is counted, named and led to whoever answers it; what fails
becomes the error object, and the headers that all answers have are put on.

The addresses of inference are looked up here. All others are the aiohttp application's, whose way through its resolver
takes several microseconds more, which is nothing to whoever administers and a part of what a short completion costs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from gateway import errors, head
from gateway.doors import Doors
from gateway.errors import GatewayError, Shape
from gateway.house import Gateway
from gateway.origins import Origins
from gateway.proxies import Proxies

Endpoint = Callable[[Gateway, web.Request], Awaitable[web.StreamResponse]]


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
        head.begin(request, self._proxies.address_of(request))
        head.also(request, self._origins.headers(request))
        try:
            asked = self._origins.preflight(request)
            endpoint = self._endpoints.get(request.raw_path)
            # Who expects "100 Continue" before the body is told so by the application.
            if asked is not None:
                response: web.StreamResponse = web.Response(status=204, headers=asked)
            elif endpoint is None or request.method != hdrs.METH_POST or hdrs.EXPECT in request.headers:
                response = await self._application(request)
            else:
                response = await endpoint(self._gw, request)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            response = _said(request, error) or self._refusal(request, errors.of_http(error, request))
        except Exception as error:
            response = self._refusal(request, errors.described(error, request[head.HEAD].request_id))
        finally:
            if is_counted:
                doors.leave()
        head.complete(request, response)
        if doors.are_closed:
            response.force_close()
        return response

    def _refusal(self, request: web.Request, failure: GatewayError) -> web.Response:
        path, shapes = request.path, self._shapes
        shape = next((shapes[root] for root in shapes if path.startswith(root)), errors.shaped)
        return shape(failure, request[head.HEAD].request_id)


def _said(request: web.Request, error: web.HTTPException) -> web.Response | None:
    """The answer to OPTIONS where nobody has one of their own: what else is taken there (RFC 9110, section 9.3.7)."""
    if request.method != hdrs.METH_OPTIONS or not isinstance(error, web.HTTPMethodNotAllowed):
        return None
    return web.Response(status=204, headers={"allow": ", ".join(sorted({*error.allowed_methods, hdrs.METH_OPTIONS}))})
