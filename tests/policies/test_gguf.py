"""Reading a GGUF's header: what a writer of llama.cpp's own package puts there comes back, and nothing damaged costs
more than a sentence."""

from __future__ import annotations

import tracemalloc
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import gguf as package
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import gguf

TENSORS = {
    "a.weight": np.arange(64, dtype=np.float32).reshape(2, 32),
    "b.weight": np.ones(3, np.float32),
    "c.weight": np.ones((4, 2, 5), np.float16),
}


@cache
def a_file() -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.gguf"
        writer = package.GGUFWriter(path, "llama")
        writer.add_uint64("many", 1 << 40)
        writer.add_int8("few", -3)
        writer.add_float32("half", 0.5)
        writer.add_bool("yes", True)
        writer.add_string("said", "größe")
        writer.add_array("words", ["one", "東京", ""])
        writer.add_array("numbers", [1, 2, 3])
        writer.add_array("scores", [0.5, -1.0])
        for name, values in TENSORS.items():
            writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()


def parsed(content: bytes) -> gguf.Header:
    return gguf.parse(memoryview(content))


def test_what_was_written_is_read():
    header = parsed(a_file())
    assert header.version == 3
    assert header.text("general.architecture") == "llama"
    assert header.metadata["many"] == 1 << 40
    assert header.metadata["few"] == -3
    assert header.number("half") == 0.5
    assert header.flag("yes", False)
    assert header.text("said") == "größe"
    assert header.texts("words") == ["one", "東京", ""]
    assert header.numbers("numbers") == [1, 2, 3]
    assert header.numbers("scores") == [0.5, -1.0]
    for name, values in TENSORS.items():
        place = header.tensors[name]
        assert place.shape == values.shape
        found = a_file()[place.at : place.at + place.num_bytes]
        assert np.array_equal(np.frombuffer(found, values.dtype).reshape(place.shape), values)


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda header: header.integer("gone"), "it lacks gone"),
        (lambda header: header.integer("few"), "it has an impossible few: -3"),
        (lambda header: header.integer("many"), "it has an impossible many: "),
        (lambda header: header.text("yes"), "it has an impossible yes: True"),
        (lambda header: header.numbers("words"), "it has an impossible words: an array of 3"),
        (lambda header: header.texts("numbers"), "it has an impossible numbers: an array of 3"),
        (lambda header: header.flag("said", True), "it has an impossible said: größe"),
    ],
)
def test_a_value_of_another_type_is_named(ask, said):
    with pytest.raises(gguf.GgufInvalid, match=said):
        ask(parsed(a_file()))


def test_every_kind_that_llama_cpp_has_is_known_by_name():
    sizes = {kind.name: (kind.num_values, kind.num_bytes) for kind in gguf.KINDS.values()}
    theirs = {kind.name: size for kind, size in package.GGML_QUANT_SIZES.items() if kind.value in gguf.KINDS}
    assert sizes == theirs
    assert all(
        gguf.KINDS[kind.value].name == kind.name for kind in package.GGML_QUANT_SIZES if kind.value in gguf.KINDS
    )


def test_a_file_cut_anywhere_before_its_last_value_is_refused():
    content = a_file()
    end = max(place.at + place.num_bytes for place in parsed(content).tensors.values())
    assert end > len(content) - 32
    for length in range(end):
        with pytest.raises(gguf.GgufInvalid):
            parsed(content[:length])


@given(at=st.integers(0, 10_000), value=st.integers(0, 255), num_bytes=st.integers(1, 8))
def test_whatever_is_changed_in_a_file_costs_a_sentence_at_most(at, value, num_bytes):
    content = bytearray(a_file())
    at %= len(content)
    content[at : at + num_bytes] = bytes([value]) * len(content[at : at + num_bytes])
    tracemalloc.start()
    said = ""
    try:
        header = parsed(bytes(content))
        for key, what in header.metadata.items():
            if isinstance(what, gguf.Array):
                header.texts(key) if what.kind == 8 else header.numbers(key)
    except gguf.GgufInvalid as error:
        said = str(error)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert said.isprintable()
    assert peak < 1 << 20


REFUSED = {
    "another magic": (lambda c: b"GGML" + c[4:], "it does not begin as one"),
    "nothing": (lambda c: b"", "it does not begin as one"),
    "the first version": (lambda c: c[:4] + b"\x01" + c[5:], "its version is 1, where 2 and 3 are read"),
    "the other byte order": (
        lambda c: c[:4] + b"\x00\x00\x00\x03" + c[8:],
        "its version is 50331648, .*; it was written for big-endian machines",
    ),
    "a billion values": (lambda c: c[:16] + (10**9).to_bytes(8, "little") + c[24:], "cut short"),
    "a billion tensors": (lambda c: c[:8] + (10**9).to_bytes(8, "little") + c[16:], "cut short"),
    "a string that never ends": (lambda c: c.replace(b"\x05\0\0\0\0\0\0\0llama", b"\xff" * 8 + b"llama"), "cut short"),
    "words that never end": (lambda c: c.replace(b"\x03\0\0\0\0\0\0\0one", b"\xff" * 8 + b"one"), "cut short"),
    "a value twice": (lambda c: c.replace(b"many", b"said"), "it says said twice"),
    "a tensor twice": (lambda c: c.replace(b"b.weight", b"a.weight"), "it holds tensor a.weight twice"),
    "a key that is no text": (lambda c: c.replace(b"many", b"ma\xff\xfe"), "a string in its header is no UTF-8"),
    "a kind that nobody knows": (
        lambda c: c.replace(b"b.weight" + bytes.fromhex("01000000 0300000000000000 00000000"),
                            b"b.weight" + bytes.fromhex("01000000 0300000000000000 63000000")),
        "its tensor b.weight is of type 99, which is not known",
    ),
    "blocks that do not fit": (
        lambda c: c.replace(b"b.weight" + bytes.fromhex("01000000 0300000000000000 00000000"),
                            b"b.weight" + bytes.fromhex("01000000 0300000000000000 08000000")),
        "its tensor b.weight cannot be 3 in Q8_0",
    ),
    "two tensors in the same bytes": (
        lambda c: c.replace(b"b.weight" + bytes.fromhex("01000000 0300000000000000 00000000 0001000000000000"),
                            b"b.weight" + bytes.fromhex("01000000 0300000000000000 00000000 0000000000000000")),
        "its tensors a.weight and b.weight lie in the same bytes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_wrong_is_said_in_one_sentence(what):
    spoil, said = REFUSED[what]
    content = spoil(a_file())
    assert content != a_file()
    with pytest.raises(gguf.GgufInvalid, match=said):
        parsed(content)
