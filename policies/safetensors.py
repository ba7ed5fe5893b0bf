"""The header of a safetensors file: which tensors it holds, as what, and whether all their bytes are there.

Bytes to values only: whoever calls has the file open. Layout: the safetensors README, "Format".
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import msgspec

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The format's own bound."""
BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
FLOATS = frozenset(("F16", "BF16", "F32", "F64"))


class SafetensorsInvalid(ValueError):
    """This is no whole safetensors file; half a sentence about it."""


class Tensor(NamedTuple):
    """What the header of a file says of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def header_length(head: bytes, file_bytes: int) -> int:
    """Bytes of the header, from the file's first ``LENGTH_BYTES``. Raises SafetensorsInvalid."""
    if len(head) < LENGTH_BYTES:
        raise SafetensorsInvalid("it is too short to be a safetensors file")
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    if not 2 <= length <= min(MAX_HEADER_BYTES, file_bytes - LENGTH_BYTES):
        raise SafetensorsInvalid("it does not begin as a safetensors file does, or is cut short")
    return length


def tensors_of(header: bytes, file_bytes: int) -> dict[str, Tensor]:
    """By name. ``header`` without its length. Raises SafetensorsInvalid."""
    try:
        raw: dict[str, Any] = msgspec.json.decode(header, type=dict[str, Any])
        raw.pop("__metadata__", None)
        entries = msgspec.convert(raw, dict[str, _Entry])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise SafetensorsInvalid("its header cannot be read") from None
    data_bytes = file_bytes - LENGTH_BYTES - len(header)
    at = 0
    for entry in sorted(entries.values(), key=lambda entry: entry.data_offsets):
        start, end = entry.data_offsets
        size = math.prod(entry.shape) * BITS[entry.dtype] // 8 if entry.dtype in BITS else end - start
        if start != at or end - start != size or min([0, *entry.shape]) < 0:
            raise SafetensorsInvalid("its tensors do not lie as its header says")
        at = end
    if at != data_bytes:
        raise SafetensorsInvalid(f"its tensors take {at} bytes, and it has {data_bytes} for them")
    return {
        name: Tensor(entry.dtype, tuple(entry.shape), entry.data_offsets[1] - entry.data_offsets[0])
        for name, entry in entries.items()
    }
