"""What lies more than 2**31 numbers behind the beginning of a tensor is found, where an offset in 32 bits would have
come round: the slots and heads of a large pool, rows of many logits, experts and matrices. On the CPU alone, where
memory that nobody writes to is only reserved.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.interpreter import GridExecutor, interpreter_builder

from policies.terms import Sampling
from tests.kernels.device import DEVICE
from tests.worker.pools import slots_of
from worker.attention.base import Extent, Scores
from worker.attention.paged import TritonAttention
from worker.attention.reference import ReferenceAttention
from worker.kv_cache import KVCache, KVShape
from worker.models.architecture import Mixture
from worker.models.experts_on_cuda import CudaExperts
from worker.models.forms import Int4, Int8
from worker.models.linear.on_cuda import CudaInt4Linear
from worker.models.linear.scaled_on_cuda import CudaScaledLinear, to_int8
from worker.models.ops import TorchOps, Turning
from worker.models.shapes import SHAPES
from worker.models.stacks import Stack
from worker.models.triton_ops import TritonOps
from worker.native import huge_empty
from worker.sampling import in_torch
from worker.sampling.on_device import draw, mask
from worker.sampling.wishes import Wishes
from worker.triton import experts as experts_kernels
from worker.triton import scaled as scaled_kernels
from worker.triton import streamed as streamed_kernels

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="a device has no memory that is only reserved")

FAR = 1 << 31
LAST = 2
MANY = 1000
"""Programs along one dimension of a launch, of which the last ones are enough."""


@pytest.fixture(autouse=True)
def only_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a launch has many programs the last of them alone are run; and no argument is copied back onto itself."""
    run: Any = GridExecutor.__call__
    before: tuple[int, ...] = ()

    def run_last(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal before
        whole = (*self.grid, 1, 1)[:3]
        self.grid = tuple(LAST if num > MANY else num for num in whole)
        before = tuple(num - kept for num, kept in zip(whole, self.grid, strict=True))
        run(self, *args, **kwargs)

    def set_grid_idx(*place: int) -> None:
        interpreter_builder.grid_idx = tuple(at + num for at, num in zip(place, before, strict=True))

    monkeypatch.setattr(GridExecutor, "__call__", run_last)
    monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *args: None)
    monkeypatch.setattr(interpreter_builder, "set_grid_idx", set_grid_idx)


def rows_beyond(width: int, dtype: torch.dtype) -> Tensor:
    """[any, width], zeros; the last two rows, random, begin beyond."""
    rows = huge_empty((FAR // width + 3, width), dtype)
    rows[-LAST:] = torch.randn(LAST, width).to(dtype)
    return rows


@pytest.mark.parametrize(
    ("num_kv_heads", "numbers_of_a_head", "kept"),
    [(1, FAR + 4096, torch.float16), (3, FAR // 2 + 4096, torch.float16), (3, FAR // 2 + 4096, torch.int8)],
    ids=["slots", "heads", "heads, one byte"],
)
def test_the_end_of_a_large_pool(num_kv_heads, numbers_of_a_head, kept):
    torch.manual_seed(0)
    head_dim, block_size, num_heads = 64, 16, 2 * num_kv_heads
    num_blocks = numbers_of_a_head // (head_dim * block_size)
    cache = KVCache(KVShape(1, num_kv_heads, head_dim), num_blocks, block_size, kept, DEVICE, kept is torch.int8)
    extents = [Extent(0, 5, 0, [num_blocks - 1]), Extent(5, 1, 30, [num_blocks - 2, num_blocks - 4])]
    whole = [Extent(0, extent.start + extent.num_tokens, 0, extent.block_ids) for extent in extents]
    for each in whole:
        past = torch.randn(2, each.num_tokens, num_kv_heads, head_dim)
        cache.write(0, slots_of([each], block_size), *past)
    slots, scores = slots_of(extents, block_size), Scores(0.1, (0,))
    heads = torch.randn(6, num_heads + 2 * num_kv_heads, head_dim).half()
    parts = heads.split((num_heads, num_kv_heads, num_kv_heads), 1)
    expected = ReferenceAttention(cache, scores).plan(extents, slots).attend(0, *parts)
    own = torch.cat([slots_of([each], block_size) for each in whole])
    held = [tensor.index_select(1, own) for tensor in (cache.keys[0], cache.values[0])]
    backend = TritonAttention(cache, scores, num_heads, num_processors=64)
    still = Turning(torch.ones(6, head_dim), torch.zeros(6, head_dim))
    architecture = replace(SHAPES["S"], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    for is_turned in (False, True):
        cache.keys[0][:, slots], cache.values[0][:, slots] = 0, 0
        plan = backend.plan(extents, slots)
        got = (
            TritonOps().attend(plan, 0, heads.flatten(1).clone(), architecture, still)
            if is_turned
            else plan.attend(0, *parts)
        )
        torch.testing.assert_close(got, expected, atol=5e-3, rtol=5e-3)
        for tensor, kept_before in zip((cache.keys[0], cache.values[0]), held, strict=True):
            torch.testing.assert_close(tensor.index_select(1, own), kept_before, atol=1, rtol=0)


def test_attention_of_the_last_of_many_rows():
    torch.manual_seed(9)
    num_heads, num_kv_heads, head_dim, block_size = 8, 4, 64, 16
    cache = KVCache(KVShape(1, num_kv_heads, head_dim), 24, block_size, torch.float16, DEVICE)
    cache.write(0, torch.arange(24 * block_size), *torch.randn(2, 24 * block_size, num_kv_heads, head_dim).half())
    qkv = rows_beyond((num_heads + 2 * num_kv_heads) * head_dim, torch.float16)
    heads = qkv.view(len(qkv), -1, head_dim).split((num_heads, num_kv_heads, num_kv_heads), 1)
    # Of these the first is read by one program, the other by several.
    blocks = [list(range(2)), list(range(3, 23))]
    near = [Extent(0, 1, 20, blocks[0]), Extent(1, 1, 300, blocks[1])]
    far = [extent._replace(row=len(qkv) - LAST + extent.row) for extent in near]
    scores, own = Scores(0.1, (0,)), slots_of(near, block_size)
    slots = torch.full((len(qkv),), -1)
    slots[-LAST:] = own
    backend = TritonAttention(cache, scores, num_heads, num_processors=16)
    plan = backend.plan(far, slots)
    assert [launch.merged_rows for launch in plan.launches] != [0]
    got = plan.attend(0, *heads)[-LAST:]
    last = [each[-LAST:].contiguous() for each in heads]
    expected = ReferenceAttention(cache, scores).plan(near, own).attend(0, *last)
    torch.testing.assert_close(got, expected, atol=5e-3, rtol=5e-3)

    angles = huge_empty((2, len(qkv), head_dim), torch.float32)
    angles[0, -LAST:] = 1.0
    architecture = replace(SHAPES["S"], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    cache.keys[0][:, own], cache.values[0][:, own] = 0, 0
    got = TritonOps().attend(backend.plan(far, slots), 0, qkv, architecture, Turning(*angles))[-LAST:]
    torch.testing.assert_close(got, expected, atol=5e-3, rtol=5e-3)


def test_the_last_of_many_rows_between_matrices():
    torch.manual_seed(1)
    ours, width = TritonOps(), 4096
    x, norm = rows_beyond(width, torch.float16), torch.rand(width)
    before = x[-LAST:].clone()
    normed = ours.add_norm(x, x, norm, norm, 1e-5)
    expected = TorchOps().add_norm(before, before.clone(), norm, norm, 1e-5)
    torch.testing.assert_close(x[-LAST:], before, atol=4e-3, rtol=4e-3)
    torch.testing.assert_close(normed[-LAST:], expected, atol=4e-3, rtol=4e-3)

    gates = rows_beyond(width, torch.float16)
    torch.testing.assert_close(
        ours.gate(gates, "silu")[-LAST:], TorchOps().gate(gates[-LAST:], "silu"), atol=4e-3, rtol=4e-3
    )

    codes, scales = to_int8(gates)
    torch.testing.assert_close(codes[-LAST:].float() * scales[-LAST:, None], gates[-LAST:].float(), atol=0.02, rtol=0)


def test_the_heads_of_the_last_of_many_rows():
    torch.manual_seed(2)
    architecture = replace(SHAPES["S"], num_heads=40, num_kv_heads=12, head_dim=64)
    qkv = rows_beyond(64 * 64, torch.float16)
    angles = huge_empty((2, len(qkv), 32), torch.float32)
    angles[:, -LAST:] = torch.randn(2, LAST, 32)
    expected = qkv[-LAST:].clone()
    TorchOps().turn(expected, architecture, Turning(*angles[:, -LAST:]))
    TritonOps().turn(qkv, architecture, Turning(*angles))
    torch.testing.assert_close(qkv[-LAST:], expected, atol=4e-3, rtol=4e-3)


def test_the_last_of_many_rows_of_logits():
    torch.manual_seed(3)
    vocab_size = 1 << 18
    logits = rows_beyond(vocab_size, torch.float32)
    num = len(logits)
    bits = torch.full((LAST, vocab_size // 32), -1, dtype=torch.int32)
    bits[:, : vocab_size // 64] = 0x55555555
    own = logits[-LAST:].clone()
    own[:, 1 : vocab_size // 2 : 2] = -torch.inf
    mask(logits, torch.tensor([num - 2, num - 1]), bits)
    assert torch.equal(logits[-LAST:], own)
    asked = [Sampling(1, temperature=0.7, top_k=40, top_p=0.9)] * num
    keys = [(row, 0) for row in range(num)]
    drawn = draw(logits, Wishes.of(asked, keys, DEVICE))
    assert torch.equal(drawn[-LAST:], in_torch.draw(own, asked[-LAST:], keys[-LAST:]))


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_the_last_outputs_of_a_large_matrix(form):
    torch.manual_seed(4)
    width = 4096 if form == "int8" else 2048
    num_inputs, group = 4096, 64
    codes = huge_empty((FAR // width + 64, width), torch.int8)
    codes[-64:] = torch.randint(-128, 128, (64, width), dtype=torch.int8)
    x = torch.randn(3, num_inputs) / 64
    if form == "int8":
        scales = torch.rand(len(codes))
        got = CudaScaledLinear(Int8(codes, scales), None, rounds_inputs=False)(x)
        dense = codes[-64:].float() * scales[-64:, None]
    else:
        scales = huge_empty((2, len(codes), num_inputs // group), torch.float32)
        scales[:, -64:] = torch.rand(2, 64, num_inputs // group)
        got = CudaInt4Linear(Int4(codes.view(torch.uint8), *scales, group), None)(x)
        dense = Int4(codes[-64:].view(torch.uint8), *scales[:, -64:], group).dense(torch.float32)
    torch.testing.assert_close(got[:, -64:], F.linear(x, dense), atol=2e-3, rtol=1e-4)


def test_the_last_outputs_of_a_large_matrix_and_few_rows():
    torch.manual_seed(5)
    matrix = rows_beyond(4096, torch.float16)
    x, y = torch.randn(2, 4096) / 64, torch.zeros(2, len(matrix))
    streamed_kernels.stream[(len(matrix),)](
        matrix, x, x, x, x, y, len(matrix), 4096, x.stride(0), y.stride(0), 1e-5, ROWS=2, FLOAT8=0, SCALED=False,
        HAS_BIAS=False, NORMED=False, ACTIVATION=None, ADDS=False, BLOCK_N=1, BLOCK_K=1024, STAGES=1, EARLY=False,
    )  # fmt: skip
    torch.testing.assert_close(y[:, -LAST:], F.linear(x, matrix[-LAST:].float()))


def test_sums_of_integers_of_the_last_of_many_rows():
    torch.manual_seed(6)
    sums, scales = huge_empty((FAR // 4096 + 3, 4096), torch.int32), torch.rand(4096)
    sums[-LAST:] = torch.randint(-1000, 1000, (LAST, 4096), dtype=torch.int32)
    x_scales, y = torch.rand(len(sums)), huge_empty(tuple(sums.shape), torch.float16)
    scaled_kernels.rescale[(len(sums), 4)](sums, x_scales, scales, scales, y, 4096, HAS_BIAS=False, BLOCK=1024)
    expected = sums[-LAST:] * x_scales[-LAST:, None] * scales
    torch.testing.assert_close(y[-LAST:].float(), expected, atol=0.5, rtol=1e-3)


def test_the_last_of_many_experts():
    torch.manual_seed(7)
    num_experts, size, inner = 513, 2048, 1024
    gate_up = huge_empty((num_experts, 2 * inner, size), torch.int8)
    down = huge_empty((num_experts, size, inner), torch.int8)
    assert gate_up[:-1].numel() == FAR
    for stack in (gate_up, down):
        stack[-1] = torch.randint(-128, 128, stack.shape[1:], dtype=torch.int8)
    scales = torch.rand(num_experts, 2 * inner) / 2000, torch.rand(num_experts, size) / 2000
    logits = torch.full((1, num_experts), -9.0)
    logits[0, -1] = 1.0
    stacks = Stack(gate_up, scales[0]), Stack(down, scales[1])
    x = torch.randn(1, size)
    opened = TorchOps().gate(F.linear(x, gate_up[-1].float() * scales[0][-1, :, None]), "silu")
    expected = F.linear(opened, down[-1].float() * scales[1][-1, :, None])
    experts = CudaExperts(Mixture(num_experts, 1, True), *stacks, None, is_repeatable=False)
    torch.testing.assert_close(experts(x, logits, "silu"), expected, atol=1e-2, rtol=1e-3)


def test_the_last_sums_over_experts():
    torch.manual_seed(8)
    parts = rows_beyond(4096, torch.float16)
    parts = parts[len(parts) % 2 :]
    y = huge_empty((len(parts) // 2, 4096), torch.float16)
    experts_kernels.combine[(len(y), 4)](parts, y, 4096, NUM_EACH=2, BLOCK=1024)
    torch.testing.assert_close(y[-1], parts[-LAST:].float().sum(0).half())
