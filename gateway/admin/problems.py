"""What goes wrong in the administration, as problem details (RFC 9457): which field, what is wrong, what to do.

A ``Problem`` is a failure like any other, so whoever serves the same changes in another shape lets it pass;
``shaped`` writes those of /admin/v1 as ``application/problem+json``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any, ClassVar

import msgspec
from aiohttp import web

from gateway import failures
from gateway.errors import GatewayError
from gateway.openai.decoding import plain
from policies.choices import nearest_field, told_choices

ROOT = "/admin/v1/"
CONTENT_TYPE = "application/problem+json"
TYPE = "urn:penstock:problem:"


class Field(msgspec.Struct, frozen=True):
    """One thing in the request that has to change."""

    name: str
    """The path of a field of the body, or the name of a query parameter or a header."""
    message: str


class ProblemBody(msgspec.Struct, frozen=True):
    """What a refusal says; ``detail`` is for the person who has to do something about it."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    """The request's id, which is in the log."""
    fields: list[Field] = []


class Problem(GatewayError):
    """Base of what only the administration refuses."""

    type = "invalid_request_error"
    title: ClassVar[str]

    def __init__(self, detail: str, fields: Iterable[Field] = (), *, etag: str | None = None) -> None:
        self.fields = tuple(fields)
        self.etag = etag
        """Of what is there now, where a request spoke of an older state."""
        super().__init__(detail, param=self.fields[0].name if self.fields else None)

    def headers(self) -> dict[str, str]:
        return {**super().headers(), **({"etag": self.etag} if self.etag else {})}


class Invalid(Problem):
    """A field of the body, a query parameter or a header is not what it must be."""

    status, code, title = 400, "invalid_fields", "The request is not as it must be"

    @classmethod
    def of(cls, fields: Iterable[tuple[str, str]]) -> Invalid:
        """For (name, what is wrong with it), at least one."""
        named = [Field(name, message) for name, message in fields]
        return cls("; ".join(f"{field.name}: {field.message}" for field in named), named)


class NotThere(Problem):
    """There is no such thing."""

    status, code, title = 404, "not_found", "There is no such thing"


class Conflict(Problem):
    """What is there already stands against it."""

    status, code, title = 409, "conflict", "What is there stands against it"


class KeyReused(Problem):
    """An Idempotency-Key that stands for another request."""

    status, code, title = 409, "idempotency_key_reused", "The Idempotency-Key stands for another request"


class Stale(Problem):
    """If-Match names another version than the one that is there."""

    status, code, title = 412, "stale_version", "It has changed meanwhile"


class BodyTooLong(Problem):
    """The body is longer than any that this address has use for."""

    status, code, title = 413, "request_too_large", "The body is too long"


class MatchRequired(Problem):
    """A change of something that several people change says which version it is about."""

    status, code, title = 428, "if_match_required", "If-Match is required"


def body_of(failure: GatewayError, instance: str) -> ProblemBody:
    """Any failure as a problem."""
    title = failure.title if isinstance(failure, Problem) else HTTPStatus(failure.status).phrase
    fields = list(failure.fields) if isinstance(failure, Problem) else []
    code = failure.code or title.lower().replace(" ", "_")
    message = failures.detail(failure).message
    return ProblemBody(TYPE + code, title, failure.status, message, instance, fields)


def shaped(failure: GatewayError, request_id: str) -> web.Response:
    """The answer to a request under ``ROOT`` that failed."""
    body = msgspec.json.encode(body_of(failure, request_id))
    return web.Response(status=failure.status, body=body, content_type=CONTENT_TYPE, headers=failure.headers())


_AT = re.compile(r"(?s)(.*?)(?: - at `(key` in `)?\$\.?(.*)`)?")


def of_validation(error: msgspec.ValidationError, type_: Any) -> Invalid:
    """msgspec's "Object contains unknown field `x` - at `$.limits`", of what should be of this type, as a problem of
    ``limits.x``."""
    found = _AT.fullmatch(str(error))
    assert found is not None
    what, path = found[1], found[3] or ""
    begin = f"{path}." if path else ""
    if named := re.fullmatch(r"Object missing required field `(.*)`", what):
        return Invalid.of([(begin + named[1], "is required")])
    if named := re.fullmatch(r"Object contains unknown field `(.*)`", what):
        near = nearest_field(named[1], type_, path)
        hint = f"; did you mean {near}?" if near else ""
        return Invalid.of([(begin + named[1], f"there is no such field{hint}")])
    what = told_choices(what, type_, path, bool(found[2]))
    if found[2]:
        what = f"one of its keys: {what[0].lower()}{what[1:]}"
    return Invalid.of([(path or "body", plain(f"{what[0].lower()}{what[1:]}"))])
