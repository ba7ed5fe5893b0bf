"""Compiled kernels compute what torch computes, or are found out."""

from __future__ import annotations

import itertools
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.worker.compiling import SWITCH, changed, made, needs_compiler, optimise, switch, targeted
from tests.worker.with_tiles import TILES
from worker.native import PackedMatrix, coding_pays, trial
from worker.native.build import built
from worker.native.library import Library
from worker.native.pages import HUGE_PAGE_BYTES, huge_empty
from worker.native.trusted import library
from worker.proof import failures


@pytest.fixture
def num_threads() -> Iterator[int]:
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


@needs_compiler
def test_this_machine_has_kernels_and_they_compute_what_torch_does():
    assert library() is not None


@needs_compiler
@pytest.mark.parametrize("less", [("-mno-avx512bf16",), ("-mno-avx512f",)])
def test_machines_that_can_do_less_get_the_same(tmp_path, less):
    if platform.machine() != "x86_64":
        pytest.skip("these are instructions of x86")
    if targeted(less) == targeted():  # this machine can do no more: its own kernels are those
        assert library() is not None
        return
    assert not list(failures(made(tmp_path, "-O0", *less)))  # nothing is where it is by inlining alone


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 16, 23, 64, 65, 200, 300, 530])
def test_a_packed_matrix_multiplies_as_torch_does_and_each_row_for_itself(num_tokens, gated, dtype):
    library = Library(str(built()))
    if not library.has_linear:
        pytest.skip("the processor does not multiply bfloat16")
    torch.manual_seed(num_tokens)
    for columns, size in ((40, 96), (608, 96), (608, 2400), (1216, 96), (4192, 96)):
        x, bias = torch.randn(num_tokens, size).bfloat16(), torch.randn(columns).bfloat16()
        weight = torch.randn(columns, size).bfloat16() / 8
        matrix = PackedMatrix(weight, bias, gated)
        got = library.linear(x, matrix, dtype)
        expected = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
        torch.testing.assert_close(got.float(), expected, atol=2e-2, rtol=1e-2)
        assert torch.equal(got.bfloat16().to(dtype), got)
        alone = library.linear(x[-1:].contiguous(), matrix, dtype)
        assert torch.equal(alone, got[-1:])
        if matrix.gated:
            apart = library.gate(library.linear(x, matrix, torch.bfloat16), "silu")
            assert torch.equal(library.gated(x, matrix, "silu"), apart)


def scaled(weight, chance, low, high):
    """Some weights times two to the power of whatever is between the two."""
    powers = 2.0 ** torch.randint(low, high, weight.shape)
    return torch.where(torch.rand(weight.shape) < chance, weight * powers, weight).bfloat16()


WEIGHTS = {
    "usual": lambda weight: weight.bfloat16(),
    "some of any size": lambda weight: scaled(weight, 3e-4, -120, 90),
    "half of the rows zeros": lambda weight: weight.bfloat16() * (torch.arange(len(weight)) % 2)[:, None],
    "less than the least normal number": lambda weight: (weight * 1e-38).bfloat16(),
}


@needs_compiler
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("gated", [False, True])
def test_a_matrix_in_twelve_bits_multiplies_to_the_same_bits(weights, gated):
    library = Library(str(built()))
    if not library.has_linear:
        pytest.skip("the processor does not multiply bfloat16")
    torch.manual_seed(0)
    for columns, size in ((40, 96), (608, 96), (1152, 896), (608, 2400)):
        weight, bias = WEIGHTS[weights](torch.randn(columns, size) / 50), torch.randn(columns).bfloat16()
        plain, coded = PackedMatrix(weight, bias, gated), PackedMatrix(weight, bias, gated, library.code)
        assert coded.is_coded
        for num_tokens in (1, 2, 3, 5, 7, 8, 9, 14, 16, 23, 64, 65, 200, 530):
            x = torch.randn(num_tokens, size).bfloat16()
            expected, got = (library.linear(x, each, torch.float32) for each in (plain, coded))
            if library.has_tiles and num_tokens <= 2:  # not by tiles then
                torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)
            else:
                assert torch.equal(got, expected)
            if coded.gated:
                assert torch.equal(library.gated(x, coded, "silu"), library.gate(got.bfloat16(), "silu"))


def decoded(panels, exceptions, firsts, columns, size):
    """coded.h's format, read weight by weight: the bits of [columns, size], whose tiles are neighbours."""
    panels = panels.numpy().view(np.uint16).reshape(-1, 32 + size * 24)
    tables, groups = panels[:, None, None, None, :32], panels[:, 32:].reshape(len(panels), size // 8, 2, 3, 32)
    # [panels, groups, tiles, lines, 32]
    codes = groups[:, :, :, :1] >> np.array([0, 4, 8, 12])[:, None] & 15
    rests = groups[:, :, :, [1, 1, 2, 2]]
    rests[..., 1::2, :] = rests[..., 1::2, :] << 8 | rests[..., 1::2, :] >> 8
    bits = np.take_along_axis(np.broadcast_to(tables, codes.shape), codes.astype(np.int64), -1) | rests & 0x807F
    # As they are packed: [panels, steps, tiles, 16 pairs, 16 columns, 2].
    bits = bits.reshape(len(panels), size // 32, 4, 2, 4, 32).swapaxes(2, 3).reshape(len(panels), -1)
    for panel, (first, last) in enumerate(itertools.pairwise(firsts)):
        for exception in exceptions[first:last].tolist():
            place, value = exception & 0xFFFFFFFF, exception >> 32 & 0xFFFF
            assert bits[panel, place] & 0x7FFF == 0
            bits[panel, place] = value
    packed = bits.reshape(len(panels), size // 32, 2, 16, 16, 2)
    return packed.transpose(0, 2, 4, 1, 3, 5).reshape(-1, size)[:columns]


@needs_compiler
@pytest.mark.parametrize(("columns", "size"), [(32, 32), (40, 96), (608, 224)])
def test_nothing_is_lost_in_twelve_bits(columns, size):
    library = Library(str(built()))
    if not library.has_linear:
        pytest.skip("the processor does not multiply bfloat16")
    torch.manual_seed(size)
    weight = torch.randn(columns, size).bfloat16()
    for value in (torch.inf, -torch.inf, torch.nan, 1e-40, -1e-40, 0.0, -0.0, 3e38, 1e-38):
        weight[torch.randint(columns, (3,)), torch.randint(size, (3,))] = value
    weight[columns // 2, :32] = 2.0 ** torch.arange(-140, -108)  # denormal, and then less than usual
    packed = PackedMatrix(weight, None, False, library.code)
    assert packed.is_coded
    assert np.array_equal(decoded(*packed.coded, columns, size), weight.view(torch.int16).numpy().view(np.uint16))


@needs_compiler
def test_a_matrix_whose_exponents_are_too_many_stays_as_it_is():
    library = Library(str(built()))
    if not library.has_linear:
        pytest.skip("the processor does not multiply bfloat16")
    torch.manual_seed(0)
    weight = scaled(torch.randn(256, 256), 0.01, -100, -50)
    packed = PackedMatrix(weight, None, False, library.code)
    assert not packed.is_coded
    x = torch.randn(3, 256).bfloat16()
    expected = library.linear(x, PackedMatrix(weight, None, False), torch.float32)
    assert torch.equal(library.linear(x, packed, torch.float32), expected)


@needs_compiler
def test_whether_twelve_bits_pay_is_tried_once_a_machine_and_then_known(cache, monkeypatch):
    optimise(monkeypatch, "-O0")
    kernels = Library(str(built()))
    if not kernels.has_linear:
        assert not coding_pays(kernels)
        return
    assert 0.1 < trial.gain_of_coding(kernels, 512, 256) < 10
    tried = []
    monkeypatch.setattr(trial, "gain_of_coding", lambda library: tried.append(library) or 1.25)
    assert coding_pays(kernels)
    (kept,) = cache.glob("kernels-*-coded-*.txt")
    assert float(kept.read_text()) == 1.25
    kept.write_text("0.93")
    assert not coding_pays(Library(str(built())))
    assert len(tried) == 1
    kept.write_text("")
    assert coding_pays(Library(str(built())))
    assert len(tried) == 2


@pytest.fixture(scope="module")
def emulated(tmp_path_factory) -> Library:
    """Tiles, see emulated_tiles.h."""
    if not Library(str(built())).has_linear:
        pytest.skip("the processor does not multiply bfloat16")
    return made(tmp_path_factory.mktemp("emulated"), "-O2", *TILES)


@needs_compiler
@pytest.mark.usefixtures("num_threads")
def test_kernels_with_tiles_compute_what_torch_does_where_tiles_are_only_emulated(emulated):
    library = emulated
    assert library.has_tiles
    assert not list(failures(library))
    torch.manual_seed(0)
    for columns, size in ((40, 96), (320, 96), (608, 2400), (4192, 96)):
        weight, bias = scaled(torch.randn(columns, size) / 50, 3e-4, -120, 30), torch.randn(columns).bfloat16()
        plain, coded = PackedMatrix(weight, bias, True), PackedMatrix(weight, bias, True, library.code)
        assert coded.is_coded
        for num_tokens in (3, 16, 17, 64, 65, 200, 530):
            x = torch.randn(num_tokens, size).bfloat16()
            for num_threads in (1, 6):  # some of them with nothing to do
                torch.set_num_threads(num_threads)
                expected, got = (library.linear(x, each, torch.float32) for each in (plain, coded))
                assert torch.equal(got, expected)
                if coded.gated:
                    opened = library.gate(got.bfloat16(), "silu")
                    assert torch.equal(library.gated(x, coded, "silu"), opened)


@needs_compiler
def test_the_last_rows_of_very_many_are_a_tile_alone(emulated):
    library = emulated
    torch.manual_seed(0)
    x, weight = torch.randn(7681, 32).bfloat16(), torch.randn(96, 32).bfloat16()
    expected = torch.nn.functional.linear(x.float(), weight.float()).bfloat16().float()
    for code in (None, library.code):
        got = library.linear(x, PackedMatrix(weight, None, False, code), torch.float32)
        torch.testing.assert_close(got, expected, atol=2e-2, rtol=1e-2)


@needs_compiler
def test_floats_and_pairs_of_bfloat16_make_the_same_bits_of_numbers_of_all_sizes(tmp_path):
    decision = "static const bool found = find_whether_pairs_are_slow();"
    source = changed(tmp_path, [("floats.h", decision, "const bool found = penstock_switch;")])
    library = made(tmp_path, "-O1", "-mno-amx-tile", "-mno-amx-bf16", *SWITCH, source=source)
    if not library.has_linear:
        pytest.skip("the processor does not multiply bfloat16")
    by_floats = switch(library)
    by_floats.value = True
    assert not list(failures(library))
    torch.manual_seed(0)
    for num_tokens in (1, 4, 5, 8, 14, 15, 17, 32, 61, 65, 300):
        for columns, size in ((40, 96), (608, 2400), (1024, 160)):
            # Some products are smaller than the least normal number, and so are some of what they are added to.
            x = (torch.randn(num_tokens, size) * 2.0 ** torch.randint(-110, 3, (num_tokens, 1))).bfloat16()
            # Those of a panel are alike enough to be coded.
            sizes = torch.randint(-30, 3, (-(-columns // 32),)).repeat_interleave(32)[:columns, None]
            weight = (torch.randn(columns, size) * 2.0**sizes).bfloat16()
            matrices = [PackedMatrix(weight, None, False), PackedMatrix(weight, None, False, library.code)]
            assert matrices[1].is_coded
            products = []
            for by_floats.value in (True, False):
                products += [library.linear(x, each, torch.float32) for each in matrices]
            assert all(torch.equal(product, products[0]) for product in products)


@needs_compiler
@pytest.mark.parametrize("vocab_size", [3, 64, 1000, 1025, 151_936])
def test_the_largest_of_each_half_tile_of_logits_is_found_and_so_is_what_is_no_number(vocab_size):
    library = Library(str(built()))
    torch.manual_seed(vocab_size)
    logits = torch.randn(3, vocab_size) - 5.0
    logits[0, :32] = -torch.inf
    for place, value in enumerate((torch.inf, -torch.inf, torch.nan)):
        logits[place, -1 - place] = value
    halves = torch.nn.functional.pad(logits, (0, -vocab_size % 64), value=-torch.inf).view(3, -1, 2, 32)
    found, expected = library.maxima(logits), halves.amax(-1)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what it was asked for")
@pytest.mark.parametrize("num_bytes", [1000, 20 * HUGE_PAGE_BYTES])
def test_weights_lie_where_the_system_may_use_huge_pages(num_bytes):
    weights = huge_empty((num_bytes,), torch.uint8)
    flags = _flags_of_mapping(weights.data_ptr())
    assert "sh" not in flags, "shared memory has no huge pages of its own accord"
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert "hg" in flags


def _flags_of_mapping(address: int) -> list[str]:
    """See proc_pid_smaps(5), VmFlags."""
    is_here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, _, rest = line.partition(" ")
        if not head.endswith(":"):
            begin, _, end = head.partition("-")
            is_here = int(begin, 16) <= address < int(end, 16)
        elif is_here and head == "VmFlags:":
            return rest.split()
    raise AssertionError("not mapped")
