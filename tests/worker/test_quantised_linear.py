"""Matrices of few bits, multiplied by the compiled kernels, against the obvious sums."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.compiling import kernels, needs_compiler, random
from worker.models.forms import Int4, Int8
from worker.models.linear import Means, linear_of
from worker.models.linear.int4 import PackedInt4Linear
from worker.models.linear.int8 import Int8Linear
from worker.models.quantize import int4_of, int8_of

pytestmark = needs_compiler

NUM_TOKENS = st.sampled_from((1, 2, 3, 4, 5, 16, 17, 31, 64, 65, 130, 300))
WIDTHS = st.sampled_from((1, 7, 16, 31, 32, 40, 65, 97, 600))


def int8_linear(form: Int8, bias: torch.Tensor | None) -> Int8Linear:
    linear = linear_of(form, bias, Means(kernels()))
    if not isinstance(linear, Int8Linear):
        pytest.skip("this processor has no VNNI")
    return linear


def int4_linear(form: Int4, bias: torch.Tensor | None, is_repeatable: bool = True) -> PackedInt4Linear:
    linear = linear_of(form, bias, Means(kernels(), is_repeatable=is_repeatable))
    if not isinstance(linear, PackedInt4Linear):
        pytest.skip("this processor has no VNNI")
    return linear


def test_inputs_stay_as_they_are_where_only_weights_are_to_be_rounded():
    form, x = int8_of(random(1, 64, 128)), random(2, 7, 128).bfloat16()
    exact = x.double() @ form.dense(torch.float32).double().T
    for few in (1, 7):
        alone = linear_of(form, None, Means(kernels(), rounds_inputs=False)).wide(x[:few])
        # Of the products only the sum is rounded, to bfloat16.
        assert torch.allclose(alone.double(), exact[:few], rtol=2**-8, atol=1e-3)
    assert (int8_linear(form, None).wide(x) - exact).abs().max() > 5e-3


def rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's codes, and what they are multiples of [num_tokens, 1]."""
    largest = x.float().abs().amax(1, keepdim=True)
    inverse = torch.where(largest > 0, torch.tensor(127.0) / largest, 0.0)
    return (x.float() * inverse).round(), largest / 127.0


@settings(deadline=None)
@given(NUM_TOKENS, st.integers(1, 300), WIDTHS, st.sampled_from((torch.bfloat16, torch.float32)), st.booleans())
def test_int8_is_the_product_of_rounded_tokens_and_codes(num_tokens, num_inputs, num_outputs, dtype, has_bias):
    form = int8_of(random(num_outputs, num_outputs, num_inputs))
    bias = random(1, num_outputs).to(dtype) if has_bias else None
    linear = int8_linear(form, bias)
    x = random(num_inputs, num_tokens, num_inputs).to(dtype)
    codes, scales = rounded(x)
    # In float64 the sums are exact, as they are in the kernel.
    expected = (codes.double() @ form.codes.double().T).float() * scales * form.scales
    if bias is not None:
        expected += bias.float()
    got = linear.wide(x)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-5)
    assert torch.equal(linear(x), got.to(dtype))


@settings(deadline=None)
@given(NUM_TOKENS, st.sampled_from((48, 96, 896, 1100)), WIDTHS, st.integers(0, 2**16))
def test_int8_of_a_token_does_not_depend_on_who_comes_along(num_tokens, num_inputs, num_outputs, seed):
    linear = int8_linear(int8_of(random(seed, num_outputs, num_inputs)), random(1, num_outputs).bfloat16())
    x = random(seed + 1, num_tokens, num_inputs).bfloat16()
    together = linear(x)
    for row in {0, num_tokens // 2, num_tokens - 1}:
        assert torch.equal(linear(x[row : row + 1].clone()), together[row : row + 1])


@pytest.mark.parametrize("num_tokens", [1, 3, 40, 150])
@pytest.mark.parametrize("quantised", [int8_of, int4_of])
def test_a_matrix_whose_halves_lie_side_by_side_multiplies_to_the_same(quantised, num_tokens):
    form = quantised(random(0, 160, 192))
    bias, x = random(1, 160).bfloat16(), random(2, num_tokens, 192).bfloat16()
    apart, together = (linear_of(form, bias, Means(kernels()), gated) for gated in (False, True))
    assert torch.equal(apart.wide(x), together.wide(x))
    assert torch.equal(apart(x), together(x))


@pytest.mark.parametrize("num_tokens", [3, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_int8_tokens_that_are_zero_tiny_huge_or_not_numbers(num_tokens, dtype):
    form = int8_of(random(0, 20, 70))
    x = random(1, num_tokens, 70).to(dtype)
    x[0] = 0.0
    linear = int8_linear(form, None)
    assert torch.equal(linear(x)[0], torch.zeros(20, dtype=dtype))
    for factor in (1e-30, 1e30):
        torch.testing.assert_close(
            linear.wide(x * factor) / factor, linear.wide(x), atol=0.5, rtol=0.05 if dtype is torch.bfloat16 else 1e-3
        )
    for wrong in (float("nan"), float("inf"), -float("inf")):
        x[1, 69] = wrong
        y = linear(x)
        assert y[1].isnan().all()
        assert y[2:].isfinite().all()


def in_groups(x: torch.Tensor, form: Int4) -> torch.Tensor:
    """x [num_tokens, in] as the kernel rounds it, in the order of the matrix."""
    x = x.float() if form.order is None else x.float()[:, form.order]
    codes, scales = rounded(x.reshape(-1, form.group))
    return (codes * scales).view_as(x)


@settings(deadline=None)
@given(
    NUM_TOKENS,
    st.integers(1, 5),
    st.sampled_from((32, 64, 128)),
    WIDTHS,
    st.sampled_from((torch.bfloat16, torch.float32)),
    st.booleans(),
    st.sampled_from((1.0, 1e-9, 1e6)),
)
def test_int4_is_the_product_of_rounded_groups_and_the_dense_matrix(
    num_tokens, num_groups, group, num_outputs, dtype, has_order, magnitude
):
    num_inputs = num_groups * group
    form = int4_of(random(num_outputs, num_outputs, num_inputs) * magnitude, group)
    if has_order:
        order = torch.randperm(num_inputs, generator=torch.Generator().manual_seed(1))
        form = Int4(form.codes, form.scales, form.offsets, group, order)
    bias = (random(2, num_outputs) * magnitude).to(dtype)
    linear = int4_linear(form, bias)
    x = random(3, num_tokens, num_inputs).to(dtype)
    unordered = Int4(form.codes, form.scales, form.offsets, group)
    expected = in_groups(x, form) @ unordered.dense(torch.float32).T + bias.float()
    got = linear.wide(x)
    # Scales and offsets are float16 in the kernel.
    torch.testing.assert_close(got, expected, atol=1e-2 * magnitude * num_inputs**0.5, rtol=1e-3)
    assert torch.equal(linear(x), got.to(dtype))
    # And rounding the inputs moves little of what such sums amount to: 0.03 is five deviations of one sum.
    weight = form.dense(torch.float32)
    plain, amount = x.float() @ weight.T + bias.float(), (x.float().square() @ weight.square().T).sqrt()
    assert float((got - plain).norm()) < 0.03 * float(amount.norm())


@settings(deadline=None)
@given(NUM_TOKENS, st.integers(1, 9), st.sampled_from((32, 64, 128)), WIDTHS, st.integers(0, 2**16))
def test_int4_of_a_token_does_not_depend_on_who_comes_along(num_tokens, num_groups, group, num_outputs, seed):
    linear = int4_linear(
        int4_of(random(seed, num_outputs, num_groups * group), group), random(1, num_outputs).bfloat16()
    )
    x = random(seed + 1, num_tokens, num_groups * group).bfloat16()
    together = linear.wide(x)
    for row in {0, num_tokens // 2, num_tokens - 1}:
        assert torch.equal(linear.wide(x[row : row + 1].clone()), together[row : row + 1])


@settings(deadline=None)
@given(
    st.sampled_from((65, 130, 300)),
    st.integers(1, 5),
    st.sampled_from((32, 64, 128)),
    WIDTHS,
    st.sampled_from((torch.bfloat16, torch.float32)),
    st.sampled_from((1.0, 1e-9, 1e6)),
)
def test_int4_of_many_tokens_is_near_the_product_of_rounded_tokens(
    num_tokens, num_groups, group, num_outputs, dtype, magnitude
):
    num_inputs = num_groups * group
    form = int4_of(random(num_outputs, num_outputs, num_inputs) * magnitude, group)
    bias, x = (random(2, num_outputs) * magnitude).to(dtype), random(3, num_tokens, num_inputs).to(dtype)
    linear = int4_linear(form, bias, is_repeatable=False)
    weight = form.dense(torch.float32)
    codes, scales = rounded(x)
    expected = codes * scales @ weight.T + bias.float()
    got = linear.wide(x)
    # A weight is off by half of a 127th of its column's largest, give or take: a sum by some deviations of such errors.
    step = weight.abs().amax(1) / 127.0
    assert ((got - expected).abs() <= 3.0 * step * x.float().norm(dim=1, keepdim=True) + 1e-2 * magnitude).all()
    assert float((got - expected).norm()) < 0.01 * float((x.float().square() @ weight.square().T).sqrt().norm())
    assert torch.equal(linear(x), got.to(dtype))
    # In any company of as many or more, and among few as those of few are.
    assert torch.equal(linear.wide(torch.cat((x, x))), torch.cat((got, got)))
    assert torch.equal(linear.wide(x[:40]), int4_linear(form, bias).wide(x[:40]))


def test_int4_of_one_scale_far_from_the_others():
    form = int4_of(random(0, 20, 128), 32)
    form.scales[3] *= 1e6
    form.offsets[3] *= 1e6
    form.scales[5], form.offsets[5] = 0.0, 0.0
    x = random(1, 2, 128).bfloat16()
    expected = in_groups(x, form) @ form.dense(torch.float32).T
    got = int4_linear(form, None).wide(x)
    assert torch.equal(got[:, 5], torch.zeros(2))
    # float16 keeps even what is a millionth of the largest.
    torch.testing.assert_close(got, expected, atol=0.05, rtol=5e-3)


def test_int4_tokens_that_are_not_numbers_stay_alone():
    linear = int4_linear(int4_of(random(0, 20, 128), 32), None)
    for num_tokens in (3, 40):
        x = random(1, num_tokens, 128).bfloat16()
        x[0] = 0.0
        x[1, 127] = float("nan")
        y = linear(x)
        assert torch.equal(y[0], torch.zeros(20, dtype=torch.bfloat16))
        assert y[1].isnan().all()
        assert y[2:].isfinite().all()
