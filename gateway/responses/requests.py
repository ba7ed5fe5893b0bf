"""POST /v1/responses: the body, what it asks of a chat, and what of it the answer repeats.

As in ``openai.requests``: unknown fields are tolerated, null means the default, and what this server cannot do is
refused by name, within items and tools as well (``responses.unserved``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from gateway import openai
from gateway.openai import Malformed
from gateway.openai.extras import Extras, check_extras, refused
from gateway.openai.requests import CacheSalt, Metadata, Named, Penalty, PenstockOptions, StreamOptions
from gateway.responses.context import CacheOptions, Compaction, ImageOptions
from gateway.responses.conversation import Message
from gateway.responses.tools import callable_of, check_nesting, choice_of, paths_of, tool_of_chat, tools_of

Include = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]
"""All but the last are of things that no answer has here, and change nothing."""
LOGPROBS: Include = "message.output_text.logprobs"
Id = Annotated[str, Meta(min_length=1, max_length=64)]


class Reasoning(msgspec.Struct, frozen=True, kw_only=True):
    """``summary``: the reasoning comes as the item's summary rather than as its content; it is the whole either way.
    ``context``: whose reasoning of earlier turns a model reads is its template's word."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """The older name."""
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class BackgroundOptions(msgspec.Struct, frozen=True, kw_only=True):
    """There is no cheaper time to wait for, nor anything else to go on with."""

    completion_window: Literal["soonest"] | None = None
    continuation_id: str | None = None

    def __post_init__(self) -> None:
        if self.continuation_id is not None:
            raise ValueError("'continuation_id' is not supported by this server")


class TextFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``schema`` and its company are of ``json_schema`` alone."""

    type: Literal["text", "json_object", "json_schema"] = msgspec.field()
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$(?!\n)")] | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The form of the text."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ConversationRef(msgspec.Struct, frozen=True):
    """A conversation."""

    id: Id


class Asked(Extras, frozen=True, kw_only=True):
    """What a request says of the prompt; all that a count of its tokens needs."""

    input: str | list[dict[str, Any]] | None = None
    """Text of the user, or items: messages, function calls and their outputs, reasoning, references to items."""
    instructions: str | None = None
    """First of all, and of this response alone: the next one says its own."""
    previous_response_id: Id | None = None
    conversation: Id | ConversationRef | None = None
    """Its items come before the input; a response's are added to it."""
    text: TextConfig | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=1024)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """auto: the oldest turns are left out of a prompt that is too long."""
    chat_template_kwargs: dict[str, Any] | None = None
    """For the template's own switches, as in a chat."""

    @property
    def conversation_id(self) -> str | None:
        return self.conversation.id if isinstance(self.conversation, ConversationRef) else self.conversation


class CountRequest(Asked, frozen=True, kw_only=True):
    """POST /v1/responses/input_tokens."""

    model: str | None = None
    personality: Any = None


class ResponseRequest(Asked, frozen=True, kw_only=True):
    """POST /v1/responses."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    background: bool | None = None
    """The answer is written whether or not the client stays."""
    background_options: BackgroundOptions | None = None
    store: bool | None = None
    """Kept, unless this is false or the policy keeps nothing, to be read again and to be gone on from."""
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None
    max_tool_calls: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None
    """Of tools that run here; there are none."""
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    include: list[Include] | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    user: Named | None = None
    safety_identifier: Annotated[str, Meta(max_length=128)] | None = None
    prompt_cache_key: Named | None = None
    prompt_cache_options: CacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    image: ImageOptions | None = None
    access_programs: Any = None
    prompt: Any = None
    moderation: Any = None
    context_management: Annotated[list[Compaction], Meta(max_length=16)] | None = None
    penstock: PenstockOptions | None = None

    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    """From here on vLLM's, for its clients."""
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] | None = None
    logit_bias: dict[str, float] | None = None
    include_reasoning: bool | None = None
    """False: no item says what the model thinks."""
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    cache_salt: CacheSalt | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    structured_outputs: dict[str, Any] | None = None
    enable_response_messages: bool | None = None
    previous_input_messages: Any = None
    """These two would have the conversation in the model's own form, and are refused."""

    max_tokens: Any = None
    """From here on a chat's, which have other names in a response."""
    max_completion_tokens: Any = None
    response_format: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    @property
    def obfuscates(self) -> bool:
        """The deltas of the stream are padded."""
        return self.stream_options is not None and bool(self.stream_options.include_obfuscation)


_decoder, _count = msgspec.json.Decoder(ResponseRequest), msgspec.json.Decoder(CountRequest)
AS_THEY_ARE = (
    "model",
    "stream",
    "temperature",
    "top_p",
    "metadata",
    "service_tier",
    "user",
    "safety_identifier",
    "prompt_cache_key",
    "penstock",
    "chat_template_kwargs",
    "seed",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "stop",
    "include_stop_str_in_output",
    "ignore_eos",
    "cache_salt",
    "min_tokens",
    "stop_token_ids",
    "allowed_token_ids",
    "bad_words",
    "structured_outputs",
)
"""What a chat calls by the same name."""
OURS = (
    ("max_completion_tokens", "max_output_tokens"),
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("reasoning_effort", "reasoning.effort"),
    ("allowed_tools.", ""),
    ("].custom.format.grammar", "].format"),
    ("].custom", "]"),
    ("tool_choice.custom", "tool_choice"),
    (".function", ""),
)
"""What a chat's words are called here."""
ELSEWHERE = {
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
}
"""What would be passed over under a chat's name, and its name here."""

_TOOL = re.compile(r"tools\[(\d+)\]")

A = TypeVar("A", bound=Asked)
T = TypeVar("T")


def parse(body: bytes) -> ResponseRequest:
    """The request in ``body``. Raises Malformed."""
    call = openai.decoded(_decoder, body)
    for name in ("access_programs", "prompt", "moderation", "previous_input_messages"):
        if getattr(call, name) is not None:
            raise refused(name)
    _checked(call)
    for name, ours in ELSEWHERE.items():
        if getattr(call, name) is not None:
            raise refused(name, f"of a response it is '{ours}'")
    if call.enable_response_messages:
        raise refused("enable_response_messages")
    form = None if call.text is None else call.text.format
    if call.structured_outputs and form is not None and form.type != "text":
        what = "'text.format' and 'structured_outputs' cannot both say what the answer must be"
        raise Malformed(what, "structured_outputs")
    if call.background and call.store is False:
        raise Malformed("'background' needs the response to be stored: 'store' must not be false", "background")
    return call


def parse_count(body: bytes) -> CountRequest:
    """The request in ``body``. Raises Malformed."""
    call = _checked(openai.decoded(_count, body))
    if call.personality is not None:
        raise refused("personality")
    return call


def chat_of(call: ResponseRequest, messages: list[Message]) -> openai.ChatRequest:
    """The chat that it means. Raises Malformed in a response's words."""
    asked = {name: msgspec.to_builtins(getattr(call, name)) for name in AS_THEY_ARE}
    asked |= _of_prompt(call, messages)
    asked["max_completion_tokens"] = call.max_output_tokens
    if call.wants_logprobs:
        asked |= {"logprobs": True, "top_logprobs": call.top_logprobs or 0}
    return in_our_words(call, lambda: _chat(asked))


def tooling_of(call: Asked) -> openai.Tooling | None:
    """As the chat that it means has it. Raises Malformed in a response's words."""
    asked = _of_prompt(call, [])
    chosen = asked["tool_choice"], asked["parallel_tool_calls"]
    return in_our_words(call, lambda: openai.tooling(asked["tools"], *chosen, None, None))


def counted_chat_of(call: CountRequest, messages: list[Message]) -> openai.ChatRequest:
    """The chat whose prompt is counted. Raises Malformed in a response's words."""
    if call.model is None:
        raise Malformed("Missing required parameter: 'model'.", "model", "missing_required_parameter")
    asked = {"model": call.model, "chat_template_kwargs": call.chat_template_kwargs, **_of_prompt(call, messages)}
    return in_our_words(call, lambda: _chat(asked))


def in_our_words(call: Asked, work: Callable[[], T]) -> T:
    """What ``work`` returns. Raises Malformed with the names that a response has for a chat's fields."""
    try:
        return work()
    except Malformed as error:
        raise said_of_a_chat(call, error) from None


def said_of_a_chat(call: Asked, error: Malformed) -> Malformed:
    """The same of the response that meant it."""
    message, param = str(error), error.param
    if param is not None and param.startswith("messages"):  # which of the items it came from is not known
        message, param = message.replace(f"'{param}'", "'input'"), "input"
    if param is not None and (tool := _TOOL.match(param)):  # the chat has those of a namespace beside the others
        ours = param.replace(tool[0], paths_of(call.tools)[int(tool[1])], 1)
        message, param = message.replace(param, ours), ours
    for theirs, ours in OURS:
        if param is not None and theirs in param:
            message, param = message.replace(theirs, ours), param.replace(theirs, ours)
    return Malformed(message, param, error.code)


def _chat(asked: dict[str, Any]) -> openai.ChatRequest:
    given = {name: value for name, value in asked.items() if value is not None}
    return openai.check_chat(openai.converted(given, openai.ChatRequest, ""))


def _of_prompt(call: Asked, messages: list[Message]) -> dict[str, Any]:
    """What both kinds of request ask of the chat."""
    reasoning, text = call.reasoning or Reasoning(), call.text or TextConfig()
    tools = [tool_of_chat(tool) for tool in callable_of(tools_of(call.tools))]
    return {
        "messages": messages,
        "tools": tools or None,
        "tool_choice": choice_of(call.tool_choice) if isinstance(call.tool_choice, dict) else call.tool_choice,
        "parallel_tool_calls": call.parallel_tool_calls,
        "response_format": None if text.format is None else _format(text.format),
        "reasoning_effort": reasoning.effort,
        "verbosity": text.verbosity,
    }


def _format(form: TextFormat) -> dict[str, Any] | None:
    if form.type != "json_schema":
        return {"type": form.type} if form.type == "json_object" else None
    said = {"name": form.name, "schema": form.schema, "description": form.description, "strict": form.strict}
    return {"type": "json_schema", "json_schema": {name: value for name, value in said.items() if value is not None}}


def _checked(call: A) -> A:
    check_extras(call)
    if call.conversation is not None and call.previous_response_id is not None:
        raise Malformed(
            "'conversation' and 'previous_response_id' cannot both be gone on from",
            "previous_response_id",
            "mutually_exclusive_parameters",
        )
    if call.input is None and call.previous_response_id is None and call.conversation is None:
        raise Malformed("Missing required parameter: 'input'.", "input", "missing_required_parameter")
    form = None if call.text is None else call.text.format
    if form is not None and form.type == "json_schema":
        for name in ("name", "schema"):
            if getattr(form, name) is None:
                path = f"text.format.{name}"
                raise Malformed(f"Missing required parameter: '{path}'.", path, "missing_required_parameter")
        check_nesting(form.schema, "text.format.schema")
    if isinstance(call.tool_choice, dict):
        check_nesting(call.tool_choice, "tool_choice")
    elif call.tool_choice is not None and call.tool_choice not in ("none", "auto", "required"):
        raise Malformed("Invalid 'tool_choice': it is none, auto or required", "tool_choice", "invalid_value")
    return call
