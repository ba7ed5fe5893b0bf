"""Failures as Ollama's clients expect them."""

from __future__ import annotations

import msgspec
from aiohttp import web

from gateway import failures
from gateway.errors import GatewayError

NAMES = (("response_format.json_schema.schema", "format"),)
"""What a chat's fields are called here."""


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of a refusal, and the last line of a stream that failed."""

    error: str


def described(failure: GatewayError) -> ErrorBody:
    return ErrorBody(failures.told(failure, NAMES))


def line(failure: GatewayError) -> bytes:
    """The last one of a stream."""
    return msgspec.json.encode(described(failure)) + b"\n"


def shaped(failure: GatewayError, request_id: str) -> web.Response:
    """The failure as an answer."""
    return web.Response(
        status=failure.status,
        body=msgspec.json.encode(described(failure)),
        content_type="application/json",
        headers=failure.headers(),
    )
