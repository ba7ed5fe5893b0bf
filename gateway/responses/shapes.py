"""The response object, and what else /v1/responses answers with: openai-python's ``types/responses``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from gateway import errors, failures, openai
from gateway.openai.pages import ends_of
from gateway.responses.items import AnyItem
from gateway.responses.requests import (
    ConversationRef,
    Include,
    Reasoning,
    ResponseRequest,
    TextConfig,
    TextFormat,
)
from gateway.responses.tools import AnyTool, tools_of
from policies.terms import Usage

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
OPEN: tuple[Status, ...] = ("queued", "in_progress")
"""What it is before it has ended."""


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0
    """Nobody pays for writing one."""


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    """Tokens; ``input_tokens`` includes the cached ones."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> ResponseUsage:
        return cls(
            usage.num_prompt_tokens,
            InputTokensDetails(usage.num_cached_tokens),
            usage.num_completion_tokens,
            OutputTokensDetails(usage.num_reasoning_tokens),
            usage.num_prompt_tokens + usage.num_completion_tokens,
        )


class ResponseError(msgspec.Struct, frozen=True):
    """Why a response failed."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str

    @classmethod
    def of(cls, failure: errors.GatewayError) -> ResponseError:
        said = failures.detail(failure, is_kept=True).message
        if failure.status == 429:
            return cls("rate_limit_exceeded", said)
        return cls("invalid_prompt" if 400 <= failure.status < 408 else "server_error", said)


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: Literal["max_output_tokens", "content_filter"]

    @classmethod
    def of(cls, ended_as: str) -> IncompleteDetails | None:
        """None: it is complete."""
        match ended_as:
            case "length":
                return cls("max_output_tokens")
            case "content_filter":
                return cls("content_filter")
            case _:
                return None


class ReasoningBody(msgspec.Struct, frozen=True):
    effort: str | None
    summary: str | None


class TextBody(msgspec.Struct, frozen=True):
    format: TextFormat
    verbosity: str | None


class ResponseBody(msgspec.Struct, frozen=True, kw_only=True):
    """A response: as it is now, and what was asked. Times in Unix seconds."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    background: bool
    completed_at: int | None = None
    conversation: ConversationRef | None = None
    """The one that its items are added to."""
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[AnyItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningBody
    safety_identifier: str | None
    service_tier: str
    store: bool
    """Whether it is kept, which the policy may not allow."""
    temperature: float
    text: TextBody
    tool_choice: str | dict[str, Any]
    tools: list[AnyTool]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None
    penstock: openai.PenstockExtras | UnsetType = UNSET


class DeletedResponse(msgspec.Struct, frozen=True):
    id: str
    object: str = "response"
    deleted: bool = True


class ItemsQuery(msgspec.Struct, frozen=True, kw_only=True):
    """``after``: the id of an item; the page begins behind it."""

    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    include: list[Include] = msgspec.field(name="include[]", default=[])
    """As in a request."""


class ItemList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of items."""

    object: str = "list"
    data: list[AnyItem]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def of(cls, page: list[AnyItem], has_more: bool) -> ItemList:
        first_id, last_id = ends_of(page)
        return cls(data=page, first_id=first_id, last_id=last_id, has_more=has_more)


class InputTokens(msgspec.Struct, frozen=True):
    """What a request's prompt would be long."""

    input_tokens: int
    object: str = "response.input_tokens"


def begun(call: ResponseRequest, response_id: str, created_at: int, stores: bool) -> ResponseBody:
    """As it is before there is any answer. Raises Malformed."""
    reasoning, text = call.reasoning or Reasoning(), call.text or TextConfig()
    return ResponseBody(
        id=response_id,
        conversation=None if call.conversation_id is None else ConversationRef(call.conversation_id),
        created_at=created_at,
        status="queued" if call.background else "in_progress",
        background=bool(call.background),
        instructions=call.instructions,
        max_output_tokens=call.max_output_tokens,
        max_tool_calls=call.max_tool_calls,
        metadata=call.metadata or {},
        model=call.model,
        parallel_tool_calls=call.parallel_tool_calls is not False,
        previous_response_id=call.previous_response_id,
        prompt_cache_key=call.prompt_cache_key,
        reasoning=ReasoningBody(reasoning.effort, reasoning.summary or reasoning.generate_summary),
        safety_identifier=call.safety_identifier,
        service_tier=call.service_tier or "auto",
        store=stores,
        temperature=1.0 if call.temperature is None else call.temperature,
        text=TextBody(text.format or TextFormat(type="text"), text.verbosity),
        tool_choice=call.tool_choice or "auto",
        tools=tools_of(call.tools),
        top_logprobs=call.top_logprobs or 0,
        top_p=1.0 if call.top_p is None else call.top_p,
        truncation=call.truncation or "disabled",
        user=call.user,
    )
