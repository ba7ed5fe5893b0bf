"""The small operations between the matrices: in plain torch for any device and type, or compiled for the CPU.

Sums and angles are float32 whatever the type.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.attention import Plan
from worker.models.architecture import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation, Architecture
from worker.native import DTYPES, MAX_HEAD_DIM, Library

_ALONE = 32768
"""Numbers that torch does not share out among threads."""
_VECTOR = 64
"""Numbers in some whole vectors, of any type."""


class Turning(NamedTuple):
    """What becomes of queries and keys: they are normed, where there are weights, and turned."""

    cos: Tensor
    """[num_tokens, rotary_dim], as is ``sin``; both as Rotary gives them."""
    sin: Tensor
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None


class Ops(Protocol):
    """Norm weights are float32."""

    def add_norm(self, x: Tensor, delta: Tensor | None, post: Tensor | None, pre: Tensor | None, eps: float) -> Tensor:
        """x [num_tokens, size] grows in place by delta, normed by ``post`` where there is one; returns x normed by
        ``pre``, or x itself where there is none. RMSNorm (Zhang and Sennrich 2019)."""
        ...

    def attend(self, plan: Plan, layer: int, qkv: Tensor, architecture: Architecture, turning: Turning) -> Tensor:
        """qkv [num_tokens, all heads * head_dim], overwritten -> what the plan makes of its heads."""
        ...

    def turn(self, qkv: Tensor, architecture: Architecture, turning: Turning) -> None:
        """The query and key heads of qkv, in place, as ``attend`` does."""
        ...

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """gate_up [num_tokens, 2 * size] -> activation(first half) * second half; the clamped one clamps both, and the
        second grows by 1."""
        ...


class TurnsFirst(ABC):
    """Attends to heads that it has turned in place."""

    @abstractmethod
    def turn(self, qkv: Tensor, architecture: Architecture, turning: Turning) -> None:
        """The query and key heads of qkv, as for ``attend``."""

    def attend(self, plan: Plan, layer: int, qkv: Tensor, architecture: Architecture, turning: Turning) -> Tensor:
        """See Ops."""
        self.turn(qkv, architecture, turning)
        heads = qkv.view(len(qkv), -1, architecture.head_dim)
        keys_at, values_at = architecture.num_heads, architecture.num_heads + architecture.num_kv_heads
        return plan.attend(layer, heads[:, :keys_at], heads[:, keys_at:values_at], heads[:, values_at:])


class TorchOps(TurnsFirst):
    """For any device and type."""

    def add_norm(self, x: Tensor, delta: Tensor | None, post: Tensor | None, pre: Tensor | None, eps: float) -> Tensor:
        """See Ops."""
        if delta is not None:
            x += delta if post is None else _rms_norm(delta, post, eps)
        return x if pre is None else _rms_norm(x, pre, eps)

    def turn(self, qkv: Tensor, architecture: Architecture, turning: Turning) -> None:
        """See TurnsFirst."""
        num_heads, num_kv_heads, head_dim = architecture.num_heads, architecture.num_kv_heads, architecture.head_dim
        cos, sin, query_norm, key_norm = turning
        if query_norm is not None and key_norm is not None:
            for part, weight in (
                (qkv[:, : num_heads * head_dim], query_norm),
                (qkv[:, num_heads * head_dim : (num_heads + num_kv_heads) * head_dim], key_norm),
            ):
                wide = part if architecture.qk_norm == "width" else part.unflatten(1, (-1, head_dim))  # type: ignore[no-untyped-call]
                wide.copy_(_rms_norm(wide, weight, architecture.norm_eps))
        rotary_dim = cos.shape[1]
        heads = qkv.view(len(qkv), -1, head_dim)[:, : num_heads + num_kv_heads, :rotary_dim]
        wide = heads.float()
        heads.copy_(torch.addcmul(wide * cos[:, None], wide.roll(rotary_dim // 2, -1), sin[:, None]))

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """See Ops."""
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
            case "clamped_swiglu":
                opened, up = opened.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
                return (opened * torch.sigmoid(SWIGLU_ALPHA * opened)).mul_(up + 1)


class RepeatableOps(TorchOps):
    """For the CPU, a row with the same bits in any company.

    torch computes what is left of a thread's part after whole vectors with other functions than the vectors, so that
    what is no plain arithmetic must not be shared out among threads, nor a row end in the middle of a vector.
    """

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """See Ops."""
        size = gate_up.shape[1] // 2
        rows = max(1, _ALONE // size) if size % _VECTOR == 0 else 1
        pieces = [super(RepeatableOps, self).gate(piece, activation) for piece in torch.split(gate_up, rows)]
        return torch.cat(pieces) if pieces else gate_up.new_empty((0, size))


class NativeOps(TurnsFirst):
    """For the CPU, where the compiled kernels are."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self.add_norm, self.gate = library.add_norm, library.gate

    @staticmethod
    def serves(architecture: Architecture, dtype: torch.dtype) -> bool:
        """Whether the kernels compute this model's type and heads."""
        return dtype in DTYPES and architecture.head_dim <= MAX_HEAD_DIM

    def turn(self, qkv: Tensor, architecture: Architecture, turning: Turning) -> None:
        """See TurnsFirst."""
        self._library.turn(
            qkv,
            architecture.num_heads,
            architecture.num_kv_heads,
            architecture.head_dim,
            *turning,
            architecture.qk_norm == "width",
            architecture.norm_eps,
        )


def softcapped(logits: Tensor, cap: float) -> Tensor:
    """logits [num_rows, vocab_size], overwritten where ``cap`` is not 0, -> cap * tanh(logits / cap)."""
    if not cap:
        return logits
    if logits.device.type != "cpu":
        return cap * torch.tanh(logits / cap)
    for row in logits:  # each shared out among the threads as it is when it is alone, so that it has the same bits
        row.div_(cap).tanh_().mul_(cap)
    return logits


def sigmoids(x: Tensor) -> Tensor:
    """x [num_rows, size] -> sigmoid(x), a row with the same bits in any company: see RepeatableOps."""
    if x.device.type != "cpu":
        return x.sigmoid()
    size = x.shape[1]
    whole = F.pad(x, (0, -size % _VECTOR))
    for rows in torch.split(whole, max(1, _ALONE // whole.shape[1])):
        rows.sigmoid_()
    return whole[:, :size]


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
