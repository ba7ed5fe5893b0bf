"""One step: plan, allocate, forward, sample, report. It knows no sockets and no clock of its own.

Where the device computes by itself (``Runner.overlaps``), a step is launched before the tokens of the one before it are
read: the host plans and reports while the device computes. A sequence is then planned with a token that is there but
not known; one that turns out to have ended has computed one token in vain.

A fault of one request fails that request. A fault of the forward pass fails the requests of that step, and the engine
goes on; but where memory ran out nothing is lost, and the next steps are smaller. An AssertionError is a broken
invariant and is nobody's fault that could be contained: it leaves ``step``, and the worker must stop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from policies import settings, wire
from policies.batching import limits_of
from policies.costs import StepCosts, Work, shares
from policies.prefix import Chain, root_of
from policies.terms import FinishReason
from worker.adapters import Adapter
from worker.admission import refusal
from worker.blocks import Pool
from worker.budget import Budget, OutOfMemory
from worker.flight import NO_WORK, Draw, Flight, spans_of, work_of
from worker.inputs import Span
from worker.scheduler import Scheduler
from worker.sequence import Request, Sequence

if TYPE_CHECKING:
    from torch import Tensor

    from worker.parallel.runner import ParallelRunner
    from worker.runner import Runner
    from worker.sampler import Sampled, Sampler

Faults = dict[str, Exception]
"""Requests that cannot go on, and why."""

MIN_WAITING = 128
"""The line is at least so long: one request may ask for that many answers."""

log = logging.getLogger("penstock.worker")


class Engine:
    """All requests of one model on one device."""

    def __init__(
        self,
        runner: Runner | ParallelRunner,
        sampler: Sampler,
        engine: settings.Engine,
        now: Callable[[], float],
        costs: StepCosts | None = None,
    ) -> None:
        """``costs``: what is known of this runner's steps already."""
        self._runner = runner
        self._sampler = sampler
        self._now = now
        self._limits = limits_of(engine)
        self._prefix_cache = engine.prefix_cache
        self._eos_token_ids = frozenset(runner.eos_token_ids)
        self._pool = Pool(runner.num_blocks)
        self._budget = Budget(self._limits)
        self._scheduler = Scheduler(self._pool, runner.block_size, self._limits, runner.copy_block)
        self._requests: dict[str, Request] = {}
        self._suspects: set[str] = set()
        """Requests that were in a batch whose sampling failed; they are sampled one by one until they pass."""
        self._flight: Flight | None = None
        """Launched, and not landed: only where the runner overlaps."""
        self._landed_at = 0.0
        self._costs = costs or StepCosts()
        self._num_arrivals = 0
        self._num_prefill_tokens = 0
        self._num_decode_tokens = 0
        self._num_steps = 0
        self._busy_s = 0.0
        self._told = (0, 0.0)
        """Steps and busy seconds that the last Stats told of."""
        self.draining = False
        """Refuse what is new."""

    @property
    def has_work(self) -> bool:
        return bool(self._requests) or self._flight is not None

    def holds(self, request_id: str) -> bool:
        """Whether any sequence of this request has not ended."""
        return request_id in self._requests

    @property
    def max_sequences(self) -> int:
        return self._limits.max_sequences

    @property
    def max_waiting(self) -> int:
        """Sequences that may wait here; the gateway's line is the one that is meant to be long."""
        return max(4 * self._limits.max_sequences, MIN_WAITING)

    def add(self, submit: wire.Submit, adapter: Adapter | None = None) -> wire.Failed | None:
        """Take a request in, or say why not. ``adapter``: the one that it names."""
        refused = self._refusal(submit)
        if refused is not None:
            return refused
        now = self._now()
        sampling = submit.sampling
        stop_token_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stop_token_ids |= self._eos_token_ids
        root = root_of(submit.cache_salt, submit.adapter)
        chain = Chain(self._runner.block_size, root) if self._prefix_cache else None
        if chain is not None:
            chain.extend(submit.prompt_token_ids)
        request = self._requests[submit.request_id] = Request(submit.request_id, adapter)
        for index in submit.indices:
            self._num_arrivals += 1
            own_chain = chain.fork() if chain else None
            sequence = Sequence(request, submit, index, self._num_arrivals, stop_token_ids, own_chain, now)
            request.live.append(sequence)
            self._scheduler.add(sequence)
        return None

    def cancel(self, request_id: str, index: int | None = None) -> list[wire.Delta]:
        """End one sequence of a request, or all; nothing if there is none such. Their blocks are free on return."""
        request = self._requests.get(request_id)
        if request is None:
            return []
        now = self._now()
        gone = [sequence for sequence in request.live if index is None or sequence.index == index]
        return [self._end(sequence, [], None, "cancelled", now) for sequence in gone]

    def step(self) -> tuple[list[wire.Delta], list[wire.Failed]]:
        """Compute one step, if there is anything to compute. What moved, and what failed."""
        before, self._flight = self._flight, None
        deltas: list[wire.Delta] = []
        failed: list[wire.Failed] = []
        if before is not None and not before.may_be_overtaken:
            deltas, failed = self._land(before)
            before = None
        flight = None
        if self._requests:
            flight, faults = self._launch(before)
            failed += faults
        if self._runner.overlaps:
            self._flight, flight = flight, before
        if flight is not None:
            more, faults = self._land(flight)
            deltas += more
            failed += faults
        return deltas, failed

    def _launch(self, before: Flight | None) -> tuple[Flight | None, list[wire.Failed]]:
        """Plan a step and give it to the device. ``before``: the one that the device may still be busy with."""
        started_at = self._now()
        batch = self._scheduler.schedule(started_at, self._costs)
        assert batch or before is not None, "there is work, and none of it can be done"
        if not batch:
            return None, []
        sources = before.sources() if before is not None else {}
        spans = spans_of(batch, sources)
        work = work_of(spans)
        sampled_before = before.draws[0].pending.token_ids if sources and before is not None else None
        try:
            logits = self._runner.forward(spans, sampled_before)
        except AssertionError:
            raise
        except Exception as error:
            now = self._now()
            self._spend(now - started_at, work, spans, batch)
            if isinstance(error, OutOfMemory) and self._budget.shrink(sum(num_tokens for _, num_tokens in batch)):
                # Nothing was committed: those who fit into a smaller step compute the same again, the others pause.
                self._scheduler.limits = self._budget.limits
                log.warning("%s; steps hold at most %d tokens now", error, self._budget.limits.max_step_tokens)
                return None, []
            log.exception("a step of %d sequences failed", len(batch))
            return None, self._fail({sequence.request.request_id: error for sequence, _ in batch}, now)
        rows, indices = self._commit(batch, self._now())
        draws: list[Draw] = []
        faults: Faults = {}
        if rows:
            # Forks begin with the row of the prompt's last token: the same logits, each with its own seed.
            draws, faults = self._sample(logits if len(indices) == logits.shape[0] else logits[indices], rows)
        flight = Flight(batch, spans, work, draws, started_at)
        if faults:
            self._spend(self._now() - started_at, work, spans, batch)
            flight = Flight([], [], NO_WORK, draws, started_at)
        return flight, self._fail(faults, self._now())

    def _land(self, flight: Flight) -> tuple[list[wire.Delta], list[wire.Failed]]:
        """Read a step's tokens."""
        drawn = [(draw, draw.pending.take()) for draw in flight.draws]
        now = self._now()
        # Before anything ends, so that whoever ends in this step has its share of it.
        if flight.batch:
            seconds = now - max(flight.started_at, self._landed_at)
            self._spend(seconds, flight.work, flight.spans, flight.batch)
            self._costs.observe(flight.work, seconds)
        self._landed_at = now
        self._budget.passed()
        self._scheduler.limits = self._budget.limits
        faults: Faults = {
            sequence.request.request_id: ArithmeticError("the model gave no usable logits")
            for draw, sampled in drawn
            if min(sampled.token_ids) < 0
            for sequence, token_id in zip(draw.sequences, sampled.token_ids, strict=True)
            if token_id < 0 and not sequence.has_ended
        }
        failed = self._fail(faults, now)
        return self._report(drawn, now), failed

    def stats(self, num_gateways: int = 1) -> wire.Stats:
        """The state now; step_ms is the mean since the last call."""
        num_steps, busy_s = self._num_steps - self._told[0], self._busy_s - self._told[1]
        step_ms = 1e3 * busy_s / num_steps if num_steps else 0.0
        self._told = self._num_steps, self._busy_s
        return wire.Stats(
            num_waiting=len(self._scheduler.waiting),
            num_running=len(self._scheduler.running),
            num_blocks=self._pool.num_blocks,
            num_used_blocks=self._pool.num_used,
            num_cached_blocks=self._pool.num_cached,
            num_free_blocks=self._pool.num_free,
            num_prefill_tokens=self._num_prefill_tokens,
            num_decode_tokens=self._num_decode_tokens,
            num_steps=self._num_steps,
            step_ms=step_ms,
            draining=self.draining,
            cost_weights=self._costs.weights,
            num_gateways=num_gateways,
            busy_s=self._busy_s,
            **self._scheduler.counts(),
        )

    def kept_blocks(self) -> list[bytes]:
        """The digests of all blocks that a prompt could find."""
        return self._pool.named()

    def take_moved_blocks(self) -> tuple[list[bytes], list[bytes]]:
        """Of those, the ones that came and the ones that went since the last call."""
        return self._pool.take_moved()

    def load(self) -> tuple[int, int]:
        """How many wait, how many run: what a Stats out of turn is for."""
        return len(self._scheduler.waiting), len(self._scheduler.running)

    def audit(self) -> None:
        """Every block and every sequence accounted for; O(blocks). Raises AssertionError."""
        self._scheduler.audit()
        num_live = sum(len(request.live) for request in self._requests.values())
        assert num_live == sum(self.load()), "a sequence is in no queue"
        assert num_live or not self._pool.num_used, "a block is used, and nobody is there to use it"

    # Parts of a step

    def _spend(self, seconds: float, work: Work, spans: list[Span], batch: list[tuple[Sequence, int]]) -> None:
        """A step's time, to those who were in it and have not ended meanwhile; if all have, it was nobody's."""
        there = [(sequence, span) for (sequence, _), span in zip(batch, spans, strict=True) if not sequence.has_ended]
        if not there:
            return
        self._num_steps += 1
        self._busy_s += seconds
        work = work if len(there) == len(batch) else work_of([span for _, span in there])
        decode_s, context_s, chunk = shares(self._costs.weights, work, seconds)
        decode_s += context_s
        for sequence, span in there:
            num_tokens = len(span.token_ids)
            if num_tokens == 1:
                sequence.engine_s += decode_s + context_s * span.start
            else:
                sequence.engine_s += chunk.seconds(num_tokens, span.start)

    def _commit(self, batch: list[tuple[Sequence, int]], now: float) -> tuple[list[Sequence], list[int]]:
        """Note what is computed. Returns the sequences to sample, and for each the row of the logits."""
        rows: list[Sequence] = []
        sources: list[int] = []
        num_logits = 0
        for sequence, num_tokens in batch:
            if num_tokens == 1 and sequence.has_output:
                self._num_decode_tokens += 1
            else:
                self._num_prefill_tokens += num_tokens
            self._scheduler.commit(sequence, num_tokens)
            if sequence.num_computed == len(sequence.token_ids):
                rows.append(sequence)
                sources.append(num_logits)
                for fork in self._scheduler.fork(sequence, now):
                    rows.append(fork)
                    sources.append(num_logits)
                num_logits += 1
        return rows, sources

    def _sample(self, logits: Tensor, sequences: list[Sequence]) -> tuple[list[Draw], Faults]:
        """One batched sample, and one each for those whose last batch failed."""
        draws: list[Draw] = []
        faults: Faults = {}
        suspects = self._suspects
        if not suspects:
            self._sample_batch(logits, sequences, draws, faults)
            return draws, faults
        is_suspect = [sequence.request.request_id in suspects for sequence in sequences]
        together = [position for position, suspect in enumerate(is_suspect) if not suspect]
        alone = [[position] for position, suspect in enumerate(is_suspect) if suspect]
        for positions in [together, *alone]:
            batch = [sequences[position] for position in positions]
            if batch and batch[0].request.request_id not in faults:  # else a sibling has failed a moment ago
                self._sample_batch(logits[positions], batch, draws, faults)
        for draw in draws:
            suspects.difference_update(sequence.request.request_id for sequence in draw.sequences)
        return draws, faults

    def _sample_batch(self, logits: Tensor, sequences: list[Sequence], draws: list[Draw], faults: Faults) -> None:
        """Adds to ``draws`` and ``faults``."""
        try:
            pending = self._sampler.start(logits, [one.row for one in sequences], self._runner.maxima_of(logits))
        except AssertionError:
            raise
        except Exception as error:
            log.exception("sampling for %d sequences failed", len(sequences))
            if len(sequences) == 1:
                faults[sequences[0].request.request_id] = error
                return
            # The logits may be half overwritten. Computed anew and sampled one by one, only the faulty request fails.
            now = self._now()
            for sequence in sequences:
                self._suspects.add(sequence.request.request_id)
                self._scheduler.preempt(sequence, now)
            return
        draws.append(Draw(sequences, [sequence.expect() for sequence in sequences], pending))

    def _report(self, drawn: list[tuple[Draw, Sampled]], now: float) -> list[wire.Delta]:
        """What moved, of the sequences that have not ended meanwhile."""
        deltas = []
        for draw, sampled in drawn:
            tokens = zip(draw.sequences, draw.positions, sampled.token_ids, sampled.logprobs, strict=True)
            for sequence, position, token_id, logprob in tokens:
                if sequence.has_ended:
                    continue
                sequence.settle(position, token_id, now)
                logprobs = None if logprob is None else [logprob]
                reason = sequence.ending()
                if reason is None:
                    found = sequence.num_cached_tokens if position == sequence.num_prompt_tokens else None
                    delta = wire.Delta(sequence.request.request_id, sequence.index, [token_id], logprobs, None, found)
                else:
                    delta = self._end(sequence, [token_id], logprobs, reason, now)
                deltas.append(delta)
        return deltas

    # Ends

    def _end(
        self,
        sequence: Sequence,
        token_ids: list[int],
        logprobs: list[wire.TokenLogprob] | None,
        reason: FinishReason,
        now: float,
    ) -> wire.Delta:
        request = sequence.request
        self._scheduler.remove(sequence, now)
        if not request.live:
            self._forget(request.request_id)
        return wire.Delta(request.request_id, sequence.index, token_ids, logprobs, sequence.finish(reason, now))

    def _forget(self, request_id: str) -> None:
        del self._requests[request_id]
        self._suspects.discard(request_id)

    def _fail(self, faults: Mapping[str, Exception], now: float) -> list[wire.Failed]:
        """End whole requests by a fault."""
        failed = []
        for request_id, error in faults.items():
            engine_s = kv_block_s = 0.0
            for sequence in list(self._requests[request_id].live):
                self._scheduler.remove(sequence, now)
                engine_s += sequence.engine_s
                kv_block_s += sequence.kv_block_s
            self._forget(request_id)
            reason = f"{type(error).__name__}: {error}"
            failed.append(wire.Failed(request_id, "internal", reason, engine_s, kv_block_s))
        return failed

    def _refusal(self, submit: wire.Submit) -> wire.Failed | None:
        request_id, num_waiting = submit.request_id, len(self._scheduler.waiting)
        if self.draining:
            return wire.Failed(request_id, "draining", "the worker takes no new requests")
        if request_id in self._requests:
            return wire.Failed(request_id, "invalid_request", "a request of this id is being answered")
        max_tokens = min(self._runner.max_model_tokens, self._runner.num_blocks * self._runner.block_size)
        impossible = refusal(submit, self._runner.vocab_size, max_tokens)
        if impossible is None and len(submit.indices) + num_waiting > self.max_waiting:
            return wire.Failed(request_id, "overloaded", f"{num_waiting} sequences wait already")
        return impossible
