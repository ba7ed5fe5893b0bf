"""One upstream as this gateway sees it: whether it may be asked, how fast it is, and what became of its requests."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator

import msgspec

from gateway.clock import Clock
from gateway.upstreams.failures import Trouble
from gateway.upstreams.known import Known
from policies.upstreams.breaker import Breaker, State
from policies.upstreams.choice import NUM_LATEST, Candidate, Latency, percentile
from policies.upstreams.retries import Budget

log = logging.getLogger(__name__)

HEDGE_SHARE = 0.95
"""A request is hedged when it takes longer than so many of the latest."""
LOOK_S = 0.25
"""Between two looks for room at it, for those who do not wait in its line."""


class ServerView(msgspec.Struct, frozen=True, kw_only=True):
    """One of them, live, since this gateway knows it."""

    state: State
    """closed: it is asked; open: it failed too often, and is not; half_open: the next request tries it."""
    num_open: int
    """Requests that it has at the moment."""
    num_asked: int
    """As are the others, since this gateway knows it; retries and hedges included."""
    num_failed: int
    num_retries: int
    """Requests that were sent again after it had failed."""
    num_hedges: int
    """Requests that were sent to another one as well."""
    num_openings: int
    """Of the breaker."""
    num_without_usage: int
    """Answers that said nothing of their usage, so that our own count was billed."""
    num_disagreements: int
    """Answers whose usage was not what was counted here."""
    latency_ms: float | None
    """Until the first word of a stream, or where it never had one until the whole answer, as a moving average that
    follows peaks; null: not known yet."""
    last_failure: str
    """Why it failed the last time; empty: it never has."""


class Server:
    """``terms`` and ``key`` may change; what is known of its behaviour then stays as long as it is at the same
    address."""

    def __init__(
        self, known: Known, clock: Clock, freed: Callable[[], None], num_gateways: Callable[[], int] = lambda: 1
    ) -> None:
        """``freed`` hears that it has room for one more. ``num_gateways``: those that ask it."""
        self.known = known
        self._clock = clock
        self._freed = freed
        self._num_gateways = num_gateways
        self.num_open = 0
        self.num_asked = self.num_failed = self.num_retries = self.num_hedges = self.num_openings = 0
        self.num_without_usage = self.num_disagreements = 0
        self._num_kept = 0
        """Places for requests that are about to be sent there again."""
        self.last_failure = ""
        self._latency = {True: Latency(), False: Latency()}
        """Until the first word of a stream, and until the whole of what is none."""
        self._latest_s: dict[bool, deque[float]] = {streams: deque(maxlen=NUM_LATEST) for streams in (True, False)}
        terms = known.terms
        self._breaker = Breaker(terms.breaker_failures, terms.breaker_open_s)
        self._was_seen = False
        """By a probe, since its breaker opened."""
        self._budget = Budget(terms.retry_share)

    @property
    def name(self) -> str:
        return self.known.terms.name

    @property
    def admits(self) -> bool:
        """Its breaker lets a request through."""
        return self._breaker.admits(self._clock.now())

    @property
    def is_well(self) -> bool:
        """A request is let through, and not only to find out whether it is still away: its probe says that."""
        state = self._breaker.state(self._clock.now())
        return state == "closed" or (self.admits and (self._was_seen or not self.known.terms.probe_s))

    @property
    def max_open(self) -> int:
        """Requests of this gateway that it is sent at a time: as many as those of any other that asks it, and one at
        least."""
        return max(1, self.known.terms.max_concurrent // self._num_gateways())

    @property
    def num_free(self) -> int:
        """Requests that it may be sent beside those that it has, and those that come back to it."""
        return max(0, self.max_open - self.num_open - self._num_kept)

    @property
    def has_place(self) -> bool:
        """For one that comes back to it."""
        return self.num_open < self.max_open

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Meanwhile a place is kept for one that comes back to it, or the next that falls free."""
        self._num_kept += 1
        try:
            yield
        finally:
            self._num_kept -= 1
            self._freed()

    def candidate(self, streams: bool) -> Candidate:
        return Candidate(self.known.terms.weight, self._latency[streams], self.num_open)

    @property
    def first_word_s(self) -> float | None:
        """Until the first word of a stream; None: nobody knows."""
        latency = self._latency[True]
        return None if latency.at is None else latency.average_s

    @property
    def opens_again_s(self) -> float:
        """Until its breaker lets one through."""
        return self._breaker.retry_after_s(self._clock.now())

    def hedge_s(self, streams: bool) -> float | None:
        """After so long a request is hedged; None: it is not."""
        return percentile(self._latest_s[streams], HEDGE_SHARE) if self.known.terms.hedge else None

    def changed(self, known: Known) -> None:
        """It has other terms from now on. That it failed with another key says nothing any more."""
        before, terms, is_other_key = self.known.terms, known.terms, known.key != self.known.key
        self.known = known
        of_breaker = before.breaker_failures, before.breaker_open_s
        if is_other_key or of_breaker != (terms.breaker_failures, terms.breaker_open_s):
            self._breaker = Breaker(terms.breaker_failures, terms.breaker_open_s)
        if before.retry_share != terms.retry_share:
            self._budget = Budget(terms.retry_share)

    def asked(self, is_first: bool) -> None:
        """A request goes there. ``is_first``: it was not sent before."""
        now = self._clock.now()
        self.num_open += 1
        self.num_asked += 1
        self._breaker = self._breaker.asked(now) if self._breaker.admits(now) else self._breaker
        if is_first:
            self._budget = self._budget.sent(now)

    def may_send_again(self) -> bool:
        """Whether its budget has one more; then it is spent."""
        left = self._budget.spent(self._clock.now())
        if left is None:
            return False
        self._budget = left
        return True

    def began(self, seconds: float, streams: bool) -> None:
        """It says something, so long after it was asked."""
        now = self._clock.now()
        self._latency[streams] = self._latency[streams].observed(seconds, now)
        self._latest_s[streams].append(seconds)

    def succeeded(self) -> None:
        """One was answered as a whole."""
        now, was = self._clock.now(), self._breaker.open_until
        self._breaker = self._breaker.succeeded(now)
        if was is not None and self._breaker.open_until is None:
            log.info("upstream %s answers again", self.name)

    def failed(self, trouble: Trouble) -> None:
        self.num_failed += 1
        self.last_failure = self.known.key.without(str(trouble))
        if trouble.is_fault:
            self._fault()
        else:
            self._breaker = self._breaker.given_up()

    def left(self) -> None:
        """One of its requests is over."""
        self.num_open -= 1
        self._freed()

    def given_up(self) -> None:
        """Whoever had asked wants no answer any more."""
        self._breaker = self._breaker.given_up()

    def probed(self, why: str) -> None:
        """``why`` it is not there; empty: it is."""
        if why:
            self.last_failure = self.known.key.without(why)
            self._fault()
        else:
            self._breaker = self._breaker.seen(self._clock.now())
            self._was_seen = True

    def view(self) -> ServerView:
        return ServerView(
            state=self._breaker.state(self._clock.now()),
            num_open=self.num_open,
            num_asked=self.num_asked,
            num_failed=self.num_failed,
            num_retries=self.num_retries,
            num_hedges=self.num_hedges,
            num_openings=self.num_openings,
            num_without_usage=self.num_without_usage,
            num_disagreements=self.num_disagreements,
            latency_ms=next((1e3 * each.average_s for each in self._latency.values() if each.at is not None), None),
            last_failure=self.last_failure,
        )

    def _fault(self) -> None:
        num_openings = self._breaker.num_openings
        self._breaker = self._breaker.failed(self._clock.now())
        if self._breaker.num_openings > num_openings:
            self.num_openings += 1
            self._was_seen = False
            log.warning("upstream %s is not asked for %.1f s: %s", self.name, self.opens_again_s, self.last_failure)
