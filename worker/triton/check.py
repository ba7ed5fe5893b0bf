"""One small kernel against torch, to see that kernels are compiled and launched here at all."""

from __future__ import annotations

import torch

from worker.triton.attention import write
from worker.triton.early import early


def agrees(device: torch.device) -> bool:
    """Whether a few keys and values arrive in their slots."""
    new = torch.arange(64, dtype=torch.float32, device=device).view(2, 2, 16)
    pool = torch.zeros((2, 2, 4, 16), device=device)
    slots = torch.tensor([2, -1], device=device)
    write[(2,)](
        new, -new, pool[0], pool[1], pool, pool, slots, new.stride(0), pool.stride(1), 0, 2, 1.0, 1.0,
        PLAIN=True, FLOAT8=0, PER_TOKEN=False, HEAD_DIM=16, BLOCK_H=2, BLOCK_D=16, **early(device),
    )  # fmt: skip
    expected = torch.zeros_like(pool)
    expected[0, :, 2], expected[1, :, 2] = new[0], -new[0]
    return torch.equal(pool, expected)
