"""Grammars of text that a model writes inside of a JSON string: every literal and expression of a Lark grammar is
rewritten to match what JSON writes for the same text. What a string cannot be told of is refused by name.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from functools import lru_cache

MAX_CHARS = 1 << 14
"""Of a grammar that is rewritten, which the event loop waits for."""
_SHORT = '"\\\n\t\r\b\f'
"""Characters that JSON writes as a backslash and one more. Other control characters are in no class."""
_SPECIAL = frozenset(_SHORT) | {chr(code) for code in range(0x20)}
_PLAIN = r'[^"\\\x00-\x1f]'
_PART = re.compile(
    r"""
    (?P<comment> //[^\n]* | \#[^\n]* )
    | (?P<range> "(?:\\.|[^"\\\n])" \s* \.\. \s* "(?:\\.|[^"\\\n])" )
    | (?P<string> "(?:\\.|[^"\\\n])*" i? )
    | (?P<expression> /(?:\\.|[^/\\])+/ [a-z]* )
    | (?P<directive> %[a-z_]+ [^\n]* )
    | (?P<token> <[^>\n]*> )
    """,
    re.VERBOSE | re.DOTALL,
)
_IMPORT = re.compile(r"%import\s+common\s*(?:\.\s*(\w+)(?:\s*->\s*(\w+))?|\(([\w\s,]+)\))\s*(?://.*)?")
_COMMON = {
    "CR": r"\r",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
}
"""Of Lark's own terminals, those that have characters which JSON escapes."""
_UNESCAPED = frozenset((
    "CNAME", "DECIMAL", "DIGIT", "FLOAT", "HEXDIGIT", "INT", "LCASE_LETTER", "LETTER", "NUMBER", "SIGNED_FLOAT",
    "SIGNED_INT", "SIGNED_NUMBER", "UCASE_LETTER", "WORD",
))  # fmt: skip
_LETTERS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}


class NotEscapable(ValueError):
    """One sentence on what stands in the way."""


@lru_cache(64)
def in_json(grammar: str) -> str:
    """The same in Lark for text inside of a JSON string. Raises NotEscapable."""
    if len(grammar) > MAX_CHARS:
        raise NotEscapable(f"it has {len(grammar)} characters, and {MAX_CHARS} are allowed")
    whole = _Escaper(True)
    said = whole.grammar(grammar)
    return said if whole.is_clear else _Escaper(False).grammar(grammar)


class _Escaper:
    """llguidance takes what is longest and never goes back: behind a class that may go on with one escape no other
    escape can begin. So where a grammar has several, its classes do without: the texts that are left are its own
    still."""

    def __init__(self, escapes_in_classes: bool) -> None:
        self._escapes_in_classes = escapes_in_classes
        self._classes: set[str] = set()
        """The escapes that classes had."""
        self._literals: set[str] = set()

    @property
    def is_clear(self) -> bool:
        """What a backslash goes on with is never in doubt."""
        return not self._classes or (len(self._classes) == 1 and not self._literals)

    def grammar(self, grammar: str) -> str:
        said, at = [], 0
        for part in _PART.finditer(grammar):
            said += [grammar[at : part.start()], self._part(part)]
            at = part.end()
        return "".join([*said, grammar[at:]])

    def _part(self, part: re.Match[str]) -> str:
        text = part[0]
        match part.lastgroup:
            case "comment":
                return ""
            case "range":
                first, last = (_literal(each) for each in re.findall(r'"(?:\\.|[^"\\\n])"', text))
                return f"/{self._class(f'[{re.escape(first)}-{re.escape(last)}]')}/"
            case "string":
                content = _literal(text.removesuffix("i"))
                written = json.dumps(content, ensure_ascii=False)[1:-1]
                self._literals |= _SPECIAL & set(content)
                if text.endswith("i") and written != content:
                    raise NotEscapable(f"{text[:60]} has characters that JSON escapes, and no case")
                return json.dumps(written, ensure_ascii=False) + ("i" if text.endswith("i") else "")
            case "expression":
                source, _, flags = text[1:].rpartition("/")
                return f"/{self._expression(source, flags)}/{flags.replace('s', '')}"
            case "directive":
                return self._directive(text)
            case _:
                raise NotEscapable(f"{text[:60]} is a token, and no text")

    def _directive(self, text: str) -> str:
        if text.startswith("%ignore"):
            return "%ignore" + self.grammar(text.removeprefix("%ignore"))
        found = _IMPORT.fullmatch(text.strip())
        if found is None:
            raise NotEscapable(f"'{text[:60]}' cannot be used")
        names = (
            [(found[1], found[2] or found[1])] if found[1] else [(name.strip(),) * 2 for name in found[3].split(",")]
        )
        lines = []
        for name, alias in names:
            if name in _COMMON:
                lines.append(f"{alias}: /{self._expression(_COMMON[name], '')}/")
            elif name in _UNESCAPED:
                lines.append(f"%import common.{name}" + ("" if alias == name else f" -> {alias}"))
            else:
                raise NotEscapable(f"'common.{name[:40]}' cannot be imported")
        return "\n".join(lines)

    def _expression(self, source: str, flags: str) -> str:
        if set(flags) - set("isu"):
            raise NotEscapable(f"the flags '{flags[:20]}' cannot be used")
        said = "".join(self._atoms(source, "s" in flags))
        if "i" in flags and said != source:
            raise NotEscapable(f"/{source[:60]}/ may have characters that JSON escapes, and has no case")
        return said

    def _atoms(self, source: str, has_newline: bool) -> Iterator[str]:
        at = 0
        while at < len(source):
            char, rest = source[at], source[at : at + 80]
            if char == "[":
                end = _end_of_class(source, at)
                yield self._class(source[at:end])
                at = end
            elif char == "\\":
                atom, length = self._escape(rest)
                yield atom
                at += length
            elif char == ".":
                yield self._class(r"[\s\S]" if has_newline else r"[^\n]")
                at += 1
            elif rest.startswith("(?") and not (group := re.match(r"\(\?(?::|P?<\w+>)", rest)):
                raise NotEscapable(f"'{rest[:10]}' cannot be used")
            elif rest.startswith("(?"):
                assert group is not None
                yield group[0]
                at += len(group[0])
            else:
                yield self._char(char) if char in _SPECIAL else char
                at += 1

    def _escape(self, rest: str) -> tuple[str, int]:
        """What an expression's escape at the front becomes, and how long it is."""
        kind = rest[1:2]
        if kind and kind in "dDwWsS":
            return self._class(f"[{rest[:2]}]"), 2
        if kind in _LETTERS:
            return self._char(_LETTERS[kind]), 2
        if code := re.match(r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\[xu]\{([0-9a-fA-F]{1,5})\}", rest):
            return self._char(chr(int(code[1] or code[2] or code[3], 16))), code.end()
        if not kind or kind.isalnum():
            raise NotEscapable(f"'{rest[:2]}' cannot be used")
        return self._char(kind), 2

    def _char(self, char: str) -> str:
        """In an expression, as JSON writes it, as one that may be repeated."""
        if char not in _SPECIAL:
            return r"\/" if char == "/" else re.escape(char)
        self._literals.add(char)
        return f"(?:{re.escape(json.dumps(char)[1:-1])})"

    def _class(self, text: str) -> str:
        """One character of a class; those that JSON escapes as it does."""
        members = _members(text)
        if not _SPECIAL.intersection(members):
            return text
        escapes = "".join(re.escape(json.dumps(char)[2]) for char in _SHORT if char in members)
        plain = f"[{text}&&{_PLAIN}]"
        self._classes.add(escapes)
        if not escapes or (not self._escapes_in_classes and len(members) > len(_SPECIAL.intersection(members))):
            return plain
        return rf"(?:{plain}|\\[{escapes}])"


def _literal(quoted: str) -> str:
    try:
        text = json.loads(quoted)
    except ValueError:
        raise NotEscapable(f"{quoted[:60]} has an escape that is unknown") from None
    assert isinstance(text, str)
    return text


@lru_cache(256)
def _members(text: str) -> str:
    """Of a class, those in ASCII."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            expression = re.compile(text)
    except (re.error, FutureWarning, OverflowError):
        raise NotEscapable(f"'{text[:40]}' cannot be used") from None
    return "".join(char for char in map(chr, range(0x80)) if expression.match(char))


def _end_of_class(source: str, at: int) -> int:
    """The place behind the bracket that closes the one here."""
    found = re.compile(r"\[\^?\]?(?:\\.|[^\\\]\[])*\]", re.DOTALL).match(source, at)
    if found is None or re.search(r"&&|--|~~|\\[pPbB]", found[0]):
        raise NotEscapable(f"'{source[at : at + 40]}' cannot be used")
    return found.end()
