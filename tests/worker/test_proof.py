"""Kernels that compute something else than torch, or crash, are found out before anything is computed with them."""

from __future__ import annotations

import logging
import resource
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.worker.compiling import COMPILER, SWITCH, changed, made, needs_compiler, switch
from worker import proof
from worker.native import trusted
from worker.native.check import agrees_with_torch
from worker.native.library import Library
from worker.native.trusted import Unproved, library, prove

WITH_EXCEPTIONS = "_mm512_or_si512(low, _mm512_load_si512(held[one] + line * Coded::LINE))"
SLIPS = [
    ("small.h", "return 1.0f / std::sqrt", "1.0f", "1.02f"),
    ("decode.h", "= slot *", "slot", "(slot ^ 1)"),
    ("chunk.h", "score = positions >= key ?", "positions >= key", "positions > key"),
    ("chunk.h", "sinks[(first + at) % group]", "(first + at) % group", "at % 2"),
    ("forms.h", "dim % TILE * DEPTH;", "dim", "(dim ^ 1)"),
    ("small.h", "x[i] * 0.70710678118654752f", "0.70710678118654752f", "0.71f"),
    ("small.h", "* (up + 1.0f)", "up + 1.0f", "up"),
    ("maxima.h", "return (one > other) |", "one > other", "one < other"),
    ("maxima.h", "(places[i] - row * of.vocab_size)", "row * of.vocab_size", "0"),
    ("as_floats.h", "* 0x1p120f", "0x1p120f", "0x1p119f"),
    ("as_floats.h", "codes >> (4 * input)", "4 * input", "4"),
    ("output.h", "gated<bf16>(as_stored(low), as_stored(high)", "as_stored(high)", "high * 1.1f"),
    ("noise.h", "(z >> 27)", "27", "28"),
    ("pairs.h", "TILE_SIZE + pair * LANES)", "TILE_SIZE + pair * LANES", "TILE_SIZE"),
    ("int8_matrix.h", "= 128 * rounded", "128", "127"),
    ("int4_matrix.h", "epi16(line, 4)", " 4", " 5"),
    ("widened.h", "widened(_mm512_srli_epi16(codes, 4)", " 4", " 5"),
    ("coded.h", "_mm512_srli_epi16(codes, 4 * number)", "4 * number", "4"),
    ("coded_rows.h", f"low = {WITH_EXCEPTIONS};", WITH_EXCEPTIONS, "low"),
    ("coding.h", "{uint32_t(place + lane)", "place + lane", "place + (lane ^ 2)"),
]
"""Of each: a header, a place in it, what is right there, and what is not."""
WHOLE_SLIPS = [
    ("between.h", "const int64_t row = pass_.rows[place], size", "pass_.rows[place]", "place"),
    ("between.h", "pass_.cosines[layer.rope]", "layer.rope", "0"),
    ("between.h", "get_from(x) * network_.embedding_scale", "network_.embedding_scale", "1.0f"),
    ("between.h", "if (cut.window == window)", "cut.window == window", "true"),
    ("between.h", "tapped + row * size, x + row * size", "x + row * size", "x"),
    ("whole.h", "(layer * PLACES + place)", "place", "0"),
    ("whole.h", "layer.mlp_post_norm, this->norm_behind", "layer.mlp_post_norm", "nullptr"),
    ("whole.h", "std::memcpy(pass_.hidden + at, normed", "normed", "own_.x + at"),
    ("whole_floats.h", "layer.mlp_post_norm, this->norm_behind", "layer.mlp_post_norm", "nullptr"),
    ("whole_floats.h", "std::memcpy(pass_.hidden + row * size, normed", "normed", "own_.x + row * size"),
    ("whole_floats.h", "own_.mixed + row * size, size, tile", "row * size", "0"),
    ("whole_floats.h", "* 2 * size + from;", "from", "0"),
    ("whole_floats.h", "* size + from * own", "from * own", "from"),
    ("small.h", "head : head - num_heads) * head_dim", "head_dim", "0"),
    ("small.h", "put(head + i, held[i])", "held[i]", "0.0f"),
    ("adapt.h", "(__m512)place.get_from(y_ + rows[row] * columns_)", "rows[row]", "rows[0]"),
    ("follow.h", "step.slots += at", "at", "0"),
    ("follow.h", "largest(tops, tops)", "largest(tops, tops)", "0.0f"),
    ("attend.h", "sharers[at]] = length;", "length", "length / 2"),
    ("attend.h", "begin = length - window;", "length - window", "0"),
]
"""The same of what only whole steps come to."""


@pytest.fixture(scope="module")
def slipping(tmp_path_factory) -> Library:
    """Kernels that slip as the switch says, and compute what torch does where it says nothing."""
    directory = tmp_path_factory.mktemp("slipping")
    changes = [
        (name, place, place.replace(right, f"(penstock_switch == {number} ? {wrong} : {right})"))
        for number, (name, place, right, wrong) in enumerate(SLIPS + WHOLE_SLIPS)
    ]
    library = made(directory, "-O0", *SWITCH, source=changed(directory, changes))
    switch(library).value = -1
    assert not list(proof.failures(library))
    return library


@needs_compiler
@pytest.mark.parametrize("number", range(len(SLIPS)))
def test_kernels_that_compute_something_else_are_found_out(slipping, number):
    name = SLIPS[number][0]
    of_int8 = dict.fromkeys(("int8_matrix.h", "int4_matrix.h", "widened.h"), slipping.has_int8)
    of_bfloat16 = dict.fromkeys(("coded.h", "coded_rows.h", "coding.h", "output.h"), slipping.has_linear)
    has_pairs = slipping.has_linear and not slipping.has_tiles
    if not {"forms.h": slipping.has_adapt, "pairs.h": has_pairs, **of_int8, **of_bfloat16}.get(name, True):
        pytest.skip("nothing here uses it")
    switch(slipping).value = number
    assert not agrees_with_torch(slipping)


@needs_compiler
@pytest.mark.parametrize("number", range(len(SLIPS), len(SLIPS) + len(WHOLE_SLIPS)))
def test_whole_steps_that_compute_something_else_are_found_out(slipping, number):
    if WHOLE_SLIPS[number - len(SLIPS)][0] in ("whole.h", "adapt.h") and not slipping.has_whole:
        pytest.skip("no step of bfloat16 in one call here")
    switch(slipping).value = number
    assert agrees_with_torch(slipping)
    assert next(proof.failures(slipping), None)


@needs_compiler
def test_what_a_proof_found_is_said_and_known_at_the_next_start(slipping, monkeypatch):
    path = Path(slipping.path)
    monkeypatch.setenv("PENSTOCK_SWITCH", "0")
    with pytest.raises(Unproved, match="do not compute what torch does on this machine: parts") as said:
        prove(path)
    monkeypatch.delenv("PENSTOCK_SWITCH")
    with pytest.raises(Unproved) as again:
        prove(path)
    assert str(again.value) == str(said.value)
    (kept,) = path.parent.glob("*-proved-*.txt")
    assert str(kept) in str(said.value)
    kept.write_text("")  # as if the machine had stopped while it was written
    prove(path)
    monkeypatch.setenv("PENSTOCK_SWITCH", "0")
    prove(path)
    monkeypatch.setattr(trusted, "_version", lambda: "of another torch")
    with pytest.raises(Unproved, match="parts"):
        prove(path)


@needs_compiler
def test_kernels_that_crash_end_a_process_of_their_own(tmp_path, monkeypatch, caplog):
    source, path = tmp_path / "crashing.cpp", tmp_path / "crashing.so"
    source.write_text("__attribute__((constructor)) static void crash() { __builtin_trap(); }")
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", str(path), str(source)], check=True)
    monkeypatch.setattr(trusted, "built", lambda: path)
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        assert library.__wrapped__() is None
    first, second = (record.getMessage() for record in caplog.records)
    assert first == second
    assert "they crash on this machine: SIG" in first


@needs_compiler
def test_a_proof_that_does_not_end_or_begin_is_tried_again(slipping, monkeypatch):
    path = Path(slipping.path)
    for kept in path.parent.glob("*-proved-*.txt"):
        kept.unlink()
    monkeypatch.setattr(trusted, "TIMEOUT_S", 0.01)
    with pytest.raises(Unproved, match="could not be found out"):
        prove(path)
    monkeypatch.setattr(trusted, "PROOF", ("no-such-program",))
    with pytest.raises(Unproved, match="could not be found out"):
        prove(path)
    monkeypatch.setattr(trusted, "PROOF", ("false",))
    with pytest.raises(Unproved, match="ended with 1"):
        prove(path)
    assert not list(path.parent.glob("*-proved-*.txt"))


def test_of_workers_that_start_together_one_has_them_proved(tmp_path, monkeypatch):
    log = tmp_path / "told"
    monkeypatch.setattr(trusted, "PROOF", ("sh", "-c", f"echo tried >> {log}; sleep 0.3"))
    with ThreadPoolExecutor(3) as pool:
        for each in [pool.submit(prove, tmp_path / "kernels.so") for _ in range(3)]:
            each.result()
    assert log.read_text() == "tried\n"


def test_where_the_disk_is_full_nothing_is_left_of_what_a_proof_found(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(trusted, "PROOF", ("true",))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        prove(tmp_path / "kernels.so")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "is forgotten" in caplog.text
    assert list(tmp_path.iterdir()) == []
