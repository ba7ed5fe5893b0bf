"""Every kernel compiles for every device it is meant for, as it would be launched there. No device is needed: Triton
brings its own assembler.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from policies.terms import Sampling
from tests.worker.pools import slots_of
from worker.attention.base import Extent, Scores, Shape
from worker.attention.paged import TritonAttention
from worker.inputs import Laid, planned
from worker.kv_cache import KVCache, KVShape
from worker.models.architecture import Mixture
from worker.models.experts_on_cuda import CudaExperts
from worker.models.forms import Fp8, Int4, Int8
from worker.models.fused import FusedDecoder
from worker.models.linear import Means
from worker.models.linear.on_cuda import CudaInt4Linear, to_float8
from worker.models.linear.scaled_on_cuda import ROUNDED_TOKENS, CudaScaledLinear
from worker.models.load import build_decoder
from worker.models.ops import Turning
from worker.models.shapes import SHAPES
from worker.models.shard import Shard
from worker.models.sources import PlainSource
from worker.models.stacks import Stack
from worker.models.triton_ops import TritonOps
from worker.sampling.on_device import Wishes, draw, mask

CPU = torch.device("cpu")
SHARED_BYTES = {80: 99 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}
"""What one program may have, by device. sm_80 has 163 KiB, but what is compiled for it stands for sm_89 as well: see
``in_turn``."""
REGISTERS = 65536
"""What a processor has, and so the largest program."""
MOST_STACK_BYTES = {"attend": 80, "multiply": 16, "stream": 8, "add_norm": 8}
"""By kernel; of the others none. float32, which tensor cores do not multiply, may have any."""


def in_turn(*cases: Any) -> list[Any]:
    """Each for sm_90, and for sm_80, sm_89 or sm_120, whose tensor cores Triton asks for the same."""
    return [(arch, *case) for at, case in enumerate(cases) for arch in ((80, 89, 120)[at % 3], 90)]


class OnPaper:
    """A driver of no device: kernels are compiled for one, and not launched."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture(params=sorted(SHARED_BYTES))
def compiled(request, monkeypatch):
    """All that was compiled, by name; checked at the end."""
    kernels: list[tuple[str, Any]] = []
    wide: set[int] = set()
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        kernels.append((self.__name__, kernel))
        if kwargs.get("MULTIPLY") is triton.language.float32:
            wide.add(id(kernel))
        return kernel

    monkeypatch.setattr(JITFunction, "run", compile_only)
    triton.runtime.driver.set_active(OnPaper(request.param))
    yield kernels
    assert kernels
    for name, kernel in {id(kernel): (name, kernel) for name, kernel in kernels}.values():
        assert kernel.metadata.shared <= SHARED_BYTES[request.param], name
        registers, stack_bytes = used_by(kernel)
        assert registers * 32 * kernel.metadata.num_warps <= REGISTERS, name
        assert id(kernel) in wide or stack_bytes <= MOST_STACK_BYTES.get(name, 0), (name, stack_bytes)


def used_by(kernel: Any) -> tuple[int, int]:
    """Registers, and bytes of the stack, where what finds no register goes, of each thread."""
    (path,) = [path for name, path in kernel.metadata_group.items() if name.endswith(".cubin")]
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(rf"Function {kernel.metadata.name}:\s*REG:(\d+) STACK:(\d+)", said)
    assert found, said
    return int(found[1]), int(found[2])


@pytest.mark.parametrize(
    ("compiled", "dtype", "group", "num_tokens", "head_dim", "window"),
    in_turn(
        (torch.bfloat16, 4, 1, 128, 0),
        (torch.bfloat16, 4, 17, 128, 0),
        (torch.float16, 7, 200, 80, 100),
        (torch.bfloat16, 4, 200, 256, 0),
        (torch.float8_e4m3fn, 4, 1, 128, 0),
        (torch.int8, 4, 200, 128, 0),
        (torch.float8_e4m3fn, 4, 200, 128, 100),
    ),
    indirect=["compiled"],
)
def test_attention(compiled, dtype, group, num_tokens, head_dim, window):
    attend(compiled, dtype, group, num_tokens, head_dim, window)


@pytest.mark.parametrize(
    ("compiled", "dtype", "kept", "qk_norm"),
    [
        (80, torch.float16, torch.float16, "width"),
        (80, torch.bfloat16, torch.int8, "none"),
        (89, torch.bfloat16, torch.float8_e4m3fn, "head"),
        (90, torch.bfloat16, torch.bfloat16, "none"),
        (90, torch.bfloat16, torch.float8_e4m3fn, "none"),
    ],
    indirect=["compiled"],
)
def test_heads_on_their_way_into_the_pool(compiled, dtype, kept, qk_norm):
    architecture = replace(SHAPES["S"], num_heads=24, num_kv_heads=6, head_dim=128, qk_norm=qk_norm)
    cache = KVCache(KVShape(1, 6, 128), 300, 16, kept, CPU, scaled=kept.itemsize == 1)
    extents = [Extent(0, 1, 400, range(270))]
    plan = TritonAttention(cache, Scores(0.1, (0,)), 24, num_processors=132).plan(extents, slots_of(extents, 16))
    norms = (None, None) if qk_norm == "none" else (torch.zeros(24 * 128), torch.zeros(6 * 128))
    turning = Turning(*torch.zeros(2, 1, 64), *norms)
    TritonOps().attend(plan, 0, torch.zeros(1, 36 * 128, dtype=dtype), architecture, turning)
    assert {name for name, _ in compiled} == {"turn_and_write", "attend", "reduce"}


@pytest.mark.parametrize("compiled", [89], indirect=True)
@pytest.mark.parametrize(("kept", "group", "head_dim"), [(torch.float32, 7, 64), (torch.int8, 4, 128)])
def test_attention_of_wide_numbers_where_there_is_least_memory(compiled, kept, group, head_dim):
    attend(compiled, kept, group, 200, head_dim, 0, is_wide=True)


@pytest.mark.parametrize("compiled", [89], indirect=True)
@pytest.mark.parametrize("head_dim", [128, 256])
def test_as_many_heads_as_share_keys_have_room_where_there_is_least_memory(compiled, head_dim):
    group = 1
    while TritonAttention.serves(KVCache(KVShape(1, 2, head_dim), 1, 16, torch.bfloat16, CPU), 4 * group):
        group *= 2
    assert group == 16384 // head_dim
    attend(compiled, torch.bfloat16, group, 1, head_dim, 0)


def attend(
    compiled: Any, kept: torch.dtype, group: int, num_tokens: int, head_dim: int, window: int, is_wide: bool = False
) -> None:
    dtype = torch.float32 if is_wide else torch.bfloat16 if kept.itemsize == 1 else kept
    scaled = kept.itemsize == 1 and window == 0
    cache = KVCache(KVShape(1, 2, head_dim), 300, 16, kept, CPU, scaled=scaled)
    sinks = (torch.zeros(2 * group),) if group == 7 else ()
    scores = Scores(0.1, (window,), 5.0 if window else 0.0, sinks)
    backend = TritonAttention(cache, scores, 2 * group, num_processors=132, dtype=dtype)
    extents = [Extent(0, num_tokens, 4000, range(270))]
    heads = torch.zeros(num_tokens, 2 * group + 4, head_dim, dtype=dtype)
    backend.plan(extents, slots_of(extents, 16)).attend(0, *heads.split((2 * group, 2, 2), 1))
    assert {name for name, _ in compiled} >= {"write", "attend"}


@pytest.mark.parametrize(
    ("compiled", "group", "kept"),
    in_turn((4, torch.bfloat16), (1, torch.bfloat16), (4, torch.float8_e4m3fn)),
    indirect=["compiled"],
)
def test_attention_of_recorded_steps_with_chunks(compiled, group, kept):
    cache = KVCache(KVShape(1, 2, 128), 300, 16, kept, CPU)
    backend = TritonAttention(cache, Scores(0.1, (0,)), 2 * group, num_processors=132)
    shape = Shape(128, 16)
    places = torch.zeros(backend.num_places(shape, 300), dtype=torch.int32)
    heads = torch.zeros(128, 2 * group + 4, 128, dtype=torch.bfloat16)
    backend.fixed(shape, torch.zeros(128).long(), places).attend(0, *heads.split((2 * group, 2, 2), 1))
    assert [name for name, _ in compiled] == ["write", *2 * ["attend"], *2 * ["reduce"]]


@pytest.mark.parametrize(
    ("compiled", "dtype", "group", "num_tokens"),
    in_turn(
        (torch.bfloat16, 32, 1),
        (torch.bfloat16, 128, 17),
        (torch.bfloat16, 64, 100),
        (torch.float16, 64, 100),
        (torch.bfloat16, 128, 300),
    ),
    indirect=["compiled"],
)
def test_four_bit_matrices(compiled, dtype, group, num_tokens):
    four_bits(dtype, group, num_tokens)


@pytest.mark.parametrize("compiled", [89], indirect=True)
def test_four_bit_matrices_of_wide_numbers_where_there_is_least_memory(compiled):
    four_bits(torch.float32, 128, 100)


def four_bits(dtype: torch.dtype, group: int, num_tokens: int) -> None:
    form = Int4(torch.zeros(256, 1024, dtype=torch.uint8), *torch.zeros(2, 256, 2048 // group), group)
    CudaInt4Linear(form, torch.zeros(256, dtype=dtype))(torch.zeros(num_tokens, 2048, dtype=dtype))


@pytest.mark.parametrize(
    ("compiled", "kind", "dtype", "num_tokens"),
    in_turn(
        (torch.int8, torch.bfloat16, 1),
        (torch.int8, torch.bfloat16, 100),
        (torch.float8_e4m3fn, torch.bfloat16, 100),
        (torch.int8, torch.float32, 100),
    ),
    indirect=["compiled"],
)
def test_matrices_of_one_byte_codes(compiled, kind, dtype, num_tokens):
    codes, scales = torch.zeros(256, 2048, dtype=torch.int8).view(kind), torch.ones(256)
    form = Int8(codes, scales) if kind is torch.int8 else Fp8(codes, scales)
    linear = CudaScaledLinear(form, torch.zeros(256, dtype=dtype), rounds_inputs=False)
    linear(torch.zeros(num_tokens, 2048, dtype=dtype))


@pytest.mark.parametrize("compiled", [80], indirect=True)
def test_many_tokens_times_int8(compiled):
    form = Int8(torch.zeros(256, 2048, dtype=torch.int8), torch.ones(256))
    linear = CudaScaledLinear(form, torch.zeros(256, dtype=torch.bfloat16), rounds_inputs=True)
    linear(torch.zeros(ROUNDED_TOKENS, 2048, dtype=torch.bfloat16))
    assert {name for name, _ in compiled} == {"to_codes", "rescale"}


@pytest.mark.parametrize(
    ("compiled", "kind", "dtype", "num_tokens"),
    [
        *in_turn(
            (torch.bfloat16, torch.bfloat16, 1),
            (torch.float16, torch.float16, 160),
            (torch.bfloat16, torch.bfloat16, 600),
            (torch.int8, torch.bfloat16, 80),
            (torch.float8_e4m3fn, torch.bfloat16, 80),
            (torch.int8, torch.bfloat16, 600),
            (torch.uint8, torch.bfloat16, 1),
            (torch.uint8, torch.bfloat16, 80),
            (torch.uint8, torch.bfloat16, 600),
            (torch.float32, torch.float32, 600),
        ),
        (89, torch.uint8, torch.float32, 600),
        (89, torch.int8, torch.float32, 80),
    ],
    indirect=["compiled"],
)
def test_experts(compiled, monkeypatch, kind, dtype, num_tokens):
    monkeypatch.setattr("worker.models.experts_on_cuda.num_processors", lambda device: 132)
    stacks = []
    for num_outputs, num_inputs in ((768, 1024), (1024, 384)):
        shape, bias = (16, num_outputs), torch.zeros(16, num_outputs, dtype=dtype) if kind is torch.float16 else None
        if kind is torch.uint8:
            codes = torch.zeros(*shape, num_inputs // 2, dtype=kind)
            stacks.append(Stack(codes, *torch.zeros(2, *shape, num_inputs // 128), 128))
        else:
            matrices = torch.zeros(*shape, num_inputs, dtype=torch.int8 if kind.itemsize == 1 else kind).view(kind)
            stacks.append(Stack(matrices, torch.ones(shape) if kind.itemsize == 1 else None, bias=bias))
    mixture = Mixture(16, 4, True, num_groups=4, num_chosen_groups=2, scores="sigmoid")
    experts = CudaExperts(mixture, *stacks, torch.zeros(16), is_repeatable=False)
    experts(torch.zeros(num_tokens, 1024, dtype=dtype), torch.zeros(num_tokens, 16), "silu")
    gates = ["gate"] if kind is torch.uint8 and num_tokens == 600 else []
    assert [name for name, _ in compiled] == ["route", "sort", "multiply", *gates, "multiply", "combine"]


@pytest.mark.parametrize(
    ("compiled", "dtype"),
    [(80, torch.float32), (89, torch.float16), (80, torch.bfloat16), (90, torch.bfloat16)],
    indirect=["compiled"],
)
def test_small_operations(compiled, dtype):
    ops, x, weight = TritonOps(), torch.zeros(2, 4096, dtype=dtype), torch.zeros(4096)
    ops.add_norm(x, x, weight, weight, 1e-6)
    ops.gate(x, "silu")
    ops.gate(x, "gelu_tanh")
    ops.gate(x, "gelu")
    ops.gate(x, "clamped_swiglu")
    for qk_norm in ("head", "width"):
        architecture = replace(SHAPES["S"], num_heads=24, num_kv_heads=4, head_dim=128, qk_norm=qk_norm)
        size = 128 if qk_norm == "head" else 4096
        ops.turn(x, architecture, Turning(*torch.zeros(2, 2, 64), torch.zeros(size), torch.zeros(size)))
    to_float8(x)


@pytest.mark.parametrize(
    ("compiled", "quantize", "num_rows"),
    [(80, "int8", 2), (80, "fp8", 4), (89, "none", 4), (90, "fp8", 4)],
    indirect=["compiled"],
)
def test_products_of_few_rows(compiled, monkeypatch, quantize, num_rows):
    """More of them take more registers. For one, and for 90 without quantisation, see what begins early."""
    monkeypatch.setattr("worker.models.fused.ROWS", (num_rows,))
    dtype = torch.bfloat16
    monkeypatch.setattr("worker.models.linear.has_triton", lambda device: True)
    monkeypatch.setattr("worker.models.linear.plain.packs_bfloat16", lambda: False)
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_layers": 1}
    own = replace(SHAPES["S"], **sizes, layer_ropes=(0,), windows=(0,), qkv_bias=True)
    source = PlainSource(lambda name, shape: torch.zeros(shape, dtype=dtype))
    model = build_decoder(Shard.of(own), source, dtype, CPU, 128, Means(rounds_inputs=False), quantize)
    FusedDecoder.all_of(model, TritonOps())  # tries what it would use
    assert {name for name, _ in compiled} >= {"add_norm", "gate", "stream"}


@pytest.mark.parametrize("compiled", [90], indirect=True)
def test_what_begins_early_waits_on_each_of_its_ways(compiled, monkeypatch):
    """Once, before anything branches: who left without would let others go before their time."""
    for module in ("attention.paged", "models.fused", "models.triton_ops", "triton.check"):
        monkeypatch.setattr(f"worker.{module}.early", lambda device: {"EARLY": True, "launch_pdl": True})
    monkeypatch.setattr("worker.models.linear.has_triton", lambda device: True)
    monkeypatch.setattr("worker.models.linear.plain.packs_bfloat16", lambda: False)
    monkeypatch.setattr("worker.models.fused.ROWS", (1,))
    attend(compiled, torch.bfloat16, 4, 1, 128, 0)
    own = replace(SHAPES["S"], hidden_size=1024, num_layers=1, layer_ropes=(0,), windows=(0,))
    source = PlainSource(lambda name, shape: torch.zeros(shape, dtype=torch.bfloat16))
    model = build_decoder(Shard.of(own), source, torch.bfloat16, CPU, 128, Means(rounds_inputs=False))
    FusedDecoder.all_of(model, TritonOps())
    cache = KVCache(KVShape(1, own.num_kv_heads, own.head_dim), 8, 16, torch.bfloat16, CPU)
    plan = TritonAttention(cache, Scores(0.1, (0,)), own.num_heads).plan(
        [Extent(0, 1, 40, range(3))], torch.zeros(1).long()
    )
    qkv = torch.zeros(1, (own.num_heads + 2 * own.num_kv_heads) * own.head_dim, dtype=torch.bfloat16)
    TritonOps().attend(plan, 0, qkv, own, Turning(*torch.zeros(2, 1, own.head_dim)))
    assert {name for name, _ in compiled} == {
        "write",
        "attend",
        "reduce",
        "turn_and_write",
        "add_norm",
        "gate",
        "stream",
    }
    for name, kernel in compiled:
        assert kernel.metadata.launch_pdl, name
        before, *behind = kernel.asm["ptx"].split("griddepcontrol.wait")
        assert len(behind) == 1, name
        assert before.count("griddepcontrol.launch_dependents") == 1, name
        assert not re.search(r"\b(bra|ret|st\.global)\b", before), name


@pytest.mark.parametrize("compiled", [89, 90], indirect=True)
def test_draws(compiled):
    asked = [Sampling(max_tokens=1, temperature=0.7, top_k=5, top_p=0.9)]
    draw(torch.zeros(1, 151_936), Wishes.of(asked, [(1, 2)], CPU))
    mask(torch.zeros(1, 151_936), torch.zeros(1, dtype=torch.int64), torch.zeros(1, 4748, dtype=torch.int32))
    assert [name for name, _ in compiled] == ["survey", "draw", "mask"]


@pytest.mark.parametrize("compiled", [90], indirect=True)
def test_one_kv_head_for_all_and_a_repeatable_row(compiled):
    architecture = replace(SHAPES["S"], num_heads=8, num_kv_heads=1, head_dim=128, qk_norm="head")
    cache = KVCache(KVShape(1, 1, 128), 300, 16, torch.bfloat16, CPU)
    backend = TritonAttention(cache, Scores(0.1, (0,)), 8, num_processors=132, is_repeatable=True)
    extents = [Extent(0, 3, 4000, range(270))]
    turning = Turning(*torch.zeros(2, 3, 128), torch.zeros(128), torch.zeros(128))
    plan = backend.plan(extents, slots_of(extents, 16))
    TritonOps().attend(plan, 0, torch.zeros(3, 1280, dtype=torch.bfloat16), architecture, turning)
    assert {name for name, _ in compiled} == {"turn_and_write", "attend"}


@pytest.mark.parametrize("compiled", [90], indirect=True)
def test_nothing_is_compiled_anew_for_another_number_of_rows_blocks_or_splits(compiled):
    """A worker would stand still for seconds in the middle of serving."""
    cache = KVCache(KVShape(1, 2, 64), 600, 16, torch.bfloat16, CPU)
    backend = TritonAttention(cache, Scores(0.1, (0,)), 8, num_processors=132)
    codes, scales = torch.zeros(192, 2048, dtype=torch.int8), torch.ones(192)
    one_byte = CudaScaledLinear(Int8(codes, scales), None, rounds_inputs=False)
    four_bits = CudaInt4Linear(Int4(codes[:, :1024].view(torch.uint8), *torch.zeros(2, 192, 32), 64), None)
    stacks = Stack(torch.zeros(16, 256, 512).bfloat16()), Stack(torch.zeros(16, 512, 128).bfloat16())
    experts = CudaExperts(Mixture(16, 4, True), *stacks, None, is_repeatable=False)
    for num in (1, 2, 3, 4, 5, 16):
        rows = range(num)
        asked = [Sampling(max_tokens=1, temperature=0.7, top_p=0.9)] * num
        draw(torch.zeros(num, 1000), Wishes.of(asked, [(row, 0) for row in rows], CPU))
        extents = [Extent(row, 1, 1000 + 16 * num, range(64 + num)) for row in rows]
        laid = Laid([0] * num, [0] * num, list(rows), list(rows)[: num // 2], extents, 0, [], [])
        _, plan = planned(laid, backend, CPU)
        plan.attend(0, *torch.zeros(num, 12, 64, dtype=torch.bfloat16).split((8, 2, 2), 1))
        for linear in (one_byte, four_bits):
            linear(torch.zeros(num, 2048, dtype=torch.bfloat16))
        experts(torch.zeros(num, 512, dtype=torch.bfloat16), torch.zeros(num, 16), "silu")
    names = [name for name, _ in {id(kernel): (name, kernel) for name, kernel in compiled}.values()]
    others = ["combine", "route", "sort", "multiply", "multiply"]
    expected = ["add_up", "attend", "draw", "multiply", "multiply", "reduce", "survey", "write", *others]
    assert sorted(names) == sorted(expected)
