"""Objects that have a key twice: JSON leaves open which of the values counts, and readers differ in it.

A decoder keeps one of them and does not tell. What it keeps has as many strings, keys and values together, as the body,
unless a key was there twice; those of a body are counted by their quotes. Only where the numbers differ is the body
read again, for the place.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from gateway.openai.failures import Malformed

_plain = msgspec.json.Decoder()


def check_keys(body: bytes) -> None:
    """Of an object or a list. Raises Malformed where an object in it has a key twice, and RecursionError."""
    try:
        kept = _plain.decode(body)
    except msgspec.DecodeError:  # numbers that no field takes, in one that nobody reads
        kept = []
    if 2 * _num_strings(kept) != _num_quotes(body):
        _find(body)


def _num_quotes(body: bytes) -> int:
    """Around strings."""
    num = body.count(b'"')
    if b"\\" in body and rb"\"" in body:
        num -= body.replace(rb"\\", b"").count(rb"\"")  # a backslash that is escaped escapes nothing
    return num


def _num_strings(value: Any) -> int:
    """Keys and values in all of it."""
    num, values = (len(value), value.values()) if type(value) is dict else (0, value)
    for each in values:
        kind = type(each)
        if kind is str:
            num += 1
        elif kind is dict or kind is list:
            num += _num_strings(each)
    return num


class _Twice(NamedTuple):
    """In place of an object."""

    key: str


def _find(body: bytes) -> None:
    found = json.loads(body, object_pairs_hook=_object, parse_int=str)
    for path in _paths(found, ""):
        raise Malformed(f"Invalid body: '{path}' is there twice.", path, "duplicate_key")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | _Twice:
    kept = dict(pairs)
    if len(kept) == len(pairs):
        return kept
    ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
    return _Twice(key)


def _paths(value: Any, path: str) -> Iterator[str]:
    """Of keys that are there twice."""
    if isinstance(value, _Twice):
        yield f"{path}.{value.key}" if path else value.key
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _paths(each, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _paths(each, f"{path}[{number}]")
