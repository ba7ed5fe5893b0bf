"""compressed-tensors, as llm-compressor writes it: packed (W4A16, W8A16), int-quantized (W8A8) and float-quantized.

Groups of modules have a scheme each, by class ("Linear"), by name or by an expression ("re:"); ``ignore`` takes modules
out again. Integers stand for themselves, below and above zero; packed ones are raised by half their range.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker.expressions import Expressions, SlowExpression
from worker.models.errors import ModelError
from worker.models.fields import Fields
from worker.models.fitting import Fit
from worker.models.forms import Form
from worker.models.importers.packing import eight_bits, float_8, four_bits, nibbles, paired
from worker.models.weights import FLOATS, Checkpoint

_PACKED, _NAIVE = "pack-quantized", ("int-quantized", "float-quantized", "naive-quantized")
_PLAIN = "dense"


@dataclass(frozen=True, slots=True)
class _Scheme:
    targets: tuple[str, ...]
    format: str
    bits: int
    is_float: bool
    strategy: str
    group: int
    is_symmetric: bool
    block: tuple[int, int]


class CompressedTensors:
    """See Importer."""

    def __init__(self, fields: Fields) -> None:
        """Raises ModelError."""
        for key, what in (("sparsity_config", "sparse"), ("transform_config", "transformed")):
            table = fields.table(key)
            if table is not None and table.raw and table.raw.get("format", "other") != _PLAIN:
                raise ModelError(f"this {fields.architecture} is {what} as well, which is not supported")
        self._architecture, self._expressions = fields.architecture, Expressions()
        self._ignored = _texts(fields, "ignore", self._expressions)
        groups = fields.table("config_groups")
        self._schemes = []
        for name in groups.raw if groups else ():
            group = groups.table(name) if groups else None
            scheme = _scheme(fields, group, self._expressions) if group else None
            if scheme is not None:
                self._schemes.append(scheme)

    def matrix(self, checkpoint: Checkpoint, name: str, shape: tuple[int, int], fit: Fit) -> Form | None:
        """See Importer."""
        if self._names(name, self._ignored):
            return None
        scheme = self._scheme_of(name)
        if scheme is None:
            return None
        scales = _scales(checkpoint, name, scheme, shape)
        if scheme.is_float:
            codes = checkpoint.take(f"{name}.weight", shape, dtypes=(torch.float8_e4m3fn,))
            return float_8(codes, scales, scheme.block if scheme.strategy == "block" else None, name, fit)
        g_idx = None
        if f"{name}.weight_g_idx" in checkpoint:
            g_idx = checkpoint.take(f"{name}.weight_g_idx", (shape[1],), dtypes=(torch.int32, torch.int64))
        if scheme.is_symmetric:
            checkpoint.drop(f"{name}.weight_zero_point")  # some files have it all the same
        zeros = None if scheme.is_symmetric else _zeros(checkpoint, name, scheme, scales)
        codes = _codes(checkpoint, name, scheme, shape)
        half = 2 ** (scheme.bits - 1)
        if scheme.bits == 4:
            raised = torch.full_like(scales, half) if zeros is None else zeros + half
            return four_bits(codes, scales, raised, g_idx, name, fit)
        return eight_bits(codes, scales, zeros, g_idx, name, fit)

    def _scheme_of(self, name: str) -> _Scheme | None:
        """As compressed-tensors chooses (``match_targets``): by the whole name, else by an expression, else by class,
        in whatever order the groups are."""
        for is_meant in (lambda entry: entry == name, lambda entry: entry.startswith("re:"), lambda entry: True):
            for scheme in self._schemes:
                if self._names(name, tuple(filter(is_meant, scheme.targets))):
                    return scheme
        return None

    def _names(self, name: str, entries: tuple[str, ...]) -> bool:
        """Every matrix is of a Linear. Raises ModelError."""
        try:
            return any(
                self._expressions.match(entry[3:], name) if entry.startswith("re:") else entry in (name, "Linear")
                for entry in entries
            )
        except SlowExpression as slow:
            raise ModelError(
                f"the expressions of this {self._architecture}'s groups take too long to match, as {slow}"
            ) from None


def _scheme(fields: Fields, group: Fields, expressions: Expressions) -> _Scheme | None:
    """None where the weights are left as they were. Raises ModelError."""
    weights = group.table("weights")
    layout = group.text("format", fields.text("format", _PLAIN))
    if weights is None or layout == _PLAIN:
        return None
    architecture = fields.architecture
    if layout != _PACKED and layout not in _NAIVE:
        raise ModelError(f"the compressed-tensors format {layout[:80]} of this {architecture} is not supported")
    bits, kind = weights.integer("num_bits", 8), weights.text("type", "int")
    if kind not in ("int", "float") or bits not in ((8,) if kind == "float" else (4, 8)):
        raise ModelError(f"weights of {bits} bits ({kind[:80]}) in this {architecture} are not supported")
    size = weights.raw.get("group_size")
    strategy = weights.text("strategy", "tensor" if size is None else "channel" if size == -1 else "group")
    known = ("tensor", "channel", "block") if kind == "float" else ("tensor", "channel", "group")
    if strategy not in known:
        raise ModelError(f"scales by {strategy[:80]} in this {architecture} are not supported for {kind}")
    block = weights.raw.get("block_structure") or [1, 1]
    if not isinstance(block, list) or len(block) != 2 or not all(type(part) is int and part > 0 for part in block):
        raise weights.wrong("block_structure", block)
    return _Scheme(
        targets=_texts(group, "targets", expressions),
        format=layout,
        bits=bits,
        is_float=kind == "float",
        strategy=strategy,
        group=weights.positive("group_size") if strategy == "group" else 0,
        is_symmetric=weights.flag("symmetric", True),
        block=(block[0], block[1]),
    )


def _scales(checkpoint: Checkpoint, name: str, scheme: _Scheme, shape: tuple[int, int]) -> Tensor:
    """[out, groups] f32; of blocks one for each."""
    num_outputs, num_inputs = shape
    if scheme.strategy == "group":
        if num_inputs % scheme.group:
            raise ModelError(f"groups of {scheme.group} do not divide the {num_inputs} inputs of {name}")
        return checkpoint.take(f"{name}.weight_scale", (num_outputs, num_inputs // scheme.group)).float()
    if scheme.strategy == "block":
        height, width = scheme.block
        return checkpoint.take(f"{name}.weight_scale", (-(-num_outputs // height), -(-num_inputs // width))).float()
    shapes: tuple[tuple[int, ...], ...] = (
        ((num_outputs, 1), (num_outputs,)) if scheme.strategy == "channel" else ((1,), (), (1, 1))
    )
    scales = checkpoint.take_one_of(f"{name}.weight_scale", shapes)
    return scales.float().reshape(-1, 1).expand(num_outputs, 1).contiguous()


def _zeros(checkpoint: Checkpoint, name: str, scheme: _Scheme, scales: Tensor) -> Tensor:
    """[out, groups] f32, below and above zero as the weights."""
    num_outputs, num_groups = scales.shape
    full = f"{name}.weight_zero_point"
    packed = (-(-num_outputs * scheme.bits // 32), num_groups)
    shapes: tuple[tuple[int, ...], ...] = ((num_outputs, num_groups), (1,), ())
    if num_groups == 1:
        shapes = (*shapes, (num_outputs,))
    if scheme.format == _PACKED:
        shapes = (packed, *shapes)
    zeros = checkpoint.take_one_of(full, shapes, (torch.int32, torch.int8, torch.int64, *FLOATS))
    if tuple(zeros.shape) == packed and zeros.dtype == torch.int32 and scheme.format == _PACKED:
        words = zeros.t()
        raised = nibbles(words) if scheme.bits == 4 else words.contiguous().view(torch.uint8)
        return raised.t()[:num_outputs].float() - float(1 << (scheme.bits - 1))
    if zeros.numel() not in (1, num_outputs * num_groups):
        raise ModelError(f"the packed zero points of {name} are {str(zeros.dtype).removeprefix('torch.')}, not int32")
    return zeros.float().reshape(-1, num_groups if zeros.numel() > 1 else 1).expand(num_outputs, num_groups)


def _codes(checkpoint: Checkpoint, name: str, scheme: _Scheme, shape: tuple[int, int]) -> Tensor:
    """Of four bits [out, in / 2] uint8, as Int4 has them; of eight [out, in] int8."""
    num_outputs, num_inputs = shape
    if scheme.bits == 4 and num_inputs % 2:
        raise ModelError(f"the odd number of inputs of {name} is not supported in four bits")
    if scheme.format != _PACKED:
        codes = checkpoint.take(f"{name}.weight", shape, dtypes=(torch.int8,))
        return codes if scheme.bits == 8 else paired((codes + 8).view(torch.uint8))
    sizes = checkpoint.take(f"{name}.weight_shape", (2,), dtypes=(torch.int64, torch.int32)).tolist()
    if tuple(sizes) != shape:
        there, wanted = ("x".join(map(str, each)) for each in (sizes, shape))
        raise ModelError(f"the matrix of {name} is {there}, not {wanted}")
    num_words = -(-num_inputs * scheme.bits // 32)
    words = checkpoint.take(f"{name}.weight_packed", (num_outputs, num_words), dtypes=(torch.int32,))
    raised = words.view(torch.uint8)[:, : num_inputs * scheme.bits // 8]
    if scheme.bits == 4:
        return raised.contiguous()
    return torch.bitwise_xor(raised, 128).view(torch.int8)


def _texts(fields: Fields, key: str, expressions: Expressions) -> tuple[str, ...]:
    value: Any = fields.raw.get(key) or []
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise fields.wrong(key, value)
    for entry in value:
        if entry.startswith("re:"):
            try:
                expressions.add(entry[3:])
            except ValueError:
                raise fields.wrong(key, entry) from None
    return tuple(value)
