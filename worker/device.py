"""What a device can keep, and when it is out of memory, or lost."""

from __future__ import annotations

import torch

from policies import settings
from worker.budget import OutOfMemory
from worker.models import ModelError
from worker.triton import has_triton

_NO_MEMORY = 2
"""cudaErrorMemoryAllocation."""
_NO_MEMORY_WORDS = ("can't allocate memory", "Triton Error [CUDA]: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Not "out of memory" alone, as NCCL says it: its ranks have parted then."""


def refuse_unrepeatable(engine: settings.Engine, device: torch.device) -> None:
    """Raises ModelError where ``engine.deterministic`` is asked for and cannot be kept."""
    if not engine.deterministic:
        return
    if engine.tensor_parallel > 2:
        raise ModelError(
            f"engine.deterministic is on and engine.tensor_parallel {engine.tensor_parallel}, but among more than two"
            " processes numbers are added up in an order that depends on how many there are"
        )
    if device.type == "cuda" and (engine.attention != "auto" or not has_triton(device)):
        raise ModelError("engine.deterministic needs Triton and engine.attention = auto on CUDA devices")


def is_out_of_memory(error: BaseException) -> bool:
    """torch has a type for what its allocator on CUDA says. Its allocator on the CPU, Triton and cuBLAS say so in words
    only, and CUDA itself by a number."""
    kinds = (OutOfMemory, MemoryError, torch.OutOfMemoryError)
    is_cudas_own = isinstance(error, torch.AcceleratorError) and getattr(error, "error_code", None) == _NO_MEMORY
    return isinstance(error, kinds) or is_cudas_own or any(words in str(error) for words in _NO_MEMORY_WORDS)


class DeviceLost(AssertionError):
    """The device computes nothing any more in this process."""


def is_lost(device: torch.device) -> bool:
    """Whether an error that has come up is CUDA's own: those last as long as the process."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False
