"""Answers of the Messages API that are one JSON body, and the parts that events have of them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.openai import PenstockExtras
from policies import terms

Reason = Literal["end_turn", "max_tokens", "model_context_window_exceeded", "refusal", "stop_sequence", "tool_use"]

SIGNATURE = "penstock"
"""Of thinking. Clients send it back; it proves nothing and is not looked at."""
TIERS = {"priority": "priority", "flex": "batch"}
"""Anthropic's words for how it was served; every other one is "standard"."""


class OutputDetails(msgspec.Struct, frozen=True):
    thinking_tokens: int


class UsageBody(msgspec.Struct, frozen=True, kw_only=True):
    """``input_tokens`` are those that were computed: cached ones are counted apart, where OpenAI includes them."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    """Nobody pays more for what is kept, so it is counted as input alone."""
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputDetails | UnsetType = UNSET
    service_tier: str | UnsetType = UNSET

    @classmethod
    def of(cls, usage: terms.Usage, service_tier: str | UnsetType = UNSET) -> UsageBody:
        """``usage`` in Anthropic's arithmetic; ``service_tier`` in OpenAI's word."""
        return cls(
            input_tokens=usage.num_prompt_tokens - usage.num_cached_tokens,
            cache_read_input_tokens=usage.num_cached_tokens,
            output_tokens=usage.num_completion_tokens,
            output_tokens_details=OutputDetails(usage.num_reasoning_tokens) if usage.num_reasoning_tokens else UNSET,
            service_tier=UNSET if service_tier is UNSET else TIERS.get(service_tier, "standard"),
        )


class Text(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class ToolUse(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class Thought(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = SIGNATURE


class MessageBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of an answer, and of the event that begins a stream."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[Text | ToolUse | Thought]
    stop_reason: Reason | None
    stop_sequence: str | None
    usage: UsageBody
    penstock: PenstockExtras | UnsetType = UNSET


class TokenCount(msgspec.Struct, frozen=True):
    """How long a prompt is."""

    input_tokens: int
