"""The small operations for CUDA, by the kernels of ``worker.triton``. Importing this imports Triton."""

from __future__ import annotations

import triton
from torch import Tensor

from worker.attention import Plan, WindowedPlan
from worker.attention.paged_plan import TritonPlan
from worker.models.architecture import Activation, Architecture
from worker.models.ops import Turning, TurnsFirst
from worker.triton import small as kernels
from worker.triton import turned as turned_kernels
from worker.triton.early import early

_GATED_AT_ONCE = 1024


class TritonOps(TurnsFirst):
    """Ops for CUDA devices from sm_80 on, for any type."""

    def add_norm(self, x: Tensor, delta: Tensor | None, post: Tensor | None, pre: Tensor | None, eps: float) -> Tensor:
        """See Ops."""
        out = x if pre is None else x.new_empty(x.shape)
        if not len(x) or (delta is None and pre is None):
            return out
        block = triton.next_power_of_2(x.shape[1])
        kernels.add_norm[(len(x),)](
            x, x if delta is None else delta, x if post is None else post, x if pre is None else pre, out,
            x.shape[1], x.stride(0), 0 if delta is None else delta.stride(0), eps,
            HAS_DELTA=delta is not None, HAS_POST=post is not None, HAS_PRE=pre is not None, BLOCK=block,
            num_warps=min(16, max(4, block // 512)), **early(x.device),
        )  # fmt: skip
        return out

    def turn(self, qkv: Tensor, architecture: Architecture, turning: Turning) -> None:
        """See TurnsFirst."""
        if not len(qkv):
            return
        cos, sin, query_norm, key_norm = turning
        norm = 0
        if query_norm is not None and key_norm is not None:
            norm = 2 if architecture.qk_norm == "width" else 1
        rotary_dim, head_dim = cos.shape[1], architecture.head_dim
        block_h = triton.next_power_of_2(architecture.num_heads)
        turned_kernels.turn[(len(qkv), 2)](
            qkv, cos, sin, cos if query_norm is None else query_norm, cos if key_norm is None else key_norm,
            qkv.stride(0), cos.stride(0), architecture.num_heads, architecture.num_kv_heads, architecture.norm_eps,
            NORM=norm, HEAD_DIM=head_dim, ROTARY_DIM=rotary_dim, BLOCK_H=block_h,
            BLOCK_HALF=triton.next_power_of_2(rotary_dim // 2),
            BLOCK_REST=triton.next_power_of_2(max(1, head_dim - rotary_dim)),
            num_warps=min(16, max(4, block_h * triton.next_power_of_2(head_dim) // 1024)),
        )  # fmt: skip

    def attend(self, plan: Plan, layer: int, qkv: Tensor, architecture: Architecture, turning: Turning) -> Tensor:
        """See Ops."""
        if isinstance(plan, WindowedPlan):
            plan, layer = plan.of(layer)
        if not isinstance(plan, TritonPlan):
            return super().attend(plan, layer, qkv, architecture, turning)
        return plan.attend_turning(layer, qkv, *turning, architecture.qk_norm == "width", architecture.norm_eps)

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """See Ops."""
        num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty((num_tokens, size))
        if num_tokens:
            kernels.gate[(num_tokens, triton.cdiv(size, _GATED_AT_ONCE))](
                gate_up, out, size, gate_up.stride(0), ACTIVATION=activation, BLOCK=_GATED_AT_ONCE,
                **early(gate_up.device),
            )  # fmt: skip
        return out
