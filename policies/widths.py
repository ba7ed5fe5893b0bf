"""How many things a schema may mean at one place of an answer: whoever reads it has all of them in mind at once, in a
time that grows with the square of their number and more.

A choice may be any of what it offers; of lists any item of each may follow the same bracket, of objects what each says
of a property of the same name, if what has to come before it is the same. Whatever is not told apart by its first byte
counts, and so does each property that need not come.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any, NamedTuple

from policies.grammar import list_in, map_in
from policies.schemas import referred

MAX_LOOKS = 1 << 18
"""At one schema."""
_CHOICES, _CONSTANT = ("anyOf", "oneOf"), {"const", "enum"}


class Width(NamedTuple):
    num: int
    path: str
    """To the widest place, from the whole; "[]" is any item."""
    is_whole: bool = True
    """All of it has been looked at; else it may be wider elsewhere."""


def width_of(schema: Any) -> Width:
    """At its widest place."""
    looking = _Looking(schema)
    left: list[tuple[str, list[Any]]] = [("", [schema])]
    known = set[frozenset[int]]()
    widest = Width(0, "")
    while left:
        path, meant = left.pop()
        together = frozenset(map(id, meant))
        if together in known:
            continue
        known.add(together)
        num, parts = looking.offered(meant)
        if num > widest.num:
            widest = Width(num, path)
        left += [(path + step, following) for step, following in looking.following(parts)]
        if looking.num_looks > MAX_LOOKS:
            return widest._replace(is_whole=False)
    return widest


class _Looking:
    """At one schema, whose parts are there as long as this is."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self.num_looks = 0
        """At parts, names and whatever else lists have."""
        self._required: dict[int, frozenset[str]] = {}
        self._constants: dict[int, bytes] = {}
        """By the id of a part."""
        self._told: dict[tuple[int, str, bytes], int] = {}
        """What came before and a property that has said what the whole is -> the number of both together, from 1."""

    def offered(self, meant: list[Any]) -> tuple[int, list[dict[str, Any]]]:
        """How many things a value may be that is any of these, and the parts of a schema that say what they are."""
        num, parts, left, seen = 0, list[dict[str, Any]](), list(meant), set[int]()
        while left:
            part = left.pop()
            if not isinstance(part, dict) or id(part) in seen:
                continue
            seen.add(id(part))
            parts.append(part)
            choices = [each for word in _CHOICES for each in list_in(part, word)]
            # Constants are one text between them.
            offered = [each for each in choices if isinstance(each, dict) and not each.keys() & _CONSTANT]
            num += len(offered)
            left += offered
            whole, named = list_in(part, "allOf"), map_in(part, "properties")
            left += whole
            required = self._required_of(part)
            num += sum(name not in required for name in named)
            self.num_looks += 1 + len(choices) + len(whole) + len(named)
            if "$ref" in part:
                try:
                    left.append(referred(self._root, part["$ref"]))
                except LookupError:
                    continue
        return num, parts

    def following(self, parts: list[dict[str, Any]]) -> Iterator[tuple[str, list[Any]]]:
        """What may be meant together within a value that is any of these, by the step there."""
        rows = [list_in(part, "prefixItems") or list_in(part, "items") for part in parts]
        for place in range(max(map(len, rows), default=0)):
            self.num_looks += len(rows)
            if self.num_looks > MAX_LOOKS:
                return
            yield f"[{place}]", [row[place] for row in rows if place < len(row)]
        yield "[]", [part["items"] for part in parts if isinstance(part.get("items"), dict)]
        named: dict[tuple[str, int], list[Any]] = {}
        for part in parts:
            required, before = self._required_of(part), 0
            for name, child in map_in(part, "properties").items():
                named.setdefault((name, before), []).append(child)
                # One that has said what it is, is no other any more.
                if name in required and isinstance(child, dict) and child.keys() & _CONSTANT:
                    key = before, name, self._constant_of(child)
                    before = self._told.setdefault(key, len(self._told) + 1)
        for (name, _), children in named.items():
            yield f".{name}", children
        others = [part["additionalProperties"] for part in parts if isinstance(part.get("additionalProperties"), dict)]
        by_pattern = [child for part in parts for child in map_in(part, "patternProperties").values()]
        self.num_looks += len(by_pattern)
        yield ".*", others + by_pattern

    def _required_of(self, part: dict[str, Any]) -> frozenset[str]:
        required = self._required.get(id(part))
        if required is None:
            names = [name for name in list_in(part, "required") if isinstance(name, str)]
            required = self._required[id(part)] = frozenset(names)
        return required

    def _constant_of(self, part: dict[str, Any]) -> bytes:
        """The same for all that may say the same."""
        constant = self._constants.get(id(part))
        if constant is None:
            text = json.dumps([part.get("const"), part.get("enum")])
            constant = self._constants[id(part)] = blake2b(text.encode(), digest_size=16).digest()
        return constant
