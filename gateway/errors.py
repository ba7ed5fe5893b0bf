"""What can go wrong.

A failure is a class; its attributes are the answer's status, type, code and headers, and ``failures`` makes the answer
of it. Statuses and codes are OpenAI's where OpenAI has them. Its client retries 408, 409, 429 and everything from 500
on, after ``retry-after-ms``; a delay above 120 s makes it give up.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import ClassVar

from gateway import telemetry
from policies import wire

log = logging.getLogger(__name__)


class GatewayError(Exception):
    """Base of all failures that a client hears of. The message is written for the client."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: str | None = None
    kept: str | None = None
    """The message where it is kept, and other keys of the tenant may read it; None: the same."""
    should_retry: ClassVar[bool | None] = None
    """Says ``x-should-retry`` where the status alone would make a client do the wrong thing."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: float | None = None
    ):
        super().__init__(message)
        self.param = param
        self.retry_after_s = retry_after_s
        if code is not None:
            self.code = code

    def headers(self) -> dict[str, str]:
        """The headers that go with the refusal."""
        headers = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(math.ceil(self.retry_after_s))
            headers["retry-after-ms"] = str(math.ceil(1e3 * self.retry_after_s))
        if self.should_retry is not None:
            headers["x-should-retry"] = "true" if self.should_retry else "false"
        return headers


class InvalidRequest(GatewayError):
    """A parameter is missing, of the wrong type, out of range or not served here; ``param`` names it."""

    status, type = 400, "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    """The prompt, or the prompt with the completion that was asked for, is longer than the model's context."""

    code = "context_length_exceeded"
    counted: tuple[int, int] | None = None
    """Tokens that there are, at least, and those that may be; None where an upstream counted them."""

    @classmethod
    def of(cls, max_tokens: int, num_tokens: int, param: str, how: str = "") -> ContextLengthExceeded:
        """In OpenAI's words, from which clients read both numbers to cut what they ask; ``how`` sure the second one is,
        as a sentence."""
        what = f"This model's maximum context length is {max_tokens} tokens. However, your {param} resulted in"
        do = f"Please reduce the length of the {param}. The completion needs room in that context as well."
        error = cls(" ".join(filter(None, (what, f"{num_tokens} tokens.", do, how))), param=param)
        error.counted = num_tokens, max_tokens
        return error


class InvalidApiKey(GatewayError):
    """No key, or one that is not known or no longer valid."""

    status, type, code = 401, "invalid_request_error", "invalid_api_key"


class PermissionDenied(GatewayError):
    """The key is good, but not for this, or not from there."""

    status, type, code = 403, "permission_error", "permission_denied"


class NotFound(GatewayError):
    """There is nothing at this address."""

    status, type, code = 404, "invalid_request_error", "unknown_url"


class ModelNotFound(GatewayError):
    """No model of this name is served, or none that the caller may use: the answer is the same."""

    status, type, code = 404, "invalid_request_error", "model_not_found"

    @classmethod
    def named(cls, model: str) -> ModelNotFound:
        return cls(f"The model `{model}` does not exist or you do not have access to it.", param="model")


class ObjectNotFound(GatewayError):
    """Nothing of this kind has this id, or it is another tenant's: the answer is the same."""

    status, type, code = 404, "invalid_request_error", "not_found"


class NotServedHere(GatewayError):
    """The address is one of a dialect that is spoken here, but there is nothing at it."""

    status, type, code = 501, "invalid_request_error", "not_served_here"
    should_retry = False


class MethodNotAllowed(GatewayError):
    """The address exists, but not for this method."""

    status, type, code = 405, "invalid_request_error", "method_not_allowed"

    def __init__(self, message: str, *, allowed: str) -> None:
        """``allowed``: the methods that it takes."""
        super().__init__(message)
        self.allowed = allowed

    def headers(self) -> dict[str, str]:
        return {**super().headers(), "allow": self.allowed}


class BodyTimeout(GatewayError):
    """The body came too slowly, or stopped before its end."""

    status, type, code = 408, "invalid_request_error", "request_timeout"

    def __init__(self) -> None:
        super().__init__("The body did not come to its end.")


class QueueTimeout(GatewayError):
    """The request waited for a worker with room as long as the settings allow."""

    status, type, code = 408, "server_error", "queue_timeout"


class IdempotencyKeyReused(GatewayError):
    """The key belongs to another request; trying again would not change that."""

    status, type, code = 409, "invalid_request_error", "idempotency_key_reused"
    should_retry = False


class InUse(GatewayError):
    """What is asked for cannot be changed or deleted while something else needs it as it is."""

    status, type, code = 409, "invalid_request_error", "in_use"
    should_retry = False


class BodyTooLarge(GatewayError):
    """The body is longer than ``server.max_body_bytes``, or a file, or a part of one, than it may be."""

    status, type, code = 413, "invalid_request_error", "request_too_large"


class RangeNotSatisfiable(GatewayError):
    """There is no such part of a file of so many bytes, or what is asked for is not one range of bytes."""

    status, type, code = 416, "invalid_request_error", "range_not_satisfiable"

    def __init__(self, num_bytes: int) -> None:
        super().__init__(f"The file has {num_bytes} bytes: 'Range' names one part of it, as 'bytes=first-last'")
        self.num_bytes = num_bytes

    def headers(self) -> dict[str, str]:
        return {**super().headers(), "content-range": f"bytes */{self.num_bytes}"}


class RateLimited(GatewayError):
    """A ceiling of the policy is reached."""

    status, type, code = 429, "rate_limit_error", "rate_limit_exceeded"

    def __init__(
        self, message: str, *, headers: Mapping[str, str], retry_after_s: float | None = None, kept: str | None = None
    ) -> None:
        """``headers``: the ``x-ratelimit-*`` that go with it."""
        super().__init__(message, retry_after_s=retry_after_s)
        self._headers = headers
        self.kept = kept

    def headers(self) -> dict[str, str]:
        return {**self._headers, **super().headers()}


class RequestsLimited(RateLimited):
    """Too many requests in a minute, or at once for the places or the money that there are."""

    type = "requests"


class TokensLimited(RateLimited):
    """Too many tokens in a minute or a day."""

    type = "tokens"


class NeverFits(TokensLimited):
    """The request alone is above the ceiling; trying again is in vain."""

    should_retry = False


class BudgetSpent(RateLimited):
    """The money of the period is spent; waiting a moment does not help."""

    type, code, should_retry = "insufficient_quota", "insufficient_quota", False

    def __init__(self, message: str, *, headers: Mapping[str, str], ends_at: int, kept: str | None = None) -> None:
        """``ends_at``: Unix seconds, of the period."""
        super().__init__(message, headers=headers, kept=kept)
        self.ends_at = ends_at


class QuotaExceeded(GatewayError):
    """The tenant's files would have more bytes than the settings allow."""

    status, type, code = 403, "invalid_request_error", "storage_quota_exceeded"


class TooManyBatches(RateLimited):
    """The tenant has as many batches that are not over as the settings allow."""

    code, should_retry = "batch_limit_exceeded", False


class UnsupportedMediaType(GatewayError):
    """The body is not declared as what its address takes, or is packed in a way that is not known."""

    status, type, code = 415, "invalid_request_error", "unsupported_media_type"


class ServiceUnavailable(GatewayError):
    """Nothing is wrong with the request; the same one may be answered a little later."""

    status, type, code = 503, "service_unavailable_error", "server_is_overloaded"


class QueueFull(ServiceUnavailable):
    """As many requests of this class wait for this model as the settings allow."""


class SlowDown(ServiceUnavailable):
    """The first token would come later than the request's class allows, so it is refused before it waits in vain."""

    code = "slow_down"


class StoreUnavailable(ServiceUnavailable):
    """The database of tenants, keys and policies, and of files and batches, cannot be reached."""

    code = "store_unavailable"

    @classmethod
    def for_clients(cls, is_change: bool) -> StoreUnavailable:
        """Of a tenant, who asks for its files and batches."""
        unsure = " A change that was under way may have been made." if is_change else ""
        return cls(f"Files and batches cannot be reached at the moment. Please try again.{unsure}", retry_after_s=1.0)

    @classmethod
    def for_operators(cls, is_change: bool, is_file: bool) -> StoreUnavailable:
        """Whoever administers, and can do something about it. ``is_file``: it is SQLite's."""
        what = "so this can be neither done nor looked up" if is_change else "so this cannot be looked up"
        again = "send this again" + (
            "; a change that was under way may have been made, which the same Idempotency-Key makes safe to repeat"
            if is_change
            else ""
        )
        check = (
            "Check that the disk under store.data_dir has room and can be written to, and that no other program keeps "
            "penstock.db locked"
            if is_file
            else "Check that PostgreSQL runs and that this gateway reaches it at store.url"
        )
        return cls(
            f"The database cannot be reached, {what} now; answers for tenants go on without it. {check}, then {again}.",
            retry_after_s=1.0,
        )


class FilesUnavailable(ServiceUnavailable):
    """What holds the tenants' files cannot be written now."""

    code = "files_unavailable"


class LedgerBehind(ServiceUnavailable):
    """More finished requests wait to be written down than the settings allow."""


class ModelUnavailable(ServiceUnavailable):
    """The model is served here, but no worker can answer for it now."""

    code = "model_unavailable"


class LimitsUnavailable(ServiceUnavailable):
    """The limits are shared with other gateways and cannot be asked now, and the policy wants none broken."""

    code = "limits_unavailable"


class Draining(ServiceUnavailable):
    """This gateway is going down; running answers finish, new ones are refused."""

    code = "draining"


class StorageFull(GatewayError):
    """The disk takes no more."""

    status, type, code, should_retry = 507, "server_error", "insufficient_storage", False


class WorkerLost(GatewayError):
    """The worker that computed this answer went away before it was complete."""

    status, type, code = 503, "server_error", "worker_lost"


class EndsWorkers(GatewayError):
    """Worker after worker was lost over this request, the last one while it computed nothing else: trying again would
    cost others their time."""

    code, should_retry = "ends_workers", False


class RequestFailed(GatewayError):
    """The worker refused or gave up the request. ``of`` makes the failure that the client hears."""

    code = "internal_error"

    @staticmethod
    def of(failed: wire.Failed, request: wire.Submit) -> GatewayError:
        """The failure for a worker's ``Failed``, by its code; ``request`` is what it was told."""
        match failed.code:
            case "context_length_exceeded":
                return ContextLengthExceeded(failed.reason)
            case "invalid_request":
                return InvalidRequest(failed.reason)
            case "overloaded" | "draining":
                return ServiceUnavailable("The model is overloaded at the moment. Please try again.", retry_after_s=1.0)
            case "adapter_unavailable":
                why = "a worker has no use of this request's adapter: %s"
                log.error(why, failed.reason, extra=telemetry.about_sent(request))
                return ModelUnavailable("This model cannot answer at the moment. Please try again.", retry_after_s=1.0)
            case _:
                log.error("a worker failed this request: %s", failed.reason, extra=telemetry.about_sent(request))
                return RequestFailed("The model failed while answering this request.")


class InternalError(GatewayError):
    """Our own fault; what it was is in the log, under the request's id."""

    code = "internal_error"

    def __init__(self) -> None:
        super().__init__("The server had an error while processing your request. Please try again.")
