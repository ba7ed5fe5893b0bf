"""Calls in tags, as Qwen 3 Coder and Qwen 3.5 write them: each argument between its own, a string as it stands.

What an argument is, its function's schema says: where that wants a string, everything is one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gateway.parsers.calls import Calls, Sink, json_schema, quoted
from gateway.parsers.scan import NotACall, Read, literal, spaces, until

_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""Templates that were written for Python show these."""


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
            key = yield from until(">", (yield), 4096)
            value = yield from _value(sink)
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

    def arguments(self, rule: str, schema: dict[str, Any], is_strict: bool) -> list[str]:
        """In the order of the schema; references within it are no concern of one argument, so such are held to
        nothing."""
        rules, parts = [], []
        for number, (key, given) in enumerate((schema.get("properties") or {}).items()):
            part, value = f"{rule}_{number}", f"{rule}_{number}_value"
            closing = quoted("\n</parameter>\n")
            if _is_string(given) and isinstance(given.get("enum"), list):
                rules.append(f"{value}: " + " | ".join(quoted(str(each)) for each in given["enum"]))
            elif _is_string(given) or "$ref" in json.dumps(given):
                rules.append(f"{value}[suffix={closing}]: /(?s:.*)/")
                closing = ""
            else:
                rules.append(f"{value}: %json {json_schema(given if isinstance(given, dict) else {}, is_strict)}")
            rules.append(f"{part}: {quoted(f'<parameter={key}>' + chr(10))} {value} {closing}")
            parts.append(part if key in (schema.get("required") or ()) else f"{part}?")
        return [f"{rule}: {' '.join(parts) or quoted('')}", *rules]


def _value(sink: Sink) -> Read[str]:
    """Without the newlines that the tags have around it."""
    text = yield
    while not text.endswith("</parameter>"):
        sink.arguments("")  # what was read is part of the call, however long it becomes
        text += yield
    return text[: -len("</parameter>")].removeprefix("\n").removesuffix("\n")


def _typed(value: str, schema: Any) -> str:
    """As JSON."""
    if schema is None or _is_string(schema):
        return _said(value)
    text = _PYTHON.get(value.strip(), value)
    try:
        json.loads(text, parse_constant=_refused)
    except (ValueError, RecursionError, NotACall):
        return _said(value)
    return text.strip()


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
