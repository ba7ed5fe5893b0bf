"""A decoder's step of very few rows on a CUDA device, in four launches a layer beside attention's: norms, gates and
sums are parts of the products (``worker.triton.streamed``). Importing this imports Triton.

With one row, reading the matrices is what a step takes. torch's products of so few rows do not always read them at the
device's rate, and each small operation between them costs a launch. What serves better, this or the decoder as it is,
is measured where it is used.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch
import triton
from torch import Tensor

from worker.attention import Plan
from worker.models.architecture import Activation
from worker.models.decoder import Decoder, Layer
from worker.models.linear import Linear
from worker.models.linear.base import Stored
from worker.models.linear.on_cuda import CudaFp8Linear
from worker.models.linear.plain import PlainLinear
from worker.models.linear.scaled_on_cuda import CudaScaledLinear
from worker.models.mlp import feed
from worker.models.ops import Ops, Turning, softcapped
from worker.triton import streamed as kernels
from worker.triton.early import early

ROWS = (1, 2, 4)
"""Of a step; a sum for each of them is held in registers."""
_PIECE = 4096
"""Numbers of all rows of x, at once."""
_SUMS = 8192
"""That a program holds, for all rows of x: 64 for each thread."""
_MOST_OFF = 0.1
"""Of the largest number, that two ways of rounding may differ by; it is half of that where the model rounds inputs to
float8."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Way:
    """To read the matrices; of each, the bytes of a row that are read at once."""

    name: str
    stages: int
    """Pieces under way at once in a program: one, straight into registers, while other programs wait less; or more, by
    way of shared memory."""
    qkv: int = 2048
    output: int = 2048
    gate_up: int = 2048
    down: int = 2048
    head: int = 2048


WAYS = (
    Way("1 at once", 1),
    Way("3 at once", 3, output=1024, gate_up=1024, head=1024),
)
"""Which is fastest is found out where they are used; the second is, on an H200."""


@dataclass(frozen=True, slots=True)
class _Matrices:
    """Of a layer."""

    qkv: Stored
    output: Stored
    gate_up: Stored
    down: Stored

    @classmethod
    def of(cls, layer: Layer) -> Self | None:
        found = [stored_of(each) for each in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        matrices = [each for each in found if each is not None]
        has_norms = layer.attention_pre_norm is not None and layer.mlp_pre_norm is not None
        has_others = layer.attention_post_norm is not None or layer.mlp_post_norm is not None
        return cls(*matrices) if len(matrices) == len(found) and has_norms and not has_others else None


class FusedDecoder:
    """In place of a Decoder's ``forward`` where each row's logits are wanted, and nothing else."""

    rows = ROWS

    def __init__(self, model: Decoder, ops: Ops, layers: list[_Matrices], head: Stored, way: Way) -> None:
        self._model, self._ops, self._layers, self._head, self._way = model, ops, layers, head, way
        self._early = early(model.device)

    @classmethod
    def all_of(cls, model: Decoder, ops: Ops) -> list[Self]:
        """One for each of WAYS that says on this device what ``model`` says; none where it has other parts."""
        layers, head = [_Matrices.of(layer) for layer in model.layers], stored_of(model.head)
        held = [layer for layer in layers if layer is not None]
        if head is None or model.norm is None or len(held) < len(layers):
            return []
        return [each for each in (cls(model, ops, held, head, way) for way in WAYS) if each.agrees()]

    def __str__(self) -> str:
        return f"fused, {self._way.name}"

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor, plan: Plan, logits: Tensor) -> None:
        """token_ids and positions [num_rows] i64, as many as one of ``rows``, into logits
        [num_rows, vocab_size] f32."""
        model, architecture, num_rows = self._model, self._model.architecture, len(token_ids)
        x = model.enter(token_ids)
        angles = [rotary.at(positions) for rotary in model.rotaries]
        for index, (layer, own) in enumerate(zip(model.layers, self._layers, strict=True)):
            qkv = self._multiply(
                own.qkv, self._way.qkv, x, x.new_empty((num_rows, len(own.qkv.codes))), layer.attention_pre_norm
            )
            turning = Turning(*angles[architecture.layer_ropes[index]], layer.query_norm, layer.key_norm)
            mixed = self._ops.attend(plan, index, qkv, architecture, turning)
            self._multiply(own.output, self._way.output, mixed, x, adds=True)
            self._multiply(own.down, self._way.down, self._gated(own, layer, x), x, adds=True)
        self._multiply(self._head, self._way.head, x, logits, model.norm)
        if architecture.logits_softcap:
            logits.copy_(softcapped(logits, architecture.logits_softcap))

    def agrees(self) -> bool:
        """Whether all products of a first layer and the head, of random rows, are what the model's own are. Compiles
        what is used later."""
        try:
            chance = torch.Generator(self._model.device).manual_seed(0)
            pairs = (pair for num_rows in ROWS for pair in self._pairs(num_rows, chance))
            worst = torch.stack([self._off(*pair) for pair in pairs]).max()
            is_near = bool(worst <= _MOST_OFF)
        except Exception:
            log.exception("fused steps of few rows do not run here")
            return False
        if not is_near:
            log.error("fused steps of few rows (%s) are off by %.3g", self, float(worst))
        return is_near

    @torch.inference_mode()
    def _pairs(self, num_rows: int, chance: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        model, ops, own, layer = self._model, self._ops, self._layers[0], self._model.layers[0]
        eps, activation, device = model.architecture.norm_eps, model.architecture.activation, model.device
        assert layer.qkv is not None
        assert layer.gate_up is not None
        assert layer.down is not None
        assert model.head is not None

        def rows(size: int) -> Tensor:
            return torch.randn((num_rows, size), generator=chance, device=device, dtype=model.dtype)

        x, mixed = rows(layer.qkv.in_features), rows(layer.output.in_features)
        normed = ops.add_norm(x, None, None, layer.attention_pre_norm, eps)
        yield (
            layer.qkv(normed),
            self._multiply(own.qkv, self._way.qkv, x, rows(layer.qkv.out_features), layer.attention_pre_norm),
        )
        yield x + layer.output(mixed), self._multiply(own.output, self._way.output, mixed, x.clone(), adds=True)
        normed = ops.add_norm(x, None, None, layer.mlp_pre_norm, eps)
        fed = feed(normed, layer.gate_up, layer.down, ops, activation, 0, None)
        yield x + fed, self._multiply(own.down, self._way.down, self._gated(own, layer, x), x.clone(), adds=True)
        normed, logits = ops.add_norm(x, None, None, model.norm, eps), rows(model.head.out_features).float()
        yield model.head.wide(normed), self._multiply(self._head, self._way.head, x, logits, model.norm)

    @staticmethod
    def _off(expected: Tensor, got: Tensor) -> Tensor:
        return (got.float() - expected.float()).abs().max() / expected.float().abs().max()

    def _gated(self, own: _Matrices, layer: Layer, x: Tensor) -> Tensor:
        gated = x.new_empty((len(x), len(own.gate_up.codes) // 2))
        return self._multiply(
            own.gate_up, self._way.gate_up, x, gated, layer.mlp_pre_norm, self._model.architecture.activation
        )

    def _multiply(
        self,
        stored: Stored,
        piece_bytes: int,
        x: Tensor,
        y: Tensor,
        norm: Tensor | None = None,
        activation: Activation | None = None,
        adds: bool = False,
    ) -> Tensor:
        """x [num_rows, in] into y [num_rows, out], of which there are half as many with an activation."""
        codes, scales, bias = stored.codes, stored.scales, stored.bias
        (num_rows, num_outputs), num_inputs = y.shape, codes.shape[1]
        block_k = min(piece_bytes // codes.itemsize, _PIECE // num_rows, triton.next_power_of_2(num_inputs))
        block_n = max(1, min(_SUMS // (block_k * num_rows), 8) // (1 if activation is None else 2))
        kernels.stream[(triton.cdiv(num_outputs, block_n),)](
            codes, x if scales is None else scales, x if bias is None else bias, x, x if norm is None else norm, y,
            num_outputs, num_inputs, x.stride(0), y.stride(0), self._model.architecture.norm_eps, ROWS=num_rows,
            FLOAT8=stored.float8, SCALED=scales is not None, HAS_BIAS=bias is not None, NORMED=norm is not None,
            ACTIVATION=activation, ADDS=adds, BLOCK_N=block_n, BLOCK_K=block_k, STAGES=self._way.stages,
            **self._early,
        )  # fmt: skip
        return y


def stored_of(linear: Linear | None) -> Stored | None:
    """As ``worker.triton.streamed`` can read it; None: it cannot."""
    stored = linear.stored() if isinstance(linear, PlainLinear | CudaScaledLinear | CudaFp8Linear) else None
    return stored if stored is not None and stored.codes.is_contiguous() else None
