"""The K and V tensors of all layers, in one pool of blocks, sized to what the device has free.

Owns memory and its measure; who holds which block is the allocator's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from policies import settings
from worker.native import huge_empty


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token leaves behind."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Of one block, K and V of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * block_size * dtype.itemsize


class KVCache:
    """K and V of every layer, each [num_kv_heads, num_slots, head_dim]; block b holds the slots [b * block_size, (b +
    1) * block_size).

    A head's slots lie side by side, so blocks that are neighbours in a table are one stretch of memory that attention
    reads in place. On the CPU the pool is reserved, not touched: pages that were never written cost no memory.
    """

    def __init__(
        self,
        shape: KVShape,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        scaled: bool = False,
    ) -> None:
        """``scaled``: numbers are multiples of a scale that each token and head has of its own."""
        self.num_blocks, self.block_size = num_blocks, block_size
        size = (2, shape.num_layers, shape.num_kv_heads, num_blocks * block_size, shape.head_dim)
        # Elsewhere than on the CPU, attention pads its gathers with slots that may never have been written: NaN must
        # not be there.
        on_cpu = device.type == "cpu"
        self._pool = huge_empty(size, dtype) if on_cpu else torch.zeros(size, dtype=dtype, device=device)
        self.keys: list[Tensor] = list(self._pool[0])
        self.values: list[Tensor] = list(self._pool[1])
        self._scales = torch.zeros(size[:-1], device=device) if scaled else None
        self.key_scales: list[Tensor | None] = [None] * shape.num_layers
        """A layer, [num_kv_heads, num_slots] f32."""
        self.value_scales: list[Tensor | None] = [None] * shape.num_layers
        if self._scales is not None:
            self.key_scales, self.value_scales = list(self._scales[0]), list(self._scales[1])

    def copy_block(self, source: int, target: int) -> None:
        """K and V of all layers."""
        size = self.block_size
        self._pool[:, :, :, target * size : (target + 1) * size] = self._pool[
            :, :, :, source * size : (source + 1) * size
        ]
        if self._scales is not None:
            self._scales[..., target * size : (target + 1) * size] = self._scales[
                ..., source * size : (source + 1) * size
            ]


def budget_bytes(engine: settings.Engine, device: torch.device, num_ranks: int = 1) -> int:
    """Bytes that may become KV of one of so many ranks: a share of what is free now, under the configured ceiling of
    them all. On the CPU what is free is theirs together, elsewhere each has a device.
    """
    free = free_bytes(device) // num_ranks if device.type == "cpu" else free_bytes(device)
    budget = int(free * engine.kv_memory_share)
    return min(budget, engine.max_kv_bytes // num_ranks) if engine.max_kv_bytes else budget


def free_bytes(device: torch.device) -> int:
    """Bytes free on the device; on the CPU what the kernel would hand out without swapping, within the control group's
    limit.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return max(
        0, min(_available(Path("/proc/meminfo")), _cgroup_room(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")))
    )


_UNKNOWN_BYTES = 2 << 30
"""Where the system does not say: enough for a small model; max_kv_bytes cannot raise it, kv_memory_share can."""
_UNLIMITED_BYTES = 1 << 62


def _available(meminfo: Path) -> int:
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return _UNKNOWN_BYTES


def _cgroup_room(root: Path, membership: Path) -> int:
    """What the tightest of this process's control groups (version 2, or 1) leaves; page cache counts as free."""
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        return _UNLIMITED_BYTES
    room = _UNLIMITED_BYTES
    for _, controllers, path in (line for line in lines if len(line) == 3):
        if controllers == "":
            base, limit_name, used_name = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit_name, used_name = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = base / path.lstrip("/")
        # Inside a container the path may be the host's; the container's own group is then mounted as the root.
        for directory in (group, *group.parents):
            limit = _number(directory / limit_name)
            if limit:
                room = min(room, limit - _number(directory / used_name) + _page_cache(directory / "memory.stat"))
            if directory == base:
                break
    return room


def _page_cache(stat: Path) -> int:
    try:
        fields = dict(line.split() for line in stat.read_text().splitlines())
        return int(fields["inactive_file"]) + int(fields["active_file"])
    except (OSError, ValueError, KeyError):
        return 0


def _number(path: Path) -> int:
    """0 where there is no such file, or it says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0
