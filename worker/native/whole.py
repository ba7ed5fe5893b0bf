"""The structures of a whole step, as linear.h and whole.h declare them; whoever fills one keeps what it points to."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch.nn.functional as F
from torch import Tensor

from worker.native.pages import huge_empty

TILE = 16
"""Columns of a matrix that lie together; two times as many are a panel."""


class Matrix(ctypes.Structure):
    _fields_ = (
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("size", c_int64),
        ("columns", c_int64),
        ("apart", c_int64),
    )


class Turning(ctypes.Structure):
    _fields_ = (
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("rotary_dim", c_int64),
        ("over_width", c_int32),
        ("eps", c_float),
    )


class Layer(ctypes.Structure):
    _fields_ = (
        *((name, Matrix) for name in ("qkv", "output", "gate_up", "down")),
        *(
            (name, c_void_p)
            for name in (
                "attention_pre_norm",
                "attention_post_norm",
                "mlp_pre_norm",
                "mlp_post_norm",
                "query_norm",
                "key_norm",
                "keys",
                "values",
            )
        ),
        ("window", c_int64),
        ("rope", c_int64),
    )


class Network(ctypes.Structure):
    _fields_ = (
        ("turning", Turning),
        ("num_layers", c_int64),
        ("hidden_size", c_int64),
        ("layers", c_void_p),
        ("embedding", c_void_p),
        ("embedding_scale", c_float),
        ("eps", c_float),
        ("activation", c_int64),
        ("norm", c_void_p),
        ("head", Matrix),
    )


class Pass(ctypes.Structure):
    _fields_ = (
        ("token_ids", c_void_p),
        ("rows", c_void_p),
        ("num_logits", c_int64),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("logits", c_void_p),
        ("memory", c_void_p),
    )


class PackedMatrix:
    """A bfloat16 matrix [columns, size], packed for the tiles of AMX."""

    def __init__(self, weight: Tensor, bias: Tensor | None, gated: bool) -> None:
        """``size`` must be a multiple of 32; ``gated``: the lower half of the rows opens the upper half, and where its
        size is a multiple of 16 the kernels can say at once what comes through.
        """
        columns, size = weight.shape
        self.gated = gated and columns % (2 * TILE) == 0
        self.packed = packed_tiles(weight, self.gated)
        self.bias = bias
        self.struct = Matrix(
            packed=self.packed.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            size=size,
            columns=columns,
            apart=columns // 2 if self.gated else TILE,
        )


def packed_tiles(weight: Tensor, gated: bool = False) -> Tensor:
    """weight [columns, size] bfloat16 -> panels [columns / 32, size / 32, 2, 16, 16, 2], filled up to whole panels.

    The tiles of AMX: rows are pairs of inputs, columns outputs. A panel is two tiles, neighbours, or, ``gated``, one
    of the upper half and the one at the same place in the lower.
    """
    columns, size = weight.shape
    if gated:
        tiles = weight.view(2, columns // (2 * TILE), TILE, size // 32, 16, 2).permute(1, 3, 0, 4, 2, 5)
    else:
        filled = F.pad(weight, (0, 0, 0, -columns % (2 * TILE)))
        tiles = filled.view(-1, 2, TILE, size // 32, 16, 2).permute(0, 3, 1, 4, 2, 5)
    return huge_empty(tiles.shape, weight.dtype).copy_(tiles)
