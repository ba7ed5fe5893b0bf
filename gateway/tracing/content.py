"""What was asked, as every trace tells it; and in what words, and what was answered, as a trace may tell it where both
the operator and the tenant's policy say so.

Words are in the shape that the conventions give ``gen_ai.input.messages``: a list of messages, each with a role and
parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from gateway.openai import ChatRequest, CompletionRequest
from gateway.tracing.kept import Asked

if TYPE_CHECKING:
    from gateway.reply import Answer


OUTPUT_TYPES = {"text": "text", "json_object": "json", "json_schema": "json"}
"""By ``response_format``."""


def asked_of(call: Any) -> Asked:
    """Not in what words."""
    output_type = None
    if isinstance(call, (ChatRequest, CompletionRequest)) and call.response_format is not None:
        output_type = OUTPUT_TYPES.get(call.response_format.get("type", ""))
    return Asked(call.model, bool(call.stream), call.seed, call.service_tier, output_type)


def prompt_of(call: Any, max_bytes: int) -> str:
    """JSON, or as much of it as there is room for; empty where it is no text."""
    if isinstance(call, ChatRequest):
        messages = [{"role": _role(message), "parts": [_part(message)]} for message in call.messages]
    elif isinstance(call, CompletionRequest):
        messages = [{"role": "user", "parts": [{"type": "text", "content": text}]} for text in call.texts]
    else:
        return ""
    return _cut(messages, max_bytes)


def completion_of(answer: Answer, max_bytes: int) -> str:
    """As ``prompt_of``, of what was said."""
    messages = [
        {
            "role": "assistant",
            "parts": [{"type": "text", "content": answer.said(choice)}],
            "finish_reason": choice.finish_reason or "",
        }
        for choice in answer.choices
    ]
    return _cut(messages, max_bytes)


def _role(message: Any) -> str:
    return str(getattr(message, "role", "user"))


def _part(message: Any) -> dict[str, Any]:
    content = msgspec.to_builtins(getattr(message, "content", None))
    if isinstance(content, str):
        return {"type": "text", "content": content}
    return {"type": "text", "content": msgspec.json.encode(msgspec.to_builtins(message)).decode()}


def _cut(messages: list[dict[str, Any]], max_bytes: int) -> str:
    told = msgspec.json.encode(messages)
    return told[:max_bytes].decode(errors="ignore")
