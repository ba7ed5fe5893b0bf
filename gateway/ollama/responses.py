"""Answers of Ollama's API: one JSON body, or lines of it, of which the last one is ``done``."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from gateway import openai


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: dict[str, Any]


class Call(msgspec.Struct, frozen=True):
    """A call, always whole."""

    id: str
    function: CalledFunction


class Message(msgspec.Struct, frozen=True, kw_only=True):
    role: str = "assistant"
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[Call] | UnsetType = UNSET


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """What both kinds have; the counts are those of the last line, durations are in nanoseconds."""

    model: str
    created_at: str
    done: bool
    logprobs: list[openai.ChatLogprob] | UnsetType = UNSET
    """One entry for each token that was said since the last line, where they were asked for; OpenAI's entries."""
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class ChatBody(Body, frozen=True, kw_only=True):
    message: Message


class GenerateBody(Body, frozen=True, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET


def silence(call: openai.ChatRequest | openai.CompletionRequest, is_chat: bool) -> bytes:
    """A line without a word, for a stream that has nothing to say yet: of these there are no comments."""
    said: dict[str, Any] = {"model": call.model, "created_at": instant(time.time()), "done": False}
    body = ChatBody(message=Message(content=""), **said) if is_chat else GenerateBody(response="", **said)
    return msgspec.json.encode(body) + b"\n"


def instant(unix_s: float) -> str:
    """As RFC 3339 writes it."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")
