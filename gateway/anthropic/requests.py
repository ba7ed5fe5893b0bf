"""Requests of the Messages API: bytes to typed Structs, and these to a chat request, whose checks then hold for them.

Unknown fields are tolerated, as newer clients send them. ``cache_control`` says nothing here: prefixes are cached
anyway. Thinking that comes back is shown to the model where its template has a place for it; what another provider has
made unreadable (``redacted_thinking``) is left out.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateway.anthropic.failures import UNTHREADED
from gateway.openai import ChatRequest, Malformed, decoded, parse_chat
from gateway.openai.custom import Name
from gateway.openai.extras import refused
from gateway.openai.requests import MAX_STOPS

Kind = Literal["adaptive", "between_tools", "disabled", "enabled"]
StopSequence = Annotated[str, Meta(min_length=1, max_length=1024)]


class CacheControl(msgspec.Struct, frozen=True):
    """Where a prefix ends that is worth keeping; accepted, and of no consequence."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """Text."""

    text: str
    cache_control: CacheControl | None = None


class ToolUseBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A call that an earlier answer made."""

    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None


class ToolResultBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_result"):
    """What came of a call."""

    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


class ThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """What an earlier answer thought. Signatures are Anthropic's own and not looked at."""

    thinking: str
    signature: str | None = None


class RedactedBlock(msgspec.Struct, frozen=True, tag_field="type", tag="redacted_thinking"):
    """The same, unreadable."""

    data: str


Block = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedBlock


class Message(msgspec.Struct, frozen=True):
    """One message of the conversation so far."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]
    clear_at: Literal["next_user_message", "never"] | None = None
    output_config: dict[str, Any] | None = None
    """These two are beta's, of a system's words: what is said is said to the end, and of the whole answer."""


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that the client runs."""

    name: Name
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    """"custom"; the others run at Anthropic."""
    strict: bool | None = None
    input_examples: list[dict[str, Any]] | None = None
    """Shown to the model as its template shows the rest of a tool."""
    allowed_callers: list[str] | None = None
    defer_loading: bool | None = None
    """Every call is the model's own, and of every tool it is told."""
    cache_control: CacheControl | None = None


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a tool is to be called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the model thinks before it answers, where it can. The budget is not enforced; thinking that is omitted is
    not told, and cannot come back."""

    type: Kind
    budget_tokens: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, frozen=True):
    """JSON by a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How hard the model tries, and in what form it answers."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None
    task_budget: Any = None


class Edit(msgspec.Struct, frozen=True):
    """Of a conversation before it is read. How much of earlier thinking a model reads is its template's word; nothing
    else is left out."""

    type: str


class ContextManagement(msgspec.Struct, frozen=True):
    """What of a conversation is left out when it has become long."""

    edits: list[Edit] | None = None


class UserMetadata(msgspec.Struct, frozen=True):
    """``user_id`` is in the ledger's row."""

    user_id: Annotated[str, Meta(max_length=512)] | None = None


class PenstockOptions(msgspec.Struct, frozen=True):
    """Ours. ``receipt``: the answer says what it cost and where its time went."""

    receipt: bool | None = None


class Diagnostics(msgspec.Struct, frozen=True):
    """Why a prefix was not found in the cache is nothing that is known here; accepted, and of no consequence."""

    previous_message_id: str | None = None


class CountRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens, and what the other one has of it."""

    model: str
    messages: Annotated[list[Message], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """An older name of ``output_config.format``."""
    cache_control: CacheControl | None = None
    speed: Literal["standard", "fast"] | None = None
    """"fast" asks for the class that "priority" does."""
    context_management: ContextManagement | None = None
    mcp_servers: list[Any] | None = None
    compaction: Any = None
    thread: Any = None
    """These four are beta's. Without a server's tools, as a summary, or behind what a thread has, it would be another
    answer: they are refused."""


class MessageRequest(CountRequest, frozen=True, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Meta(ge=1, le=2**63 - 1)]
    stop_sequences: Annotated[list[StopSequence], Meta(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    stream: bool | None = None
    metadata: UserMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    diagnostics: Diagnostics | None = None
    container: Any = None
    inference_geo: str | None = None
    """These two are refused: nothing runs in a container here, and where a model computes is not a request's choice."""

    penstock: PenstockOptions | None = None


_message = msgspec.json.Decoder(MessageRequest)
_count = msgspec.json.Decoder(CountRequest)


def parse_message(body: bytes) -> ChatRequest:
    """What is asked in ``body``. Raises Malformed."""
    asked = _decoded(_message, body)
    for name in ("container", "inference_geo"):
        if getattr(asked, name) is not None:
            raise refused(name)
    fields = _chat(asked)
    if asked.messages[-1].role == "assistant":
        raise Malformed("'messages': an answer cannot be begun for this server's models; end with the user", "messages")
    fields |= {
        "max_completion_tokens": asked.max_tokens,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": asked.top_k or None,
        "stop": asked.stop_sequences,
        "include_reasoning": asked.thinking is None or asked.thinking.display != "omitted",
        "stream": asked.stream,
        "user": asked.metadata.user_id if asked.metadata else None,
        "service_tier": _tier(asked),
        "penstock": asked.penstock,
    }
    return _checked(fields)


def parse_count(body: bytes) -> ChatRequest:
    """What is to be counted: up to where the model would speak, also where it has just spoken. Raises Malformed."""
    return _checked(_chat(_decoded(_count, body)))


def _decoded(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    try:
        return decoded(decoder, body)
    except Malformed as error:
        if error.param is not None and "Invalid value" in str(error) and error.param.endswith("type"):
            kind = str(error).rpartition("Invalid value")[2].strip(" .")
            what = "only text, tool_use, tool_result and thinking are"
            raise Malformed(f"'{error.param}': {kind} is not supported by this server; {what}", error.param) from None
        raise


def _checked(fields: dict[str, Any]) -> ChatRequest:
    try:
        return parse_chat(msgspec.json.encode({name: value for name, value in fields.items() if value is not None}))
    except RecursionError:
        raise Malformed("The body could not be read as JSON: it is nested too deeply") from None


def _check_served(asked: CountRequest) -> None:
    """Raises Malformed."""
    for name in ("mcp_servers", "compaction"):
        if getattr(asked, name):
            raise refused(name)
    if asked.thread:
        raise Malformed("'thread' is not supported by this server; send the whole conversation", "thread", UNTHREADED)
    if asked.output_config is not None and asked.output_config.task_budget is not None:
        raise refused("output_config.task_budget")
    if asked.context_management is not None:
        for number, edit in enumerate(asked.context_management.edits or ()):
            if edit.type != "clear_thinking_20251015":
                raise refused(f"context_management.edits[{number}]", "a conversation is read whole or not at all")


def _chat(asked: CountRequest) -> dict[str, Any]:
    _check_served(asked)
    messages: list[dict[str, Any]] = []
    if asked.system:
        messages.append({"role": "system", "content": _text(asked.system)})
    for number, message in enumerate(asked.messages):
        messages += _messages(message, f"messages[{number}]")
    fields: dict[str, Any] = {"model": asked.model, "messages": messages}
    if asked.tools:
        fields["tools"] = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(asked.tools)]
    if (choice := asked.tool_choice) is not None:
        fields["tool_choice"] = _choice(choice)
        if choice.disable_parallel_tool_use:
            fields["parallel_tool_calls"] = False
    thinking = None if asked.thinking is None else asked.thinking.type
    if thinking == "enabled":
        fields["enable_thinking"] = True
    if thinking == "disabled":
        fields["reasoning_effort"] = "none"
    elif asked.output_config is not None and asked.output_config.effort is not None:
        effort = asked.output_config.effort
        fields["reasoning_effort"] = "high" if effort in ("xhigh", "max") else effort
    if (form := _form(asked)) is not None:
        schema = {"name": "output", "schema": form.schema, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def _form(asked: CountRequest) -> OutputFormat | None:
    form = None if asked.output_config is None else asked.output_config.format
    if form is not None and asked.output_format is not None:
        raise Malformed("'output_format' is an older name of 'output_config.format': send one of them", "output_format")
    return asked.output_format if form is None else form


def _tier(asked: MessageRequest) -> str | None:
    if asked.service_tier == "standard_only":
        return "default"
    return "priority" if asked.speed == "fast" else asked.service_tier


def _messages(message: Message, path: str) -> list[dict[str, Any]]:
    """One message may hold what are several in a chat: results of tools are messages of their own there."""
    if message.clear_at == "next_user_message":
        raise refused(f"{path}.clear_at")
    if message.output_config:
        raise refused(f"{path}.output_config")
    if not message.content:
        raise Malformed(f"'{path}.content': a message has to say something", f"{path}.content")
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if message.role == "assistant":
        return [_answered(message.content, path)]
    said: list[dict[str, Any]] = []
    for number, block in enumerate(message.content):
        match block:
            case TextBlock(text):
                if not said or said[-1]["role"] == "tool":
                    said.append({"role": message.role, "content": []})
                said[-1]["content"].append({"type": "text", "text": text})
            case ToolResultBlock() if message.role == "user":
                told = _text(block.content or "")
                text = (f"failed: {told}" if told else "failed") if block.is_error else told
                said.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
            case _:
                raise _misplaced(message.role, block, f"{path}.content[{number}]")
    return said


def _answered(blocks: list[Block], path: str) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        match block:
            case TextBlock(text):
                texts.append(text)
            case ThinkingBlock(thinking):
                thoughts.append(thinking)
            case RedactedBlock():
                pass
            case ToolUseBlock(id, name, input):
                function = {"name": name, "arguments": msgspec.json.encode(input).decode()}
                calls.append({"id": id, "type": "function", "function": function})
            case _:
                raise _misplaced("assistant", block, f"{path}.content[{number}]")
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _misplaced(role: str, block: Block, path: str) -> Malformed:
    kind = block.__struct_config__.tag
    return Malformed(f"'{path}.type': no message of role {role} has a block of type {kind}", f"{path}.type")


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _tool(tool: Tool, path: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        # Some of them run at Anthropic and others at the client; what they are only Anthropic's models know.
        what = f"'{path}.type': the tool {str(tool.type)[:60]} is one of Anthropic's own; only custom ones are taken"
        raise Malformed(what, f"{path}.type")
    if tool.input_schema is None:
        raise Malformed(f"Missing required parameter: '{path}.input_schema'.", f"{path}.input_schema")
    if tool.defer_loading:
        raise refused(f"{path}.defer_loading")
    if tool.allowed_callers is not None and "direct" not in tool.allowed_callers:
        raise refused(f"{path}.allowed_callers", "a tool is called by the model itself")
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    for name in ("description", "strict", "input_examples"):
        if (value := getattr(tool, name)) is not None:
            function[name] = value
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        if not choice.name:
            raise Malformed("Missing required parameter: 'tool_choice.name'.", "tool_choice.name")
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type
