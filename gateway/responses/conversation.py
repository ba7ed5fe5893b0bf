"""Items as the messages of a chat, which is what a model's template reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.openai import Malformed
from gateway.responses.items import (
    AnyItem,
    CustomToolCallItem,
    CustomToolCallOutputItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    MessageItem,
    ReasoningItem,
    text_of,
)
from gateway.responses.tools import full_name

Message = dict[str, Any]
LEADING = ("system", "developer")


def messages_of(instructions: str | None, items: Sequence[AnyItem]) -> list[Message]:
    """What an assistant thought, said and called in one go is one message. Raises Malformed for the output of a call
    that nobody made."""
    messages: list[Message] = []
    called: set[str] = set()
    for item in items:
        match item:
            case MessageItem(role="assistant"):
                _turn(messages, "content", "tool_calls")["content"] = item.text
            case ReasoningItem():
                parts = item.content or item.summary
                _turn(messages, "reasoning_content", "content", "tool_calls")["reasoning_content"] = "\n".join(
                    [part.text for part in parts]
                )
            case FunctionCallItem():
                called.add(item.call_id)
                call = {"name": full_name(item.namespace, item.name), "arguments": item.arguments}
                _turn(messages).setdefault("tool_calls", []).append(
                    {"id": item.call_id, "type": "function", "function": call}
                )
            case CustomToolCallItem():
                called.add(item.call_id)
                custom = {"name": full_name(item.namespace, item.name), "input": item.input}
                _turn(messages).setdefault("tool_calls", []).append(
                    {"id": item.call_id, "type": "custom", "custom": custom}
                )
            case FunctionCallOutputItem() | CustomToolCallOutputItem():
                if item.call_id not in called:
                    kind = "function" if isinstance(item, FunctionCallOutputItem) else "custom tool"
                    raise Malformed(
                        f"No tool call found for {kind} call output with call_id {item.call_id[:64]}.", "input"
                    )
                text = item.output if isinstance(item.output, str) else text_of(item.output)
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text})
            case MessageItem():
                messages.append({"role": item.role, "content": item.text})
    for message in messages:
        if message["role"] == "assistant" and "content" not in message and "tool_calls" not in message:
            message["content"] = ""
    return _instructed(instructions, messages)


def without_oldest(messages: list[Message], num_dropped: int) -> list[Message]:
    """Without so many of the oldest turns; what leads the conversation stays, and so does its last turn. A turn begins
    with what a user says."""
    num_leading = next((n for n, message in enumerate(messages) if message["role"] not in LEADING), len(messages))
    starts = turns(messages)
    first = starts[min(num_dropped, len(starts) - 1)] if starts else num_leading
    return messages[:num_leading] + messages[max(first, num_leading) :]


def turns(messages: Sequence[Message]) -> list[int]:
    """Where each begins."""
    return [number for number, message in enumerate(messages) if message["role"] == "user"]


def _turn(messages: list[Message], *over: str) -> Message:
    """The assistant's message that goes on; a new one when the last has one of the fields that it must not have."""
    last = messages[-1] if messages else None
    if last is None or last["role"] != "assistant" or any(name in last for name in over):
        last = {"role": "assistant"}
        messages.append(last)
    return last


def _instructed(instructions: str | None, messages: list[Message]) -> list[Message]:
    """One message leads, as templates take no more than one."""
    if not instructions:
        return messages
    if messages and messages[0]["role"] in LEADING:
        first = {**messages[0], "content": f"{instructions}\n\n{messages[0]['content']}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": instructions}, *messages]
