"""The values that a field takes, where it takes only some: for whoever has sent another one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from msgspec import inspect

_PART = re.compile(r"\[[^\]]+\]|[^.\[]+(?:\[\])?")
"""A place, or a name, which in queries may itself end with []."""
_type_of = lru_cache(256)(inspect.type_info)


def choices_at(type_: Any, path: str) -> list[str]:
    """As they are written in JSON, by ``path`` of a value of this type; none where it takes any."""
    kinds = list(_each(_type_of(type_)))
    for part in _PART.findall(path):
        kinds = [kind for outer in kinds for inner in _within(outer, part) for kind in _each(inner)]
    values = {value for kind in kinds if isinstance(kind, inspect.LiteralType) for value in kind.values}
    return [f"'{value}'" if isinstance(value, str) else str(value) for value in sorted(values, key=str)]


def _each(kind: inspect.Type) -> Iterator[inspect.Type]:
    """What it may be."""
    match kind:
        case inspect.UnionType():
            for one in kind.types:
                yield from _each(one)
        case inspect.Metadata():
            yield from _each(kind.type)
        case _:
            yield kind


def _within(kind: inspect.Type, part: str) -> Iterator[inspect.Type]:
    match kind:
        case inspect.StructType():
            yield from (field.type for field in kind.fields if field.encode_name == part)
        case inspect.ListType() | inspect.VarTupleType():
            yield kind.item_type
        case inspect.DictType():
            yield kind.value_type
