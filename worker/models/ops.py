"""The small operations between the matrices, in plain torch, for any device and type. Sums and angles are float32
whatever the type.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.models.architecture import Activation


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., size], weight [size] f32 -> x's shape and type (Zhang and Sennrich 2019)."""
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """heads [num_tokens, num_heads, head_dim]; cos and sin [num_tokens, rotary_dim] as Rotary gives them -> the same
    shape, turned.
    """
    rotary_dim = cos.shape[1]
    turning = heads[..., :rotary_dim].float()
    turned = torch.addcmul(turning * cos[:, None], turning.roll(rotary_dim // 2, -1), sin[:, None]).to(heads.dtype)
    return turned if rotary_dim == heads.shape[2] else torch.cat((turned, heads[..., rotary_dim:]), 2)


def gate(gate_up: Tensor, activation: Activation) -> Tensor:
    """gate_up [num_tokens, 2 * size] -> activation(first half) * second half."""
    opened, up = gate_up.chunk(2, 1)
    match activation:
        case "silu":
            return F.silu(opened).mul_(up)
        case "gelu":
            return F.gelu(opened).mul_(up)
        case "gelu_tanh":
            return F.gelu(opened, approximate="tanh").mul_(up)
        case "relu":
            return F.relu(opened).mul_(up)
