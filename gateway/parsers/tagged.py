"""Calls in tags, as Qwen 3 Coder, Qwen 3.5 and GLM write them: each argument between its own, a string as it stands.

What an argument is, its function's schema says: where that wants a string, everything is one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from gateway.parsers.calls import Calls, Sink, json_schema, one_of, quoted
from gateway.parsers.custom import ARGUMENT
from gateway.parsers.marks import without_marks
from gateway.parsers.scan import NotACall, Read, literal, spaces, until
from policies import wire
from policies.expressions import has_choice_outside
from policies.grammar import spelled, unanchored

MAX_NAME_CHARS = 256
_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""Templates that were written for Python show these."""
_KINDS: dict[type, frozenset[str]] = {
    str: frozenset(("string",)),
    bool: frozenset(("boolean",)),
    int: frozenset(("integer", "number")),
    float: frozenset(("number",)),
    dict: frozenset(("object",)),
    list: frozenset(("array",)),
    type(None): frozenset(("null",)),
}
"""What a schema calls a value of a type of Python's."""
_DEFINITIONS = ("$defs", "definitions")
_OF_TEXTS = (("pattern", str), ("minLength", int), ("maxLength", int))


class Tagged(Calls):
    """``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``, one after another."""

    marks = ("<tool_call>", "</tool_call>")
    opens = ("<tool_call>",)
    between = "\n"
    needs_schema = True

    def read(self, spelled: Mapping[str, str], sink: Sink) -> Read[None]:
        yield from literal("<function=", (yield from spaces((yield))))
        name = yield from until(">", (yield), 256)
        sink.begin(name.strip())
        sink.arguments("{")
        number = 0
        while True:
            yield from literal("<", (yield from spaces((yield))))
            char = yield
            if char == "/":
                break
            yield from literal("parameter=", char)
            key = without_marks((yield from until(">", (yield), 4096)))
            value = (yield from _value("</parameter>", sink)).removeprefix("\n").removesuffix("\n")
            sink.arguments(f"{', ' if number else ''}{_said(key)}: {_typed(value, sink.schema(name.strip(), key))}")
            number += 1
        yield from literal("function>", (yield))
        sink.arguments("}")
        sink.end()
        yield from literal(spelled["</tool_call>"], (yield from spaces((yield))))

    def call(self, words: Mapping[str, str], name: str, arguments: str) -> str:
        return f"{quoted(f'<function={name}>' + chr(10))} {arguments} {quoted('</function>')}"

    def section(self, words: Mapping[str, str], call: str, several: bool) -> str:
        return f"""{quoted(chr(10))} {call} {quoted(chr(10))} {words["</tool_call>"]}"""

    def arguments(self, words: Mapping[str, str], rule: str, schema: dict[str, Any], is_strict: bool) -> list[str]:
        return _arguments(
            rule,
            schema,
            is_strict,
            lambda key: quoted(f"<parameter={key}>\n"),
            quoted("\n</parameter>\n"),
        )

    def text(self, words: Mapping[str, str], rule: str, grammar: wire.Grammar) -> list[str]:
        return _text(rule, grammar, quoted(f"<parameter={ARGUMENT}>\n"), quoted("\n</parameter>\n"))


class Glm(Calls):
    """``<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>``, one after another, with or
    without newlines between the tags."""

    marks = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    opens = ("<tool_call>",)
    between = "\n"
    needs_schema = True

    def read(self, spelled: Mapping[str, str], sink: Sink) -> Read[None]:
        again, end = spelled["<arg_key>"], spelled["</tool_call>"]
        name = yield
        while not name.endswith((again, end)):
            if len(name) > MAX_NAME_CHARS:
                raise NotACall
            name += yield
        is_over = name.endswith(end)
        name = name.removesuffix(end if is_over else again).strip()
        sink.begin(name)
        sink.arguments("{")
        number = 0
        while not is_over:
            key = without_marks((yield from until(spelled["</arg_key>"], (yield), 4096)).strip())
            yield from literal(spelled["<arg_value>"], (yield from spaces((yield))))
            value = yield from _value(spelled["</arg_value>"], sink)
            sink.arguments(f"{', ' if number else ''}{_said(key)}: {_typed(value, sink.schema(name, key))}")
            number += 1
            is_over = yield from one_of(again, end)
        sink.arguments("}")
        sink.end()

    def call(self, words: Mapping[str, str], name: str, arguments: str) -> str:
        return f"{quoted(name + chr(10))} {arguments}"

    def section(self, words: Mapping[str, str], call: str, several: bool) -> str:
        return f"{call} {words['</tool_call>']}"

    def arguments(self, words: Mapping[str, str], rule: str, schema: dict[str, Any], is_strict: bool) -> list[str]:
        closing = words["</arg_value>"]
        return _arguments(rule, schema, is_strict, lambda key: self._opening(words, key), closing, quoted("\n"))

    def text(self, words: Mapping[str, str], rule: str, grammar: wire.Grammar) -> list[str]:
        return _text(rule, grammar, self._opening(words, ARGUMENT), words["</arg_value>"], quoted("\n"))

    @staticmethod
    def _opening(words: Mapping[str, str], key: str) -> str:
        return " ".join((words["<arg_key>"], quoted(key), words["</arg_key>"], quoted("\n"), words["<arg_value>"]))


def _arguments(
    rule: str,
    schema: dict[str, Any],
    is_strict: bool,
    opening: Callable[[str], str],
    closing: str,
    behind: str = "",
) -> list[str]:
    """In the order of the schema. ``opening`` of a key, ``closing`` and ``behind`` are what is around a value, in
    Lark."""
    rules, parts = [], []
    for number, (key, given) in enumerate((schema.get("properties") or {}).items()):
        part, value, closes = f"{rule}_{number}", f"{rule}_{number}_value", closing
        among = _among(given)
        whole = None if _is_string(given) else _whole(given, schema)
        if among is not None:
            rules.append(f"{value}: " + " | ".join(quoted(each) for each in among))
        elif whole is not None:
            rules.append(f"{value}: %json {json_schema(whole, is_strict)}")
        else:
            rules.append(f"{value.upper()}: {_text_of(given)}")
            if closing.startswith("<"):  # one token, which is in no text
                rules.append(f"{value}: {value.upper()}")
            else:
                rules.append(f"{value}[suffix={closing}]: {value.upper()}")
                closes = ""
        rules.append(f"{part}: {opening(key)} {value} {closes} {behind}".rstrip())
        parts.append(part if key in (schema.get("required") or ()) else f"{part}?")
    return [f"{rule}: {' '.join(parts) or quoted('')}", *rules]


def _among(schema: Any) -> list[str] | None:
    """The texts of which an argument that is a string is one; None: it may be others."""
    if not _is_string(schema):
        return None
    if isinstance(schema.get("enum"), list):
        return [str(each) for each in schema["enum"]]
    return [schema["const"]] if isinstance(schema.get("const"), str) else None


def _whole(given: Any, schema: dict[str, Any]) -> dict[str, Any] | None:
    """What an argument must be, by itself; None: it refers to something that only the whole schema has."""
    if not isinstance(given, dict):
        return {}
    if not _references(given):
        return given
    definitions = {word: schema[word] for word in _DEFINITIONS if word in schema}
    if given.keys() & definitions.keys():
        return None
    whole = {**given, **definitions}
    is_known = all(
        isinstance(each, str) and each.startswith(tuple(f"#/{word}/" for word in definitions))
        for each in _references(whole)
    )
    return whole if is_known else None


def _references(schema: Any) -> list[Any]:
    found, left = [], [schema]
    while left:
        node = left.pop()
        if isinstance(node, dict):
            found += [node["$ref"]] if "$ref" in node else []
            left += node.values()
        elif isinstance(node, list):
            left += node
    return found


def _text_of(schema: Any) -> str:
    """What an argument that is a string must be as it stands, as a terminal in Lark."""
    pattern, least, most = (_word(schema, word, kind) for word, kind in _OF_TEXTS)
    said = []
    if least or most is not None:
        said.append(f"/(?s:.){{{least or 0},{'' if most is None else most}}}/")
    rest = (pattern or "").removeprefix("^")
    inner = unanchored(rest)
    is_anchored = inner != pattern
    # An end of the text that belongs to one of several choices is left to the model.
    if pattern and not (is_anchored and has_choice_outside(inner)):
        before = "" if pattern.startswith("^") else "(?s:.*)"
        behind = "" if rest != inner else "(?s:.*)"
        said.append(spelled(wire.Grammar("regex", f"{before}(?:{inner}){behind}")).removeprefix("start: "))
    return " & ".join(said) or "/(?s:.*)/"


def _word(schema: Any, word: str, kind: type) -> Any:
    found = schema.get(word) if isinstance(schema, dict) else None
    return found if isinstance(found, kind) else None


def _text(rule: str, grammar: wire.Grammar, opening: str, closing: str, behind: str = "") -> list[str]:
    """For a custom tool's one argument, which stands here as it is."""
    value, closes = f"{rule}_text", closing
    if grammar.kind == "lark":
        text = f"{value}: %lark {{\n{grammar.source}\n}}"
    elif closing.startswith("<"):
        text = f"{value}: {spelled(grammar).removeprefix('start: ')}"
    else:
        text, closes = f"{value}[suffix={closing}]: {spelled(grammar).removeprefix('start: ')}", ""
    return [f"{rule}: {opening} {value} {closes} {behind}".rstrip(), text]


def _value(end: str, sink: Sink) -> Read[str]:
    """What comes before ``end``, which is read too."""
    text = yield
    while not text.endswith(end):
        sink.arguments("")  # what was read is part of the call, however long it becomes
        text += yield
    return without_marks(text[: -len(end)])


def _typed(value: str, schema: Any) -> str:
    """As JSON."""
    if schema is None or _is_string(schema):
        return _said(value)
    text = _PYTHON.get(value.strip(), value)
    try:
        parsed = json.loads(text, parse_constant=_refused)
        kinds = _kinds(schema)
    except (ValueError, RecursionError, NotACall):
        return _said(value)
    # Where it may be a string or null, digits are a string.
    return _said(value) if "string" in kinds and not kinds & _KINDS[type(parsed)] else text.strip()


def _kinds(schema: Any) -> frozenset[str]:
    """Of JSON, those that it says a value may be of; empty where it does not say, or not of all."""
    if not isinstance(schema, dict):
        return frozenset()
    if isinstance(schema.get("enum"), list):
        return frozenset().union(*(_KINDS.get(type(each), ()) for each in schema["enum"]))
    kinds = schema.get("type")
    if isinstance(kinds, str | list):
        return frozenset([kinds] if isinstance(kinds, str) else map(str, kinds))
    among = schema.get("anyOf") or schema.get("oneOf")
    each = [_kinds(one) for one in among] if isinstance(among, list) else []
    return frozenset().union(*each) if all(each) else frozenset()


def _refused(constant: str) -> None:
    raise NotACall(constant)


def _is_string(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return False
    among = schema.get("enum")
    is_among = isinstance(among, list) and len(among) > 0 and all(isinstance(each, str) for each in among)
    return is_among or schema.get("type") == "string"


def _said(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
