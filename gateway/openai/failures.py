"""The error object, and the one way in which reading a request fails."""

from __future__ import annotations

import msgspec


class ErrorDetail(msgspec.Struct, frozen=True):
    """All four keys are always there; ``param`` and ``code`` may be null."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of a refusal, and the same object as the data of an event once the first byte of a stream is out."""

    error: ErrorDetail


class Malformed(ValueError):
    """The request is not what the API takes. The message is for the client; ``param`` is the path of the field, as in
    ``messages[0].content``."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
