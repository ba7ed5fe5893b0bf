"""Whether a server that fails is asked again: closed, open, half open (M. Nygard, "Release It!", 2007).

Closed, everything passes; after so many failures in a row it opens, and nothing does. When its time is over one request
is let through: if that succeeds it closes, else it opens again for twice as long, up to a bound.
"""

from __future__ import annotations

from typing import Literal

import msgspec

State = Literal["closed", "open", "half_open"]
LONGEST_S = 60.0
"""An opening lasts no longer than this, or than the first if that is more."""


class Breaker(msgspec.Struct, frozen=True):
    """One server's; instants in seconds of whatever clock the caller keeps."""

    max_failures: int
    """In a row."""
    open_s: float
    """How long it is open the first time."""
    num_failures: int = 0
    """In a row, while closed."""
    num_openings: int = 0
    """Since it was last closed."""
    open_until: float | None = None
    """None: it is closed."""
    trial_since: float | None = None
    """When the one request was let through that is to say whether it closes."""

    def state(self, now: float) -> State:
        if self.open_until is None:
            return "closed"
        return "open" if now < self.open_until else "half_open"

    def admits(self, now: float) -> bool:
        """Whether a request may pass. A trial that nobody has heard of for so long as it would be open does not keep
        others away."""
        match self.state(now):
            case "closed":
                return True
            case "open":
                return False
            case _:
                return self.trial_since is None or now - self.trial_since >= self._length_s

    def asked(self, now: float) -> Breaker:
        """A request passes; it must be admitted."""
        assert self.admits(now)
        return self if self.open_until is None else msgspec.structs.replace(self, trial_since=now)

    def succeeded(self, now: float) -> Breaker:
        """One was answered. While it is open, an answer to an earlier request says nothing new."""
        if self.state(now) == "open":
            return self
        return Breaker(self.max_failures, self.open_s)

    def failed(self, now: float) -> Breaker:
        """One was not."""
        match self.state(now):
            case "open":
                return self
            case "half_open":
                return self._opened(now)
            case _:
                counted = msgspec.structs.replace(self, num_failures=self.num_failures + 1)
                return counted if counted.num_failures < self.max_failures else counted._opened(now)

    def given_up(self) -> Breaker:
        """One was taken back by whoever had asked: it says nothing, and another one may be the trial."""
        return self if self.trial_since is None else msgspec.structs.replace(self, trial_since=None)

    def seen(self, now: float) -> Breaker:
        """It has answered a probe: a request may try it now, however long it was to stay open."""
        return msgspec.structs.replace(self, open_until=now) if self.state(now) == "open" else self

    def retry_after_s(self, now: float) -> float:
        """Until a request may pass, 0 when it may."""
        return 0.0 if self.open_until is None else max(0.0, self.open_until - now)

    @property
    def _length_s(self) -> float:
        longest = max(self.open_s, LONGEST_S)
        return min(longest, self.open_s * 2.0 ** max(0, min(self.num_openings, 32) - 1))

    def _opened(self, now: float) -> Breaker:
        opened = msgspec.structs.replace(self, num_openings=self.num_openings + 1, num_failures=0, trial_since=None)
        return msgspec.structs.replace(opened, open_until=now + opened._length_s)
