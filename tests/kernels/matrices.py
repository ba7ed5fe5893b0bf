"""Matrices of codes multiply as what they stand for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernels.device import DEVICE, examples
from worker.models.fitting import eight_of, together
from worker.models.forms import Fp8, Int4, Int8
from worker.models.linear import on_cuda, scaled_on_cuda
from worker.models.linear.on_cuda import CudaFp8Linear, CudaInt4Linear, to_float8
from worker.models.linear.scaled_on_cuda import ROUNDED_TOKENS, CudaScaledLinear, to_int8
from worker.models.quantize import fp8_of, int8_of

TOLERANCES: dict[torch.dtype, dict[str, float]] = {
    torch.float32: {"atol": 2e-4, "rtol": 2e-4},
    torch.float16: {"atol": 2e-2, "rtol": 5e-3},
    torch.bfloat16: {"atol": 5e-2, "rtol": 2e-2},
}


def int4(num_outputs: int, num_inputs: int, group: int, ordered: bool) -> Int4:
    return Int4(
        torch.randint(0, 256, (num_outputs, num_inputs // 2), dtype=torch.uint8, device=DEVICE),
        torch.rand(num_outputs, num_inputs // group, device=DEVICE) / 100,
        -torch.rand(num_outputs, num_inputs // group, device=DEVICE) / 10,
        group,
        torch.randperm(num_inputs, device=DEVICE) if ordered else None,
    )


@settings(max_examples=examples(25), deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    num_tokens=st.sampled_from((0, 1, 2, 16, 17, 33, 70, 300)),
    num_outputs=st.sampled_from((1, 50, 64, 200)),
    group=st.sampled_from((32, 64, 128)),
    num_groups=st.sampled_from((1, 3, 8)),
    ordered=st.booleans(),
    has_bias=st.booleans(),
    dtype=st.sampled_from(tuple(TOLERANCES)),
    seed=st.integers(0, 99),
)
def test_four_bit_codes_multiply_as_the_weights_they_stand_for(
    num_tokens, num_outputs, group, num_groups, ordered, has_bias, dtype, seed
):
    torch.manual_seed(seed)
    form = int4(num_outputs, group * num_groups, group, ordered)
    x = torch.randn(num_tokens, group * num_groups).to(DEVICE, dtype)
    bias = torch.randn(num_outputs).to(DEVICE, dtype) if has_bias else None
    expected = x.float() @ form.dense(torch.float32).T + (0 if bias is None else bias.float())
    linear = CudaInt4Linear(form, bias)
    got, wide = linear(x), linear.wide(x)
    assert (got.dtype, wide.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(got.float(), expected, **TOLERANCES[dtype])
    torch.testing.assert_close(wide, expected, **TOLERANCES[dtype])


@pytest.mark.parametrize("other", [int8_of, fp8_of])
def test_unlike_forms_become_one_where_they_lie(other):
    """As four bits of queries and six of values in a GGUF."""
    torch.manual_seed(0)
    parts = [int4(16, 128, 32, ordered=False), other(torch.randn(8, 128, device=DEVICE))]
    one = together({"queries": parts[0], "values": parts[1]}, torch.float32, lambda _, *form: eight_of(*form))
    assert isinstance(one, Int8)
    assert one.codes.device.type == one.scales.device.type == DEVICE.type
    near, exact = one.dense(torch.float32), torch.cat([part.dense(torch.float32) for part in parts])
    assert float((near - exact).norm() / exact.norm()) < 0.02


def test_a_product_of_few_tokens_is_the_same_to_the_bit_each_time():
    torch.manual_seed(0)
    linear, x = CudaInt4Linear(int4(64, 1024, 64, False), None), torch.randn(3, 1024).to(DEVICE, torch.bfloat16)
    assert torch.equal(linear(x), linear(x))


def test_an_output_head_is_unpacked_in_parts(monkeypatch):
    monkeypatch.setattr(on_cuda, "_OUTPUTS_AT_ONCE", 40)
    torch.manual_seed(0)
    form, x = int4(100, 64, 32, False), torch.randn(on_cuda.DENSE_TOKENS, 64).to(DEVICE)
    bias = torch.randn(100).to(DEVICE)
    expected = x @ form.dense(torch.float32).T + bias
    torch.testing.assert_close(CudaInt4Linear(form, bias)(x), expected, **TOLERANCES[torch.float32])


def scaled(kind: type[Int8 | Fp8], num_outputs: int, num_inputs: int) -> Int8 | Fp8:
    scales = torch.rand(num_outputs, device=DEVICE) / 100
    if kind is Int8:
        return Int8(torch.randint(-127, 128, (num_outputs, num_inputs), dtype=torch.int8, device=DEVICE), scales)
    return Fp8((torch.randn(num_outputs, num_inputs) * 50).to(torch.float8_e4m3fn).to(DEVICE), scales)


@settings(max_examples=examples(25), deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    kind=st.sampled_from((Int8, Int8, Fp8)),
    num_tokens=st.sampled_from((0, 1, 2, 16, 17, 33, 70, 150)),
    num_outputs=st.sampled_from((1, 50, 64, 200)),
    num_inputs=st.sampled_from((8, 100, 128, 1000)),
    has_bias=st.booleans(),
    dtype=st.sampled_from(tuple(TOLERANCES)),
    seed=st.integers(0, 99),
)
def test_one_byte_codes_multiply_as_the_weights_they_stand_for(
    kind, num_tokens, num_outputs, num_inputs, has_bias, dtype, seed
):
    torch.manual_seed(seed)
    form = scaled(kind, num_outputs, num_inputs)
    x = torch.randn(num_tokens, num_inputs).to(DEVICE, dtype)
    bias = torch.randn(num_outputs).to(DEVICE, dtype) if has_bias else None
    expected = x.float() @ form.dense(torch.float32).T + (0 if bias is None else bias.float())
    linear = CudaScaledLinear(form, bias, rounds_inputs=False)
    got, wide = linear(x), linear.wide(x)
    assert (got.dtype, wide.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(got.float(), expected, **TOLERANCES[dtype])
    torch.testing.assert_close(wide, expected, **TOLERANCES[dtype])


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_many_tokens_are_rounded_and_multiplied_as_integers_and_few_are_not(dtype, has_bias, monkeypatch):
    monkeypatch.setattr(scaled_on_cuda, "_SUMS_AT_ONCE", 3000)
    torch.manual_seed(0)
    form, x = scaled(Int8, 40, 96), torch.randn(ROUNDED_TOKENS + 30, 96).to(DEVICE, dtype)
    bias = torch.randn(40).to(DEVICE, dtype) if has_bias else None
    linear = CudaScaledLinear(form, bias, rounds_inputs=True)
    added = 0 if bias is None else bias.double()
    codes, scales = to_int8(x)
    rounded = (codes.double() @ form.codes.double().T) * scales.double()[:, None] * form.scales.double() + added
    torch.testing.assert_close(linear.wide(x).double(), rounded, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(linear(x).double(), rounded, **TOLERANCES[dtype])
    exact = x[:5].double() @ form.dense(torch.float32).double().T + added
    torch.testing.assert_close(linear.wide(x[:5]).double(), exact, **TOLERANCES[torch.float32])


def test_a_matrix_that_torch_does_not_take_is_multiplied_by_the_kernel():
    torch.manual_seed(0)
    form, x = scaled(Int8, 39, 96), torch.randn(ROUNDED_TOKENS, 96).to(DEVICE)
    linear = CudaScaledLinear(form, None, rounds_inputs=True)
    torch.testing.assert_close(linear(x), x @ form.dense(torch.float32).T, **TOLERANCES[torch.float32])


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("size", [16, 100, 5000])
def test_a_row_is_rounded_to_int8_as_torch_would(size, dtype):
    torch.manual_seed(size)
    x = (torch.randn(4, size) * torch.tensor([[1e-3], [1.0], [1e4], [0.0]])).to(DEVICE, dtype)
    x[1, :4] = torch.tensor([127.0, 0.5, 1.5, -2.5])
    codes, scales = to_int8(x)
    torch.testing.assert_close(scales, x.float().abs().amax(1).clamp(min=1e-12) / 127.0)
    assert codes[1, :4].tolist() == [127, 0, 2, -2]
    assert torch.equal(codes.float(), (x.float() / scales[:, None]).round())


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("size", [16, 100, 5000])
def test_a_row_is_rounded_to_float8_as_torch_would(size, dtype):
    torch.manual_seed(size)
    x = torch.randn(4, size) * torch.tensor([[1e-3], [1.0], [1e4], [0.0]])
    x[0, :3] = torch.tensor([1e-8, -3e-6, 1e-5])
    x = x.to(DEVICE, dtype)
    codes, scales = to_float8(x)
    expected = x.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 448.0
    torch.testing.assert_close(scales, expected)
    assert torch.equal(codes.float(), (x.float() / scales).clamp(-448, 448).to(torch.float8_e4m3fn).float())


def test_float8_codes_multiply_as_the_weights_they_stand_for():
    torch.manual_seed(1)
    form = Fp8(torch.randn(48, 64).to(torch.float8_e4m3fn).to(DEVICE), torch.rand(48, device=DEVICE) / 10)
    if not CudaFp8Linear.serves(form):
        pytest.skip("this torch has no scaled product for this device")
    x, bias = torch.randn(5, 64).to(DEVICE, torch.bfloat16), torch.randn(48).to(DEVICE, torch.bfloat16)
    codes, scales = to_float8(x)
    expected = codes.float() * scales @ form.dense(torch.float32).T + bias.float()
    torch.testing.assert_close(CudaFp8Linear(form, bias)(x).float(), expected, atol=2e-2, rtol=2e-2)
    assert CudaFp8Linear(form, bias)(x.half()).dtype is torch.float16
