"""Requests of Ollama's API: bytes to typed Structs, and these to a chat request or a completion, whose checks then hold
for them.

Unknown fields and options are tolerated. ``keep_alive`` and what options say about loading a model (``num_ctx``,
``num_gpu`` and others) are of no consequence here: when models are loaded and how, the settings say, but that nothing
is loaded for whoever wants it unloaded. Samplers that this server has not (mirostat, typical_p, tfs_z) and windows of
penalties are passed over.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from gateway import openai
from gateway.openai import CompletionRequest, Malformed, decoded
from gateway.openai.requests import MAX_STOPS

StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
Think = bool | Literal["low", "medium", "high", "max"]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How it is sampled. Below zero, ``num_predict`` is as many tokens as fit."""

    num_predict: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    repeat_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What both ways of asking have."""

    model: str
    stream: bool | None = None
    """Unless it says false the answer is a stream of lines."""
    format: Literal["", "json"] | dict[str, Any] | None = None
    """"json", or a JSON schema."""
    options: Options | None = None
    think: Think | None = None
    keep_alive: float | str | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: dict[str, Any] | None = None


class Call(msgspec.Struct, frozen=True):
    """A call that an earlier answer made."""

    function: CalledFunction
    id: str | None = None


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One message of the conversation so far."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[Call] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class ChatRequest(Asked, frozen=True, kw_only=True):
    """POST /api/chat. Without messages it asks for the model to be loaded, or unloaded where it is kept no time."""

    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None


class GenerateRequest(Asked, frozen=True, kw_only=True):
    """POST /api/generate. Without a prompt it is as a chat without messages."""

    prompt: str | None = None
    system: str | None = None
    suffix: str | None = None
    """The text that follows what is generated."""
    raw: bool | None = None
    """The prompt goes to the model as it stands, not as a message of a user."""
    template: str | None = None
    context: list[int] | None = None
    images: list[str] | None = None
    width: int | None = None
    height: int | None = None
    steps: int | None = None
    """These three are of models that paint."""


class Nothing(NamedTuple):
    """A request without a question, which is about its model alone."""

    model: str
    done_reason: Literal["load", "unload"]


_chat = msgspec.json.Decoder(ChatRequest)
_generate = msgspec.json.Decoder(GenerateRequest)
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = rf"(\d++\.?\d*+|\.\d++)({'|'.join(_UNITS_S)})"
_PARTS, _DURATION = re.compile(_PART, re.ASCII), re.compile(rf"(?:{_PART})++", re.ASCII)
"""As Go writes one. No digit is looked at twice: a client may send ever so many."""


def name_of(model: str) -> str:
    """Ollama's models have a tag, which is "latest" where nobody has said another."""
    return model.removesuffix(":latest")


def parse_chat(body: bytes) -> openai.ChatRequest | Nothing:
    """What is asked in ``body``. Raises Malformed."""
    asked = decoded(_chat, body)
    if not asked.messages:
        return _nothing(asked)
    fields = _fields(asked)
    fields["messages"] = _messages(asked.messages)
    if asked.tools:
        fields["tools"] = asked.tools
    return _as_chat(asked, fields)


def parse_generate(body: bytes) -> openai.ChatRequest | CompletionRequest | Nothing:
    """As ``parse_chat``; a completion where the prompt is not a user's message."""
    asked = decoded(_generate, body)
    for name in ("template", "context", "images", "width", "height", "steps"):
        if getattr(asked, name):
            raise _not_here(name)
    if not asked.prompt:
        return _nothing(asked)
    fields = _fields(asked)
    if not asked.raw and asked.suffix is None:
        system = [{"role": "system", "content": asked.system}] if asked.system else []
        fields["messages"] = [*system, {"role": "user", "content": asked.prompt}]
        return _as_chat(asked, fields)
    if asked.format:
        raise Malformed("'format' needs a conversation: it is not taken with 'raw' or 'suffix'", "format")
    if asked.raw and asked.system:
        raise Malformed("'system' needs a conversation: it is not taken with 'raw'", "system")
    num_logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
    fields |= {"prompt": asked.prompt, "suffix": asked.suffix, "logprobs": num_logprobs}
    fields.setdefault("max_tokens", 2**31 - 1)
    fields["reasoning_effort"] = fields["enable_thinking"] = None
    return openai.parse_completion(_encoded(fields))


def _nothing(asked: Asked) -> Nothing:
    return Nothing(name_of(asked.model), "unload" if _is_no_time(asked.keep_alive) else "load")


def _is_no_time(keep_alive: float | str | None) -> bool:
    """Less than a second, as Ollama counts them; a negative one is for ever."""
    if isinstance(keep_alive, str):
        if keep_alive != "0" and not _DURATION.fullmatch(keep_alive):
            return False
        keep_alive = sum([float(number) * _UNITS_S[unit] for number, unit in _PARTS.findall(keep_alive)])
    return keep_alive is not None and 0.0 <= keep_alive < 1.0


def _fields(asked: Asked) -> dict[str, Any]:
    """Of a chat request and of a completion alike."""
    if asked.top_logprobs and not asked.logprobs:
        raise Malformed("'top_logprobs' needs 'logprobs' to be true", "top_logprobs")
    options = asked.options or Options()
    fields: dict[str, Any] = {
        "model": name_of(asked.model),
        "stream": asked.stream is not False,
        "temperature": options.temperature,
        "top_k": options.top_k or None,
        "top_p": options.top_p,
        "min_p": options.min_p,
        "seed": options.seed,
        "stop": options.stop,
        "repetition_penalty": options.repeat_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
    }
    if asked.think is True:
        fields["enable_thinking"] = True
    else:
        fields["reasoning_effort"] = "none" if asked.think is False else asked.think
    if options.num_predict is not None and options.num_predict >= 0:
        fields["max_tokens"] = max(1, options.num_predict)
    return fields


def _as_chat(asked: Asked, fields: dict[str, Any]) -> openai.ChatRequest:
    if asked.logprobs:
        fields |= {"logprobs": True, "top_logprobs": asked.top_logprobs}
    if asked.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif isinstance(asked.format, dict):
        schema = {"name": "format", "schema": asked.format, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return openai.parse_chat(_encoded(fields))


def _encoded(fields: dict[str, Any]) -> bytes:
    try:
        return msgspec.json.encode({name: value for name, value in fields.items() if value is not None})
    except RecursionError:
        raise Malformed("The body could not be read as JSON: it is nested too deeply") from None


def _messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Results of tools come in the order of the calls, as Ollama's calls have no ids of their own."""
    said: list[dict[str, Any]] = []
    open_ids: list[str] = []
    num_calls = 0
    for number, message in enumerate(messages):
        if message.images:
            raise _not_here(f"messages[{number}].images")
        entry: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.thinking and message.role == "assistant":
            entry["reasoning_content"] = message.thinking
        if message.tool_calls and message.role == "assistant":
            entry["tool_calls"] = []
            for call in message.tool_calls:
                id = call.id or f"call_{num_calls}"
                num_calls += 1
                open_ids.append(id)
                arguments = msgspec.json.encode(call.function.arguments or {}).decode()
                function = {"name": call.function.name, "arguments": arguments}
                entry["tool_calls"].append({"id": id, "type": "function", "function": function})
        if message.role == "tool":
            id = message.tool_call_id or (open_ids[0] if open_ids else f"call_{num_calls}")
            if id in open_ids:
                open_ids.remove(id)
            entry["tool_call_id"] = id
            if message.tool_name:
                entry["name"] = message.tool_name
        said.append(entry)
    return said


def _not_here(name: str) -> Malformed:
    return Malformed(f"'{name}' is not supported by this server", name)
