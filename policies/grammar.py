"""Grammars in the words of llguidance, which both sides hand them to: the gateway to see whether they can be read, the
worker to hold answers to them."""

from __future__ import annotations

import json
import re
from typing import Any

from policies.wire import Grammar

MAX_ROW_ITEMS, MAX_ITEMS = 1_000, 30_000
"""Of llguidance's parser where somebody wrote the rules, at one place of a text and for one mask: what ambiguous ones
take grows with the square of the former. Grammars of SQL, C, JSON, chess and English sentences came by with both, on
the 151,936 tokens of Qwen 2; with 500 and 20,000 not all of them did."""

MAX_BLANKS = 64
WHITESPACE = rf"[ \t\n\r]{{1,{MAX_BLANKS}}}"
"""Between the parts of a JSON text; a model that has nothing to say would write blanks until it is cut."""
_TEXTS = re.compile(r'"(?:\\.|[^"\\\n])*"?|/(?:\\.|[^/\\\n])*/?')
"""In Lark, what stands for itself."""
_MARK = re.compile(r"[<\[][^<>\[\]]+[>\]]")
MAX_NESTING = 100
"""Levels of a schema, each object, list and schema counted; llguidance reads 128."""


class NotReadable(ValueError):
    """One sentence on a grammar's source, without its name."""


def spelled(grammar: Grammar) -> str:
    """As llguidance reads it. Raises NotReadable; what it does not see, llguidance will."""
    match grammar.kind:
        case "json_schema":
            return _schema(read_schema(grammar.source), grammar.is_strict)
        case "json_object":
            return _schema({"type": "object"}, grammar.is_strict)
        case "regex":
            return f"start: /{_slashed(grammar.source)}/"
        case "lark":
            return grammar.source
        case "choice":
            texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in read_choice(grammar.source))
            # One lexeme: as alternatives of a rule, more than 2,000 would be too many for a row of the parser.
            return f"start: CHOICE\nCHOICE: {texts}"


def marks_in(grammar: Grammar) -> list[str]:
    """What may be called as a special token is in what answers may have to say; not the special tokens of Lark."""
    texts = _TEXTS.findall(grammar.source) if grammar.kind == "lark" else [grammar.source]
    return _MARK.findall(" ".join(texts).replace("\\", ""))


def texts_left_out(lark: str) -> str:
    """A grammar in Lark without what stands for itself."""
    return _TEXTS.sub(" ", lark)


def read_schema(source: str) -> dict[str, Any]:
    """Raises NotReadable."""
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise NotReadable(f"it is not JSON that can be read: {error}") from None
    if isinstance(schema, bool):
        return {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise NotReadable("a schema is an object")
    if not is_nested_within(schema, MAX_NESTING):
        raise NotReadable(f"it is nested more than {MAX_NESTING} levels deep")
    return schema


def schemas_of(grammar: Grammar) -> list[Any]:
    """Those in it that can be read."""
    match grammar.kind:
        case "json_schema":
            sources = [grammar.source]
        case "lark":
            sources = [line.partition("%json ")[2] for line in grammar.source.splitlines()]
        case _:
            sources = []
    found = []
    for source in filter(None, sources):
        try:
            found.append(json.loads(source))
        except (ValueError, RecursionError):
            continue
    return found


def read_choice(source: str) -> list[str]:
    """Raises NotReadable."""
    try:
        choices = json.loads(source)
    except (ValueError, RecursionError):
        choices = None
    if not isinstance(choices, list) or not choices or not all(isinstance(text, str) and text for text in choices):
        raise NotReadable("a choice is a list of one or more strings, none of them empty")
    return choices


def is_nested_within(value: Any, max_levels: int) -> bool:
    """``value``: as JSON is read. Keeps no stack of calls."""
    level = [value]
    for _ in range(max_levels):
        level = [child for each in level for child in children_of(each)]
        if not level:
            return True
    return False


def list_in(part: dict[str, Any], word: str) -> list[Any]:
    """What a part of a schema has under this word, if it is a list."""
    found = part.get(word)
    return found if isinstance(found, list) else []


def map_in(part: dict[str, Any], word: str) -> dict[str, Any]:
    """What it has under this word, if it is an object."""
    found = part.get(word)
    return found if isinstance(found, dict) else {}


def children_of(value: Any) -> list[Any]:
    """Objects and lists in it."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [child for child in inner if isinstance(child, dict | list)]


def _schema(schema: dict[str, Any], is_strict: bool) -> str:
    # What these options say is ours to decide, whatever a client's schema says of them.
    options = {"whitespace_pattern": WHITESPACE, "lenient": not is_strict, "coerce_one_of": not is_strict}
    return json.dumps({"grammars": [{"json_schema": {**schema, "x-guidance": options}}]})


def unanchored(expression: str) -> str:
    """The same where it is matched as a whole, so that anchors at its ends say nothing."""
    expression = expression.removeprefix("^")
    return expression[:-1] if re.search(r"(?<!\\)(\\\\)*\$$", expression) else expression


def _slashed(expression: str) -> str:
    """Between slashes."""
    escaped = re.sub(r"\\.|/|\n", _escaped, unanchored(expression), flags=re.DOTALL)
    # An empty pair of slashes would begin a comment.
    return escaped or "()"


def _escaped(found: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n"}.get(found[0], found[0])
