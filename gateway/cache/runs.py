"""One computation, many readers: equal requests that come while the answer is being computed read along.

No task stands between. Whoever has read everything waits for the worker on behalf of all, and a reader that leaves
meanwhile leaves this to the next; the computation ends early only when the last one has left.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from gateway.clock import Clock
from gateway.errors import GatewayError
from gateway.flight import Flight
from gateway.flights import Flights, Source
from gateway.pieces import Counted, Piece
from gateway.spent import Spent
from gateway.traceparent import context_of
from policies import wire
from policies.answers import Kept, Outcome, Told
from policies.terms import Usage

MAX_SCORED = 32
"""Tokens with log-probabilities that are told in one go."""


class Run:
    """A computation and everything that came of it so far: at most as many tokens as were asked for."""

    def __init__(
        self, source: Source, submits: Sequence[wire.Submit], rank: int, clock: Clock, ended: Callable[[Run], None]
    ) -> None:
        """``rank``: how important it is to the queue, smaller is more. ``ended`` is called once, when the answer is
        whole, has failed, or is needed by nobody."""
        self.source = source
        self.rank = rank
        self.clock = clock
        self.began_at = clock.now()
        self.request_ids = [submit.request_id for submit in submits]
        self.log: list[wire.Delta] = []
        self.error: GatewayError | None = None
        self.readers: dict[Reader, None] = {}
        """In the order in which they came."""
        self.payer: Reader | None = None
        """The one of them on whose account the computation is; the last one stays it."""
        self._ended: Callable[[Run], None] | None = ended
        self._num_open = sum(submit.num_sequences for submit in submits)
        self._stopped: set[tuple[str, int]] = set()
        self._is_awaited = False
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def is_over(self) -> bool:
        return self._ended is None

    def suits(self, rank: int) -> bool:
        """A more important request does not wait in a less important one's place."""
        return self.rank <= rank or self.source.were_sent

    async def advance(self) -> None:
        """Until there may be more in the log, or an error."""
        if self._is_awaited:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
            return
        self._is_awaited = True
        try:
            self._take(await self.source.deltas())
        except GatewayError as error:
            self.error = error
            self.source.close()  # of several prompts only one may have failed
            self._end()
        finally:
            # Also when this reader is cancelled: one of the others takes its place.
            self._is_awaited = False
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def stop(self, request_id: str, index: int) -> None:
        if (request_id, index) not in self._stopped:
            self._stopped.add((request_id, index))
            self.source.cancel(request_id, index)

    def leave(self, reader: Reader) -> None:
        if self.is_over:  # nothing changes any more, and who paid stays who paid
            return
        self.readers.pop(reader, None)
        if not self.readers:
            self.source.close()
            self._end()
        elif reader is self.payer:
            self.payer = next(iter(self.readers))
            self.payer.outcome = "miss"

    def kept(self, made_at: int) -> Kept | None:
        """The whole answer; None when it has not become one."""
        if self._num_open:
            return None
        parts = {request_id: part for part, request_id in enumerate(self.request_ids)}
        sequences: dict[tuple[str, int], list[wire.Delta]] = {}
        for delta in self.log:
            sequences.setdefault((delta.request_id, delta.index), []).append(delta)
        told = []
        for (request_id, index), deltas in sequences.items():
            finish = deltas[-1].finish
            assert finish is not None
            if finish.reason not in ("stop", "length") and (request_id, index) not in self._stopped:
                return None
            token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
            logprobs = [logprob for delta in deltas for logprob in delta.logprobs or ()]
            pieces = [delta for delta in deltas if isinstance(delta, Piece)]
            words = [word for piece in pieces for word in piece.words]
            counted = pieces[-1].counted if pieces else None
            told.append(
                Told(
                    parts[request_id],
                    index,
                    token_ids,
                    logprobs or None,
                    finish.reason,
                    finish.has_end_token,
                    words if pieces else None,
                    None if counted is None else counted.usage,
                )
            )
        return Kept(made_at, told)

    def _take(self, deltas: list[wire.Delta]) -> None:
        self.log += deltas
        for delta in deltas:
            if delta.finish is not None:
                self._num_open -= 1
        if not self._num_open:
            self._end()

    def _end(self) -> None:
        if self._ended is not None:
            ended, self._ended = self._ended, None
            ended(self)


class Reader:
    """One of a run's readers, with a place of its own in what was said. A ``Source``."""

    def __init__(self, run: Run, submits: Sequence[wire.Submit]) -> None:
        self._run = run
        self._num_read = 0
        self._joined_at = run.clock.now()
        mine = [submit.request_id for submit in submits]
        self._mine = None if mine == run.request_ids else dict(zip(run.request_ids, mine, strict=True))
        """This reader's request ids by the run's; None: they are the same."""
        self.outcome: Outcome = "shared" if run.readers else "miss"
        if run.payer is None:
            run.payer = self
        run.readers[self] = None

    async def deltas(self) -> list[wire.Delta]:
        run = self._run
        while self._num_read == len(run.log):
            if run.error is not None:
                raise run.error
            await run.advance()
        new = run.log[self._num_read :] if self._num_read else list(run.log)
        self._num_read += len(new)
        return new if self._mine is None else [self._as_mine(delta, self._mine) for delta in new]

    def cancel(self, request_id: str, index: int) -> None:
        if self._mine is not None:
            request_id = next(theirs for theirs, mine in self._mine.items() if mine == request_id)
        self._run.stop(request_id, index)

    def close(self) -> None:
        self._run.leave(self)

    @property
    def followed(self) -> str:
        """W3C trace context of the request that began the computation; empty: it has no trace."""
        source = self._run.source
        first = source.first if isinstance(source, Flights) else source
        return context_of(first.request.request_id, first.request.traceparent) if isinstance(first, Flight) else ""

    @property
    def were_sent(self) -> bool:
        return self._run.source.were_sent

    @property
    def queue_s(self) -> float:
        return max(0.0, self._run.source.queue_s - (self._joined_at - self._run.began_at))

    @property
    def first_token_at(self) -> float | None:
        at = self._run.source.first_token_at
        return None if at is None else max(at, self._joined_at)

    @property
    def spent(self) -> Spent:
        run = self._run
        spent = run.source.spent.since(self._joined_at - run.began_at)
        return spent if self is run.payer else spent.by_nobody()

    @property
    def is_over(self) -> bool:
        return self is not self._run.payer or self._run.source.is_over

    async def over(self) -> None:
        if self is self._run.payer:
            await self._run.source.over()

    def _as_mine(self, delta: wire.Delta, ids: dict[str, str]) -> wire.Delta:
        finish, counted = delta.finish, delta.counted if isinstance(delta, Piece) else None
        if finish is not None and self.outcome == "shared":
            finish = _unreused(finish)
            counted = counted and Counted(_uncached(counted.usage), counted.by)
        if isinstance(delta, Piece):
            return msgspec.structs.replace(delta, request_id=ids[delta.request_id], finish=finish, counted=counted)
        return wire.Delta(ids[delta.request_id], delta.index, delta.token_ids, delta.logprobs, finish)


class Replay:
    """A kept answer as it is told again: all at once, but for log-probabilities, of which it takes long to tell. A
    ``Source``."""

    outcome: Outcome = "hit"
    were_sent = True
    queue_s = 0.0
    spent = Spent()
    is_over = True

    def __init__(self, kept: Kept, submits: Sequence[wire.Submit], clock: Clock) -> None:
        self.first_token_at: float | None = None
        self._kept = kept
        self._request_ids = [submit.request_id for submit in submits]
        self._clock = clock
        self._left: deque[list[wire.Delta]] = deque()
        """What follows after a turn for everybody else."""

    @property
    def num_tokens(self) -> int:
        """Of all sequences together; a stop string may have ended the text of one before its last token."""
        return sum([len(told.token_ids) for told in self._kept.sequences])

    async def deltas(self) -> list[wire.Delta]:
        if self._left:
            await asyncio.sleep(0)
            return self._left.popleft()
        self.first_token_at = self._clock.now()
        deltas: list[wire.Delta] = []
        for told in self._kept.sequences:
            request_id = self._request_ids[told.part]
            finish = wire.Finish(told.reason, 0, 0, 0.0, 0.0, 0.0, has_end_token=told.has_end_token)
            if told.words is not None:
                counted = None if told.usage is None else Counted(_uncached(told.usage), "upstream")
                deltas.append(
                    Piece(
                        request_id,
                        told.index,
                        told.token_ids,
                        finish=finish,
                        words=told.words,
                        counted=counted,
                    )
                )
            else:
                ids, logprobs = told.token_ids, told.logprobs
                while logprobs is not None and len(ids) > MAX_SCORED:
                    deltas.append(wire.Delta(request_id, told.index, ids[:MAX_SCORED], logprobs[:MAX_SCORED]))
                    ids, logprobs = ids[MAX_SCORED:], logprobs[MAX_SCORED:]
                deltas.append(wire.Delta(request_id, told.index, ids, logprobs, finish))
        if any(told.logprobs for told in self._kept.sequences):
            self._left.extend([delta] for delta in deltas)
            return self._left.popleft()
        return deltas

    def cancel(self, request_id: str, index: int) -> None:
        """Nothing is computed."""

    async def over(self) -> None:
        """It has been from the beginning."""

    def close(self) -> None:
        """Nothing is held."""


def _unreused(finish: wire.Finish) -> wire.Finish:
    """For whoever reads along: the engine worked once, and what it found of the prompt is on the bill of the one who
    pays."""
    times = finish.queue_s, finish.prefill_s, finish.decode_s
    return wire.Finish(finish.reason, 0, 0, *times, has_end_token=finish.has_end_token)


def _uncached(usage: Usage) -> Usage:
    """An upstream's, likewise."""
    return msgspec.structs.replace(usage, num_cached_tokens=0)
