"""Where these tests run: on a CUDA device, or on the CPU under Triton's interpreter (TRITON_INTERPRET=1, set before
anything imports Triton).
"""

from __future__ import annotations

import os

import torch

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")


def examples(num: int) -> int:
    """So many, or few of them on a device, where each shape is compiled anew."""
    return num if DEVICE.type == "cpu" else max(2, num // 8)


if DEVICE.type == "cpu":
    from tests.kernels.interpreted import hasten

    hasten()
