"""Kernels for NVIDIA devices from sm_80 on, in Triton: optional, and tried before they are trusted.

Owns the kernels; the modules beside this one import Triton, so they are imported only once ``has_triton`` has said yes.
Where it says no everything runs in torch; nothing else changes.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec

import torch

log = logging.getLogger(__name__)


@cache
def has_triton(device: torch.device) -> bool:
    """Whether kernels run on this device: it is new enough, Triton is installed, and one kernel says what torch says.

    The last is for what Triton needs beside itself: its own files to write to, a compiler for its launcher.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0) or find_spec("triton") is None:
        return False
    try:
        from worker.triton.check import agrees

        ours = agrees(device)
    except Exception:
        log.exception("Triton's kernels do not run here; torch computes instead")
        return False
    if not ours:
        log.error("Triton's kernels and torch disagree; torch computes instead")
    return ours
