"""The K and V tensors of all layers, in one pool of blocks, sized to what the device has free.

Owns memory and its measure; who holds which block is the allocator's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from policies import settings
from policies.engine import KV_MEMORY_SHARES
from worker.cgroups import MEMBERSHIP, ROOT, groups
from worker.native import huge_empty

SCALE_BYTES = 4
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""What the largest number of a token and head becomes."""
LEAST = 1e-12
"""No such number counts as smaller."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token leaves behind."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    is_shared: bool = False
    """A key is its own value, and kept once."""

    @property
    def num_kept(self) -> int:
        """K and V, or what is both."""
        return 1 if self.is_shared else 2

    def block_bytes(self, block_size: int, dtype: torch.dtype, scaled: bool = False) -> int:
        """Of one block, K and V of all layers."""
        row_bytes = self.head_dim * dtype.itemsize + (SCALE_BYTES if scaled else 0)
        return self.num_kept * self.num_layers * self.num_kv_heads * block_size * row_bytes


@dataclass(frozen=True, slots=True)
class KVType:
    """How numbers are kept."""

    dtype: torch.dtype
    is_scaled: bool = False
    """They are multiples of a scale that each token and head has of its own."""


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
        size = (shape.num_kept, shape.num_layers, shape.num_kv_heads, num_blocks * block_size, shape.head_dim)
        on_cpu = device.type == "cpu"
        self._pool = huge_empty(size, dtype) if on_cpu else torch.zeros(size, dtype=dtype, device=device)
        self.keys: list[Tensor] = list(self._pool[0])
        self.values: list[Tensor] = list(self._pool[-1])
        self._scales: Tensor | None = None
        if scaled:
            scales = size[:-1]
            self._scales = huge_empty(scales, torch.float32) if on_cpu else torch.zeros(scales, device=device)
        self._tensors = [self._pool] if self._scales is None else [self._pool, self._scales]
        self.key_scales: list[Tensor | None] = [None] * shape.num_layers
        """A layer, [num_kv_heads, num_slots] f32."""
        self.value_scales: list[Tensor | None] = [None] * shape.num_layers
        if self._scales is not None:
            self.key_scales, self.value_scales = list(self._scales[0]), list(self._scales[-1])

    @property
    def caches(self) -> list[KVCache]:
        """All pools that there are."""
        return [self]

    @property
    def block_bytes(self) -> int:
        """Of one block, in all layers."""
        return sum(tensor.nbytes for tensor in self._tensors) // self.num_blocks

    def stretches(self, start: int, end: int) -> list[tuple[int, int]]:
        """Where blocks [start, end) lie: addresses, each with its bytes."""
        found = []
        for tensor in self._tensors:
            size = tensor.stride(2) * tensor.itemsize // self.num_blocks
            rows = range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, size * self.num_blocks)
            found += [(row + start * size, (end - start) * size) for row in rows]
        return found

    def keeps(self, dtype: torch.dtype) -> bool:
        """Numbers of this type are kept as they are."""
        return self._scales is None and self._pool.dtype is dtype

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """keys and values [num_tokens, num_kv_heads, head_dim] into slots [num_tokens] i64."""
        _put(self.keys[layer], self.key_scales[layer], slots, keys)
        _put(self.values[layer], self.value_scales[layer], slots, values)

    def read(self, layer: int, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of slots [...] i64, copied: [num_kv_heads, ..., head_dim] in ``dtype``."""
        keys = _taken(self.keys[layer], self.key_scales[layer], slots, dtype)
        return keys, _taken(self.values[layer], self.value_scales[layer], slots, dtype)

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


def _put(pool: Tensor, scales: Tensor | None, slots: Tensor, rows: Tensor) -> None:
    rows = rows.transpose(0, 1)
    if scales is None:
        pool.index_copy_(1, slots, rows.to(pool.dtype))
        return
    rows = rows.float()
    by = rows.abs().amax(-1).clamp_min_(LEAST) / LARGEST[pool.dtype]
    codes = rows / by[..., None]
    codes = codes.round_() if pool.dtype is torch.int8 else codes
    # Not every device copies float8 by index; bytes are copied everywhere.
    pool.view(torch.int8).index_copy_(1, slots, codes.to(pool.dtype).view(torch.int8))
    scales.index_copy_(1, slots, by)


def _taken(pool: Tensor, scales: Tensor | None, slots: Tensor, dtype: torch.dtype) -> Tensor:
    places = slots.flatten()
    if scales is None:
        rows = pool.index_select(1, places).to(dtype)
    else:
        codes = pool.view(torch.int8).index_select(1, places).view(pool.dtype).float()
        rows = codes.mul_(scales.index_select(1, places)[..., None]).to(dtype)
    return rows.view(len(pool), *slots.shape, -1)


def budget_bytes(engine: settings.Engine, device: torch.device, num_ranks: int = 1) -> int:
    """Bytes that may become KV of one of so many ranks: a share of what is free now, under the configured ceiling of
    them all. On the CPU what is free is theirs together, elsewhere each has a device.
    """
    free = free_bytes(device) // num_ranks if device.type == "cpu" else free_bytes(device)
    budget = int(free * (engine.kv_memory_share or KV_MEMORY_SHARES[device.type]))
    return min(budget, engine.max_kv_bytes // num_ranks) if engine.max_kv_bytes else budget


def free_bytes(device: torch.device) -> int:
    """Bytes free on the device; on the CPU what the kernel would hand out without swapping, within the control group's
    limit.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what torch keeps for later, of what loading took, is free as well
        return int(torch.cuda.mem_get_info(device)[0])
    return max(0, min(_available(Path("/proc/meminfo")), _cgroup_room(ROOT, MEMBERSHIP)))


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
    """What the tightest of this process's control groups leaves; page cache counts as free."""
    room = _UNLIMITED_BYTES
    for directory in groups("memory", root, membership):
        limit = _number(directory / "memory.max") or _number(directory / "memory.limit_in_bytes")
        if limit:
            used = _number(directory / "memory.current") or _number(directory / "memory.usage_in_bytes")
            room = min(room, limit - used + _page_cache(directory / "memory.stat"))
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
