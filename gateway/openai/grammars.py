"""What an answer must be, by whichever of its names a request says it: OpenAI's ``response_format``, vLLM's
``structured_outputs`` and ``guided_...``, SGLang's ``regex`` and ``ebnf``."""

from __future__ import annotations

import json
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from gateway.openai.decoding import converted
from gateway.openai.extras import refused
from gateway.openai.failures import Malformed
from policies import wire

if TYPE_CHECKING:
    from gateway.openai.requests import ChatRequest, CompletionRequest

Choices = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=10_000)]
Kind = Literal["json_schema", "json_object", "regex", "lark", "choice"]

_ways_to_ask = attrgetter(
    *("response_format", "structured_outputs", "regex", "ebnf"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)
_guided = attrgetter("guided_json", "guided_regex", "guided_choice", "guided_grammar")
NOTHING_ASKED = (None,) * 8
_UNSERVED = ("structural_tag", "whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")


class JsonSchema(msgspec.Struct, frozen=True):
    """``strict``: the answer is whole and as the schema says, whatever ends it, and no word of the schema is passed
    over."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$(?!\n)")]
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class StructuredOutputs(msgspec.Struct, frozen=True):
    """vLLM's; one of the first five. The others would make another answer of it, and are refused."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    whitespace_pattern: Any = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None


class AskedGrammar(NamedTuple):
    """A grammar as it was asked for; it may turn out not to be one."""

    grammar: wire.Grammar
    param: str
    """The path of the field that it stands in."""


def asked_grammar(call: ChatRequest | CompletionRequest) -> AskedGrammar | None:
    """None: any text will do. Raises Malformed."""
    if _ways_to_ask(call) == NOTHING_ASKED:
        return None  # as nearly always, and reading them one by one takes 3 us
    asked = [_of_format(call.response_format)] if call.response_format is not None else []
    outputs = converted(call.structured_outputs or {}, StructuredOutputs, "structured_outputs")
    for name in _UNSERVED:
        if getattr(outputs, name):
            raise refused(f"structured_outputs.{name}")
    asked += _of_outputs(outputs, "structured_outputs.")
    asked += _of_outputs(StructuredOutputs(*_guided(call)), "guided_")
    asked += _of_outputs(StructuredOutputs(regex=call.regex, grammar=call.ebnf), "")
    found = [each for each in asked if each is not None]
    for each in found[1:]:
        # Clients of vLLM of any version say the same by its older name and by its newer one.
        if each.grammar != found[0].grammar:
            raise Malformed(
                f"'{found[0].param}' and '{each.param}' cannot both say what the answer must be", each.param
            )
    return found[0] if found else None


def _of_format(response_format: dict[str, Any]) -> AskedGrammar | None:
    path = "response_format"
    match response_format.get("type"):
        case "text":
            return None
        case "json_object":
            if schema := response_format.get("schema"):  # llama.cpp's, and that of some clouds
                said = converted(schema, dict[str, Any], f"{path}.schema")
                return AskedGrammar(wire.Grammar("json_schema", _text(said)), f"{path}.schema")
            return AskedGrammar(wire.Grammar("json_object", "", True), path)
        case "json_schema":
            path = f"{path}.json_schema"
            if "json_schema" not in response_format:
                raise Malformed(f"Missing required parameter: '{path}'.", path, "missing_required_parameter")
            asked = converted(response_format["json_schema"], JsonSchema, path)
            schema = _text(asked.schema)
            return AskedGrammar(wire.Grammar("json_schema", schema, bool(asked.strict)), f"{path}.schema")
        case "regex" | "grammar" as kind:
            path = f"{path}.{kind}"
            source = response_format.get(kind)
            if not isinstance(source, str):
                raise Malformed(f"Missing required parameter: '{path}'.", path, "missing_required_parameter")
            return AskedGrammar(wire.Grammar("regex" if kind == "regex" else "lark", source), path)
        case other:
            path = f"{path}.type"
            known = "'text', 'json_object', 'json_schema', 'regex' and 'grammar'"
            raise Malformed(
                f"Invalid '{path}': '{str(other)[:40]}' is not supported; {known} are", path, "invalid_value"
            )


def _of_outputs(outputs: StructuredOutputs, prefix: str) -> list[AskedGrammar | None]:
    """``prefix``: of the fields' names."""
    asked: list[AskedGrammar | None] = []
    names: tuple[tuple[str, Kind, str | None], ...] = (
        ("json", "json_schema", outputs.json if isinstance(outputs.json, str) else _dumped(outputs.json)),
        ("regex", "regex", outputs.regex),
        ("choice", "choice", _dumped(outputs.choice)),
        ("ebnf" if not prefix else "grammar", "lark", outputs.grammar),
        ("json_object", "json_object", "" if outputs.json_object else None),
    )
    for name, kind, source in names:
        if source is not None:
            asked.append(AskedGrammar(wire.Grammar(kind, source), prefix + name))
    return asked


def _dumped(value: Any) -> str | None:
    return None if value is None else _text(value)


def _text(value: Any) -> str:
    try:
        # Several times as fast, which of a schema of megabytes the event loop would notice.
        return msgspec.json.encode(value).decode()
    except (OverflowError, ValueError):  # a number of more than 64 bits
        return json.dumps(value, ensure_ascii=False)
