"""The values that a field takes, where it takes only some, and the fields of an object: for who has sent others."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from msgspec import inspect

_NO_CHOICE = "Invalid enum value "
_PART = re.compile(r"\[[^\]]+\]|[^.\[]+(?:\[\])?")
"""A place, or a name, which in queries may itself end with []."""
_type_of = lru_cache(256)(inspect.type_info)


def told_choices(what: str, type_: Any, path: str, of_keys: bool = False) -> str:
    """``what`` msgspec has against the value at ``path`` of one of this type, or against its keys, which in its words
    is "Invalid enum value 'x'", as "Expected one of 'a', 'b', got 'x'". All else as it is."""
    choices = _choices_at(type_, path, of_keys) if what.startswith(_NO_CHOICE) else []
    return f"Expected one of {', '.join(choices)}, got {what.removeprefix(_NO_CHOICE)}" if choices else what


def nearest_field(name: str, type_: Any, path: str) -> str | None:
    """Of those that the object at ``path`` of one of this type may have, the one that is probably meant by this."""
    structs = [kind for kind in _at(type_, path) if isinstance(kind, inspect.StructType)]
    names = [field.encode_name for struct in structs for field in struct.fields]
    return next(iter(difflib.get_close_matches(name, names, 1)), None)


def _choices_at(type_: Any, path: str, of_keys: bool) -> list[str]:
    """As they are written in JSON; none where it takes any."""
    kinds = _at(type_, path)
    if of_keys:
        kinds = [key for kind in kinds if isinstance(kind, inspect.DictType) for key in _each(kind.key_type)]
    values = {value for kind in kinds if isinstance(kind, inspect.LiteralType) for value in kind.values}
    return [f"'{value}'" if isinstance(value, str) else str(value) for value in sorted(values, key=str)]


def _at(type_: Any, path: str) -> list[inspect.Type]:
    """What may be there."""
    kinds = list(_each(_type_of(type_)))
    for part in _PART.findall(path):
        kinds = [kind for outer in kinds for inner in _within(outer, part) for kind in _each(inner)]
    return kinds


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
