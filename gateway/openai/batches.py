"""Batches in OpenAI's shapes: the object, the lines of its input, and those of its output."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from gateway.openai.files import ExpiresAfter, Storable
from gateway.openai.requests import Metadata

Endpoint = Literal["/v1/responses", "/v1/chat/completions", "/v1/embeddings", "/v1/completions"]
"""Where the lines of a batch may go; those of them that are served here are taken."""
BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]


class BatchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/batches."""

    input_file_id: Annotated[str, Meta(min_length=1, max_length=256)]
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Lines."""

    total: int
    completed: int
    failed: int


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class BatchUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Of all lines that were answered."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class BatchError(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong with a line, or with all of it."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None
    """From 1."""


class BatchErrors(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[BatchError]


class BatchBody(msgspec.Struct, frozen=True, kw_only=True):
    """A batch; times in Unix seconds."""

    id: str
    object: str = "batch"
    endpoint: str
    model: str | None
    """Null where its lines ask several, or before they were read."""
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    usage: BatchUsage
    metadata: dict[str, str] | None


class BatchList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of batches, the newest first."""

    object: str = "list"
    data: list[BatchBody]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchQuery(msgspec.Struct, frozen=True, kw_only=True):
    """What a list of batches takes."""

    after: Annotated[str, Meta(max_length=256, pattern=Storable)] | None = None
    """The last batch of the page before."""
    limit: Annotated[int, Meta(ge=1, le=100)] = 20


class BatchLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of the input."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: str
    url: str
    body: msgspec.Raw


class BatchLineBody(msgspec.Struct, frozen=True, kw_only=True):
    """Of a line's body, as much as is looked at before it is asked: the rest is its endpoint's."""

    model: str
    stream: bool | None = None
    background: bool | None = None
    tools: msgspec.Raw | UnsetType = UNSET
    instructions: msgspec.Raw | UnsetType = UNSET
    messages: msgspec.Raw | UnsetType = UNSET
    prompt: msgspec.Raw | UnsetType = UNSET
    input: msgspec.Raw | UnsetType = UNSET

    @property
    def said(self) -> list[bytes]:
        """What makes the prompt, in the order in which prompts mostly have it."""
        parts = (self.tools, self.instructions, self.messages, self.prompt, self.input)
        return [bytes(part) for part in parts if part is not UNSET]


class LineResponse(msgspec.Struct, frozen=True, kw_only=True):
    """What the line's request was answered with."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class LineError(msgspec.Struct, frozen=True, kw_only=True):
    """Why it was never answered."""

    code: str
    message: str


class BatchOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the output, or of the errors."""

    id: str
    custom_id: str | None
    """Null where the line could not be read."""
    response: LineResponse | None
    error: LineError | None
