"""A tenth of a second of doubt: what the compiled kernels do one by one, against torch."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from worker.native.floats import FloatMatrix
from worker.native.library import ACTIVATIONS, Library
from worker.native.packed import PackedInt4, PackedInt8, PackedMatrix
from worker.native.structures import Seen, Step

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 6, 2, 64, 16, 64
LENGTHS = (1, 17, 600)
"""Of the sequences that decode."""
START, NUM_CHUNK_TOKENS = 309, 45
"""Of the one whose prompt is computed."""
NUM_ROWS = len(LENGTHS) + NUM_CHUNK_TOKENS


def agrees_with_torch(library: Library) -> bool:
    """In both types: norms, turns, gates, what becomes of logits, and attention over scattered blocks, of single tokens
    whose past is short and longer than one task takes, and of a chunk of a prompt.
    """
    generator = torch.Generator().manual_seed(7)
    with torch.inference_mode():
        return all(_agrees(library, dtype, generator) for dtype in (torch.float32, torch.bfloat16))


def _agrees(library: Library, dtype: torch.dtype, generator: torch.Generator) -> bool:
    tolerance = 1e-4 if dtype is torch.float32 else 4e-2

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    def near(got: Tensor, expected: Tensor) -> bool:
        return bool(torch.allclose(got.float(), expected.float(), atol=tolerance, rtol=tolerance))

    x, delta = random(3, 96), random(3, 96)
    weight = random(96).float()
    total = (x.float() + delta.float()).to(dtype)
    normed = library.add_norm(x, delta, None, weight, 1e-6)
    if not (near(x, total) and near(normed, F.rms_norm(total.float(), (96,), weight, 1e-6))):
        return False

    gate_up = random(3, 160) * 4
    if not all(near(library.gate(gate_up, activation), _gated(gate_up, activation)) for activation in ACTIVATIONS):
        return False

    logits = random(3, 300).float()
    maxima = library.maxima(logits)
    if not torch.equal(maxima, _maxima(logits)):
        return False
    logits[0, 3], logits[1, 5] = 9, 9
    library.refresh_maxima(logits, maxima, torch.tensor([3, 305]))
    if not torch.equal(maxima, _maxima(logits)):
        return False

    if not (_penalises_and_ranks(library, logits) and _draws(library)):
        return False

    if library.has_linear and dtype is torch.bfloat16 and not _multiplies_bfloat16(library, random, near):
        return False

    if not (_multiplies_floats(library, random) and _multiplies_codes(library, random)):
        return False

    qkv, angles = random(NUM_ROWS, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM), random(NUM_ROWS, HEAD_DIM).float()
    cos, sin = angles.cos(), angles.sin()
    heads = qkv.float().view(NUM_ROWS, -1, HEAD_DIM)[:, : NUM_HEADS + NUM_KV_HEADS].clone()
    library.turn(qkv, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, cos, sin, None, None, False, 1e-6)
    turned = heads * cos[:, None] + heads.roll(HEAD_DIM // 2, -1) * sin[:, None]
    if not near(qkv[:, : turned[0].numel()], turned.flatten(1)):
        return False
    sinks = random(NUM_HEADS).float() * 3
    kinds = ((False, None), (True, None), (False, sinks))
    return all(near(*_attended(library, qkv, random, is_int8, beside)) for is_int8, beside in kinds)


def _penalises_and_ranks(library: Library, logits: Tensor) -> bool:
    x, maxima = logits.clone(), library.maxima(logits)
    seen, counts = torch.arange(1, 300, 3), torch.arange(100).remainder(3).float()
    every = [Seen(row, len(seen), seen.data_ptr(), counts.data_ptr(), 1.75, 0.5, 0.25) for row in range(len(x))]
    library.penalise(x, every, maxima)
    own = logits[:, seen]
    own = torch.where(own < 0, own * 1.75, own / 1.75) - 0.25 * counts - 0.5 * (counts > 0)
    if not (torch.equal(x, logits.index_copy(1, seen, own)) and torch.equal(maxima, _maxima(x))):
        return False
    totals, values, tokens = library.rank(x, maxima, 20)
    expected = x.sort(stable=True, descending=True)
    are_first = torch.equal(values, expected.values[:, :20]) and torch.equal(tokens, expected.indices[:, :20])
    return are_first and torch.allclose(totals, x.logsumexp(-1))


def _draws(library: Library) -> bool:
    """Known answers: what ``worker.sampling.race`` draws among 300 tokens by streams 0 to 7, half with top-k."""
    logits = torch.arange(300).remainder(7).float().div(2).repeat(8, 1)
    wishes = b"".join(struct.pack("=Qfffi", stream, 1.0, 1.0, 0.0, 42 * (stream >= 4)) for stream in range(8))
    drawn = library.draw(logits, library.maxima(logits), wishes)
    return drawn == [[136], [179], [109], [58], [167], [118], [237], [76]]


def _multiplies_bfloat16(
    library: Library, random: Callable[..., Tensor], near: Callable[[Tensor, Tensor], bool]
) -> bool:
    """With few rows and with many, in sixteen bits a weight and in twelve; and what is made of the sums."""
    x, matrix, bias = random(74, 64), random(56, 64) / 8, random(56)
    # Where it is coded, the exponents of these have no code.
    matrix[5, 7], matrix[50, 60] = 300, -500
    expected = F.linear(x.float(), matrix.float(), bias.float())
    for packed in (PackedMatrix(matrix, bias, False), PackedMatrix(matrix, bias, False, library.code)):
        for count in (1, 2, 4, 6, 37, 74):
            maxima = torch.empty(count, 1, 2)
            got = library.linear(x[:count], packed, torch.float32, maxima)
            if not (near(got, expected[:count]) and torch.equal(maxima, _maxima(got))):
                return False
    matrix = random(96, 64) / 8
    opened, packed = F.linear(x.float(), matrix.float()), PackedMatrix(matrix, None, True)
    return all(
        near(library.gated(x[:count], packed, activation), _gated(opened[:count], activation))
        for activation in ACTIVATIONS
        for count in (1, 6, 74)
    )


def _gated(gate_up: Tensor, activation: str) -> Tensor:
    """In float32."""
    gate, up = gate_up.float().chunk(2, 1)
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    if activation == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    functions: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}
    return functions[activation](gate) * up


def _maxima(logits: Tensor) -> Tensor:
    """See Library.maxima."""
    return F.pad(logits, (0, -logits.shape[1] % 64), value=-torch.inf).view(len(logits), -1, 2, 32).amax(-1)


def _multiplies_floats(library: Library, random: Callable[..., Tensor]) -> bool:
    """By all that can become floats, with one row and with several."""
    weight, bias, x = random(56, 128).float(), random(56), random(37, 128).float()
    scales = weight.abs().amax(1) / 127
    codes, float8 = (weight / scales[:, None]).round(), (weight / scales[:, None]).to(torch.float8_e4m3fn)
    eights, terms, offsets, dense = _in_four_bits(weight, random)
    forms = [
        (FloatMatrix.of_floats(weight, library.float_panel, bias), weight),
        (FloatMatrix.of_codes(codes.to(torch.int8), scales, library.float_panel, bias), codes * scales[:, None]),
        (FloatMatrix.of_codes(float8, scales, library.float_panel, bias), float8.float() * scales[:, None]),
        (FloatMatrix.of_int4(eights, terms, offsets, 32, library.float_panel, bias), dense),
    ]
    return all(
        torch.allclose(
            library.linear_as_floats(rows, matrix), F.linear(rows, expected, bias.float()), atol=1e-3, rtol=1e-4
        )
        for matrix, expected in forms
        for rows in (x, x[:1])
    )


def _multiplies_codes(library: Library, random: Callable[..., Tensor]) -> bool:
    """Inputs that are rounded by matrices of few bits, with one row, with several and with many."""
    if not library.has_int8:
        return True
    weight, bias, x = random(56, 128).float(), random(56), random(37, 128)
    scales = weight.abs().amax(1) / 127
    codes = (weight / scales[:, None]).round()
    expected = _rounded(x.float()) @ codes.T * scales + bias.float()
    packed = PackedInt8(codes.to(torch.int8), scales, bias)
    for part in (x, x[:1]):
        got = library.linear_rounded(part, packed, torch.float32)
        # An input halfway between two codes may go either way.
        if not torch.allclose(got, expected[: len(part)], atol=0.02 * float(expected.std()), rtol=0.0):
            return False
    eights, terms, offsets, dense = _in_four_bits(weight, random)
    expected = _rounded(x.float().view(37, 4, 32)).flatten(1) @ dense.T + bias.float()
    groups = PackedInt4(eights, terms, offsets, 32, bias, may_widen=True)
    for part in (x, x[:1]):
        got = library.linear_rounded(part, groups, torch.float32)
        if not torch.allclose(got, expected[: len(part)], atol=0.02 * float(expected.std()), rtol=0.0):
            return False
    # By token as by group the inputs are nearly the same, but of the matrix each weight may be rounded again.
    got, expected = library.linear_rounded(x.repeat(2, 1), groups, torch.float32), expected.repeat(2, 1)
    return torch.allclose(got, expected, atol=0.1 * float(expected.std()), rtol=0.0)


def _in_four_bits(weight: Tensor, random: Callable[..., Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, two a byte, what those of each 32 inputs are multiplied by and what is added then, and what they stand
    for; not the weights themselves."""
    codes = weight.mul(4).add(8).round().clamp(0, 15)
    terms, offsets = random(len(weight), 4).abs().float(), random(len(weight), 4).float()
    dense = codes.view(len(weight), 4, 32) * terms[:, :, None] + offsets[:, :, None]
    stored = codes.to(torch.uint8)
    return stored[:, 0::2] | stored[:, 1::2] << 4, terms, offsets, dense.flatten(1)


def _rounded(x: Tensor) -> Tensor:
    """To multiples of a 127th of the largest of the last dimension."""
    scales = x.abs().amax(-1, keepdim=True) / 127
    return (x / scales).round() * scales


def _attended(
    library: Library, qkv: Tensor, random: Callable[..., Tensor], is_int8: bool, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Decodes of each length and a chunk, over blocks in reverse order: what the kernel says, and what torch says."""
    num_slots = NUM_BLOCKS * BLOCK_SIZE
    key_cache, value_cache = (random(NUM_KV_HEADS, num_slots, HEAD_DIM) for _ in "kv")
    key_scales = value_scales = None
    if is_int8:
        key_scales, value_scales = (random(NUM_KV_HEADS, num_slots).float().abs() / 50 for _ in "kv")
        key_cache, value_cache = (
            (each.float() * 40).clamp(-127, 127).to(torch.int8) for each in (key_cache, value_cache)
        )
    size = -(-max(LENGTHS) // BLOCK_SIZE)
    # All share their blocks but for those that their own tokens go into.
    tables = np.array([[NUM_BLOCKS - 1 - place for place in range(size)]] * (len(LENGTHS) + 1), dtype=np.int32)
    for row, length in enumerate(LENGTHS):
        tables[row, (length - 1) // BLOCK_SIZE] = row
    end = START + NUM_CHUNK_TOKENS
    own_blocks = np.arange(START // BLOCK_SIZE, -(-end // BLOCK_SIZE))
    tables[-1, own_blocks] = len(LENGTHS) + np.arange(len(own_blocks))
    lengths = np.array(LENGTHS, dtype=np.int32)
    rows = np.arange(len(LENGTHS), dtype=np.int32)
    chunks = np.array([len(LENGTHS), NUM_CHUNK_TOKENS, START], dtype=np.int32)
    owners = np.append(rows, np.repeat(len(LENGTHS), NUM_CHUNK_TOKENS))
    positions = np.append(lengths - 1, np.arange(START, end))
    slots = tables[owners, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    step = Step(
        num_tokens=NUM_ROWS,
        slots=slots.ctypes.data,
        row_stride=qkv.shape[1],
        num_slots=num_slots,
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        block_size=BLOCK_SIZE,
        num_decodes=len(LENGTHS),
        rows=rows.ctypes.data,
        lengths=lengths.ctypes.data,
        tables=tables.ctypes.data,
        table_stride=size,
        num_chunks=1,
        chunks=chunks.ctypes.data,
        chunk_tables=tables[-1:].ctypes.data,
        chunk_table_stride=size,
        scale=HEAD_DIM**-0.5,
        threads=torch.get_num_threads(),
    )
    heads = qkv.view(NUM_ROWS, -1, HEAD_DIM)
    queries, keys, values = heads.split_with_sizes((NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS), 1)
    out = qkv.new_empty((NUM_ROWS, NUM_HEADS * HEAD_DIM))
    library.attend(step, queries, keys, values, key_cache, value_cache, 0, out, key_scales, value_scales, sinks)
    if key_scales is not None and value_scales is not None:
        key_cache, value_cache = key_cache * key_scales[..., None], value_cache * value_scales[..., None]
    # What was written, which a code may be off by half a step.
    for pool, new in ((key_cache, keys), (value_cache, values)):
        wanted = new.float().transpose(0, 1)
        step_size = wanted.abs().amax(-1, keepdim=True) / 127 if is_int8 else torch.zeros(())
        if ((pool[:, slots].float() - wanted).abs() > 0.51 * step_size).any():
            return out, torch.full_like(out, torch.nan)
    expected = []
    for row, (owner, position) in enumerate(zip(owners, positions, strict=True)):
        places = np.arange(int(position) + 1)
        seen = torch.from_numpy(tables[owner, places // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + places % BLOCK_SIZE)
        k, v = key_cache[:, seen].float(), value_cache[:, seen].float()
        folded = queries[row].float().view(NUM_KV_HEADS, -1, HEAD_DIM)
        weights = folded @ k.transpose(1, 2) * HEAD_DIM**-0.5
        if sinks is not None:
            weights = torch.cat((weights, sinks.view(NUM_KV_HEADS, -1, 1)), -1)
        expected.append((weights.softmax(-1)[..., : len(places)] @ v).flatten())
    return out, torch.stack(expected)
