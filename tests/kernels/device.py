"""Where these tests run: on a CUDA device, or on the CPU under Triton's interpreter (TRITON_INTERPRET=1, set before
anything imports Triton).
"""

from __future__ import annotations

import os

import torch

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
