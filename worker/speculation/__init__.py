"""Guessing the next tokens, so that one step may write several: who is asked, how much is taken, and what came of it.

What is verified how is the engine's business (worker.engine, worker.flight), what pays is decided in
policies.speculation; the drafters are beside this.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Run
from itertools import takewhile, zip_longest
from typing import Self

from policies import settings
from policies.costs import StepCosts, Work
from policies.speculation import BEHIND_WEIGHT, Own, Survival, allot, best_length
from worker.device import is_out_of_memory
from worker.sequence import Sequence
from worker.speculation.account import Account
from worker.speculation.drafter import NO_DRAFT, Draft, Drafter, Watcher
from worker.speculation.forced import ForcedDrafter
from worker.speculation.notes import MAX_RESTING, Notes, Offer, Taken
from worker.speculation.store import StoreDrafter
from worker.speculation.suffix import SuffixDrafter
from worker.speculation.twins import Twins

__all__ = ["NO_DRAFT", "Allot", "Draft", "Drafter", "Speculation", "StoreDrafter", "SuffixDrafter"]

Allot = Callable[[Run[Run[float]], Run[float], int, float, float, int], list[int]]
"""As policies.speculation.allot."""

MAX_STRANGERS = 4
"""Sequences for which a drafter is asked that takes time, as long as next to nothing is known of it, or what it takes
is in doubt."""
SATURATED_RESTING = 8
"""Steps for which nobody is looked at where verifying anything takes too long."""
BROKE_RESTING = 32
"""Steps for which nobody is looked at while the purse is empty, before it is seen again what is in it."""
MAX_SIZE = 10
"""Bits of the size of a batch that are told apart: larger ones count as one kind."""
LOOK_EVERY = 32
"""Steps in which a device that computes by itself is once waited for, to see whether there is anything to draft."""

log = logging.getLogger("penstock.worker")


class Speculation:
    """All drafters of one engine."""

    def __init__(
        self,
        drafters: Run[Drafter],
        max_draft_tokens: int,
        allot: Allot = allot,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now = now
        self._drafting_s = self._began_at = 0.0
        """In this step, looked at sequences and asked drafters."""
        self._drafters = list(drafters)
        self._watchers = [drafter for drafter in self._drafters if isinstance(drafter, Watcher)]
        self._witnesses = tuple(self._watchers)  # who is told of nothing any more still has what it has seen
        self.watches = bool(self._watchers)
        self._max_draft_tokens = max_draft_tokens
        self._allot = allot
        self._step = self._woke_at = 0
        self._num_decodes = 1  # in the step in which it woke
        self._rests_until = self._sleeps_until = 0
        """The step in which anybody is looked at again, and the one in which anything is done again."""
        self.is_awake = False
        self._fitted_s = 0.0
        """What this step should take without drafts; 0: not asked yet."""
        self._survivals = [Survival() for _ in self._drafters]
        self._accounts = [Account(1 << max(0, bits - 1), self._drafters) for bits in range(MAX_SIZE + 1)]
        """By the size of the batch, in bits."""
        self._latest = self._accounts[0]
        self._notes: dict[Sequence, Notes] = {}
        self._promising: set[Sequence] = set()
        self._num_looks = self.num_drafts = self.num_drafted_tokens = self.num_accepted_tokens = 0
        self.num_faults: Counter[str] = Counter()
        """Requests for which a drafter was switched off, by its name."""

    @classmethod
    def of(cls, engine: settings.Engine, model: Drafter | None = None, twins: Twins | None = None) -> Self | None:
        """As configured, ``model`` standing for the draft model if there is one; None: without."""
        speculation = engine.speculation
        drafters: list[Drafter] = [SuffixDrafter(twins)] if "suffix" in speculation.drafters else []
        if "store" in speculation.drafters:
            drafters.append(StoreDrafter())
        if "grammar" in speculation.drafters:
            drafters.append(ForcedDrafter())
        if model is not None:
            drafters.append(model)
        return cls(drafters, speculation.max_draft_tokens) if speculation.enabled and drafters else None

    def wakes(self, num_decodes: int) -> bool:
        """A step begins. Whether there is anything to do in it; a batch of the size that it fell asleep with needs
        nothing meanwhile."""
        self._step += 1
        self.is_awake = self._step >= self._sleeps_until or num_decodes != self._num_decodes
        return self.is_awake

    def draft(
        self, batch: Run[tuple[Sequence, int]], work: Work, max_tokens: int, costs: StepCosts, now: float
    ) -> list[tuple[int, list[int]]]:
        """What to verify beside the work of a step: places in its batch, and what may follow the sequence's last token
        there; only for those who decode, and all of whose tokens are known. At most ``max_tokens`` in all."""
        self._drafting_s = self._fitted_s = 0.0
        self._latest.purse.pass_steps(self._step - self._woke_at - 1)
        self._woke_at, self._num_decodes = self._step, work.num_decodes
        account = self._latest = self._account(work)
        account.purse.pass_steps(1)
        if account.purse.is_empty:
            self._sleeps_until = self._step + BROKE_RESTING
            return []
        taken = []
        if self._step >= self._rests_until:
            self._began_at = self._now()
            taken = self._look(batch, work, max_tokens, costs, now)
            self._drafting_s = self._now() - self._began_at
        self._sleeps_until = self._rests_until
        return taken

    def _look(
        self, batch: Run[tuple[Sequence, int]], work: Work, max_tokens: int, costs: StepCosts, now: float
    ) -> list[tuple[int, list[int]]]:
        # Where little is left, one of the others is looked at, each in turn.
        account = self._account(work)
        effort, is_low, turn = account.effort, account.purse.is_low, self._step % len(batch)
        dear = account.due(self._step)
        wakes_at = self._step + MAX_RESTING
        awake: dict[Sequence, int] = {}
        nums: dict[Sequence, int] = {}
        places: dict[Sequence, int] = {}
        for place, (sequence, num_tokens) in enumerate(batch):
            if is_low and place != turn and sequence not in self._promising:
                wakes_at = self._step + 1
                continue
            notes = self._notes.get(sequence)
            if notes is None:
                notes = self._notes[sequence] = Notes([Own() for _ in self._survivals])
            is_awake = notes.rests_until <= self._step
            if not is_awake and not dear:
                wakes_at = min(wakes_at, notes.rests_until)
                continue
            if num_tokens == 1 and _is_known(sequence):
                num = min(self._max_draft_tokens, sequence.sampling.max_tokens - len(sequence.output_token_ids) - 1)
                if num > 0:
                    nums[sequence], places[sequence] = num, place
                    if is_awake:
                        awake[sequence] = num
            else:
                wakes_at = self._step + 1
        if not nums or max_tokens < 1:
            if batch and not nums:
                self._rests_until = min(wakes_at, account.next_due())
            return []
        step_s, token_s = 1.0, 0.0
        if costs.known:
            self._fitted_s = costs.predict(work)
            step_s, token_s = effort.step_s(self._fitted_s), effort.token_s
            if effort.wants_plain and not work.num_prefill_tokens:  # beside a prompt it would teach nothing
                return []
            if step_s <= work.num_decodes * token_s:
                # Even a guess that is always right takes longer than what it saves.
                self._rests_until = self._step + SATURATED_RESTING
                return []
            max_tokens = min(max_tokens, effort.max_tokens(step_s))
        chosen = self._from_the_free(awake)
        for index in dear:
            self._from_the_dear(index, account, nums, chosen, step_s, token_s)
        if not chosen:
            if len(nums) == len(batch):
                self._rests_until = min(account.next_due(), *[self._notes[each].rests_until for each in nums])
            return []
        sequence_chances = [each.chances for each in chosen.values()]
        weights = [_weight(sequence, now) for sequence in chosen]
        allotted = self._allot(
            sequence_chances, weights, work.num_decodes, step_s + self._now() - self._began_at, token_s, max_tokens
        )
        taken = []
        for (sequence, each), num in zip(chosen.items(), allotted, strict=True):
            notes = self._notes[sequence]
            if num:
                notes.taken = Taken(each.drafter, each.draft.strength)
                taken.append((places[sequence], each.draft.token_ids[:num]))
            else:
                self._survivals[each.drafter].refuse(each.draft.strength, notes.own[each.drafter], 1 / len(chosen))
                notes.vain(self._step, self._num_decodes)
        return taken

    def expects(self, sequences: Iterable[Sequence]) -> bool:
        """Whether there should be a draft for one of them as soon as its last token is known: the last one was right to
        some extent, and it is looked at in the next step; or it is time to look again."""
        self._num_looks += 1
        if not self._num_looks % LOOK_EVERY:
            return True
        step, notes = self._step + 1, self._notes
        if not self._promising or step < max(self._rests_until, self._sleeps_until):
            return False
        is_due = self._latest.next_due() <= step
        promising = filter(self._promising.__contains__, sequences)
        return any(is_due or notes[sequence].rests_until <= step for sequence in promising)

    def learn(self, sequence: Sequence, num_drafted: int, num_right: int) -> None:
        """What became of the draft that it had in this step, of which the first ``num_right`` tokens were right."""
        notes = self._notes[sequence]
        taken, notes.taken = notes.taken, None
        assert taken is not None
        if num_right:
            notes.num_vain = 0
        else:
            notes.vain(self._step, self._num_decodes)
        self._survivals[taken.drafter].tell(taken.strength, num_drafted, num_right, notes.own[taken.drafter])
        (self._promising.add if num_right else self._promising.discard)(sequence)
        sequence.num_drafted_tokens += num_drafted
        sequence.num_accepted_tokens += num_right
        self.num_drafts += 1
        self.num_drafted_tokens += num_drafted
        self.num_accepted_tokens += num_right

    def spent(self, work: Work, seconds: float, num_right: int, costs: StepCosts) -> None:
        """A step of this work, in which it was awake, took so long, and so many tokens of its drafts were right."""
        if not costs.known or work.num_prefill_tokens:
            return
        account = self._account(work)
        purse, effort = account.purse, account.effort
        fitted_s = self._fitted_s or costs.predict(work._replace(num_draft_tokens=0))
        plain_s, alone_s = effort.step_s(fitted_s), seconds - self._drafting_s
        if self._drafting_s and plain_s > 0.0 and work.num_decodes:
            more_s = self._drafting_s + (alone_s - plain_s if work.num_draft_tokens else 0.0)
            purse.tell(plain_s, more_s, num_right, work.num_decodes)
        effort.tell(fitted_s, alone_s, work.num_draft_tokens, work.num_decodes, num_right)

    def _account(self, work: Work) -> Account:
        return self._accounts[min(work.num_decodes.bit_length(), MAX_SIZE)]

    def counts(self) -> dict[str, int]:
        """What a worker's ``Stats`` say of it, by field."""
        return {
            "num_drafts": self.num_drafts,
            "num_drafted_tokens": self.num_drafted_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "num_drafter_faults": self.num_faults.total(),
        }

    def computed(self, batch: Run[tuple[Sequence, int]]) -> None:
        """See Watcher."""
        self._tell(lambda watcher: watcher.computed(batch))

    def watch(self, sequences: Run[Sequence], rows: Run[int]) -> None:
        """See Watcher."""
        self._tell(lambda watcher: watcher.watch(sequences, rows))

    def _tell(self, call: Callable[[Watcher], None]) -> None:
        for watcher in list(self._watchers):
            try:
                call(watcher)
            except Exception as error:
                if is_out_of_memory(error):  # there may be enough in the next step
                    log.warning("drafter %s has seen nothing of a step: %s", watcher.name, error)
                    continue
                log.warning("drafter %s is switched off", watcher.name, exc_info=error)
                self._watchers.remove(watcher)
                self.num_faults[watcher.name] += 1

    def ended(self, sequence: Sequence) -> None:
        """With whatever it has written; not by a fault."""
        for drafter in self._drafters:
            drafter.learn(sequence)

    def forget(self, sequence: Sequence) -> None:
        """It is gone."""
        self._promising.discard(sequence)
        is_noted = self._notes.pop(sequence, None) is not None
        for drafter in self._drafters if is_noted else self._witnesses:
            drafter.forget(sequence)

    def _from_the_free(self, awake: dict[Sequence, int]) -> dict[Sequence, Offer]:
        """Of each sequence that has any, the draft of which most is expected, among those that cost nothing."""
        best: dict[Sequence, Offer] = {}
        for index, drafter in enumerate(self._drafters):
            if drafter.is_free and awake:
                self._take_better(index, awake, best)
        if len(best) < len(awake):
            for sequence in awake:
                if sequence not in best:
                    self._notes[sequence].vain(self._step, self._num_decodes)
        return best

    def _from_the_dear(
        self,
        index: int,
        account: Account,
        nums: dict[Sequence, int],
        best: dict[Sequence, Offer],
        step_s: float,
        token_s: float,
    ) -> None:
        """Adds to ``best`` what one drafter proposes for those for whom it is worth its time."""
        drafter, survival = self._drafters[index], self._survivals[index]
        expected: dict[Sequence, list[float]] = {}
        known: dict[tuple[int, float], list[float]] = {}  # many of whom nothing is known are alike
        for sequence, num in nums.items():
            own = self._notes[sequence].own[index]
            kind = num, own.odds()
            if index not in self._notes[sequence].off:
                expected[sequence] = known.get(kind) or known.setdefault(kind, survival.expected(0, num, own))
        # Whoever has as good a draft already is left out.
        expected = {
            sequence: chances
            for sequence, chances in expected.items()
            if sequence not in best or sum(chances) > sum(best[sequence].chances)
        }
        if not expected:
            return
        asked, believed = list(expected), account.believed(index)
        if not survival.is_known or believed < 1.0:
            asked = asked[:MAX_STRANGERS]
        together = zip_longest(*[expected[sequence] for sequence in asked], fillvalue=0.0)
        chances = [sum(each) / len(asked) for each in together]
        others = [each for sequence, each in best.items() if sequence not in expected]
        worth = self._num_decodes + sum([sum(each.chances) for each in others])
        with_others_s = step_s + token_s * sum([len(each.chances) for each in others])
        num = best_length(
            chances,
            len(asked),
            worth,
            with_others_s,
            token_s,
            lambda num: believed * drafter.expected_s(len(asked), num),
        )
        if not num:
            account.refuse(index, self._step)
            for sequence in asked:
                survival.forgive(self._notes[sequence].own[index])
            return
        account.take(index)
        self._take_better(index, {sequence: min(num, nums[sequence]) for sequence in asked}, best)

    def _take_better(self, index: int, nums: dict[Sequence, int], best: dict[Sequence, Offer]) -> None:
        survival = self._survivals[index]
        for sequence, whole in self._ask(index, list(nums), list(nums.values())):
            draft = _up_to_end(whole, sequence)
            if not draft.token_ids:
                continue
            chances = survival.expected(draft.strength, len(draft.token_ids), self._notes[sequence].own[index])
            value = sum(chances)
            if sequence not in best or value > best[sequence].value:
                best[sequence] = Offer(value, index, draft, chances)

    def _ask(self, index: int, sequences: list[Sequence], nums: list[int]) -> list[tuple[Sequence, Draft]]:
        """One drafter, for those for whom it is not switched off."""
        if any(notes.off for notes in map(self._notes.__getitem__, sequences)):
            pairs = [
                (sequence, num)
                for sequence, num in zip(sequences, nums, strict=True)
                if index not in self._notes[sequence].off
            ]
            if not pairs:
                return []
            sequences, nums = [sequence for sequence, _ in pairs], [num for _, num in pairs]
        drafter = self._drafters[index]
        try:
            return list(zip(sequences, drafter.propose(sequences, nums), strict=True))
        except Exception as error:
            if len(sequences) > 1:
                # One of them is to blame, and is found by asking for each alone.
                return [
                    pair
                    for sequence, num in zip(sequences, nums, strict=True)
                    for pair in self._ask(index, [sequence], [num])
                ]
            (sequence,) = sequences
            whose = sequence.request.request_id
            log.warning("drafter %s is switched off for request %s", drafter.name, whose, exc_info=error)
            self._notes[sequence].off.add(index)
            self.num_faults[drafter.name] += 1
            drafter.forget(sequence)
            return []


def _is_known(sequence: Sequence) -> bool:
    """It is about to compute its last token, and that is known."""
    return sequence.num_pending == 1 and sequence.has_output and sequence.num_known == len(sequence.token_ids)


def _up_to_end(draft: Draft, sequence: Sequence) -> Draft:
    """What ends the sequence comes without being guessed, if it does, and nothing comes behind it."""
    ends = sequence.stop_token_ids
    if ends.isdisjoint(draft.token_ids):
        return draft
    return Draft(list(takewhile(lambda token_id: token_id not in ends, draft.token_ids)), draft.strength)


def _weight(sequence: Sequence, now: float) -> float:
    return BEHIND_WEIGHT if sequence.tpot_s is not None and sequence.token_due_at < now else 1.0
