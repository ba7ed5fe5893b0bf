"""Rules that somebody wrote, and schemas that take long, are followed on threads of their own: no step waits for them.

Of what rules make of a text nothing is known before: where they are ambiguous in many ways, a few hundred of them have
llguidance at one mask for half a minute, and its own bounds, which count items, come near to no time. An answer that is
held to such rules has no part in a step until its mask is there; the threads make way for others on their core; and a
token that takes too long is the last one of all answers with these rules. Rules that have turned out to be slow, and
those of which nothing is known yet, have a thread apart, and on each of the two tenants take turns: nobody's answers
stand still for long because of what somebody else wrote.

Of any other grammar it is measured what it takes within the step. One that is slow there has none of its answers there
any more: each leaves with its next token (worker.grammar.masks), and goes on as it would have. So does one of which it
is known before that it may mean many things at one place (policies.widths).
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from worker.grammar.errors import Unguided
from worker.grammar.guide import Guide, first_line
from worker.grammar.in_time import InTime, allows_others
from worker.grammar.nodes import NONE
from worker.grammar.trail import Trail
from worker.handing import Asked, carry_out
from worker.sampling.masks import Words

NICE, SLOW_NICE = 5, 10
"""Of the threads: a third of the share that others have where all want the same core, and a tenth."""
SLOW_S = 0.02
"""Of CPU, to follow one token of rules that are slow from then on."""
NOTED_S, NOTED_SHARE, MAX_NOTED_S = 0.005, 0.1, 0.1
"""Of CPU within the step, for one answer: what takes longer counts; and how much of that may be in all, as a share of
the time, and at once. Usual schemas have masks that take so long now and then, when a place is new."""
MAX_TOKEN_S = 1.0
"""Of CPU, to follow one token and find what may come next."""
WAIT_SHARE, MAX_WAIT_S = 0.1, 0.005
"""Of the time of the step loop, and at a time, for masks that are nearly there."""
_Made = TypeVar("_Made")


class Found(NamedTuple):
    """Where an answer is."""

    words: Words
    """Tokens that may come, as Bits has them."""
    may_end: bool
    is_whole: bool
    """Nothing can be added."""
    error: str | Exception = ""
    """Why it cannot be followed any further; ``words`` say nothing then. What is no fault of the grammar's is as it was
    raised."""
    is_careful: bool = False
    """A token that may come may still be one after which no end is known, see worker.grammar.in_time."""


class Aside:
    """The threads. ``wait`` is for the thread of the step loop."""

    def __init__(self, wake: Callable[[], None], now: Callable[[], float] = time.monotonic) -> None:
        """``wake``: has the step loop turn, whenever something is there; called on the threads."""
        self._now = now
        self._left_s, self._left_at = 0.0, now()
        self._quick, self._slow = _Lane("rules", NICE, wake), _Lane("slow rules", SLOW_NICE, wake)

    def submit(self, call: Callable[[], _Made], tenant: bytes = b"", is_slow: bool = False) -> Future[_Made]:
        """Raises RuntimeError where no threads can be had; once it has not, it does not."""
        self.start()
        return (self._slow if is_slow else self._quick).submit(call, tenant)

    def start(self) -> None:
        """Raises RuntimeError."""
        for lane in (self._quick, self._slow):
            lane.start()

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
        self._asked = Asked()
        """Bounded by the sequences that the engine takes: one each."""
        self._is_asked = threading.Condition()
        # A daemon, since the process does not wait for a mask when it ends.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        with self._is_asked:
            if not self._thread.is_alive():
                self._thread.start()

    def submit(self, call: Callable[[], _Made], tenant: bytes) -> Future[_Made]:
        with self._is_asked:
            future = self._asked.add(call, tenant)
            self._is_asked.notify()
        return future

    def _next(self) -> tuple[Future[Any], Callable[[], Any]]:
        with self._is_asked:
            while not self._asked:
                self._is_asked.wait()
            return self._asked.next()

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._nice)
        while True:
            if carry_out(*self._next()):  # an answer that has ended is kept by nobody
                self._wake()


class Rules:
    """Of one grammar, as all answers to it begin."""

    def __init__(self, vocabulary: LLTokenizer, matcher: LLMatcher, threads: Aside, is_aside: bool) -> None:
        """Not on the thread of the step loop. ``matcher``: at the beginning. Raises Unguided, and RuntimeError as
        Aside does."""
        self.vocabulary, self.matcher = vocabulary, matcher
        self.threads = threads
        self.lost = ""
        """Why nobody follows it any more."""
        self.is_slow = False
        self.is_doubted = False
        """It may have been what took a step long."""
        self._noted_s, self._noted_at = 0.0, 0.0
        self.first = self.found(matcher.deep_copy(), time.thread_time())
        if self.first.error:
            raise Unguided(f"the grammar cannot be compiled: {self.first.error}")
        self.is_aside = is_aside
        """No mask of it is made within the step."""
        if self.is_aside:
            threads.start()

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

    def took(self, seconds: float) -> None:
        """So much CPU, within the step and for one answer."""
        if seconds < NOTED_S:
            self.is_doubted = False
            return
        now = time.monotonic()
        self._noted_s = max(0.0, self._noted_s - NOTED_SHARE * (now - self._noted_at)) + seconds
        self._noted_at = now
        if seconds > SLOW_S or self._noted_s > MAX_NOTED_S:
            self.leave()

    def leave(self) -> None:
        """No answer to it is followed within the step any more, if there are threads to do so."""
        with suppress(RuntimeError):
            self.threads.start()
            self.is_aside = self.is_slow = True


class AsideGuide(Guide):
    """Nothing is drawn of its answer without a mask, and nothing drafted. The threads alone touch its matcher and its
    ``in_time`` while something of it is coming."""

    __slots__ = ("__weakref__", "_accepted", "_coming", "_found", "_max_tokens", "_refused", "_tenant")

    is_aside: ClassVar[bool] = True
    rules: Rules

    def __init__(
        self,
        rules: Rules,
        trail: Trail,
        stop_token_ids: frozenset[int],
        tenant: bytes,
        max_tokens: int,
        in_time: InTime | None = None,
    ) -> None:
        """``trail``: at a token of whose mask nothing is known; ``stop_token_ids``: all that end it."""
        super().__init__(trail, rules.vocabulary, stop_token_ids, in_time=in_time, rules=rules)
        self._tenant, self._max_tokens = tenant, max_tokens
        self._accepted, self._refused = NONE, list[int]()
        """Of the tokens that were drawn at its place, and had to be looked at: see InTime."""
        self._found: Found | None = None
        self._coming: Future[Found | None] | None = None
        if in_time is not None:
            in_time.is_patient = True
        if in_time is None and not trail.token_ids:
            self._found = rules.first
        else:
            self._follow()

    @classmethod
    def of(cls, guide: Guide, tenant: bytes, max_tokens: int) -> AsideGuide:
        """Goes on in place of one that was followed within the step."""
        assert guide.rules is not None
        return cls(guide.rules, guide.trail, guide.stop_token_ids, tenant, max_tokens, guide.in_time)

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
            self.rules.threads.wait(self._coming)
        found = self.found
        return found is not None and found.is_whole and not found.error

    @property
    def refused(self) -> list[int]:
        """Tokens that were drawn at its place, and after which no end would be known."""
        return self._refused

    def is_careful(self, num_left: int, num_drafted: int = 0) -> bool:
        """As far as it is known."""
        found = self._found
        return found is not None and found.is_careful

    def replay(self, token_ids: Sequence[int], max_tokens: int, is_cut: bool = False) -> bool:
        """On a thread on which others wait for nothing."""
        if not token_ids:
            return True
        if self._coming is not None and not self._coming.cancel():
            self._coming.result()
        for num, token_id in enumerate(token_ids):
            if not self.goes_on(token_id, max_tokens - num):
                return False
            self._token_ids.append(token_id)
        if self.in_time is not None:
            self.in_time.is_cut = is_cut
        self._follow()
        return True

    def advance(self, token_id: int) -> None:
        self._token_ids.append(token_id)
        self._accepted, self._refused = NONE, []
        self._follow()

    def num_allowed(self, token_ids: list[int]) -> int:
        return 0

    def allows_others(self, token_ids: Collection[int], drafted: list[int]) -> bool:
        assert self._found is not None
        return allows_others(self._found.words, token_ids)

    def forced(self, max_tokens: int = 1) -> list[int]:
        return []

    def may_take(self, token_id: int) -> bool:
        """Whether it is known that this token, which its mask lets through, is one after which there is an end; if it
        is not known, it will be when the guide is not late any more."""
        if token_id == self._accepted:
            return True
        in_time, found = self.in_time, self._found
        assert in_time is not None
        assert found is not None
        if in_time.leads_on(token_id):
            return in_time.accepts(token_id, self._num_left)
        self._come(lambda guide: guide._judge(token_id, found))
        return False

    @property
    def _num_left(self) -> int:
        return self._max_tokens - len(self._token_ids)

    def _follow(self) -> None:
        self._come(AsideGuide._follow_now)

    def _come(self, call: Callable[[AsideGuide], Found]) -> None:
        # Nobody follows an answer that has ended meanwhile.
        own = weakref.ref(self)
        self._found = None
        self._coming = self.rules.threads.submit(lambda: _of(own(), call), self._tenant, self.rules.is_slow)

    # On the threads

    def _follow_now(self) -> Found:
        rules, began_at = self.rules, time.thread_time()
        found = rules.found(rules.matcher if rules.lost else self.matcher, began_at)
        in_time = self.in_time
        if in_time is not None and not found.error:
            found = found._replace(is_careful=in_time.is_careful(self._num_left))
        return found

    def _judge(self, token_id: int, found: Found) -> Found:
        assert self.in_time is not None
        if self.in_time.accepts(token_id, self._num_left):
            self._accepted = token_id
        else:
            self._refused.append(token_id)
        return found


def _of(guide: AsideGuide | None, call: Callable[[AsideGuide], Found]) -> Found | None:
    if guide is None:
        return None
    try:
        return call(guide)
    except BaseException as error:  # of this answer alone, as it would be within the step
        own = error if isinstance(error, Exception) else RuntimeError(str(error))  # a panic of llguidance's
        return guide.rules.first._replace(error=own)
