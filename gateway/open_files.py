"""How many files this process may have open, of which each connection is one.

A shell gives 1,024 as a rule, for programs that cannot count further (``select``), and lets whoever can take more.
"""

from __future__ import annotations

import resource
from contextlib import suppress

ENOUGH = 65_536


def most() -> int:
    """That it may take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY in (soft, hard):
        return ENOUGH
    return max(soft, min(hard, ENOUGH))


def take() -> None:
    """As many as it may; processes that it starts have them, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < most():
        with suppress(OSError, ValueError):  # some systems allow fewer than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (most(), hard))
