"""What an answer must be where calls or their arguments are held to something: a grammar in llguidance's Lark.

A model that has to call calls, and one whose functions are strict calls them as their schemas say or not at all. Where
the content itself is held to a grammar, calls may come in its place; and a model that reasons may do so before either.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gateway.parsers.calls import Calls, quoted
from gateway.parsers.reader import Thinking
from policies import wire
from policies.grammar import spelled

ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}
_TEXT = "/(?s:.*)/"
_SPACE = r"/[ \n]{0,4}/"
_NO_FENCE = r"|`[^`]|``[^`]|```[^j \t\r\n{\[]|```j[^s]|```js[^o]|```jso[^n]"
"""What begins like a fence around JSON, and cannot become one; in llguidance's expressions."""


class Callable(NamedTuple):
    """A function, and what its arguments must be; or a custom tool, and the text that it is given."""

    name: str
    parameters: dict[str, Any]
    is_strict: bool
    text: wire.Grammar | None = None
    """Of a custom tool; None: any text."""


class Held(NamedTuple):
    """What a request's calls are held to."""

    functions: Sequence[Callable]
    is_required: bool
    several: bool


class Words(NamedTuple):
    """The marks of a model's form of writing, in Lark."""

    spelled: Mapping[str, str]

    def is_token(self, word: str) -> bool:
        """It is one token, that no text can be taken for."""
        return self.spelled[word].startswith("<")


def words_of(words: Sequence[str], tokens: Mapping[str, int]) -> Words:
    """``tokens``: those that llguidance counts as special ones, by name (worker/grammar/vocabulary.py)."""
    return Words({word: f"<[{tokens[word]}]>" if word in tokens else quoted(word) for word in words})


def grammar_of(
    words: Words,
    calls: Calls,
    thinking: Thinking | None,
    is_thinking: bool,
    held: Held | None,
    content: wire.Grammar | None,
) -> wire.Grammar | None:
    """None where anything may be said. ``held``: None where there are no tools; ``content``: what the text must be."""
    has_strict = held is not None and any(function.is_strict for function in held.functions)
    has_text = held is not None and any(function.text is not None for function in held.functions)
    holds_calls = held is not None and (held.is_required or content is not None or has_strict or has_text)
    frame = calls.frame(words.spelled)
    if not holds_calls and (content is None or (thinking is None and frame is None)):
        return content
    rules = []
    if content is not None and not (held is not None and held.is_required):
        rules.append(f"content: {_content(content)}")
        said = "content" if frame is None else f"{frame.content} content"
    else:
        said = ""
    if holds_calls:
        assert held is not None
        rules += _calls(words, calls, held)
        if frame is not None:
            called = f"call | {said or f'{frame.content} {_TEXT}'}"
            said = "call" if held.is_required else called
        else:
            said = _with_calls(words, calls, held, said, rules)
    if frame is not None:
        rules.append(frame.rule)
        said = f"({frame.thought})* ({said})"
    elif thinking is not None:
        said = f"{_thought(words, thinking, is_thinking, rules)} ({said})"
    is_strict = (content is not None and content.is_strict) or has_strict
    return wire.Grammar("lark", "\n".join([f"start: {said}", *rules]) + "\n", is_strict, is_composed=True)


def _calls(words: Words, calls: Calls, held: Held) -> list[str]:
    """The rule ``call``, of any one, and those that it needs."""
    rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(held.functions)))]
    for i, function in enumerate(held.functions):
        rules.append(f"call_{i}: {calls.call(words.spelled, function.name, f'arguments_{i}')}")
        if function.text is not None:
            rules += calls.text(words.spelled, f"arguments_{i}", function.text)
            continue
        # Where it need not call, what is not strict is the model's own affair.
        is_held = function.is_strict or held.is_required or calls.needs_schema
        schema = function.parameters if is_held else ANY_ARGUMENTS
        rules += calls.arguments(words.spelled, f"arguments_{i}", schema, function.is_strict)
    return rules


def _with_calls(words: Words, calls: Calls, held: Held, content: str, rules: list[str]) -> str:
    """The rule of a whole answer; ``content``: of one without calls, empty where that is any text, or forbidden."""
    section = calls.section(words.spelled, "call", held.several)
    opener = calls.opens[0] if calls.opens and not calls.first_chars else None
    opened = section if opener is None else f"{words.spelled[opener]} {section}"
    rules.append(f"section: {opened}")
    sections = "section"
    if opener is not None and calls.between is not None and held.several:
        between = f"{quoted(calls.between)} " if calls.between else ""
        sections = f"section ({between}section)*"
    if held.is_required:
        return sections
    if content:
        return f"{content} | {sections}"
    many = "*" if held.several else "?"
    if opener is None:
        # Whatever begins like a call is one: an object, or a list, or such in a fence.
        first = "".join(f"\\{char}" for char in calls.first_chars)
        others = _NO_FENCE if "`" in calls.first_chars else ""
        rules.append(rf"TEXT: /([ \t\n]*([^ \t\n{first}]{others})(?s:.*))?/")
        return f"TEXT | {sections}"
    rules.append(f"TEXT: {_TEXT}")
    if words.is_token(opener):
        return f"TEXT (section TEXT){many}"
    rules.append(f"before[suffix={words.spelled[opener]}]: {_TEXT}")
    rules.append(f"opened: {section}")
    return f"(before opened){many} TEXT"


def _thought(words: Words, thinking: Thinking, is_thinking: bool, rules: list[str]) -> str:
    """The rule of the reasoning, which is over before anything else is said."""
    closes = words.spelled[thinking.closes]
    if words.is_token(thinking.closes):
        rules.append(f"thought: {_TEXT} {closes}")
    else:
        rules.append(f"thought[suffix={closes}]: {_TEXT}")
    if is_thinking:
        return f"thought {_SPACE}"
    return f"({words.spelled[thinking.opens]} thought {_SPACE})?"


def _content(grammar: wire.Grammar) -> str:
    """A grammar as a part of another one."""
    match grammar.kind:
        case "json_schema" | "json_object":
            return "%json " + json.dumps(json.loads(spelled(grammar))["grammars"][0]["json_schema"])
        case "lark":
            return f"%lark {{\n{grammar.source}\n}}"
        case _:
            return spelled(grammar).removeprefix("start: ")


def is_mark(name: str, is_special: bool) -> bool:
    """Whether llguidance counts an added token as a special one."""
    return is_special or re.fullmatch(r"<.+>", name) is not None
