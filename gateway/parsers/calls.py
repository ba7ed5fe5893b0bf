"""How calls are written: one class for each family of models.

Each form of writing has words that open it, reads what follows as a generator of characters (gateway/parsers/scan.py),
and can say itself as a grammar, for a model that has to call. The forms were read from the models' chat templates:
Hermes 2 Pro and Qwen 2.5, Llama 3.1, Mistral 7B v0.3 and Small 3, DeepSeek V3 and V3.1, Kimi K2.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from gateway.parsers.custom import ARGUMENT, PARAMETERS
from gateway.parsers.escaping import in_json
from gateway.parsers.scan import NotACall, Read, anything, container, is_mark, literal, scalar, spaces, string, until
from policies import grammar as grammars
from policies import wire

ARGUMENTS = ("arguments", "parameters")
_FIRST_PAIR = re.compile(r'\{\s*"([^"]*)("?)\s*:?\s*(?:"([^"]*)("?))?')
"""Of an object that may have been cut."""


class Sink(Protocol):
    """Is told of a call as it is read."""

    def begin(self, name: str) -> None:
        """Raises NotACall where there is no such tool."""

    def arguments(self, text: str) -> None:
        """More of them."""

    def end(self) -> None:
        """The call is whole."""

    def schema(self, name: str, key: str) -> Any:
        """What an argument of a function has to be; None where nothing is said of it."""


class Frame(NamedTuple):
    """What stands around the parts of an answer, in Lark, where even its text does not stand by itself."""

    thought: str
    """One piece of reasoning; there may be none or several."""
    content: str
    """What comes before the text."""
    rule: str
    """That the former needs."""


class Calls:
    """A form of writing calls."""

    marks: tuple[str, ...] = ()
    """Words of it that may be special tokens."""
    opens: tuple[str, ...] = ()
    """Of those: whichever a call may begin with, anywhere in a text."""
    first_chars = ""
    """With these a call begins without any such word, as the whole answer."""
    id_chars = 24
    """Random ones in the id of a call."""
    id_prefix = "call_"
    needs_schema = False
    """Arguments are not written as one object, so a grammar has to know each of them."""
    between: str | None = None
    """What is written between one opening word's calls and the next one's; None: all calls follow one opening word."""

    def read(self, spelled: Mapping[str, str], sink: Sink) -> Read[None]:
        """A call, or several that belong together, from behind the opening word on, or from the first characters on.
        ``spelled``: the marks as they occur in the text."""
        raise NotImplementedError

    def call(self, words: Mapping[str, str], name: str, arguments: str) -> str:
        """One call in Lark. ``words``: the marks in Lark; ``arguments``: the rule for them."""
        return f"""{quoted(f'{{"name": "{name}", "arguments": ')} {arguments} {quoted("}")}"""

    def arguments(self, words: Mapping[str, str], rule: str, schema: dict[str, Any], is_strict: bool) -> list[str]:
        """The rule of that name in Lark, for one function's arguments, and those that it needs."""
        return [f"{rule}: %json {json_schema(schema, is_strict)}"]

    def text(self, words: Mapping[str, str], rule: str, grammar: wire.Grammar) -> list[str]:
        """As ``arguments``, for a custom tool whose text is in this grammar, an expression or Lark. Raises
        NotEscapable."""
        if grammar.kind == "regex":
            text = {"type": "string", "pattern": f"^(?:{grammars.unanchored(grammar.source)})$"}
            return [f"{rule}: %json {json_schema({**PARAMETERS, 'properties': {ARGUMENT: text}}, False)}"]
        whole = f"""{quoted(f'{{"{ARGUMENT}": "')} {rule}_text {quoted('"}')}"""
        return [f"{rule}: {whole}", f"{rule}_text: %lark {{\n{in_json(grammar.source)}\n}}"]

    def frame(self, words: Mapping[str, str]) -> Frame | None:
        """None where text is written as it is."""
        return None

    def section(self, words: Mapping[str, str], call: str, several: bool) -> str:
        """What follows the opening word, in Lark; ``call``: the rule of any one call."""
        raise NotImplementedError


class Hermes(Calls):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, one after another."""

    marks = ("<tool_call>", "</tool_call>")
    opens = ("<tool_call>",)
    between = "\n"

    def read(self, spelled: Mapping[str, str], sink: Sink) -> Read[None]:
        yield from an_object((yield from spaces((yield))), sink)
        yield from literal(spelled["</tool_call>"], (yield from spaces((yield))))

    def section(self, words: Mapping[str, str], call: str, several: bool) -> str:
        return f"""{quoted(chr(10))} {call} {quoted(chr(10))} {words["</tool_call>"]}"""


class Json(Calls):
    """The answer is an object with name and arguments, or an array of such; perhaps fenced as Markdown."""

    first_chars = "{[`"

    def read(self, spelled: Mapping[str, str], sink: Sink) -> Read[None]:
        char = yield from spaces((yield))
        is_fenced = char == "`"
        if is_fenced:
            yield from literal("```", char)
            char = yield
            if char == "j":
                yield from literal("json", char)
                char = yield
            char = yield from spaces(char)
        if char == "[":
            yield from an_array(char, sink)
        else:
            yield from an_object(char, sink)
            while not is_fenced:  # Llama divides several by a semicolon
                char = yield from spaces((yield))
                if char == ";":
                    char = yield from spaces((yield))
                yield from an_object(char, sink)
        if is_fenced:
            yield from literal("```", (yield from spaces((yield))))

    def section(self, words: Mapping[str, str], call: str, several: bool) -> str:
        return f"""{call} | "[" {call} ("," {call})+ "]" """ if several else call


class Llama(Json):
    """As ``Json`` without more, or behind ``<|python_tag|>``."""

    marks = ("<|python_tag|>",)
    opens = ("<|python_tag|>",)
    first_chars = "{"

    def call(self, words: Mapping[str, str], name: str, arguments: str) -> str:
        return f"""{quoted(f'{{"name": "{name}", "parameters": ')} {arguments} {quoted("}")}"""

    def section(self, words: Mapping[str, str], call: str, several: bool) -> str:
        return f"""{call} ("; " {call})*""" if several else call


class Mistral(Calls):
    """``[TOOL_CALLS]`` and an array; newer ones write ``[TOOL_CALLS]name[ARGS]{...}`` for each call."""

    marks = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    opens = ("[TOOL_CALLS]",)
    id_chars = 9
    id_prefix = ""

    def read(self, spelled: Mapping[str, str], sink: Sink) -> Read[None]:
        char = yield from spaces((yield))
        if char == "[":
            return (yield from an_array(char, sink))
        name = ""
        while char not in "{[" and not is_mark(char) and len(name) < 256:
            name += char
            char = yield
        if char != "{":
            # There may be an id too, which is the model's own affair: a client gets one that nobody had before.
            between = yield from until("{", char)
            if not between.endswith(spelled["[ARGS]"]):
                raise NotACall
        sink.begin(name.strip())
        yield from container("{", sink.arguments)
        sink.end()
        return None

    def call(self, words: Mapping[str, str], name: str, arguments: str) -> str:
        if self.is_newer(words):
            return f"{quoted(name)} {words['[ARGS]']} {arguments}"
        return super().call(words, name, arguments)

    def section(self, words: Mapping[str, str], call: str, several: bool) -> str:
        if self.is_newer(words):
            return f"{call} ({words['[TOOL_CALLS]']} {call})*" if several else call
        others = f'("," {call})*' if several else ""
        return f'"[" {call} {others} "]"'

    @staticmethod
    def is_newer(words: Mapping[str, str]) -> bool:
        """Its vocabulary has the word before the arguments."""
        return not words["[ARGS]"].startswith('"')


class DeepSeek(Calls):
    """``name<｜tool▁sep｜>{...}`` between marks; V3 and R1 write ``function``, the name and a fenced block."""

    marks = (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    )
    opens = ("<｜tool▁calls▁begin｜>",)

    def read(self, spelled: Mapping[str, str], sink: Sink) -> Read[None]:
        begin, end = spelled["<｜tool▁call▁begin｜>"], spelled["<｜tool▁call▁end｜>"]
        yield from literal(begin, (yield from spaces((yield))))
        while True:
            name = yield from until(spelled["<｜tool▁sep｜>"], (yield))
            char = yield from spaces((yield))
            if name.strip() == "function" and char != "{":  # else it is what a tool is called
                name = yield from until("\n", char)
                yield from literal("```json", (yield from spaces((yield))))
                char = yield from spaces((yield))
            sink.begin(name.strip())
            yield from container(char, sink.arguments)
            sink.end()
            char = yield from spaces((yield))
            if char == "`":
                yield from literal("```", char)
                char = yield from spaces((yield))
            yield from literal(end, char)
            if (yield from one_of(begin, spelled["<｜tool▁calls▁end｜>"])):
                return

    def call(self, words: Mapping[str, str], name: str, arguments: str) -> str:
        return f"{quoted(name)} {words['<｜tool▁sep｜>']} {arguments}"

    def section(self, words: Mapping[str, str], call: str, several: bool) -> str:
        each = f"{words['<｜tool▁call▁begin｜>']} {call} {words['<｜tool▁call▁end｜>']}"
        return f"({each}){'+' if several else ''} {words['<｜tool▁calls▁end｜>']}"


class Kimi(Calls):
    """``functions.name:0`` and the arguments between marks."""

    marks = (
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    )
    opens = ("<|tool_calls_section_begin|>",)

    def read(self, spelled: Mapping[str, str], sink: Sink) -> Read[None]:
        begin = spelled["<|tool_call_begin|>"]
        yield from literal(begin, (yield from spaces((yield))))
        while True:
            name = yield from until(spelled["<|tool_call_argument_begin|>"], (yield))
            sink.begin(name.strip().removeprefix("functions.").rpartition(":")[0])
            yield from container((yield from spaces((yield))), sink.arguments)
            sink.end()
            yield from literal(spelled["<|tool_call_end|>"], (yield from spaces((yield))))
            if (yield from one_of(begin, spelled["<|tool_calls_section_end|>"])):
                return

    def call(self, words: Mapping[str, str], name: str, arguments: str) -> str:
        return f"{quoted(f'functions.{name}:')} /[0-9]{{1,3}}/ {words['<|tool_call_argument_begin|>']} {arguments}"

    def section(self, words: Mapping[str, str], call: str, several: bool) -> str:
        each = f"{words['<|tool_call_begin|>']} {call} {words['<|tool_call_end|>']}"
        return f"({each}){'+' if several else ''} {words['<|tool_calls_section_end|>']}"


# What they are made of


def quoted(text: str) -> str:
    """In Lark."""
    return json.dumps(text)


def json_schema(schema: dict[str, Any], is_strict: bool) -> str:
    """As a part of Lark."""
    grammar = wire.Grammar("json_schema", json.dumps(schema), is_strict)
    return json.dumps(json.loads(grammars.spelled(grammar))["grammars"][0]["json_schema"])


def an_object(char: str, sink: Sink) -> Read[None]:
    """``{"name": ..., "arguments": {...}}``, exactly, with the keys in any order and others among them."""
    name: str | None = None
    early = ""  # arguments that came before the name
    has_begun = False
    yield from literal("{", char)
    char = yield from spaces((yield))
    while char != "}":
        key = yield from string(char)
        yield from literal(":", (yield from spaces((yield))))
        char = yield from spaces((yield))
        if key == "name" and name is None:
            name = yield from string(char)
            if early:
                sink.begin(name)
                sink.arguments(early)
                has_begun = True
            char = yield
        elif key in ARGUMENTS and not has_begun and not early:
            if char == "{" and name is not None:
                sink.begin(name)
                has_begun = True
                yield from container(char, sink.arguments)
                char = yield
            else:
                early, char = yield from _early(char)
                if name is not None:
                    sink.begin(name)
                    sink.arguments(early)
                    has_begun = True
        else:
            char = yield from anything(char)
        char = yield from spaces(char)
        if char == ",":
            char = yield from spaces((yield))
            if char == "}":
                raise NotACall
        elif char != "}":
            raise NotACall
    if name is None:
        raise NotACall
    if not has_begun:
        sink.begin(name)
        sink.arguments(early or "{}")
    sink.end()


def is_calling(text: str, names: frozenset[str]) -> bool:
    """Whether the beginning of an object, or of what is around one, says that it calls one of these as far as it came:
    its name comes first, or behind its type. Other objects are texts whose ends are missing."""
    found = _FIRST_PAIR.search(text)
    if found is None:
        return True
    key, is_whole, value, is_said = found.groups()
    values = {"name": names, "type": {"function"}}
    if not is_whole:
        return any(word.startswith(key) for word in values)
    among = values.get(key, ())
    return any(word == value if is_said else word.startswith(value or "") for word in among)


def _early(char: str) -> Read[tuple[str, str]]:
    """Arguments that cannot be told as they come: ahead of their name, or JSON in a string; and the character behind
    them."""
    if char == "{":
        parts: list[str] = []
        yield from container(char, parts.append)
        return "".join(parts), (yield)
    if char == '"':
        text = (yield from string(char, 1 << 20)).strip()
        if not text.startswith("{"):
            raise NotACall
        return text, (yield)
    word, char = yield from scalar(char)
    if word != "null":
        raise NotACall
    return "{}", char


def an_array(char: str, sink: Sink) -> Read[None]:
    """Objects in brackets, exactly."""
    yield from literal("[", char)
    while True:
        yield from an_object((yield from spaces((yield))), sink)
        char = yield from spaces((yield))
        if char == "]":
            return
        yield from literal(",", char)


def one_of(again: str, end: str) -> Read[bool]:
    """One of two words, behind spaces; whether it was ``end``."""
    text = yield from spaces((yield))
    while text not in (again, end):
        if not again.startswith(text) and not end.startswith(text):
            raise NotACall
        text += yield
    return text == end
