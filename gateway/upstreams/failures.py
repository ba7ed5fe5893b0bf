"""What goes wrong with an upstream, what its client hears of it, and what follows for those that are asked next."""

from __future__ import annotations

import email.utils
import time
from collections.abc import Mapping

import msgspec

from gateway.errors import ContextLengthExceeded, GatewayError, InvalidRequest, ServiceUnavailable

MAX_QUOTED_CHARS = 500
"""Of what an upstream says of a request."""
LONGEST_RETRY_AFTER_S = 86_400.0
TOO_LONG = (
    "maximum context length",  # vLLM, and OpenAI's words wherever a proxy puts another code beside them
    "maximum model length",  # vLLM
    "model's context length",  # SGLang
    "available context size",  # llama.cpp
    "prompt is too long",  # Anthropic
)
"""What is said of a prompt without a place in the context by those that have no code for it."""


class UpstreamFailed(GatewayError):
    """An upstream answered with an error, with something that is no answer, or stopped in the middle of one."""

    status, type, code = 502, "server_error", "upstream_failed"


class UpstreamUnreachable(UpstreamFailed):
    """No connection to an upstream can be had."""

    code = "upstream_unreachable"


class UpstreamTooLong(UpstreamFailed):
    """An upstream's answer is longer than the settings allow: so it would be again, and what was asked made it so."""

    should_retry = False


class UpstreamRefused(UpstreamFailed):
    """An upstream takes this gateway's key for no good one, or wants to be paid: nothing that a client could mend."""

    code = "upstream_refused"


class UpstreamTimeout(GatewayError):
    """An upstream said nothing for as long as the settings allow."""

    status, type, code = 504, "server_error", "upstream_timeout"


class UpstreamLimited(GatewayError):
    """An upstream lets this gateway have no more for now."""

    status, type, code = 429, "rate_limit_error", "upstream_rate_limited"


class UpstreamUnavailable(ServiceUnavailable):
    """None of a model's upstreams is asked at the moment, since they fail."""

    code = "upstream_unavailable"


class Trouble(Exception):
    """One request to one upstream did not succeed."""

    def __init__(
        self, error: GatewayError, *, is_fault: bool = True, elsewhere: bool = True, again: bool = True, why: str = ""
    ) -> None:
        """``error``: for the client. ``is_fault``: of the upstream's, which counts against it. ``elsewhere``: another
        one may be asked; ``again``: the same one may, too. ``why``: for the operator, where it is more than that."""
        super().__init__(why or str(error))
        self.error = error
        self.is_fault = is_fault
        self.elsewhere = elsewhere
        self.again = again

    @property
    def retry_after_s(self) -> float | None:
        return self.error.retry_after_s


class _Said(msgspec.Struct, frozen=True):
    message: str | None = None
    param: str | None = None
    code: str | int | None = None


def of_status(status: int, headers: Mapping[str, str], body: bytes) -> Trouble:
    """An answer that is an error. The message of a refusal that is the client's own affair is passed on."""
    said = _said(body)
    why = f"HTTP {status}"  # and no more: what it says may quote the request
    after_s = retry_after_s(headers)
    if status == 429:
        error: GatewayError = UpstreamLimited(
            "The server that answers for this model takes no more requests at the moment. Please try again later.",
            retry_after_s=1.0 if after_s is None else after_s,
        )
        return Trouble(error, is_fault=False, why=why)
    if status in (401, 402, 403, 407):
        error = UpstreamRefused("The server that answers for this model refuses this gateway.")
        return Trouble(error, again=False, why=why)
    if status in (404, 405, 501):
        error = UpstreamFailed("The server that answers for this model does not serve this.")
        return Trouble(error, is_fault=False, again=False, why=why)
    if 400 <= status < 500 and status not in (408, 409, 425):
        message = (said.message or "The server that answers for this model refuses the request.")[:MAX_QUOTED_CHARS]
        if said.code == "context_length_exceeded" or any(words in message for words in TOO_LONG):
            return Trouble(ContextLengthExceeded(message, param=said.param), is_fault=False, elsewhere=False, why=why)
        code = said.code if isinstance(said.code, str) else None
        refused = InvalidRequest(message, param=said.param, code=code)
        return Trouble(refused, is_fault=False, elsewhere=False, why=why)
    return Trouble(
        UpstreamFailed("The server that answers for this model failed. Please try again.", retry_after_s=after_s),
        why=why,
    )


def of_event(error: object) -> Trouble:
    """An error in the middle of a stream."""
    code = error.get("code") if isinstance(error, dict) else None
    why = f"an error in its stream, code {str(code)[:40]}"
    return Trouble(UpstreamFailed("The server that answers for this model failed while answering."), why=why)


def garbage(why: str) -> Trouble:
    """What it says cannot be read."""
    return Trouble(UpstreamFailed("The server that answers for this model gave no answer that can be read."), why=why)


def cut(why: str) -> Trouble:
    """It stopped in the middle."""
    return Trouble(UpstreamFailed("The server that answers for this model stopped in the middle of it."), why=why)


def too_long(max_bytes: int) -> Trouble:
    """It is not the upstream's fault: else whoever asks for much, again and again, has it asked by nobody."""
    error = UpstreamTooLong("The answer is longer than this server takes from the one that answers for this model.")
    why = f"the answer was longer than {max_bytes} bytes"
    return Trouble(error, is_fault=False, elsewhere=False, again=False, why=why)


def unreachable(why: str) -> Trouble:
    return Trouble(UpstreamUnreachable("The server that answers for this model cannot be reached."), why=why)


def too_late(what: str, seconds: float, is_fault: bool = True) -> Trouble:
    error = UpstreamTimeout(f"The server that answers for this model {what} within {seconds:g} s.")
    return Trouble(error, is_fault=is_fault)


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """What it asks for: OpenAI's milliseconds, or HTTP's seconds or date; None where it is none of them."""
    for name, scale in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        if (text := headers.get(name)) is None:
            continue
        try:
            seconds = scale * float(text)
        except ValueError:
            try:
                seconds = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
            except (ValueError, OverflowError):
                continue
        if seconds == seconds:  # no NaN
            return min(max(0.0, seconds), LONGEST_RETRY_AFTER_S)
    return None


def _said(body: bytes) -> _Said:
    """OpenAI's error object, or what others have in its place."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return _Said()
    if not isinstance(value, dict):
        return _Said()
    error = value.get("error", value)
    if isinstance(error, str):
        return _Said(error)
    if not isinstance(error, dict):
        return _Said()
    message, param, code = (error.get(name) for name in ("message", "param", "code"))
    if not isinstance(message, str):
        message = error.get("detail") if isinstance(error.get("detail"), str) else None
    return _Said(message, param if isinstance(param, str) else None, code if isinstance(code, str | int) else None)
