"""Rules that somebody wrote are followed on threads of their own, and no step waits long for them.

Of what rules make of a text nothing is known before: where they are ambiguous in many ways, a few hundred of them have
llguidance at one mask for half a minute, and its own bounds, which count items, come near to no time. An answer that is
held to such rules has no part in a step until its mask is there; the threads make way for others on their core; and a
token that takes too long is the last one of all answers with these rules. Rules that have turned out to be slow, and
those of which nothing is known yet, have a thread apart, and on each of the two tenants take turns: nobody's answers
stand still for long because of what somebody else wrote.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from policies.grammar import MAX_ITEMS, MAX_ROW_ITEMS
from worker.grammar.errors import Unguided
from worker.grammar.guide import Guide, first_line
from worker.grammar.trail import Trail
from worker.sampling.masks import Words

NICE, SLOW_NICE = 5, 10
"""Of the threads: a third of the share that others have where all want the same core, and a tenth."""
SLOW_S = 0.02
"""Of CPU, to follow one token of rules that are slow from then on."""
MAX_TOKEN_S = 1.0
"""Of CPU, to follow one token and find what may come next."""
WAIT_SHARE, MAX_WAIT_S = 0.1, 0.005
"""Of the time of the step loop, and at a time, for masks that are nearly there."""
LIMITS = LLParserLimits(
    verbose_errors=False, max_lexer_states=50_000, max_items_in_row=MAX_ROW_ITEMS, step_max_items=MAX_ITEMS
)
"""To take in a token holds the interpreter, which few items in a row keep short."""

_Made = TypeVar("_Made")


class Found(NamedTuple):
    """Where an answer is."""

    words: Words
    """Tokens that may come, as Bits has them."""
    may_end: bool
    is_whole: bool
    """Nothing can be added."""
    error: str = ""
    """Why it cannot be followed any further; ``words`` say nothing then."""


class Aside:
    """The threads. ``wait`` is for the thread of the step loop."""

    def __init__(self, wake: Callable[[], None], now: Callable[[], float] = time.monotonic) -> None:
        """``wake``: has the step loop turn, whenever something is there; called on the threads."""
        self._now = now
        self._left_s, self._left_at = 0.0, now()
        self._quick, self._slow = _Lane("rules", NICE, wake), _Lane("slow rules", SLOW_NICE, wake)

    def submit(self, call: Callable[[], _Made], tenant: bytes = b"", is_slow: bool = False) -> Future[_Made]:
        """Raises RuntimeError where no threads can be had; once it has not, it does not."""
        for lane in (self._quick, self._slow):
            lane.start()
        return (self._slow if is_slow else self._quick).submit(call, tenant)

    def wait(self, future: Future[Found | None]) -> None:
        """As long as may be; then it is late."""
        now = self._now()
        left_s = min(MAX_WAIT_S, self._left_s + WAIT_SHARE * (now - self._left_at))
        with suppress(TimeoutError):
            future.exception(left_s)
        self._left_at = self._now()
        self._left_s = max(0.0, left_s - (self._left_at - now))


class _Lane:
    """A thread, on which tenants take turns."""

    def __init__(self, name: str, nice: int, wake: Callable[[], None]) -> None:
        self._nice, self._wake = nice, wake
        self._asked: OrderedDict[bytes, deque[tuple[Future[Any], Callable[[], Any]]]] = OrderedDict()
        """By tenant, who is next first. Bounded by the sequences that the engine takes: one each."""
        self._is_asked = threading.Condition()
        # A daemon, since the process does not wait for a mask when it ends.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        if not self._thread.is_alive():
            self._thread.start()

    def submit(self, call: Callable[[], _Made], tenant: bytes) -> Future[_Made]:
        future = Future[_Made]()
        with self._is_asked:
            self._asked.setdefault(tenant, deque()).append((future, call))
            self._is_asked.notify()
        return future

    def _next(self) -> tuple[Future[Any], Callable[[], Any]]:
        with self._is_asked:
            while not self._asked:
                self._is_asked.wait()
            tenant, own = self._asked.popitem(last=False)
            found = own.popleft()
            if own:
                self._asked[tenant] = own
        return found

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._nice)
        while True:
            future, call = self._next()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except Exception as error:  # for whoever asks
                future.set_exception(error)
            self._wake()
            del future, call  # an answer that has ended is kept by nobody


class Rules:
    """Of one grammar, as all answers to it begin."""

    def __init__(self, vocabulary: LLTokenizer, text: str) -> None:
        """On the thread. Raises Unguided."""
        self.vocabulary = vocabulary
        self.lost = ""
        """Why nobody follows it any more."""
        self.is_slow = False
        self.matcher = LLMatcher(vocabulary, text, log_level=0, limits=LIMITS)
        self.first = self.found(self.matcher.deep_copy(), time.thread_time())
        if self.first.error:
            raise Unguided(f"the grammar cannot be compiled: {self.first.error}")

    def found(self, matcher: LLMatcher, began_at: float) -> Found:
        """Where an answer is. ``began_at``: of the work on its last token, by the CPU clock of the thread."""
        words = np.empty(-(-self.vocabulary.vocab_size // 32), dtype=np.int32)
        if not self.lost and not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        seconds = time.thread_time() - began_at
        self.is_slow = self.is_slow or seconds > SLOW_S
        if seconds > MAX_TOKEN_S:
            self.lost = f"one token takes {seconds:.1f} s, and {MAX_TOKEN_S:g} s are allowed: it is ambiguous"
        error = first_line(matcher.get_error()) if matcher.is_error() else self.lost
        eos_token_id = self.vocabulary.eos_token
        may_end = bool(words[eos_token_id >> 5] >> (eos_token_id & 31) & 1)
        return Found(words, may_end, matcher.is_stopped(), error)


class AsideGuide(Guide):
    """Nothing is drawn of its answer without a mask, and nothing drafted."""

    __slots__ = ("__weakref__", "_aside", "_coming", "_found", "_rules", "_tenant")

    is_aside: ClassVar[bool] = True

    def __init__(
        self, rules: Rules, aside: Aside, tenant: bytes, eos_token_ids: frozenset[int], stop_token_ids: frozenset[int]
    ) -> None:
        super().__init__(Trail(rules.matcher.deep_copy()), rules.vocabulary, eos_token_ids, stop_token_ids)
        self._rules, self._aside, self._tenant = rules, aside, tenant
        self._found: Found | None = rules.first
        self._coming: Future[Found | None] | None = None

    @property
    def found(self) -> Found | None:
        """What may come behind its last token; None: it is late."""
        if self._coming is not None and self._coming.done():
            self._found, self._coming = self._coming.result(), None
        return self._found

    @property
    def is_late(self) -> bool:
        return self.found is None

    @property
    def is_whole(self) -> bool:
        """As far as it is known."""
        if self._coming is not None:
            self._aside.wait(self._coming)
        found = self.found
        return found is not None and found.is_whole and not found.error

    def replay(self, token_ids: Sequence[int], max_tokens: int, is_cut: bool = False) -> bool:
        if self.matcher.validate_tokens(list(token_ids)) < len(token_ids):
            return False
        if token_ids:
            self._token_ids += token_ids
            self._follow()
        return True

    def advance(self, token_id: int) -> None:
        self._token_ids.append(token_id)
        self._follow()

    def num_allowed(self, token_ids: list[int]) -> int:
        return 0

    def forced(self, max_tokens: int = 1) -> list[int]:
        return []

    def _follow(self) -> None:
        # Nobody follows an answer that has ended meanwhile.
        own = weakref.ref(self)
        self._found = None
        self._coming = self._aside.submit(lambda: _follow(own()), self._tenant, self._rules.is_slow)


def _follow(guide: AsideGuide | None) -> Found | None:
    if guide is None:
        return None
    rules, began_at = guide._rules, time.thread_time()
    return rules.found(rules.matcher if rules.lost else guide.matcher, began_at)
