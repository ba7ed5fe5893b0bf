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
from policies.costs import StepCosts, Work
from policies.prefix import Chain, root_of
from policies.terms import FinishReason
from worker import vectors
from worker.account import Account
from worker.adapters import Adapter
from worker.admission import crowded, refusal
from worker.blocks import Pool
from worker.budget import Budget
from worker.device import is_out_of_memory
from worker.drawing import Drawing, Faults, told, unusable
from worker.flight import NO_WORK, Draw, Flight, Gain, span_of, work_of
from worker.inputs import Span
from worker.scheduler import Scheduler
from worker.sequence import Request, Sequence
from worker.speculation import Speculation

if TYPE_CHECKING:
    from worker.grammar.guide import Guide
    from worker.parallel.runner import ParallelRunner
    from worker.runner import Runner
    from worker.sampler import Sampler

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
        speculation: Speculation | None = None,
    ) -> None:
        """``costs``: what is known of this runner's steps already. ``speculation``: else it is as configured."""
        self._runner = runner
        self._now = now
        limits = self._limits = limits_of(engine, 0 if runner.writes else runner.max_model_tokens)
        self._prefix_cache, self._kv_dtype = engine.prefix_cache and runner.writes, engine.kv_dtype
        self._eos_token_ids = frozenset(runner.eos_token_ids)
        pool = self._pool = Pool(runner.num_blocks)
        self._vectors = vectors.Vectors()
        self._budget = Budget(self._limits)
        self._scheduler = Scheduler(pool, runner.block_size, limits, runner.copy_block, runner.window, runner.apart)
        self._requests: dict[str, Request] = {}
        self._drawing = Drawing(sampler, runner.maxima_of, self._put_back, self._budget.shrink)
        self._flight: Flight | None = None
        """Launched, and not landed: only where the runner overlaps."""
        self._landed_at = 0.0
        self._costs = costs or StepCosts()
        self._speculation = speculation or Speculation.of(engine)
        self._account = Account()
        self._num_arrivals = 0
        self.speculates = self._speculation is not None
        """Guess; to be switched off while it is learned what plain steps cost."""
        self.draining = False
        """Refuse what is new."""
        self.rests = False
        """Nothing can be computed before a guide is heard of, see worker.grammar.aside."""

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

    def add(
        self,
        submit: wire.Submit,
        adapter: Adapter | None = None,
        guides: Mapping[int, Guide] | None = None,
        came_at: float | None = None,
    ) -> wire.Failed | None:
        """Take a request in, or say why not. ``adapter``: its own; ``guides``: by index; ``came_at``: if not now."""
        if (refused := self._refusal(submit)) is not None:
            return refused
        now = self._now() if came_at is None else came_at
        sampling = submit.sampling
        stop_token_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stop_token_ids |= self._eos_token_ids
        root = root_of(submit.cache_salt, submit.adapter, self._kv_dtype)
        num_scored = None if any(submit.emitted_token_ids.values()) else sampling.num_prompt_logprobs
        finds = self._prefix_cache and num_scored is None and (submit.pooling or vectors.LAST).kind == "last"
        chain = Chain(self._runner.block_size, root) if finds else None
        if chain is not None:
            chain.extend(submit.prompt_token_ids)
        request = self._requests[submit.request_id] = Request(submit.request_id, adapter, root, num_scored)
        for index in submit.indices:
            self._num_arrivals += 1
            own_chain, guide = chain.fork() if chain else None, guides[index] if guides is not None else None
            sequence = Sequence(request, submit, index, self._num_arrivals, stop_token_ids, own_chain, now, guide)
            request.live.append(sequence)
            self._scheduler.add(sequence)
        return None

    def cancel(self, request_id: str, index: int | None = None) -> list[wire.Delta]:
        """End one sequence of a request, or all; nothing if there is none such. Their blocks are free on return."""
        if (request := self._requests.get(request_id)) is None:
            return []
        now = self._now()
        gone = [sequence for sequence in request.live if index is None or sequence.index == index]
        return [self._end(sequence, [], None, "cancelled", now) for sequence in gone]

    def step(self) -> tuple[list[wire.Delta], list[wire.Failed]]:
        """Compute one step, if there is anything to compute. What moved, and what failed."""
        before, self._flight = self._flight, None
        deltas, failed = list[wire.Delta](), list[wire.Failed]()
        if before is not None and not (before.may_be_overtaken and self._may_overtake(before)):
            deltas, failed = self._land(before)
            before = None
        deltas += [self._end(each, [], None, reason, self._now()) for each, reason in self._scheduler.ended_aside()]
        flight = None
        if self._requests:
            flight, before, moved, faults = self._launch(before)
            deltas += moved
            failed += faults
        if self._runner.overlaps:
            self._flight, flight = flight, before
        if flight is not None:
            more, faults = self._land(flight)
            deltas += more
            failed += faults
        return deltas, failed

    def _launch(
        self, before: Flight | None
    ) -> tuple[Flight | None, Flight | None, list[wire.Delta], list[wire.Failed]]:
        """Plan a step and give it to the device. ``before``: the one that the device may still be busy with; it comes
        back, or what came of it, where its tokens had to be known."""
        started_at = self._now()
        self._scheduler.limits = self._budget.limits
        batch = self._scheduler.schedule(started_at, self._costs)
        self.rests = not batch and before is None
        assert not self.rests or self._scheduler.num_held_up, "there is work, and none of it can be done"
        if not batch:
            return None, before, [], []
        sources = before.sources() if before is not None else {}
        spans = [span_of(sequence, num_tokens, sources) for sequence, num_tokens in batch]
        work = work_of(spans)
        if self.speculates and self._speculation and self._speculation.wakes(work.num_decodes):
            work = self._draft(batch, spans, work, started_at)
        self._drawing.foresee(sequence for sequence, num in batch if sequence.may_be_drawn(num))
        sampled_before = before.sampled() if sources and before is not None else None
        try:
            logits = self._runner.forward(spans, sampled_before)
            pooled = self._vectors.take(spans, batch, self._runner)
        except AssertionError:
            raise
        except Exception as error:
            self._drawing.settle()
            self._account.spend((now := self._now()) - started_at, work, spans, batch, self._costs, now)
            for sequence, _ in batch:
                self._scheduler.end_draft(sequence, 0, now)
            if is_out_of_memory(error) and self._budget.shrink([len(span.token_ids) for span in spans], error):
                # Nothing was committed: those who fit into a smaller step compute the same again, the others pause.
                self._scheduler.take_back(batch, self._costs)
                return None, before, [], []
            log.exception("a step of %d sequences failed", len(batch))
            return None, before, [], self._fail({sequence.request.request_id: error for sequence, _ in batch}, now)
        watching = self._speculation if self.speculates and self._speculation and self._speculation.watches else None
        if watching is not None:
            watching.computed(batch)
        sampled, indices = self._commit(batch, self._now())
        deltas, failed, draws = list[wire.Delta](), list[wire.Failed](), list[Draw]()
        faults: Faults = {}
        if sampled:
            if watching is not None:
                watching.watch(sampled, indices)
            if before is not None and any(sequence.guide is not None for sequence in sampled):
                # Masks follow from the last tokens, for which the device does not wait meanwhile.
                (deltas, failed), before = self._land(before), None
            # Forks begin with the row of the prompt's last token: the same logits, each with its own seed.
            draws, faults = self._drawing.draw(logits, indices, sampled)
        flight = Flight(batch, spans, work, draws, started_at, pooled)
        if faults:
            self._account.spend((now := self._now()) - started_at, work, spans, batch, self._costs, now)
            flight = Flight([], [], NO_WORK, draws, started_at, pooled)
        return flight, before, deltas, failed + self._fail(faults, self._now())

    def _land(self, flight: Flight) -> tuple[list[wire.Delta], list[wire.Failed]]:
        """Read a step's tokens."""
        runs = [run for draw in flight.draws for run in draw.runs(draw.pending.take())]
        pooled = flight.vectors.take() if flight.vectors is not None else []
        now = self._now()
        # Before anything ends, so that whoever ends in this step has its share of it.
        if flight.batch:
            seconds = now - max(flight.started_at, self._landed_at)
            self._account.spend(seconds, flight.work, flight.spans, flight.batch, self._costs, now)
            self._costs.observe(flight.work, seconds)
            if self.speculates and self._speculation and self._speculation.is_awake:
                num_right = sum([len(run.token_ids) for run in runs]) - len(runs) if flight.work.num_draft_tokens else 0
                self._speculation.spent(flight.work, seconds, num_right, self._costs)
        self._landed_at = now
        self._budget.passed()
        faults: Faults = {
            run.sequence.request.request_id: unusable(run.sequence, run.token_ids[:-1])
            for run in runs
            if run.token_ids[-1] < 0 and not run.sequence.has_ended
        }
        for sequence, vector in pooled:
            if not vector and not sequence.has_ended:
                faults[sequence.request.request_id] = ArithmeticError("the model gave no usable vector")
        failed = self._fail(faults, now)
        deltas = [self._deliver(*each, now) for each in pooled if not each[0].has_ended]
        for run in runs:
            if not run.sequence.has_ended:
                deltas += run.sequence.request.with_scores(self._report(run, now))
        return deltas, failed

    def stats(self, num_gateways: int = 1) -> wire.Stats:
        """The state now; step_ms is the mean since the last call."""
        return wire.Stats(
            draining=self.draining,
            cost_weights=self._costs.weights,
            num_gateways=num_gateways,
            **(self._account.counts() | self._scheduler.counts() | self._drawing.counts()),
            **(self._speculation.counts() if self._speculation is not None else {}),
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

    def _may_overtake(self, before: Flight) -> bool:
        """Nobody should know its last token before the next step, for the sake of a draft."""
        return not (self.speculates and self._speculation) or not self._speculation.expects(
            sequence for sequence, _ in before.batch
        )

    def _draft(self, batch: list[tuple[Sequence, int]], spans: list[Span], work: Work, now: float) -> Work:
        """Gives some of those who decode drafts to verify, and their spans with them, as far as there is room. What
        the work becomes by it."""
        assert self._speculation is not None
        num_drafted = 0
        num_left = self._scheduler.limits.max_step_tokens - work.num_prefill_tokens - work.num_decodes
        for place, token_ids in self._speculation.draft(batch, work, num_left, self._costs, now):
            sequence, _ = batch[place]
            num_tokens = self._scheduler.make_room(sequence, sequence.num_draftable(token_ids), now)
            if num_tokens:
                sequence.draft_token_ids = token_ids[:num_tokens]
                num_drafted += num_tokens
                spans[place] = span_of(sequence, 1)
        return work._replace(num_draft_tokens=num_drafted) if num_drafted else work

    def _put_back(self, sequence: Sequence) -> None:
        self._scheduler.put_back(sequence, self._now())

    def _commit(self, batch: list[tuple[Sequence, int]], now: float) -> tuple[list[Sequence], list[int]]:
        """Note what is computed, but for drafts. Returns the sequences to sample, and the rows of the logits."""
        sampled: list[Sequence] = []
        rows: list[int] = []
        num_logits = 0
        for sequence, num_tokens in batch:
            if num_tokens == 1 and sequence.has_output:
                self._account.num_decode_tokens += 1
            else:
                self._account.num_prefill_tokens += num_tokens
            self._scheduler.commit(sequence, num_tokens)
            if sequence.num_computed == len(sequence.token_ids) and sequence.pooling is None:
                end = num_logits + 1 + len(sequence.draft_token_ids)
                sampled.append(sequence)
                rows += range(num_logits, end)
                for fork in self._scheduler.fork(sequence, now):
                    sampled.append(fork)
                    rows.append(num_logits)
                num_logits = end
        return sampled, rows

    def _report(self, run: Gain, now: float) -> list[wire.Delta]:
        """What a sequence has gained, up to whatever ends it."""
        sequence, num_drafted = run.sequence, len(run.draft)
        reason = None
        num_tokens = 0
        for token_id in run.token_ids:
            sequence.settle(run.position + num_tokens, token_id, now)
            num_tokens += 1
            reason = sequence.ending()
            if reason is not None:
                break
        self._account.gained(num_tokens)
        if num_drafted:
            self._scheduler.end_draft(sequence, num_tokens - 1, now)
            assert self._speculation is not None
            self._speculation.learn(sequence, num_drafted, min(num_tokens, len(run.token_ids) - 1))
        token_ids = run.token_ids[:num_tokens]
        logprobs = [logprob for logprob in run.logprobs[:num_tokens] if logprob is not None] or None
        found = sequence.num_cached_tokens if run.position == sequence.num_prompt_tokens else None
        if reason is not None:
            return [self._end(sequence, token_ids, logprobs, reason, now)]
        return [sequence.gained(token_ids, logprobs, found)]

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
        if self.speculates and self._speculation is not None:
            self._speculation.ended(sequence)
        self._remove(sequence, now)
        if not request.live:
            self._forget(request.request_id)
        return wire.Delta(request.request_id, sequence.index, token_ids, logprobs, sequence.finish(reason, now))

    def _deliver(self, sequence: Sequence, vector: bytes, now: float) -> wire.Delta:
        end = self._end(sequence, [], None, "stop", now)
        return wire.Delta(end.request_id, end.index, [], None, end.finish, sequence.num_cached_tokens, vector)

    def _remove(self, sequence: Sequence, now: float) -> None:
        self._vectors.forget(sequence)
        self._scheduler.remove(sequence, now)
        if self._speculation is not None:
            self._speculation.forget(sequence)

    def _forget(self, request_id: str) -> None:
        del self._requests[request_id]
        self._drawing.forget(request_id)

    def _fail(self, faults: Mapping[str, Exception], now: float) -> list[wire.Failed]:
        """End whole requests by a fault, but for those that have ended meanwhile."""
        failed = []
        for request_id, error in faults.items():
            if request_id not in self._requests:
                continue
            sequences = list(self._requests[request_id].live)
            for sequence in sequences:
                if isinstance(error, ArithmeticError):
                    self._scheduler.doubt(sequence)
                self._remove(sequence, now)
            self._forget(request_id)
            spent = [sum(each) for each in zip(*[sequence.spent for sequence in sequences], strict=True)]
            failed.append(wire.Failed(request_id, *told(error), *spent))
        return failed

    def _refusal(self, submit: wire.Submit) -> wire.Failed | None:
        if self.draining:
            return wire.Failed(submit.request_id, "draining", "the worker takes no new requests")
        if submit.request_id in self._requests:
            return wire.Failed(submit.request_id, "invalid_request", "a request of this id is being answered")
        return refusal(submit, self._runner) or crowded(submit, len(self._scheduler.waiting), self.max_waiting)
