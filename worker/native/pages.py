"""Memory for what is read whole in every step, weights and keys and values, in huge pages where the system has them.

A page of 4 KiB is read in a quarter of a microsecond, and looking up the next one takes as long as a tenth of that: in
pages of 2 MiB the same weights are read a fifth faster (benchmarks/engine.md).
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20
_ARENA_BYTES = 32 << 20
"""Small tensors share a mapping of so many bytes, which is returned with the last of them."""
_LINE_BYTES = 64

_arena: Tensor | None = None
"""What is left of the mapping that small tensors come from, uint8."""


def huge_empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """torch.empty on the CPU; what is never written costs no memory beyond the page that it lies in."""
    global _arena
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes > _ARENA_BYTES // 2:
        return own_pages(num_bytes)[:num_bytes].view(dtype).view(*shape)
    if _arena is None or len(_arena) < num_bytes:
        _arena = own_pages(_ARENA_BYTES)
    taken = _arena[:num_bytes]
    _arena = _arena[-(-num_bytes // _LINE_BYTES) * _LINE_BYTES :]
    return taken.view(dtype).view(*shape)


def own_pages(num_bytes: int) -> Tensor:
    """At least so many bytes that nobody shares, uint8, the first of them at the start of a huge page; zeros. Raises
    MemoryError."""
    try:
        # Shared memory, Python's default, has huge pages only where the system was told so, which few are.
        mapping = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError) as error:
        raise MemoryError(f"{num_bytes} bytes could not be mapped") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    return whole[-whole.data_ptr() % HUGE_PAGE_BYTES :]
