"""Pages of a KV pool that are about to be written for the first time, had ready beside the steps.

The pool is reserved, not touched (``worker.kv_cache``), and the kernel clears a huge page when it is first written to:
in a tenth of a millisecond, or in five where a machine has its memory from its host only then. A step in which one
answer becomes 128 writes to dozens of them, and meanwhile every stream beside it stands still. So a thread has as much
ready as such a step takes, from the first request on; a model that nobody has asked costs no memory for it.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading

from worker.kv_cache import KVCache
from worker.native.pages import HUGE_PAGE_BYTES

AHEAD_BYTES = 128 << 20
"""Of the pool, behind what has been written of it."""
_MADV_POPULATE_WRITE = 23
"""Of Linux's mman.h, from 5.14 on: as if every page were written to, with what is in it left as it is."""


class FreshPages:
    """Of one pool on the CPU."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._num_ahead = max(2, AHEAD_BYTES // cache.block_bytes)
        self._num_ready = 0
        """Leading blocks whose pages are there, or on their way."""
        self.is_able = sys.platform == "linux"
        self._thread: threading.Thread | None = None

    def reach(self, num_blocks: int) -> None:
        """The leading ``num_blocks`` are in use, or have been."""
        total = self._cache.num_blocks
        if num_blocks + self._num_ahead // 2 < self._num_ready or self._num_ready == total or not self.is_able:
            return
        if self._thread is None or not self._thread.is_alive():
            start, self._num_ready = self._num_ready, min(num_blocks + self._num_ahead, total)
            thread = threading.Thread(target=self._populate, args=(start, self._num_ready), daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system has no thread left, or no memory for one
                self.is_able = False
            else:
                self._thread = thread

    def wait(self) -> None:
        """Until all that is on its way is there."""
        if self._thread is not None:
            self._thread.join()

    def _populate(self, start: int, end: int) -> None:
        """One page a call: whoever maps memory meanwhile waits for no more."""
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        for first in range(start, end, num_at_once := max(1, self._num_ahead // 8)):
            for address, num_bytes in self._cache.stretches(first, min(first + num_at_once, end)):
                at, last = address - address % mmap.PAGESIZE, address + num_bytes
                while at < last:
                    following = min(last, at - at % HUGE_PAGE_BYTES + HUGE_PAGE_BYTES)
                    if madvise(at, following - at, _MADV_POPULATE_WRITE):  # an older kernel, or there is no memory
                        self.is_able = False
                        return
                    at = following
