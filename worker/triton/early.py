"""Kernels that begin while the one before them ends: programmatic dependent launch, of sm_90 and up (CUDA's
programming guide; PTX, griddepcontrol).

Between two kernels of a stream a device would stand idle: the last programs of one end one by one, and the first of the
next have to be started and to read something first. Launched early, a kernel's programs take the room that is left as
soon as all of the one before have begun; there they read what no kernel of the step writes, and then wait until all
that came before is done and can be seen.

So each program, on each of its ways, first calls ``open_next``, and calls ``wait`` before it touches what another
kernel of the step writes or reads, and before it leaves: a kernel that ends without having waited would let the ones
behind it go before their time.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from worker.triton.device import INTERPRETED

_NO: Mapping[str, bool] = {"EARLY": False}
_YES: Mapping[str, bool] = {"EARLY": True, "launch_pdl": True}


@cache
def early(device: torch.device) -> Mapping[str, bool]:
    """What the launch of a kernel that takes EARLY is told."""
    if INTERPRETED or device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return _NO
    return _YES


@triton.jit
def open_next(EARLY: tl.constexpr):
    """From now on the next kernel may begin, once all programs have said so."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait(EARLY: tl.constexpr):
    """For all kernels before this one."""
    if EARLY:
        gdc_wait()
