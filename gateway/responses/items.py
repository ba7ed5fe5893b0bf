"""Items: what a response is given and what it consists of, in the shapes of openai-python's ``types/responses``.

An item that came in and one that went out have the same shape, so that an output can be the next request's input.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway import openai
from gateway.openai import ChatLogprob, Malformed
from gateway.responses.unserved import check_served

MAX_ITEMS = 10_000
"""Of one request's input, and of a conversation's."""

Status = Literal["in_progress", "completed", "incomplete"]


class Part(msgspec.Struct, frozen=True, tag_field="type"):
    """A part of an item's content."""


class InputText(Part, frozen=True, tag="input_text"):
    text: str


class OutputText(Part, frozen=True, tag="output_text"):
    text: str
    annotations: list[dict[str, Any]] = []
    logprobs: list[ChatLogprob] = []


class OutputRefusal(Part, frozen=True, tag="refusal"):
    refusal: str


class ReasoningText(Part, frozen=True, tag="reasoning_text"):
    text: str


class SummaryText(Part, frozen=True, tag="summary_text"):
    text: str


def text_of(parts: Sequence[InputText | OutputText | OutputRefusal]) -> str:
    return "\n".join([part.refusal if isinstance(part, OutputRefusal) else part.text for part in parts])


class Item(msgspec.Struct, frozen=True, tag_field="type", kw_only=True):
    """``id`` is empty until it is part of a response."""

    id: str = ""
    status: Status = "completed"


class MessageItem(Item, frozen=True, tag="message", kw_only=True):
    """Of whoever has this role."""

    role: Literal["user", "assistant", "system", "developer"]
    content: list[InputText | OutputText | OutputRefusal]

    @property
    def text(self) -> str:
        return text_of(self.content)


class ReasoningItem(Item, frozen=True, tag="reasoning", kw_only=True):
    """What a model thought; one of the two has it."""

    summary: list[SummaryText] = []
    content: list[ReasoningText] | None = None


class FunctionCallItem(Item, frozen=True, tag="function_call", kw_only=True):
    """``arguments`` is JSON text."""

    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET
    """The tool's, where it has one."""


class FunctionCallOutputItem(Item, frozen=True, tag="function_call_output", kw_only=True):
    """What came of a call."""

    call_id: str
    output: str | list[InputText]


class CustomToolCallItem(Item, frozen=True, tag="custom_tool_call", kw_only=True):
    """``input`` is text."""

    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET
    """As a function's."""


class CustomToolCallOutputItem(Item, frozen=True, tag="custom_tool_call_output", kw_only=True):
    """What came of one."""

    call_id: str
    output: str | list[InputText]


class CompactionItem(msgspec.Struct, frozen=True, tag_field="type", tag="compaction", kw_only=True):
    """A summary of what was said, for this server alone to read."""

    id: str = ""
    encrypted_content: str


AnyItem = (
    MessageItem
    | ReasoningItem
    | FunctionCallItem
    | FunctionCallOutputItem
    | CustomToolCallItem
    | CustomToolCallOutputItem
    | CompactionItem
)


class ItemReference(msgspec.Struct, frozen=True):
    """An item of a stored response."""

    id: str


_TYPES: dict[str, type[AnyItem]] = {
    "message": MessageItem,
    "reasoning": ReasoningItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutputItem,
    "custom_tool_call": CustomToolCallItem,
    "custom_tool_call_output": CustomToolCallOutputItem,
    "compaction": CompactionItem,
}
PREFIXES: dict[type[AnyItem], str] = {
    MessageItem: "msg_",
    ReasoningItem: "rs_",
    FunctionCallItem: "fc_",
    FunctionCallOutputItem: "fco_",
    CustomToolCallItem: "ctc_",
    CustomToolCallOutputItem: "ctco_",
    CompactionItem: "cmp_",
}
"""Of ids, by the kind of item."""
UNSERVED = {"async": False, "caller": {"type": "direct"}}
"""Fields of calls and their outputs: every call is the model's own, and is waited for."""
SEALED = {"encrypted_content": None}
"""Of reasoning: none is sealed here, and what others have sealed cannot be read."""
HINTS = ("name", "namespace", "phase", "prompt_cache_breakpoint")
"""Fields that change nothing here: an output is its call's, a template knows of no phases, and all prefixes are kept. A
call's own names are no hints."""
_TEXTS = ("input_text", "output_text", "refusal")
_ID = re.compile(r"[a-z]+_([0-9a-f]{32})[0-9a-f]+")


def parse(given: str | list[dict[str, Any]], path: str = "input") -> list[AnyItem | ItemReference]:
    """The items of a request, at ``path`` of it. Raises Malformed."""
    if isinstance(given, str):
        return [said_by_user(given)]
    if len(given) > MAX_ITEMS:
        raise Malformed(f"Invalid '{path}': there may be {MAX_ITEMS} items at most", path, "array_above_max_length")
    return [_parsed(item, f"{path}[{number}]") for number, item in enumerate(given)]


def said_by_user(text: str) -> MessageItem:
    return MessageItem(role="user", content=[InputText(text)])


def named(items: list[AnyItem], made_with: str) -> list[AnyItem]:
    """With ids, where they had none, by which they are found again in the response that they are ``made_with``."""
    return [
        item if item.id else msgspec.structs.replace(item, id=id_of(type(item), made_with, number))
        for number, item in enumerate(items)
    ]


def unnamed(items: list[AnyItem]) -> list[AnyItem]:
    """Without the ids that they had elsewhere."""
    return [msgspec.structs.replace(item, id="") for item in items]


def id_of(kind: type[AnyItem], made_with: str, number: int) -> str:
    """Of the item of that number, those of the input first. ``made_with``: the id of a response, or of a request."""
    return f"{PREFIXES[kind]}{made_with.partition('_')[2]}{number:04x}"


def response_of(item_id: str) -> str | None:
    """The response that an item was made with, by its id; None when it is no id of ours."""
    found = _ID.fullmatch(item_id)
    return f"resp_{found[1]}" if found else None


def _parsed(given: dict[str, Any], path: str) -> AnyItem | ItemReference:
    kind = given.get("type")
    if kind is None:
        kind = "item_reference" if "id" in given and "role" not in given else "message"
    if kind == "item_reference":
        return openai.converted(given, ItemReference, path)
    struct = _TYPES.get(kind) if isinstance(kind, str) else None
    if struct is None:
        raise _unsupported(f"{path}.type", kind, "it takes " + ", ".join([*_TYPES, "item_reference"]))
    check_served(given, path, SEALED if struct is ReasoningItem else UNSERVED)
    given = {name: value for name, value in given.items() if value is not None} | {"type": kind}
    place = "output" if struct in (FunctionCallOutputItem, CustomToolCallOutputItem) else "content"
    parts = given.get(place)
    if struct is MessageItem and isinstance(parts, str):
        part = "output_text" if given.get("role") == "assistant" else "input_text"
        given[place] = [{"type": part, "text": parts}]
    elif isinstance(parts, list) and struct is not ReasoningItem:
        for number, part in enumerate(parts):
            if isinstance(part, dict) and part.get("type") not in _TEXTS:
                raise _unsupported(f"{path}.{place}[{number}].type", part.get("type"), "it takes text")
        given[place] = [_without_extras(part) if isinstance(part, dict) else part for part in parts]
    return openai.converted(given, struct, path)


def _without_extras(part: dict[str, Any]) -> dict[str, Any]:
    """Of an answer's own text only the text is read again."""
    return {name: value for name, value in part.items() if name not in ("logprobs", "annotations")}


def _unsupported(path: str, kind: object, instead: str) -> Malformed:
    shown = f"'{kind[:40]}'" if isinstance(kind, str) else "this"
    return Malformed(f"Invalid '{path}': {shown} is not supported by this server; {instead}", path, "unsupported_value")
