"""Stored forms of a matrix: what cutting, joining and quantising leave of it, and what multiplies with them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from policies import settings
from tests.worker import tiny
from worker.inputs import Span
from worker.models.forms import Form, Int4, Plain, joined
from worker.models.linear import linear_of
from worker.models.quantize import fp8_of, int4_of, int8_of, quantized
from worker.runner import Runner

KINDS = ("int8", "int4", "fp8")


def weight(num_rows: int, num_inputs: int, seed: int = 0) -> torch.Tensor:
    return torch.randn((num_rows, num_inputs), generator=torch.Generator().manual_seed(seed))


def forms(num_rows: int, num_inputs: int, seed: int = 0) -> list[Form]:
    plain = weight(num_rows, num_inputs, seed)
    return [Plain(plain), int8_of(plain), int4_of(plain, 32), fp8_of(plain)]


def shuffled(form: Int4) -> Int4:
    return Int4(form.codes, form.scales, form.offsets, form.group, torch.randperm(form.shape[1]))


@given(rows=st.integers(1, 9), groups=st.integers(1, 4), data=st.data())
def test_a_cut_form_is_the_cut_matrix(rows, groups, data):
    for form in forms(rows, 32 * groups):
        start = data.draw(st.integers(0, rows - 1))
        stop = data.draw(st.integers(start + 1, rows))
        assert torch.equal(form.rows(start, stop).dense(torch.float32), form.dense(torch.float32)[start:stop])
        left = 32 * data.draw(st.integers(0, groups - 1))
        right = data.draw(st.integers(left // 32 + 1, groups)) * 32
        assert torch.equal(form.columns(left, right).dense(torch.float32), form.dense(torch.float32)[:, left:right])


def test_forms_of_one_kind_join_below_each_other():
    for above, below in zip(forms(3, 64, 1), forms(5, 64, 2), strict=True):
        both = joined([above, below])
        assert both is not None
        assert both.shape == (8, 64)
        assert torch.equal(
            both.dense(torch.float32), torch.cat([above.dense(torch.float32), below.dense(torch.float32)])
        )


def test_forms_that_differ_do_not_join():
    kinds = forms(3, 64)
    for one in kinds:
        for other in kinds:
            assert (joined([one, other]) is None) == (type(one) is not type(other))
    int4 = int4_of(weight(3, 64), 32)
    assert joined([int4, int4_of(weight(3, 64), 64)]) is None
    assert joined([int4, shuffled(int4)]) is None
    assert joined([shuffled(int4), shuffled(int4_of(weight(3, 64), 32))]) is None


def test_columns_in_another_order_multiply_their_own_inputs():
    form = shuffled(int4_of(weight(6, 64), 32))
    assert form.order is not None
    x = torch.randn(4, 64)
    in_order = Int4(form.codes, form.scales, form.offsets, form.group)
    assert torch.allclose(linear_of(form)(x), x[:, form.order] @ in_order.dense(torch.float32).T, atol=1e-5)
    with pytest.raises(ValueError, match="another order"):
        form.columns(0, 32)


def test_a_group_is_not_cut():
    with pytest.raises(ValueError, match="columns 16 to 64 cut a group of 32"):
        int4_of(weight(2, 64), 32).columns(16, 64)


@given(rows=st.integers(1, 6), seed=st.integers(0, 99), exponent=st.integers(-12, 12))
def test_no_weight_moves_further_than_half_a_step(rows, seed, exponent):
    plain = weight(rows, 64, seed) * 2.0**exponent
    plain[0] = 0.0
    largest = plain.abs().amax(1, keepdim=True)
    assert ((int8_of(plain).dense(torch.float32) - plain).abs() <= largest / 127 * 0.501).all()
    groups = plain.view(rows, 2, 32)
    spread = (groups.amax(2) - groups.amin(2)).repeat_interleave(32, 1)
    assert ((int4_of(plain, 32).dense(torch.float32) - plain).abs() <= spread / 15 * 0.501 + 1e-12).all()
    # Three bits of mantissa, and e4m3's least step below its least normal number.
    assert ((fp8_of(plain).dense(torch.float32) - plain).abs() <= plain.abs() / 16 * 1.01 + largest / 448 * 2**-9).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_product_is_that_of_the_dense_matrix(dtype):
    x = torch.randn((5, 64), generator=torch.Generator().manual_seed(3)).to(dtype)
    bias = torch.randn(6).to(dtype)
    for form in forms(6, 64):
        form = Plain(form.weight.to(dtype)) if isinstance(form, Plain) else form
        linear = linear_of(form, bias)
        expected = x.float() @ form.dense(torch.float32).T + bias.float()
        assert (linear.in_features, linear.out_features) == (64, 6)
        assert linear(x).dtype is dtype
        assert linear.wide(x).dtype is torch.float32
        tolerance = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.15}[dtype]
        assert torch.allclose(linear(x).float(), expected, atol=tolerance)
        assert torch.allclose(linear.wide(x), expected, atol=tolerance)


@pytest.mark.parametrize("num_inputs", [8, 16, 24, 40, 100])
def test_a_few_tokens_are_multiplied_with_int8_codes_of_any_width(num_inputs):
    form, x = int8_of(weight(33, num_inputs)), weight(4, num_inputs, 1).bfloat16()
    exact = x.double() @ form.dense(torch.float32).double().T
    for few in range(1, 5):
        torch.testing.assert_close(linear_of(form)(x[:few]).double(), exact[:few], atol=0.05, rtol=2**-6)


def test_rows_that_no_group_divides_become_int8():
    assert quantized(Plain(weight(3, 48)), "int4").num_bytes == int8_of(weight(3, 48)).num_bytes
    already = int8_of(weight(3, 64))
    assert quantized(already, "int4") is already


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_quantised_at_load_says_nearly_the_same(kind, tmp_path):
    tiny.checkpoint(tmp_path, "LlamaForCausalLM", hidden_size=64, intermediate_size=128)
    logits = {}
    for each in ("none", kind):
        engine = settings.Engine(dtype="float32", quantize=each, block_size=tiny.BLOCK_SIZE, max_kv_bytes=1 << 20)
        runner = Runner.load(str(tmp_path), engine)
        logits[each] = runner.forward([Span([3, 14, 15, 92, 65], 0, [0], 1)]).log_softmax(-1)
    assert not torch.equal(logits["none"], logits[kind])
    divergence = (logits["none"].exp() * (logits["none"] - logits[kind])).sum()
    assert divergence < (0.3 if kind == "int4" else 0.02)
