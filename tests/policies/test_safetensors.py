"""Headers of safetensors files: what they say, and that damaged ones are told."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.safetensors import SafetensorsInvalid, Tensor, header_length, tensors_of


def read(content: bytes) -> dict[str, Tensor]:
    length = header_length(content[:8], len(content))
    return tensors_of(content[8 : 8 + length], len(content))


def file_of(entries: object, num_data_bytes: int) -> bytes:
    header = json.dumps(entries).encode()
    return len(header).to_bytes(8, "little") + header + bytes(num_data_bytes)


TENSORS = {
    "__metadata__": {"format": "pt"},
    "b": {"dtype": "F32", "shape": [2], "data_offsets": [12, 20]},
    "a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
}
WHOLE = file_of(TENSORS, 20)


def test_a_whole_file_says_what_it_holds():
    assert read(WHOLE) == {"a": Tensor("BF16", (2, 3), 12), "b": Tensor("F32", (2,), 8)}
    assert read(WHOLE)["a"].num_values == 6


@pytest.mark.parametrize(
    "content",
    [
        b"",
        WHOLE[:-1],
        WHOLE + b"\0",
        b"<!DOCTYPE html><html></html>",
        file_of([1, 2], 0),
        file_of({"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, 12),
        file_of({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, 8),
        file_of({"a": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}}, 8),
    ],
)
def test_a_damaged_one_is_told(content):
    with pytest.raises(SafetensorsInvalid):
        read(content)


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(content):
    with contextlib.suppress(SafetensorsInvalid):
        read(content)


@given(st.integers(0, len(WHOLE) - 1))
def test_wherever_it_is_cut_short_it_is_told(length):
    with pytest.raises(SafetensorsInvalid):
        read(WHOLE[:length])
