"""One request's answer on its way from a worker to its reader.

No task and no queue stands between socket and stream: a frame's deltas are laid into their flights, and each flight
wakes the one coroutine that waits for it, once, however many came.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Collection
from typing import Protocol

import msgspec

from gateway import errors
from gateway.spent import Meter, Spent
from gateway.stays import Stay, stays_of
from gateway.traceparent import NO_TRACE
from gateway.workers import Worker
from policies import wire
from policies.answers import Outcome
from policies.prefix import digests_of, root_of
from policies.priority import Order, Turn
from policies.suspicion import Standing, Suspicion
from policies.terms import FinishReason

MAX_ROUTED_BLOCKS = 1024
"""Of a prompt are looked for in the caches of the workers: what follows them makes no difference to where it goes, and
naming them takes about a microsecond each."""
NOT_SUSPECT = Suspicion()


class Keeper(Protocol):
    """Whoever launched a flight and hears that nobody reads it any more."""

    def abandon(self, flight: Flight) -> None: ...

    def ended_between(self, flight: Flight) -> None:
        """Its last sequence was given up while no worker had it."""


class Flight:
    """One request on its way: waiting in line, then with a worker, until its last sequence has finished. When the
    worker is lost, or lets it go, another one goes on behind the tokens that have arrived, and its reader sees nothing
    of it but a pause.

    A ``Source`` for the one that launched it, and an async context manager: leaving it cancels every sequence that has
    not finished. Instants are monotonic seconds.
    """

    __slots__ = (
        "_arrived",
        "_cut",
        "_ending",
        "_error",
        "_here",
        "_is_closed",
        "_is_under_way",
        "_num_cached_tokens",
        "_open",
        "_stopped",
        "_waiter",
        "_was_elsewhere",
        "digests",
        "due_at",
        "expected_at",
        "first_token_at",
        "given_at",
        "given_to",
        "is_let_in",
        "is_moving",
        "is_over",
        "is_pending",
        "keeper",
        "left_at",
        "meter",
        "num_held_tokens",
        "num_missing_pairs",
        "num_missing_tokens",
        "num_sequences",
        "num_tokens",
        "order",
        "paused_at",
        "request",
        "sent_at",
        "stays",
        "submitted_at",
        "suspicion",
        "turn",
        "worker",
    )

    outcome: Outcome = "bypass"

    def __init__(self, keeper: Keeper, request: wire.Submit, order: Order, submitted_at: float) -> None:
        self.request = request
        self.order = order
        self.turn: Turn | None = None
        """Its place in the line, and its part in the line's accounts once it was sent; None: nobody waited then."""
        self.is_let_in = False
        """With the other prompts of the same request: no line is too long for it, and it leaves its place to nobody."""
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
        """When a worker got it first; until then it waited in line."""
        self.stays: list[Stay] | None = None if request.traceparent in NO_TRACE else []
        """With the workers that had it; None: nobody asks so far, and none has left it (``stays_of``)."""
        self.left_at = 0.0
        """Its worker was done with a sequence of it."""
        self.due_at = order.deadline_at
        """When its first token was promised, once it was sent."""
        self.expected_at: float | None = None
        """When its first token should come, as it was predicted when it was let in."""
        self.first_token_at: float | None = None
        self.is_pending = False
        """A worker has it and has sent nothing yet."""
        self.num_tokens = 0
        """Of its completions so far."""
        self.num_held_tokens = order.num_tokens
        """KV tokens that it has, or is expected to come to."""
        self.suspicion = NOT_SUSPECT
        """That it is what ends workers."""
        self.paused_at: float | None = None
        """When it left its last worker, until there is a token of another one."""
        self.is_moving = False
        """Its worker has been told to let it go, so that another one goes on with it."""
        self.is_over = False
        """Its worker will say no more of it, or never had it."""
        self.keeper = keeper
        self._is_closed = False
        self._open = {index: array("I") for index in range(request.num_sequences)}
        """Sequences that have not finished, each with its tokens so far: what another worker has to know."""
        self._here = dict(self._open)
        """Those of them that its worker has, or will be given."""
        self._cut: set[int] = set()
        """Those that were cut, though they may stop by themselves."""
        self._stopped: set[int] = set()
        """Those of which nobody needs the rest."""
        self._num_cached_tokens: int | None = None
        """As its first worker said with the first token."""
        self.given_at = submitted_at
        self.given_to: Worker | None = None
        """The worker that has it, or had it last, and when it was given it."""
        self._is_under_way = False
        """Its first token has come, and nothing else than more of them is to be told of it."""
        self._was_elsewhere = False
        """Another worker has had it before the present one, or before the one that it waits for."""
        self._arrived: list[wire.Delta] = []
        self._error: errors.GatewayError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.meter = Meter()
        self._ending: asyncio.Future[None] | None = None

    def name_blocks(self, block_size: int, kv_dtype: str) -> None:
        """Where it matters which worker has them."""
        salt = root_of(self.request.cache_salt, self.request.adapter, kv_dtype)
        self.digests = digests_of(self.request.prompt_token_ids, block_size, salt, MAX_ROUTED_BLOCKS)

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
        if index not in self._open:
            return
        self._stopped.add(index)
        if self.worker is not None:
            self.worker.send(wire.Cancel(request_id, index))
        elif self.paused_at is not None:
            self._end_sequence(index, "cancelled")
            if not self._open:
                self.keeper.ended_between(self)

    async def __aenter__(self) -> Flight:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Nobody reads any more; a second time does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self.keeper.abandon(self)

    @property
    def were_sent(self) -> bool:
        """A worker has it, or had it."""
        return self.sent_at is not None

    @property
    def queue_s(self) -> float:
        """How long it waited for a worker with room, each time."""
        return self.meter.waited_s

    @property
    def spent(self) -> Spent:
        """What it took of the engine; all of it once it ``is_over``."""
        return self.meter.spent

    async def over(self) -> None:
        """Until it ``is_over``. For the one who has left it."""
        if not self.is_over:
            self._ending = asyncio.get_running_loop().create_future()
            await self._ending

    # For the keeper

    def arrive(self, delta: wire.Delta, now: float) -> bool:
        """Takes one delta in; True when its worker is done with the sequence. Raises WireError when there is no such
        sequence, or no such token."""
        index, finish, token_ids = delta.index, delta.finish, delta.token_ids
        try:
            self._here[index].fromlist(token_ids)  # a third of the time of extend()
        except KeyError:
            reason = f"a delta for sequence {index} of {self.request.request_id}, which is not open"
            raise wire.WireError(reason) from None
        except OverflowError:
            raise wire.WireError(f"a token of {self.request.request_id} whose id is none") from None
        self.num_tokens += len(token_ids)
        if delta.is_cut:
            self._cut.add(index)
        if finish is None:
            if self._is_under_way:  # as nearly all are; and what ``_wake`` does, without a call
                self._arrived.append(delta)
                waiter = self._waiter
                if waiter is not None and not waiter.done():
                    waiter.set_result(None)
            else:
                self._bring(delta, now)
            return False
        self.meter.told.append(finish)
        self.left_at = now
        del self._here[index]
        if self.is_moving and finish.reason == "cancelled" and index not in self._stopped and self.is_wanted:
            if delta.token_ids:
                self._bring(msgspec.structs.replace(delta, finish=None), now)
            return True
        del self._open[index]
        self._bring(delta, now)
        if not self._open:
            self._end()
        return True

    def fail(self, error: errors.GatewayError, failed: wire.Failed | None = None) -> None:
        """Ends here, with what the worker says of it if it does; the reader hears why once it has read what came
        before."""
        if failed is not None:
            self.meter.told.append(failed)
        self.cut(error)
        self._end()

    def cut(self, error: errors.GatewayError) -> None:
        """Ends here for its reader, while the worker has still to say that it has stopped."""
        self.worker = self.paused_at = None
        self._error = self._error or error
        self._is_under_way = False
        self._wake()

    @property
    def num_open(self) -> int:
        """Sequences that have not finished."""
        return len(self._open)

    @property
    def num_here(self) -> int:
        """Those of them that its worker has."""
        return len(self._here)

    @property
    def is_wanted(self) -> bool:
        """Somebody waits for more of it."""
        return not self._is_closed and not self.finished

    @property
    def num_known_tokens(self) -> int:
        """Of its prompt, and of what its open sequences have so far: what a worker that gets it has to compute."""
        if not self._was_elsewhere:
            return self.order.num_prompt_tokens
        return self.order.num_prompt_tokens + sum([len(token_ids) for token_ids in self._open.values()])

    def sent(self, now: float) -> None:
        """Out of the line, to a worker."""
        self.meter.waited_s += now - (self.submitted_at if self.sent_at is None else self.given_at)
        self.given_at = now
        if self.sent_at is None:
            self.sent_at = now

    def submit(self) -> wire.Submit:
        """What its worker is told."""
        if not self._was_elsewhere:
            return self.request
        emitted = {index: token_ids.tolist() for index, token_ids in self._open.items()}
        cut = sorted(self._cut & emitted.keys())
        return msgspec.structs.replace(self.request, emitted_token_ids=emitted, cut_indices=cut)

    @property
    def standing(self) -> Standing:
        """How it may go on, now that workers were lost with it, or none."""
        return self.suspicion.standing(self.num_tokens)

    def leave(self, eos_token_ids: Collection[int], now: float) -> None:
        """Its worker has it no more: what has not finished goes on elsewhere. ``eos_token_ids`` of the model."""
        began_at, first_token_at = self.given_at, self.first_token_at
        decodes_at = now if first_token_at is None else max(began_at, first_token_at)
        self.meter.leave(decodes_at - began_at, now - decodes_at)
        if self.request.traceparent and (stays := stays_of(self)):
            stays[-1].left_at, stays[-1].left = now, "moved" if self.is_moving else "lost"
            self.stays, self.left_at = stays, 0.0
        self._was_elsewhere = True
        self._is_under_way = False
        self.given_at = now  # it waits from now on
        self.worker = None
        self.is_moving = False
        self.expected_at = None
        self.paused_at = self.paused_at or now
        self.num_held_tokens = self.order.num_prompt_tokens + max(self.order.num_expected_tokens, self.num_tokens)
        for index, token_ids in list(self._open.items()):
            reason = self.request.sampling.end_of(token_ids, eos_token_ids)
            if reason == "stop" and index in self._cut:
                reason = "length"
            if index in self._stopped:
                reason = reason or "cancelled"
            if reason is not None:
                self._end_sequence(index, reason)
        self._here = dict(self._open)

    def _end_sequence(self, index: int, reason: FinishReason) -> None:
        """No worker has it, and none need have."""
        del self._open[index]
        self._here.pop(index, None)
        finish = wire.Finish(reason, self._num_cached_tokens or 0, 0, 0.0, 0.0, 0.0)
        self._arrived.append(wire.Delta(self.request.request_id, index, [], None, finish))
        self._wake()
        if not self._open:
            self._end()

    def _bring(self, delta: wire.Delta, now: float) -> None:
        """To its reader."""
        if self._error is not None:  # it has been told the end, and nothing may come after that
            return
        if self.first_token_at is None:
            self.first_token_at = now
            self._is_under_way = not self._was_elsewhere
            self._num_cached_tokens = delta.num_cached_tokens
        elif self._was_elsewhere:
            delta = self._as_one_answer(delta)
        self._arrived.append(delta)
        self._wake()

    def _as_one_answer(self, delta: wire.Delta) -> wire.Delta:
        """From a worker that went on with it: of the prompt, what counts as found is what the first one found."""
        finish, num_cached_tokens = delta.finish, self._num_cached_tokens
        if num_cached_tokens is None or (finish is None and delta.num_cached_tokens is None):
            return delta
        if finish is not None:
            finish = msgspec.structs.replace(finish, num_cached_tokens=num_cached_tokens)
        return wire.Delta(delta.request_id, delta.index, delta.token_ids, delta.logprobs, finish, num_cached_tokens)

    def _end(self) -> None:
        self.is_over = True
        if self._ending is not None and not self._ending.done():
            self._ending.set_result(None)

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
