"""When a request is sent again, and how many may be: a budget that grows with what is sent, so that a server in trouble
is not asked more often than before ("Handling Overload", in Beyer et al., "Site Reliability Engineering", 2016)."""

from __future__ import annotations

import msgspec

FIRST_S = 0.1
"""Before the first retry, at most; it doubles with each."""
LONGEST_S = 10.0
"""No retry waits longer than this; a server that asks for more is told on to the client."""
MIN_A_SECOND = 0.5
"""Retries that are allowed whatever was sent: else a server that is hardly used would never get one."""
MAX_SAVED = 10.0
"""Retries that a budget may have saved, beside what its share of the latest requests adds."""


class Budget(msgspec.Struct, frozen=True):
    """Retries that may still be sent; instants in seconds."""

    share: float
    """Of requests; 0: there are no retries."""
    level: float = MAX_SAVED / 2
    filled_at: float | None = None

    def sent(self, now: float) -> Budget:
        """A request goes out for the first time."""
        filled = self._filled(now)
        return msgspec.structs.replace(filled, level=min(MAX_SAVED, filled.level + self.share))

    def spent(self, now: float) -> Budget | None:
        """What is left after one more; None: there is no more."""
        filled = self._filled(now)
        if not self.share or filled.level < 1.0:
            return None
        return msgspec.structs.replace(filled, level=filled.level - 1.0)

    def _filled(self, now: float) -> Budget:
        since_s = 0.0 if self.filled_at is None else max(0.0, now - self.filled_at)
        level = min(MAX_SAVED, self.level + MIN_A_SECOND * since_s)
        return msgspec.structs.replace(self, level=level, filled_at=now)


def pause_s(num_retries: int, draw: float, retry_after_s: float | None) -> float | None:
    """Before a request is sent again that was so many times already: anything up to a bound that doubles, so that those
    that failed together do not come back together; no sooner than the server asks for. ``draw`` in [0, 1). None: it
    asks for more than anybody should wait."""
    if retry_after_s is not None and retry_after_s > LONGEST_S:
        return None
    pause = draw * min(LONGEST_S, FIRST_S * 2.0 ** min(num_retries, 16))
    if retry_after_s is None or retry_after_s <= 0:
        return pause
    return retry_after_s + pause
