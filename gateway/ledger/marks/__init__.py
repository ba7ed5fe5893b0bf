"""How far each stream has come, for whoever settles it should this process or this machine not live to do so.

A stream opens a mark before its first byte and moves it as its tokens leave. The mark itself is memory that survives
the process (``segment``); in groups, on a thread, marks are brought to the disk, and no stream runs further ahead of
the disk than ``ledger.mark_tokens``. Bodies need no mark: nothing of them is delivered before their row is durable.
What was left behind is settled by ``recovery``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from gateway.clock import Clock, Timer
from gateway.errors import LedgerBehind
from gateway.ledger.entry import Entry
from gateway.ledger.marks.segment import OUTCOME_BITS, OUTCOMES, Opening, Segment, Word, spelled
from gateway.pieces import Piece
from policies import wire
from policies.answers import Outcome
from policies.pricing import Rates

T = TypeVar("T")
log = logging.getLogger(__name__)

GROUP_S = 0.02
"""How long a mark that nobody waits for may wait for others to go to the disk with it."""
FIRST_RETRY_S, LAST_RETRY_S = 0.1, 5.0
TYPICAL_BYTES = 1024
"""Of an opening."""
NO_ROOM = "This server cannot note what it delivers at the moment. Please try again."


class Progress(msgspec.Struct, frozen=True):
    """What a row says besides its tokens, as far as it is known."""

    num_cached_tokens: int
    cache: Outcome
    ttft_ms: float | None
    queue_ms: float
    duration_ms: float
    num_reasoning_tokens: int = 0


class Marks:
    """All marks of this process."""

    def __init__(self, directory: Path, mark_tokens: int, clock: Clock) -> None:
        self.mark_tokens = mark_tokens
        self._directory = directory
        self._clock = clock
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="marks")
        self._segment: Segment | None = None
        self._full: set[Segment] = set()
        """Those with streams that are not settled, and no room for others."""
        self._spare: Segment | None = None
        self._making: asyncio.Future[Segment] | None = None
        """The spare file."""
        self._preparing: asyncio.Task[None] | None = None
        self._openings: list[tuple[Segment, bytes, int]] = []
        """That are not written."""
        self._asking: dict[Mark, None] = {}
        """Those that want to be on the disk."""
        self._timer: Timer | None = None
        self._syncing: asyncio.Task[None] | None = None
        self._is_urgent = False
        """Somebody who asked waits, or soon will."""
        self._failure: OSError | None = None
        """Why nothing gets to the disk."""
        self._lack: OSError | None = None
        """Why there is no other file."""

    def open(self, entry: Entry, rates: Rates | None, progress: Callable[[], Progress]) -> Mark:
        """For a stream that would owe ``entry`` by now. ``progress`` says what changes. Raises LedgerBehind."""
        opening = msgspec.msgpack.encode(Opening(entry, "" if rates is None else spelled(rates)))
        segment = self._with_room(len(opening))
        first, offset = segment.take(opening)
        mark = Mark(self, segment, first, progress)
        self._openings.append((segment, opening, offset))
        self.ask(mark, urgently=True)
        return mark

    def check_room(self) -> None:
        """Raises LedgerBehind when no stream could be marked."""
        if self._failure is not None or (self._lack is not None and self._is_full(TYPICAL_BYTES)):
            raise LedgerBehind(NO_ROOM, retry_after_s=1.0)

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[Marks]:
        """On leaving, what was not settled stays for the next gateway."""
        self._preparing = _watched(self._prepare())
        await asyncio.wait([self._preparing], timeout=FIRST_RETRY_S)
        try:
            yield self
        finally:
            await self._close()

    # For marks

    def ask(self, mark: Mark, urgently: bool) -> None:
        """It wants to be on the disk as it stands."""
        self._asking[mark] = None
        if urgently:
            self._is_urgent = True
            self._sync()
        elif self._syncing is None and self._timer is None:
            self._timer = self._clock.call_later(GROUP_S, self._sync)

    def ended(self, mark: Mark) -> None:
        """Its stream is settled."""
        self._asking.pop(mark, None)
        segment = mark.segment
        if segment is not self._segment and not segment.num_open:
            self._full.discard(segment)
            self._executor.submit(segment.remove)

    # On the way to the disk

    async def _close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        tasks = [task for task in (self._syncing, self._preparing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._making is not None:
            with contextlib.suppress(OSError):
                self._spare = await self._making
        for segment in (*self._full, self._segment, self._spare):
            if segment is not None:
                await self._on_thread(segment.close if segment.num_open else segment.remove)
        self._executor.shutdown()

    def _sync(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._syncing is None and self._asking:
            self._syncing = _watched(self._sync_all())

    async def _sync_all(self) -> None:
        """Those that ask, and those that come to ask meanwhile if it is urgent."""
        try:
            while self._asking:
                self._is_urgent = False
                openings, self._openings = self._openings, []
                asking, self._asking = self._asking, {}
                reached = [(mark, mark.num_tokens) for mark in asking]
                await self._bring(openings, asking)
                for mark, num_tokens in reached:
                    mark.is_durable(num_tokens)
                if not self._is_urgent:
                    break
        finally:
            self._syncing = None
            if self._asking:
                self._timer = self._clock.call_later(GROUP_S, self._sync)

    async def _bring(self, openings: Sequence[tuple[Segment, bytes, int]], marks: Collection[Mark]) -> None:
        """Until it is done; streams wait meanwhile, and new ones are refused when it fails."""
        segments = {mark.segment for mark in marks}
        retry_s = FIRST_RETRY_S
        while True:
            try:
                await self._on_thread(_write, openings, segments)
            except OSError as error:
                log.error("ledger: marks cannot be written in %s: %s", self._directory, error.strerror)
                self._failure = error
                for mark in marks:
                    mark.wake()
            else:
                self._failure = None
                return
            await self._clock.sleep(retry_s)
            retry_s = min(2 * retry_s, LAST_RETRY_S)

    # Files

    def _is_full(self, num_bytes: int) -> bool:
        return self._segment is None or not self._segment.has_room(num_bytes)

    def _with_room(self, num_bytes: int) -> Segment:
        """Raises LedgerBehind."""
        if self._is_full(num_bytes):
            if self._spare is None:
                # Streams came faster than a file is made; this one waits for it, and all others with it.
                self._spare = self._made_now()
            if self._segment is not None and self._segment.num_open:
                self._full.add(self._segment)
            elif self._segment is not None:
                self._executor.submit(self._segment.remove)
            self._segment, self._spare = self._spare, None
        assert self._segment is not None
        if self._segment.is_half_used and self._spare is None and self._preparing is None:
            self._preparing = _watched(self._prepare())
        return self._segment

    def _made_now(self) -> Segment:
        """Raises LedgerBehind."""
        try:
            if self._lack is not None:
                raise self._lack
            return Segment(self._directory)
        except OSError as error:
            if self._preparing is None:
                self._preparing = _watched(self._prepare())
            raise LedgerBehind(NO_ROOM, retry_after_s=1.0) from error

    async def _prepare(self) -> None:
        """Until there is a file for the streams that do not fit into this one."""
        retry_s = FIRST_RETRY_S
        try:
            while self._spare is None:
                try:
                    self._making = self._on_thread(Segment, self._directory)
                    self._spare = await asyncio.shield(self._making)
                    self._making = None
                except OSError as error:
                    log.error(
                        "ledger: no file for further marks can be made in %s: %s", self._directory, error.strerror
                    )
                    self._lack = error
                    await self._clock.sleep(retry_s)
                    retry_s = min(2 * retry_s, LAST_RETRY_S)
            self._lack = None
        finally:
            self._preparing = None

    def _on_thread(self, work: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._executor, work, *arguments)


class Mark:
    """One stream's. Its row ends it."""

    __slots__ = (
        "_first",
        "_marks",
        "_next_at",
        "_progress",
        "_tokens_at",
        "_waiter",
        "_words",
        "allowed",
        "most",
        "segment",
    )

    def __init__(self, marks: Marks, segment: Segment, first: int, progress: Callable[[], Progress]) -> None:
        """``first``: the place of its slot's first number."""
        self.segment = segment
        self.most = marks.mark_tokens
        """Tokens that may be delivered in one go."""
        self.allowed = -1
        """So many may be, as far as the disk knows; before its opening is there, not even the first byte."""
        self._marks = marks
        self._words = segment.words
        self._first = first
        self._tokens_at = first + Word.TOKENS
        self._progress = progress
        self._next_at = 1
        """With so many it asks to be brought to the disk again."""
        self._waiter: asyncio.Future[None] | None = None

    def reached(self, num_tokens: int) -> None:
        """So many tokens have left the process."""
        self._words[self._tokens_at] = num_tokens
        if num_tokens >= self._next_at:
            self._next_at = num_tokens + (self.most + 1) // 2
            self._note()
            self._marks.ask(self, urgently=False)

    @property
    def num_tokens(self) -> int:
        """Of the completion, delivered."""
        return self._words[self._tokens_at]

    async def room(self, num_tokens: int) -> None:
        """Until so many tokens may have been delivered, or ``mark_tokens`` more than have, if that is less: of tokens
        that say nothing yet there may be any number.

        Raises LedgerBehind when nothing was delivered and nothing can be noted.
        """
        most = min(num_tokens, self.num_tokens + self.most)
        while most > self.allowed:
            self._marks.ask(self, urgently=True)
            if self.allowed < 0:
                self._marks.check_room()
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def portion(self, deltas: list[wire.Delta]) -> tuple[list[wire.Delta], list[wire.Delta]]:
        """As many of the first tokens as may be delivered in one go, and the rest."""
        most, num_tokens = self.most, 0
        if sum([len(delta.token_ids) for delta in deltas]) <= most:
            return deltas, []
        for place, delta in enumerate(deltas):
            num_tokens += len(delta.token_ids)
            if num_tokens > most:
                num_over = num_tokens - most
                before, after = _cut(delta, len(delta.token_ids) - num_over)
                return [*deltas[:place], *before], [after, *deltas[place + 1 :]]
        return deltas, []

    def end(self, _: object = None) -> None:
        """Its row is durable."""
        self.segment.end(self._first)
        self._marks.ended(self)

    # For Marks

    def is_durable(self, num_tokens: int) -> None:
        self.allowed = num_tokens + self.most
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _note(self) -> None:
        words, first, progress = self._words, self._first, self._progress()
        words[first + Word.CACHED_TOKENS] = progress.num_cached_tokens
        words[first + Word.OUTCOME] = progress.num_reasoning_tokens << OUTCOME_BITS | OUTCOMES.index(progress.cache)
        words[first + Word.TTFT_US] = round(1e3 * (progress.ttft_ms or 0.0))
        words[first + Word.QUEUE_US] = round(1e3 * progress.queue_ms)
        words[first + Word.DURATION_US] = round(1e3 * progress.duration_ms)


def _watched(work: Coroutine[None, None, None]) -> asyncio.Task[None]:
    """A task of which an error that nobody expects is told."""

    def tell(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("ledger: marks are not written any more", exc_info=error)

    task = asyncio.create_task(work)
    task.add_done_callback(tell)
    return task


def _cut(delta: wire.Delta, num_tokens: int) -> tuple[list[wire.Delta], wire.Delta]:
    """The first tokens, if there are any, and the rest with the end."""
    before, after = delta.token_ids[:num_tokens], delta.token_ids[num_tokens:]
    logprobs_before = logprobs_after = None
    if delta.logprobs is not None:
        logprobs_before, logprobs_after = delta.logprobs[:num_tokens], delta.logprobs[num_tokens:]
    rest = msgspec.structs.replace(delta, token_ids=after, logprobs=logprobs_after)
    if isinstance(delta, Piece):
        rest = msgspec.structs.replace(delta, **delta.rest(num_tokens))
        delta = msgspec.structs.replace(delta, counted=None, **delta.first(num_tokens))
    if not before:
        return [], rest
    return [msgspec.structs.replace(delta, token_ids=before, logprobs=logprobs_before, finish=None)], rest


def _write(openings: Sequence[tuple[Segment, bytes, int]], segments: set[Segment]) -> None:
    """Raises OSError."""
    for segment, opening, offset in openings:
        segment.keep(opening, offset)
    for segment in segments:
        segment.sync()
