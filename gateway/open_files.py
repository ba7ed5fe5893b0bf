"""How many files this process may have open, of which each connection is one.

A shell gives 1,024 as a rule, for programs that cannot count further (``select``), and lets whoever can take more.
"""

from __future__ import annotations

import logging
import math
import resource
import time
from contextlib import suppress

ENOUGH = 65_536
FEW = 16
"""So few more are said."""
AGAIN_S = 60.0
"""After which they are said again."""

log = logging.getLogger(__name__)


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


class Watch:
    """Says in the log that hardly any more may be opened: the event loop closes the connections that come then without
    a word, and what else needs a file fails."""

    def __init__(self) -> None:
        self._said_at = -math.inf

    def opened(self, number: int) -> None:
        """``number``: the newest one's. The system gives out the lowest that is free."""
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if most - number > FEW or most == resource.RLIM_INFINITY:
            return
        now = time.monotonic()
        if now - self._said_at >= AGAIN_S:
            self._said_at = now
            log.warning(
                "%d of %d files are open, nearly all of them connections; more are closed as they come, until some "
                "end: raise ulimit -Hn, or LimitNOFILE",
                number + 1,
                most,
            )
