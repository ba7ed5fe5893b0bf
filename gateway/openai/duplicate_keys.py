"""Objects that have a key twice: JSON leaves open which of the values counts, and readers differ in it.

A decoder keeps one of them and does not tell. What it keeps has as many strings, keys and values together, as the body,
unless a key was there twice; those of a body are counted by their quotes. Only where the numbers differ is the body
read again, for the place.

Long bodies are counted slice by slice on a thread, before they are decoded: what has very many parts would hold up
every stream while they are made.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from gateway.openai.failures import Malformed

LONG_BYTES = 64 << 10
"""Of a body that is read beside the event loop."""
MAX_PARTS, MAX_VALUES = 100_000, 1_250_000
"""Strings, lists and objects of a long body, and its commas; a prompt of a million token ids is let in."""
SLICE_BYTES = 128 << 10

_plain = msgspec.json.Decoder()


def check_keys(body: bytes, num_quotes: int) -> None:
    """Of an object or a list. Raises Malformed where an object in it has a key twice, and RecursionError."""
    try:
        kept = _plain.decode(body)
    except msgspec.DecodeError:  # numbers that no field takes, in one that nobody reads
        kept = []
    if 2 * _num_strings(kept) != num_quotes:
        _find(body)


def count_quotes(body: bytes) -> int:
    """Around strings. Raises Malformed where a long body has more parts than are read."""
    return _count_slices(body) if len(body) > LONG_BYTES else quotes_in(body)


def quotes_in(body: bytes) -> int:
    """Around strings, however many parts there are."""
    num = body.count(b'"')
    if b"\\" in body and (num_escaped := body.count(rb"\"")):
        bare = body.replace(rb"\\", b"")  # a backslash that is escaped escapes nothing
        num -= num_escaped if len(bare) == len(body) else bare.count(rb"\"")
    return num


def _count_slices(body: bytes) -> int:
    num_quotes = num_parts = num_commas = begin = 0
    while begin < len(body):
        end = begin + SLICE_BYTES
        while body[end - 1 : end] == b"\\":  # no escape is cut
            end += 1
        pieces = body[begin:end].replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        outside = b"".join(pieces[num_quotes % 2 :: 2])
        num_quotes += len(pieces) - 1
        num_parts += outside.count(b"{") + outside.count(b"[")
        num_commas += outside.count(b",")
        if num_quotes // 2 + num_parts > MAX_PARTS or num_commas > MAX_VALUES:
            most = f"{MAX_PARTS} strings, lists and objects, or than {MAX_VALUES} values in all"
            raise Malformed(f"The body has more parts than are read: more than {most}.", code="too_many_parts")
        begin = end
    return num_quotes


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
    # Functions of ours, as other threads run between their calls.
    found = json.loads(body, object_pairs_hook=_object, parse_int=_no_number, parse_float=_no_number)
    for path in _paths(found, ""):
        raise Malformed(f"Invalid body: '{path}' is there twice.", path, "duplicate_key")


def _no_number(_: str) -> None:
    return None


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
