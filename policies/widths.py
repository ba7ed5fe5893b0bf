"""How many things a schema may mean at one place of an answer: whoever reads it has all of them in mind at once, in a
time that grows with the square of their number and more.

A choice may be any of what it offers; of lists any item of each may follow the same bracket, of objects what each says
of a property of the same name, if what has to come before it is the same. Whatever is not told apart by its first byte
counts, and so does each property that need not come.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from policies.grammar import list_in, map_in
from policies.schemas import referred

MAX_LOOKS = 1 << 18
"""At parts, of one schema."""
_CHOICES, _CONSTANT = ("anyOf", "oneOf"), {"const", "enum"}


class Width(NamedTuple):
    num: int
    path: str
    """To the widest place, from the whole; "[]" is any item."""
    is_whole: bool = True
    """All of it has been looked at; else it may be wider elsewhere."""


def width_of(schema: Any) -> Width:
    """At its widest place."""
    left: list[tuple[str, list[Any]]] = [("", [schema])]
    known = set[frozenset[int]]()
    widest, num_looks = Width(0, ""), 0
    while left:
        path, meant = left.pop()
        together = frozenset(map(id, meant))
        if together in known:
            continue
        known.add(together)
        num, parts = _offered(schema, meant)
        if num > widest.num:
            widest = Width(num, path)
        num_looks += num + len(parts)
        for step, following in _following(parts):
            num_looks += len(following)
            left.append((path + step, following))
        if num_looks > MAX_LOOKS:
            return widest._replace(is_whole=False)
    return widest


def _offered(root: Any, meant: list[Any]) -> tuple[int, list[dict[str, Any]]]:
    """How many things a value may be that is any of these, and the parts of a schema that say what they are."""
    num, parts, left, seen = 0, list[dict[str, Any]](), list(meant), set[int]()
    while left:
        part = left.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        parts.append(part)
        for word in _CHOICES:
            # Constants are one text between them.
            offered = [each for each in list_in(part, word) if isinstance(each, dict) and not each.keys() & _CONSTANT]
            num += len(offered)
            left += offered
        left += list_in(part, "allOf")
        required = list_in(part, "required")
        num += sum(name not in required for name in map_in(part, "properties"))
        if "$ref" in part:
            try:
                left.append(referred(root, part["$ref"]))
            except LookupError:
                continue
    return num, parts


def _following(parts: list[dict[str, Any]]) -> Iterator[tuple[str, list[Any]]]:
    """What may be meant together within a value that is any of these, by the step there."""
    rows = [list_in(part, "prefixItems") or list_in(part, "items") for part in parts]
    for place in range(max(map(len, rows), default=0)):
        yield f"[{place}]", [row[place] for row in rows if place < len(row)]
    yield "[]", [part["items"] for part in parts if isinstance(part.get("items"), dict)]
    named: dict[tuple[str, str], list[Any]] = {}
    for part in parts:
        required, before = list_in(part, "required"), ""
        for name, child in map_in(part, "properties").items():
            named.setdefault((name, before), []).append(child)
            # One that has said what it is, is no other any more.
            if name in required and isinstance(child, dict) and child.keys() & _CONSTANT:
                before += json.dumps([name, child.get("const"), child.get("enum")])
    for (name, _), children in named.items():
        yield f".{name}", children
    others = [part["additionalProperties"] for part in parts if isinstance(part.get("additionalProperties"), dict)]
    yield ".*", others + [child for part in parts for child in map_in(part, "patternProperties").values()]
