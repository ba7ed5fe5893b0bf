"""The header of a GGUF file (llama.cpp's container, versions 2 and 3): its metadata, and where its tensors lie.

Bytes to values only: whoever calls has the file open, the gateway for the tokenizer and the worker for the weights.
Nothing in the file is believed before it is held against the file's length, so a damaged one costs no more memory than
it has bytes. Layout: ggml's docs/gguf.md.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import PurePath
from typing import NamedTuple, TypeVar

from policies.terms import printable

MAX_DIMENSIONS = 4
SUFFIX = ".gguf"

MAGIC = b"GGUF"
"""What a file begins with."""
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""struct's letters for the types of metadata values."""
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_MAX_PARTS = 1000

_Place = TypeVar("_Place", bound=PurePath)


class GgufInvalid(ValueError):
    """This is no whole GGUF file, or its metadata says what cannot be; half a sentence about it."""


def shown(name: str) -> str:
    """A name out of the file, fit to stand in a sentence."""
    clean = printable(name[:80])
    return clean if len(name) <= 80 else f"{clean}…"


class PartName(NamedTuple):
    """What the name of a file that is a part of a model says, as llama.cpp's gguf-split gives it."""

    model: str
    number: int
    """From 1."""
    num_parts: int

    @property
    def first(self) -> str:
        return self.of(1)

    def of(self, number: int) -> str:
        return f"{self.model}-{number:05d}-of-{self.num_parts:05d}{SUFFIX}"


def part_name(name: str) -> PartName | None:
    """None: it is that of a whole file."""
    found = _PART.fullmatch(name)
    if found is None:
        return None
    part = PartName(found[1], int(found[2]), int(found[3]))
    return part if 1 <= part.number <= part.num_parts <= _MAX_PARTS else None


def parts_of(path: _Place) -> list[_Place]:
    """Itself, or all the parts of the model that it is one of."""
    part = part_name(path.name)
    return [path] if part is None else [path.with_name(part.of(number + 1)) for number in range(part.num_parts)]


class Kind(NamedTuple):
    """How a tensor's values are stored: rows are whole blocks of ``num_values`` values in ``num_bytes`` bytes."""

    name: str
    num_values: int
    num_bytes: int


FLOATS = ("F32", "F16", "BF16")
FOUR_BITS = ("Q4_0", "Q4_1", "Q4_K")
"""Those that stay four bits once they are loaded."""
SMALL_FLOATS = ("MXFP4",)
"""Numbers of few bits, that floats have as well and become; whatever else is served becomes eight bits."""
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
KINDS: dict[int, Kind] = {
    0: Kind("F32", 1, 4),
    1: Kind("F16", 1, 2),
    2: Kind("Q4_0", 32, 18),
    3: Kind("Q4_1", 32, 20),
    6: Kind("Q5_0", 32, 22),
    7: Kind("Q5_1", 32, 24),
    8: Kind("Q8_0", 32, 34),
    10: Kind("Q2_K", 256, 84),
    11: Kind("Q3_K", 256, 110),
    12: Kind("Q4_K", 256, 144),
    13: Kind("Q5_K", 256, 176),
    14: Kind("Q6_K", 256, 210),
    16: Kind("IQ2_XXS", 256, 66),
    17: Kind("IQ2_XS", 256, 74),
    18: Kind("IQ3_XXS", 256, 98),
    19: Kind("IQ1_S", 256, 50),
    20: Kind("IQ4_NL", 32, 18),
    21: Kind("IQ3_S", 256, 110),
    22: Kind("IQ2_S", 256, 82),
    23: Kind("IQ4_XS", 256, 136),
    24: Kind("I8", 1, 1),
    25: Kind("I16", 1, 2),
    26: Kind("I32", 1, 4),
    27: Kind("I64", 1, 8),
    28: Kind("F64", 1, 8),
    29: Kind("IQ1_M", 256, 56),
    30: Kind("BF16", 1, 2),
    34: Kind("TQ1_0", 256, 54),
    35: Kind("TQ2_0", 256, 66),
    39: Kind("MXFP4", 32, 17),
}


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where one tensor lies."""

    name: str
    shape: tuple[int, ...]
    """Outermost dimension first, as torch has it."""
    kind: Kind
    at: int
    """Of its first byte, from the beginning of the file, or of the part."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Array:
    """An array of the metadata, not yet decoded."""

    kind: int
    count: int
    at: int


Value = int | float | bool | str | Array


@dataclass(slots=True)
class Header:
    """What stands before the tensors' bytes."""

    version: int
    metadata: dict[str, Value]
    tensors: dict[str, TensorPlace]
    _view: memoryview = field(repr=False)

    def text(self, key: str, default: str | None = None) -> str:
        """Raises GgufInvalid."""
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key)
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """Raises GgufInvalid."""
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
            raise self.wrong(key)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Raises GgufInvalid."""
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.wrong(key)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Raises GgufInvalid."""
        value = self.metadata.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key)
        return value

    def texts(self, key: str) -> list[str]:
        """An array of strings; bytes that are no UTF-8 become U+FFFD. Raises GgufInvalid."""
        array = self.metadata.get(key)
        if not isinstance(array, Array) or array.kind != _STRING:
            raise self.wrong(key)
        return [str(piece, "utf-8", "replace") for piece in _pieces(self._view, array.at, array.count)]

    def numbers(self, key: str) -> list[float]:
        """An array of numbers. Raises GgufInvalid."""
        array = self.metadata.get(key)
        if not isinstance(array, Array) or array.kind not in _SCALARS:
            raise self.wrong(key)
        return list(struct.unpack_from(f"<{array.count}{_SCALARS[array.kind]}", self._view, array.at))

    def loaded_bytes(self, plain_bytes: float, table_bytes: float) -> float:
        """About what the matrices take once they are loaded: a value of those that are or become floats
        ``plain_bytes``, of the others half a byte with its part of a scale and an offset, or a byte. Of the embedding
        rows are looked up, at ``table_bytes`` a value; it is multiplied as well where there is no head."""
        sizes = {**dict.fromkeys((*FLOATS, *SMALL_FLOATS), plain_bytes), **dict.fromkeys(FOUR_BITS, 0.75)}
        held = 0.0
        for name, place in self.tensors.items():
            if len(place.shape) > 1:
                num_values = math.prod(place.shape)
                if name == EMBEDDING:
                    held += num_values * table_bytes
                if name != EMBEDDING or HEAD not in self.tensors:
                    held += num_values * sizes.get(place.kind.name, 1.0)
        return held

    def wrong(self, key: str) -> GgufInvalid:
        if key not in self.metadata:
            return GgufInvalid(f"it lacks {key}")
        value = self.metadata[key]
        said = f"an array of {value.count}" if isinstance(value, Array) else shown(str(value))
        return GgufInvalid(f"it has an impossible {key}: {said}")


def parse(view: memoryview) -> Header:
    """``view``: the whole file. Raises GgufInvalid."""
    try:
        return _parse(view)
    except (struct.error, OverflowError):  # the latter where a length is larger than any place
        raise GgufInvalid("it is cut short: it ends within its header") from None


def joined(parts: Sequence[Header]) -> Header:
    """That of a model in parts, or of a whole file: with the tensors of all of them, and the metadata of the first.
    Raises GgufInvalid."""
    first, tensors = parts[0], dict[str, TensorPlace]()
    for number, part in enumerate(parts):
        place = part.integer("split.no", 0) + 1, max(1, part.integer("split.count", 1))
        if place != (number + 1, len(parts)):
            named = f"part {number + 1} of {len(parts)}" if len(parts) > 1 else "a whole file"
            raise GgufInvalid(f"it says that it is part {place[0]} of {place[1]}, and by its name it is {named}")
        if twice := sorted(tensors.keys() & part.tensors.keys()):
            raise GgufInvalid(f"its parts hold tensor {shown(twice[0])} twice")
        tensors |= part.tensors
    if len(parts) > 1 and len(tensors) != (wanted := first.integer("split.tensors.count", len(tensors))):
        raise GgufInvalid(f"its parts hold {len(tensors)} tensors, and {wanted} belong to it")
    return Header(first.version, first.metadata, tensors, first._view)


def _parse(view: memoryview) -> Header:
    if bytes(view[:4]) != MAGIC:
        raise GgufInvalid("it does not begin as one")
    version, num_tensors, num_values = struct.unpack_from("<IQQ", view, 4)
    if version not in (2, 3):
        swapped = "; it was written for big-endian machines" if version & 0xFFFF == 0 else ""
        raise GgufInvalid(f"its version is {version}, where 2 and 3 are read{swapped}")
    # The shortest value and the shortest tensor take so many bytes.
    at = 24
    _fits(view, at, num_values, 8 + 4 + 1)
    metadata: dict[str, Value] = {}
    for _ in range(num_values):
        key, at = _string(view, at)
        if key in metadata:
            raise GgufInvalid(f"it says {shown(key)} twice")
        (kind,) = struct.unpack_from("<I", view, at)
        metadata[key], at = _value(view, at + 4, kind, key)
    _fits(view, at, num_tensors, 8 + 4 + 8 + 4 + 8)
    heads = []
    for _ in range(num_tensors):
        head, at = _tensor(view, at)
        heads.append(head)
    alignment = metadata.get("general.alignment", 32)
    if isinstance(alignment, bool) or not isinstance(alignment, int) or not 8 <= alignment <= 1 << 20 or alignment % 8:
        raise GgufInvalid(f"it has an impossible general.alignment: {shown(str(alignment))}")
    begin = -(-at // alignment) * alignment
    tensors: dict[str, TensorPlace] = {}
    for name, shape, kind, offset in heads:
        if name in tensors:
            raise GgufInvalid(f"it holds tensor {shown(name)} twice")
        tensors[name] = _placed(name, shape, kind, begin + offset, len(view), alignment)
    in_order = sorted(tensors.values(), key=lambda place: place.at)
    for place, after in pairwise(in_order):
        if place.at + place.num_bytes > after.at:
            raise GgufInvalid(f"its tensors {shown(place.name)} and {shown(after.name)} lie in the same bytes")
    return Header(version, metadata, tensors, view)


def _string(view: memoryview, at: int) -> tuple[str, int]:
    (length,) = _LENGTH.unpack_from(view, at)
    _fits(view, at + 8, length, 1)
    end = at + 8 + length
    try:
        return str(view[at + 8 : end], "utf-8"), end
    except UnicodeDecodeError:
        raise GgufInvalid("a string in its header is no UTF-8") from None


def _value(view: memoryview, at: int, kind: int, key: str) -> tuple[Value, int]:
    if kind in _SCALARS:
        scalar: int | float | bool
        (scalar,) = struct.unpack_from(f"<{_SCALARS[kind]}", view, at)
        return scalar, at + struct.calcsize(f"<{_SCALARS[kind]}")
    if kind == _STRING:
        return _string(view, at)
    if kind != _ARRAY:
        raise GgufInvalid(f"its {shown(key)} is of type {kind}, which is not known")
    item_kind, count = struct.unpack_from("<IQ", view, at)
    at += 12
    if item_kind in _SCALARS:
        size = struct.calcsize(f"<{_SCALARS[item_kind]}")
        _fits(view, at, count, size)
        return Array(item_kind, count, at), at + count * size
    if item_kind != _STRING:
        raise GgufInvalid(f"its {shown(key)} is an array of type {item_kind}, which is not read")
    _fits(view, at, count, 8)
    end = at
    unpack = _LENGTH.unpack_from
    for _ in range(count):
        end += 8 + unpack(view, end)[0]
    _fits(view, at, end - at, 1)
    return Array(item_kind, count, at), end


def _pieces(view: memoryview, at: int, count: int) -> Iterator[memoryview]:
    unpack = _LENGTH.unpack_from
    for _ in range(count):
        begin = at + 8
        at = begin + unpack(view, at)[0]
        yield view[begin:at]


def _tensor(view: memoryview, at: int) -> tuple[tuple[str, tuple[int, ...], int, int], int]:
    name, at = _string(view, at)
    (num_dimensions,) = struct.unpack_from("<I", view, at)
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise GgufInvalid(f"its tensor {shown(name)} has {num_dimensions} dimensions")
    *shape, kind, offset = struct.unpack_from(f"<{num_dimensions}QIQ", view, at + 4)
    return (name, tuple(reversed(shape)), kind, offset), at + 4 + 8 * num_dimensions + 12


def _placed(name: str, shape: tuple[int, ...], kind: int, at: int, size: int, alignment: int) -> TensorPlace:
    said = shown(name)
    if kind not in KINDS:
        raise GgufInvalid(f"its tensor {said} is of type {kind}, which is not known")
    known = KINDS[kind]
    if shape[-1] % known.num_values or not all(shape):
        raise GgufInvalid(f"its tensor {said} cannot be {'x'.join(map(str, shape))} in {known.name}")
    num_bytes = math.prod(shape) // known.num_values * known.num_bytes
    if at % alignment:
        raise GgufInvalid(f"its tensor {said} does not begin at a multiple of {alignment} bytes")
    if at + num_bytes > size:
        raise GgufInvalid(f"it is cut short: its tensor {said} ends at byte {at + num_bytes} of {size}")
    return TensorPlace(name, shape, known, at, num_bytes)


def _fits(view: memoryview, at: int, count: int, size: int) -> None:
    """Whether so many things of this size, or more, can follow."""
    if count * size > len(view) - at:
        raise GgufInvalid("it is cut short: it ends within its header")
