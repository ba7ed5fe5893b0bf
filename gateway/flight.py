"""One request's answer on its way from a worker to its reader.

No task and no queue stands between socket and stream: a frame's deltas are laid into their flights, and each flight
wakes the one coroutine that waits for it, once, however many came.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import TracebackType
from typing import NamedTuple, Protocol

from gateway import errors
from gateway.workers import Worker
from policies import wire
from policies.answers import Outcome
from policies.priority import Order, Turn


class Keeper(Protocol):
    """Whoever launched a flight and hears that nobody reads it any more."""

    def abandon(self, flight: Flight) -> None: ...


class Spent(NamedTuple):
    """What an answer took of the engine, as far as the worker has told; seconds."""

    engine_s: float = 0.0
    kv_block_s: float = 0.0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    queue_s: float = 0.0
    """In line and in the worker, as are the next two of the sequence that took longest."""
    prefill_s: float = 0.0
    decode_s: float = 0.0

    def since(self, seconds: float) -> Spent:
        """For whoever came so long after it began: what it waited for was less."""
        queue_s = max(0.0, self.queue_s - seconds)
        seconds = max(0.0, seconds - self.queue_s)
        prefill_s = max(0.0, self.prefill_s - seconds)
        seconds = max(0.0, seconds - self.prefill_s)
        return self._replace(queue_s=queue_s, prefill_s=prefill_s, decode_s=max(0.0, self.decode_s - seconds))

    def by_nobody(self) -> Spent:
        """The times alone: somebody else pays for what was computed."""
        return Spent(queue_s=self.queue_s, prefill_s=self.prefill_s, decode_s=self.decode_s)

    @classmethod
    def of(cls, parts: Iterable[Spent]) -> Spent:
        """What was computed beside each other."""
        parts = list(parts)
        longest = max(parts, key=lambda spent: spent.queue_s + spent.prefill_s + spent.decode_s, default=cls())
        return longest._replace(
            engine_s=sum([spent.engine_s for spent in parts]),
            kv_block_s=sum([spent.kv_block_s for spent in parts]),
            num_drafted_tokens=sum([spent.num_drafted_tokens for spent in parts]),
            num_accepted_tokens=sum([spent.num_accepted_tokens for spent in parts]),
        )


class Flight:
    """One request on its way: waiting in line, then with a worker, until its last sequence has finished.

    A ``Source`` for the one that launched it, and an async context manager: leaving it cancels every sequence that has
    not finished. Instants are monotonic seconds.
    """

    __slots__ = (
        "_arrived",
        "_ending",
        "_error",
        "_is_closed",
        "_keeper",
        "_open",
        "_told",
        "_waiter",
        "digests",
        "expected_at",
        "first_token_at",
        "is_over",
        "is_pending",
        "num_missing_pairs",
        "num_missing_tokens",
        "num_sequences",
        "num_tokens",
        "order",
        "request",
        "sent_at",
        "submitted_at",
        "turn",
        "worker",
    )

    outcome: Outcome = "bypass"

    def __init__(self, keeper: Keeper, request: wire.Submit, order: Order, submitted_at: float) -> None:
        self.request = request
        self.order = order
        self.turn: Turn | None = None
        """Its place in the line, and its part in the line's accounts once it was sent; None: nobody waited then."""
        self.num_sequences = request.num_sequences
        self.worker: Worker | None = None
        """The one that computes it; None while it waits in line and after its end."""
        self.submitted_at = submitted_at
        self.digests: list[bytes] = []
        """Of the prompt's full blocks, where it matters which worker has them."""
        self.num_missing_tokens = order.num_prompt_tokens
        """Of the prompt, those that its worker was not known to have when it got it."""
        self.num_missing_pairs = 0
        """Of these tokens (``costs.pairs``), once it was given to a worker."""
        self.sent_at: float | None = None
        """When a worker got it; until then it waited in line."""
        self.expected_at: float | None = None
        """When its first token should come, as it was predicted when it was let in."""
        self.first_token_at: float | None = None
        self.is_pending = False
        """A worker has it and has sent nothing yet."""
        self.num_tokens = 0
        """Of its completions so far."""
        self.is_over = False
        """Its worker will say no more of it, or never had it."""
        self._keeper = keeper
        self._is_closed = False
        self._open = set(range(request.num_sequences))
        self._arrived: list[wire.Delta] = []
        self._error: errors.GatewayError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._told: list[wire.Finish | wire.Failed] = []
        self._ending: asyncio.Future[None] | None = None

    @property
    def finished(self) -> bool:
        """Every sequence has finished, or the request has failed; what arrived before may still be read."""
        return not self._open or self._error is not None

    async def deltas(self) -> list[wire.Delta]:
        """Everything that arrived since the last call, in order; waits for at least one. For one reader.

        After ``cancel`` a sequence may still bring what was on its way, and then its end, "cancelled".
        Raises RequestFailed (or what it stands for), WorkerLost, QueueTimeout or Draining, when all before is read.
        Must not be called again when the last sequence's end has been returned.
        """
        while not self._arrived:
            if self._error is not None:
                raise self._error
            assert self._open, "every sequence has finished and was read"
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        arrived, self._arrived = self._arrived, []
        return arrived

    def cancel(self, request_id: str, index: int) -> None:
        """Nobody needs the rest of this sequence (its stop string was found): it leaves the batch within one step.
        ``request_id`` is its own."""
        if self.worker is not None and index in self._open:
            self.worker.send(wire.Cancel(request_id, index))

    async def __aenter__(self) -> Flight:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Nobody reads any more; a second time does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._keeper.abandon(self)

    @property
    def were_sent(self) -> bool:
        """A worker has it, or had it."""
        return self.sent_at is not None

    @property
    def queue_s(self) -> float:
        """How long it waited for a worker with room."""
        return 0.0 if self.sent_at is None else self.sent_at - self.submitted_at

    @property
    def spent(self) -> Spent:
        """What it took of the engine; all of it once it ``is_over``."""
        told, waited_s = self._told, self.queue_s
        return _spent(told[0], waited_s) if len(told) == 1 else Spent.of([_spent(each, waited_s) for each in told])

    async def over(self) -> None:
        """Until it ``is_over``. For the one who has left it."""
        if not self.is_over:
            self._ending = asyncio.get_running_loop().create_future()
            await self._ending

    # For the keeper

    def arrive(self, delta: wire.Delta, now: float) -> bool:
        """Takes one delta in; True when it ended its sequence. Raises WireError when there is no such sequence."""
        if delta.index not in self._open:
            raise wire.WireError(f"a delta for sequence {delta.index} of {self.request.request_id}, which is not open")
        self.num_tokens += len(delta.token_ids)
        if self._error is None:  # else its reader has been told the end, and nothing may come after that
            if self.first_token_at is None:
                self.first_token_at = now
            self._arrived.append(delta)
            self._wake()
        if delta.finish is None:
            return False
        self._told.append(delta.finish)
        self._open.discard(delta.index)
        if not self._open:
            self._end()
        return True

    def fail(self, error: errors.GatewayError, failed: wire.Failed | None = None) -> None:
        """Ends here, with what the worker says of it if it does; the reader hears why once it has read what came
        before."""
        if failed is not None:
            self._told.append(failed)
        self.cut(error)
        self._end()

    def cut(self, error: errors.GatewayError) -> None:
        """Ends here for its reader, while the worker has still to say that it has stopped."""
        self.worker = None
        self._error = error
        self._wake()

    @property
    def num_open(self) -> int:
        """Sequences that have not finished."""
        return len(self._open)

    def _end(self) -> None:
        self.is_over = True
        if self._ending is not None and not self._ending.done():
            self._ending.set_result(None)

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def _spent(told: wire.Finish | wire.Failed, waited_s: float) -> Spent:
    """``waited_s``: in line."""
    engine_s, kv_block_s = told.engine_s, told.kv_block_s
    num_drafted_tokens, num_accepted_tokens = told.num_drafted_tokens, told.num_accepted_tokens
    if isinstance(told, wire.Failed):
        return Spent(engine_s, kv_block_s, num_drafted_tokens, num_accepted_tokens, waited_s)
    queue_s = waited_s + told.queue_s
    return Spent(engine_s, kv_block_s, num_drafted_tokens, num_accepted_tokens, queue_s, told.prefill_s, told.decode_s)
