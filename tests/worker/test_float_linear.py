"""Matrices in any form, multiplied as floats by the compiled kernels, against sums in float64, on less, too."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.compiling import PROCESSORS, elsewhere_at, kernels, needs_compiler, random
from worker.models.forms import Form, Fp8, Int4, Plain
from worker.models.linear import Means, linear_of
from worker.models.linear.floats import FloatLinear
from worker.models.quantize import fp8_of, int4_of, int8_of
from worker.native import FloatMatrix, Library
from worker.native.floats import BFLOAT16, FLOAT32
from worker.proof import failures

pytestmark = needs_compiler

KINDS = ("float32", "bfloat16", "int8", "fp8", "int4")
ROWS = (0, 1, 2, 3, 4, 6, 7, 8, 11, 12, 13, 25, 64, 191, 192, 200, 385)


def form_of(kind: str, weight: torch.Tensor, group: int = 32) -> Form:
    match kind:
        case "int8":
            return int8_of(weight)
        case "fp8":
            return fp8_of(weight)
        case "int4":
            return int4_of(weight, group)
    return Plain(weight.bfloat16().float() if kind == "bfloat16" else weight)


def linear(form: Form, bias: torch.Tensor | None = None, loaded: Library | None = None) -> FloatLinear:
    found = FloatLinear(form, bias, loaded or kernels())
    assert found.in_features == form.shape[1]
    assert found.out_features == form.shape[0]
    return found


def assert_product(form: Form, num_rows: int, bias: torch.Tensor | None, loaded: Library | None = None) -> None:
    x = random(num_rows, num_rows, form.shape[1])
    weight = form.dense(torch.float32).double()
    expected = x.double() @ weight.T + (0.0 if bias is None else bias.double())
    # As far as float32 may be off that is added up in one chain.
    least = 1e-30 if not num_rows else 1e-6 * float((x.double().abs() @ weight.abs().T).max())
    torch.testing.assert_close(linear(form, bias, loaded).wide(x).double(), expected, atol=least, rtol=1e-6)


@settings(deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    num_rows=st.sampled_from(ROWS),
    num_outputs=st.sampled_from((1, 15, 16, 33, 64, 97, 320)),
    num_inputs=st.sampled_from((2, 32, 64, 96, 128, 160, 288, 896)),
    has_bias=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_a_product_is_the_sum_of_what_is_stored(kind, num_rows, num_outputs, num_inputs, has_bias, seed):
    if kind == "int4" and num_inputs % 32:
        num_inputs = 32
    form = form_of(kind, random(seed, num_outputs, num_inputs))
    assert_product(form, num_rows, random(seed + 1, num_outputs) if has_bias else None)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 30])
def test_groups_of_any_size_begin_where_pieces_do_not(group, num_rows):
    assert_product(form_of("int4", random(3, 70, 5 * group), group), num_rows, None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_gets_the_same_bits_in_any_company(kind):
    multiply = linear(form_of(kind, random(1, 130, 640)), random(2, 130))
    x = random(3, 400, 640)
    whole = multiply(x)
    for num_rows in ROWS:
        for first in (0, 7):
            assert torch.equal(multiply(x[first : first + num_rows]), whole[first : first + num_rows]), (
                num_rows,
                first,
            )


def test_inputs_come_in_the_order_that_codes_were_put_in():
    form = int4_of(random(1, 40, 128))
    order = torch.randperm(128, generator=torch.Generator().manual_seed(2))
    ordered = Int4(form.codes, form.scales, form.offsets, form.group, order)
    x = random(3, 4, 128)
    expected = x.double() @ ordered.dense(torch.float32).double().T
    torch.testing.assert_close(linear(ordered).wide(x).double(), expected, atol=1e-4, rtol=1e-5)


def test_every_number_of_eight_bits_is_what_it_says():
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)
    codes = codes[codes.float().isfinite()].repeat(2)[:, None].expand(-1, 32).contiguous()
    x = torch.zeros(1, 32)
    x[0, 5] = 1.0
    got = linear(Fp8(codes, torch.ones(len(codes)))).wide(x)
    assert torch.equal(got[0], codes[:, 5].float())


def test_what_float32_does_not_need_is_not_kept():
    loaded, weight = kernels(), random(1, 24, 64)
    assert FloatMatrix.of_floats(weight, loaded.float_panel).struct.form == FLOAT32
    assert FloatMatrix.of_floats(weight.bfloat16().float(), loaded.float_panel).struct.form == BFLOAT16
    assert FloatMatrix.of_floats(weight.bfloat16().float()[:, :63], loaded.float_panel).struct.form == FLOAT32
    assert_product(Plain(weight[:, :63]), 3, None)


def test_what_is_no_number_stays_in_its_row():
    x = random(1, 9, 64)
    x[4, 3], x[6, 2] = torch.nan, torch.inf
    got = linear(form_of("bfloat16", random(2, 40, 64))).wide(x)
    assert got.isfinite().all(1).tolist() == [row not in (4, 6) for row in range(9)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_results_are_of_the_inputs_type_and_wide_ones_are_not_rounded(dtype):
    multiply = linear(form_of("int8", random(1, 40, 64)))
    x = random(2, 3, 64).to(dtype)
    assert multiply(x).dtype is dtype
    assert torch.equal(multiply(x), multiply.wide(x).to(dtype))
    assert torch.equal(multiply.wide(x), multiply.wide(x.float()))


def test_a_matrix_goes_where_nothing_faster_multiplies_it():
    loaded = kernels()
    for form in (Plain(random(1, 32, 64)), fp8_of(random(1, 32, 64))):
        assert isinstance(linear_of(form, None, Means(loaded)), FloatLinear)
    exact = Means(loaded, rounds_inputs=False)
    for form in (int8_of(random(1, 32, 64)), int4_of(random(1, 32, 64))):
        assert isinstance(linear_of(form, None, exact), FloatLinear)
        assert isinstance(linear_of(form, None, Means(loaded)), FloatLinear) is not loaded.has_int8
    assert isinstance(linear_of(Plain(random(1, 32, 64).bfloat16()), None, exact), FloatLinear) is not loaded.has_linear
    assert not isinstance(linear_of(int8_of(random(1, 32, 64)), None, Means()), FloatLinear)


@pytest.fixture(scope="module", params=PROCESSORS)
def elsewhere(request, tmp_path_factory):
    return elsewhere_at(request.param, tmp_path_factory.mktemp("elsewhere"))


def test_kernels_for_less_agree_with_torch(elsewhere):
    assert not elsewhere.has_linear
    assert not elsewhere.has_int8
    assert not list(failures(elsewhere))


@pytest.mark.parametrize("kind", KINDS)
def test_products_for_less_are_the_same_sums(elsewhere, kind):
    for num_rows in ROWS:
        assert_product(form_of(kind, random(num_rows, 100, 288)), num_rows, random(1, 100), elsewhere)
