"""What has to be set in a process before torch is loaded, so that it computes beside others and without waste; and that
one ends with another.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator

from worker.user_cache import place_triton

NICENESS = 5
"""On a CPU the engine takes what it is given; the gateway, on the same cores, wakes for a moment only but at once."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of glibc's malloc.h."""
_KEPT_BYTES = 512 << 20
_LARGEST_MMAP_THRESHOLD_BYTES = 32 << 20
"""glibc takes no more."""
_PR_SET_PDEATHSIG = 1
"""Of Linux's prctl.h."""


def prepare() -> None:
    """Call it before the first import of torch or Triton."""
    place_triton()
    # Threads that wait for each other must not burn the core of the gateway, or of whoever else they wait for.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # The activations of each step are as large as those of the last. Given back to the system in between, every page of
    # them would be fetched and cleared anew: a fifth of the time of a prompt of 512 tokens in a small model.
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return  # not glibc
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """For torch, and what is imported with it: it stays as long as the process, so the collector looks it through
    neither meanwhile nor later, which would take a sixth of a start. What little of it is garbage stays as well."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def freeze_objects() -> None:
    """The model's objects, and what else is there by now, live as long as the process: collections pass them by."""
    gc.collect()
    gc.freeze()


def end_with_parent() -> None:
    """From now on the kernel kills this process when its parent ends, even while it is stopped; only Linux can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def leave_with(file: int, grace_s: float) -> None:
    """From now on this process ends so long after the other end of this file is gone, whatever it is in the middle of:
    what it waits for may never come."""

    def wait() -> None:
        poll = select.poll()
        poll.register(file, 0)  # nothing but its end
        poll.poll()
        # The main thread may hear it, too, and take its leave in order.
        time.sleep(grace_s)
        os._exit(0)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()
