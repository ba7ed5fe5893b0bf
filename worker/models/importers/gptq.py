"""GPTQ (Frantar et al. 2022) as AutoGPTQ and GPTQModel write it.

Words of 32 bits pack codes along the inputs (``qweight`` [in * bits / 32, out]) and zero points along the outputs
(``qzeros`` [groups, out * bits / 32]), the lowest bits first. The first version of the format stores a zero point less
one, and 0 therefore as the largest code; the second, "gptq_v2", stores it as it is. ``g_idx`` names each input's group,
which act-order mixes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from worker.expressions import Expressions, SlowExpression
from worker.models.errors import ModelError
from worker.models.fields import Fields
from worker.models.fitting import Fit
from worker.models.forms import Form
from worker.models.importers.packing import eight_bits, four_bits, matches, nibbles
from worker.models.weights import Checkpoint


class Gptq:
    """See Importer."""

    def __init__(self, fields: Fields) -> None:
        """Raises ModelError."""
        self._bits = fields.integer("bits")
        if self._bits not in (4, 8):
            raise ModelError(f"the {self._bits} bits of this GPTQ {fields.architecture} are not supported, but 4 and 8")
        self._group = group_size(fields)
        layout = "marlin" if fields.flag("is_marlin_format", False) else "gptq"
        layout = fields.text("checkpoint_format", fields.text("format", layout))
        if layout not in ("gptq", "gptq_v2"):
            raise ModelError(f"the GPTQ format {layout[:80]} of this {fields.architecture} is not supported")
        self._is_less_one = layout == "gptq"
        self._has_head = fields.flag("lm_head", False)
        self._architecture, self._expressions = fields.architecture, Expressions()
        self._left_out, self._only = _chosen(fields, self._expressions)

    def matrix(self, checkpoint: Checkpoint, name: str, shape: tuple[int, int], fit: Fit) -> Form | None:
        """See Importer."""
        if not self._quantises(name):
            return None
        num_outputs, num_inputs = shape
        group = num_inputs if self._group == -1 else self._group
        each = 32 // self._bits
        if num_inputs % group or num_inputs % each or num_outputs % each:
            raise ModelError(f"groups of {group} and words of {each} codes do not divide the matrix of {name}")
        num_groups = num_inputs // group
        words = checkpoint.take(f"{name}.qweight", (num_inputs // each, num_outputs), dtypes=(torch.int32,))
        zeros = checkpoint.take(f"{name}.qzeros", (num_groups, num_outputs // each), dtypes=(torch.int32,))
        scales = checkpoint.take(f"{name}.scales", (num_groups, num_outputs)).t().float().contiguous()
        g_idx = None
        if f"{name}.g_idx" in checkpoint:
            g_idx = checkpoint.take(f"{name}.g_idx", (num_inputs,), dtypes=(torch.int32, torch.int64))
        _drop_zero_bias(checkpoint, f"{name}.bias", num_outputs)
        # A column of words is a row of ours, and its bytes come in the order of the inputs.
        codes = words.t().contiguous().view(torch.uint8)
        unpacked = self._zeros(zeros).t().float().contiguous()
        if self._bits == 4:
            return four_bits(codes, scales, unpacked, g_idx, name, fit)
        return eight_bits(codes, scales, unpacked, g_idx, name, fit)

    def _zeros(self, words: Tensor) -> Tensor:
        """[groups, out] uint8"""
        zeros = nibbles(words) if self._bits == 4 else words.contiguous().view(torch.uint8)
        return (zeros + 1) & (2**self._bits - 1) if self._is_less_one else zeros

    def _quantises(self, name: str) -> bool:
        if name == "lm_head":
            return self._has_head
        try:
            if any(self._expressions.match(pattern, name) for pattern in self._left_out):
                return False
        except SlowExpression as slow:
            raise ModelError(
                f"the expressions in dynamic of this {self._architecture} take too long to match, as {slow}"
            ) from None
        return not self._only or matches(name, self._only)


def group_size(fields: Fields) -> int:
    """-1: the whole row."""
    value = fields.raw.get("group_size", 128)
    if isinstance(value, bool) or not isinstance(value, int) or not (value == -1 or 0 < value < 1 << 20):
        raise fields.wrong("group_size", value)
    return value


def _chosen(fields: Fields, expressions: Expressions) -> tuple[list[str], list[str]]:
    """Expressions of modules that are left as they were, and the modules of a layer that are not (none: all)."""
    left_out = []
    dynamic = fields.table("dynamic")
    for pattern in dynamic.raw if dynamic else ():
        if not pattern.startswith("-:"):
            raise ModelError(
                f"this {fields.architecture} is quantised module by module ({pattern[:80]}), which is not supported"
            )
        try:
            expressions.add(pattern.removeprefix("-:"))
        except ValueError:
            raise fields.wrong("dynamic", pattern) from None
        left_out.append(pattern.removeprefix("-:"))
    only = fields.raw.get("modules_in_block_to_quantize") or []
    if not isinstance(only, list):
        raise fields.wrong("modules_in_block_to_quantize", only)
    flat = [name for entry in only for name in (entry if isinstance(entry, list) else [entry])]
    if not all(isinstance(name, str) for name in flat):
        raise fields.wrong("modules_in_block_to_quantize", only)
    return left_out, flat


def _drop_zero_bias(checkpoint: Checkpoint, name: str, size: int) -> None:
    """Old files have a bias of zeros where the model has none."""
    if name in checkpoint and not checkpoint.peek(name, (size,)).any():
        checkpoint.drop(name)
