"""Failures as the client hears them: as OpenAI's error object, for its clients, and what other dialects make theirs of.

``entrance`` is the one place that makes HTTP of a failure; ``reply`` uses ``event`` when the first byte of a stream is
already out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import msgspec
from aiohttp import web

from gateway import openai, telemetry
from gateway.errors import (
    BodyTooLarge,
    GatewayError,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    UnsupportedMediaType,
)

log = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 1000
"""Of what a client hears; a message may quote the request."""
Shape = Callable[[GatewayError, str], web.Response]
"""A failure and the request's id as an answer."""


def detail(error: GatewayError, is_kept: bool = False) -> openai.ErrorDetail:
    """What the error object says. ``is_kept``: also to other keys of the tenant."""
    message = (error.kept if is_kept else None) or str(error)
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[:MAX_MESSAGE_CHARS] + "…"
    return openai.ErrorDetail(message, error.type, error.param, error.code)


def told(error: GatewayError, names: Iterable[tuple[str, str]]) -> str:
    """What it says to clients of a dialect, whose ``names`` (a chat's, its own) the parameter at fault goes by."""
    message = detail(error).message
    for theirs, ours in names:
        if error.param is not None and theirs in error.param:
            message = message.replace(theirs, ours)
    return message


def body(error: GatewayError, is_kept: bool = False) -> bytes:
    """The error object as JSON; ``is_kept`` as in ``detail``."""
    return msgspec.json.encode(openai.ErrorBody(detail(error, is_kept)))


def event(error: GatewayError) -> bytes:
    """The error object as the last event of a stream."""
    return b"data: " + body(error) + b"\n\n"


def described(error: BaseException, request_id: str, trace_id: str | None = None) -> GatewayError:
    """``error`` as a client may hear of it; what is unexpected is logged with the request's ids and not shown."""
    if isinstance(error, GatewayError):
        return error
    if isinstance(error, web.RequestPayloadError):
        return InvalidRequest("The request body could not be read")
    if isinstance(error, openai.Malformed):
        return InvalidRequest(str(error), param=error.param, code=error.code)
    log.error("this request failed unexpectedly", exc_info=error, extra=telemetry.about(request_id, trace_id))
    return InternalError()


def shaped(failure: GatewayError, request_id: str) -> web.Response:
    """As OpenAI's clients expect it."""
    return web.Response(
        status=failure.status, body=body(failure), content_type="application/json", headers=failure.headers()
    )


def of_http(error: web.HTTPException, request: web.Request) -> GatewayError:
    """aiohttp's own refusals, before a handler runs or while it reads the body."""
    match error:
        case web.HTTPNotFound():
            meant = _meant(request)
            hint = f"did you mean {meant}?" if meant else "it is not served here"
            return NotFound(f"Invalid URL ({request.method} {request.path}); {hint}")
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            return MethodNotAllowed(
                f"Not allowed to {request.method} on {request.path} (it takes {allowed})", allowed=allowed
            )
        case web.HTTPRequestEntityTooLarge():
            return BodyTooLarge(
                f"The request body is too large: this server takes at most {request.client_max_size} bytes"
            )
        case web.HTTPUnsupportedMediaType():
            return UnsupportedMediaType("Unsupported content type: send the body as application/json")
        case _:
            return InvalidRequest(error.reason)


def _meant(request: web.Request) -> str | None:
    """The address of a client whose base URL lacks /v1, has it twice or has something before it, or that ends with a
    slash."""
    path = request.path.rstrip("/")
    known = (resource.canonical for resource in request.app.router.resources())
    ours = [each for each in known if each.startswith(("/v1/", "/api/")) and "{" not in each]
    return next((each for each in ours if each == f"/v1{path}" or path.endswith(each)), None)
