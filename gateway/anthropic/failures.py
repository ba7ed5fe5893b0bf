"""Failures as Anthropic's clients expect them, and its names for the headers of limits."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

import msgspec
from aiohttp import web

from gateway import errors, failures
from gateway.errors import GatewayError

OVERLOADED = 529
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    OVERLOADED: "overloaded_error",
}
NAMES = (
    ("response_format.json_schema.schema", "output_config.format.schema"),
    (".function.parameters", ".input_schema"),
    (".function.name", ".name"),
)
"""What a chat's fields are called here."""

_LIMIT = re.compile(r"x-ratelimit-(limit|spent|reserved|remaining|reset)-(requests|tokens|budget)")
_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m(?!s))?(?:([\d.]+)s)?(?:(\d+)ms)?")


UNTHREADED = "thread_unsupported_request"
"""The code by which Anthropic's clients know that they have to send the whole conversation."""


class Details(msgspec.Struct, frozen=True):
    """What a client may go by."""

    error_code: str
    unsupported: list[str]


class ErrorDetail(msgspec.Struct, frozen=True, omit_defaults=True):
    type: str
    message: str
    details: Details | None = None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a refusal, and the same object as the data of a stream's last event."""

    type: str = "error"
    error: ErrorDetail
    request_id: str | None = None


def status_of(failure: GatewayError) -> int:
    """What Anthropic answers with: 529 wherever there is no room at the moment."""
    has_no_room = failure.status == 503 or isinstance(failure, errors.QueueTimeout)
    return OVERLOADED if has_no_room else failure.status


def described(failure: GatewayError, request_id: str) -> ErrorBody:
    """``failure`` in Anthropic's words."""
    status = status_of(failure)
    type_ = TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    details = Details(UNTHREADED, ["thread"]) if failure.code == UNTHREADED else None
    message = failures.told(failure, NAMES)
    if isinstance(failure, errors.ContextLengthExceeded):
        # The words by which agents know that they have to make a conversation shorter.
        counted = failure.counted
        message = f"prompt is too long: {message if counted is None else '{} tokens > {} maximum'.format(*counted)}"
    return ErrorBody(error=ErrorDetail(type_, message, details), request_id=request_id)


def shaped(failure: GatewayError, request_id: str) -> web.Response:
    """The failure as an answer."""
    return web.Response(
        status=status_of(failure),
        body=msgspec.json.encode(described(failure, request_id)),
        content_type="application/json",
        headers={**limited(failure.headers()), "request-id": request_id},
    )


def event(failure: GatewayError, request_id: str) -> bytes:
    """The failure as the last event of a stream."""
    return b"event: error\ndata: %b\n\n" % msgspec.json.encode(described(failure, request_id))


def limited(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers with OpenAI's names for limits replaced by Anthropic's, whose resets are instants (RFC 3339)."""
    named: dict[str, str] = {}
    for name, value in headers.items():
        found = _LIMIT.fullmatch(name)
        if found is None:
            named[name] = value
            continue
        what, kind = found.groups()
        if what == "reset":
            value = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + seconds(value) + 0.999))
        named[f"anthropic-ratelimit-{kind}-{what}"] = value
    return named


def seconds(duration: str) -> float:
    """Of "12ms", "1.5s" or "6m0s"."""
    found = _DURATION.fullmatch(duration)
    assert found is not None
    hours, minutes, whole, ms = [float(part or 0) for part in found.groups()]
    return 3600 * hours + 60 * minutes + whole + ms / 1e3
