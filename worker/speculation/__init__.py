"""Guessing the next tokens, so that one step may write several: who is asked, how much is taken, and what came of it.

What is verified how is the engine's business (worker.engine, worker.flight), what pays is decided in
policies.speculation; the drafters are beside this.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Run
from typing import NamedTuple

from policies import settings
from policies.costs import StepCosts, Work
from policies.speculation import BEHIND_WEIGHT, Chance, Effort, Survival, allot
from worker.sequence import Sequence
from worker.speculation.drafter import NO_DRAFT, Draft, Drafter
from worker.speculation.suffix import SuffixDrafter

__all__ = ["NO_DRAFT", "Allot", "Draft", "Drafter", "Speculation", "SuffixDrafter"]

Allot = Callable[[Run[Run[float]], Run[float], int, float, float, int], list[int]]
"""As policies.speculation.allot."""

MAX_RESTING = 16
"""A sequence for which there was nothing to draft for long is looked at once in so many steps."""
LOOK_EVERY = 32
"""Steps in which a device that computes by itself is once waited for, to see whether there is anything to draft."""

log = logging.getLogger("penstock.worker")


class _Taken(NamedTuple):
    """The draft that a sequence has in this step."""

    drafter: int
    strength: int


class _Notes:
    """On one sequence."""

    __slots__ = ("num_resting", "num_vain", "off", "own", "taken")

    def __init__(self, own: list[Chance]) -> None:
        self.own = own
        """By drafter."""
        self.off: set[int] = set()
        """Drafters that have raised for it."""
        self.taken: _Taken | None = None
        self.num_vain = 0
        """Times in a row that there was nothing to draft, or nothing of it was right."""
        self.num_resting = 0
        """Steps for which nobody is asked."""

    def vain(self) -> None:
        self.num_vain += 1
        self.num_resting = min(MAX_RESTING, 1 << self.num_vain // 4) - 1


class Speculation:
    """All drafters of one engine."""

    def __init__(self, drafters: Run[Drafter], max_draft_tokens: int, allot: Allot = allot) -> None:
        self._drafters = list(drafters)
        self._max_draft_tokens = max_draft_tokens
        self._allot = allot
        self._survivals = [Survival() for _ in self._drafters]
        self._effort = Effort()
        self._notes: dict[Sequence, _Notes] = {}
        self._promising: set[Sequence] = set()
        self._num_looks = 0
        self.num_drafted_tokens = 0
        self.num_accepted_tokens = 0
        self.num_faults: Counter[str] = Counter()
        """Requests for which a drafter was switched off, by its name."""

    @classmethod
    def of(cls, engine: settings.Engine) -> Speculation | None:
        """As configured; None: without."""
        speculation = engine.speculation
        if not speculation.enabled or not speculation.drafters:
            return None
        return cls([SuffixDrafter()], speculation.max_draft_tokens)

    def draft(
        self, sequences: Collection[Sequence], work: Work, max_tokens: int, costs: StepCosts, now: float
    ) -> list[tuple[Sequence, list[int]]]:
        """What to verify beside the work of a step: for some of ``sequences``, which are all decoding, and all of
        whose tokens are known. At most ``max_tokens`` in all."""
        wanted = []
        nums = []
        for sequence in sequences:
            notes = self._notes.get(sequence)
            if notes is None:
                notes = self._notes[sequence] = _Notes([survival.own() for survival in self._survivals])
            notes.taken = None
            if notes.num_resting:
                notes.num_resting -= 1
                continue
            num = min(self._max_draft_tokens, sequence.sampling.max_tokens - len(sequence.output_token_ids) - 1)
            if num > 0:
                wanted.append(sequence)
                nums.append(num)
        if not wanted or max_tokens < 1:
            return []
        step_s, token_s = 1.0, 0.0
        if costs.known:
            step_s, token_s = self._effort.step_s(costs.predict(work)), self._effort.token_s
            if self._effort.wants_plain or step_s <= work.num_decodes * token_s:
                return []  # in the second case even a guess that is always right takes longer than what it saves
            max_tokens = min(max_tokens, self._effort.max_tokens(step_s))
        chosen = self._chosen(wanted, nums)
        if len(chosen) < len(wanted):
            found = {sequence for sequence, _, _, _ in chosen}
            for sequence in wanted:
                if sequence not in found:
                    self._notes[sequence].vain()
        if not chosen:
            return []
        chances = [chances for _, _, _, chances in chosen]
        weights = [_weight(sequence, now) for sequence, _, _, _ in chosen]
        allotted = self._allot(chances, weights, work.num_decodes, step_s, token_s, max_tokens)
        taken = []
        for (sequence, drafter, draft, _), num in zip(chosen, allotted, strict=True):
            if num:
                self._notes[sequence].taken = _Taken(drafter, draft.strength)
                taken.append((sequence, draft.token_ids[:num]))
            else:
                notes = self._notes[sequence]
                self._survivals[drafter].refuse(draft.strength, notes.own[drafter])
                notes.vain()
        return taken

    def expects(self, sequences: Iterable[Sequence]) -> bool:
        """Whether there should be a draft for one of them as soon as its last token is known: the last one was right to
        some extent, or it is time to look again."""
        self._num_looks += 1
        return not self._num_looks % LOOK_EVERY or any(sequence in self._promising for sequence in sequences)

    def learn(self, sequence: Sequence, num_drafted: int, num_right: int) -> None:
        """What became of the draft that it had in this step, of which the first ``num_right`` tokens were right."""
        notes = self._notes[sequence]
        taken, notes.taken = notes.taken, None
        assert taken is not None
        if num_right:
            notes.num_vain = 0
        else:
            notes.vain()
        self._survivals[taken.drafter].tell(taken.strength, num_drafted, num_right, notes.own[taken.drafter])
        (self._promising.add if num_right else self._promising.discard)(sequence)
        sequence.num_drafted_tokens += num_drafted
        sequence.num_accepted_tokens += num_right
        self.num_drafted_tokens += num_drafted
        self.num_accepted_tokens += num_right

    def spent(self, work: Work, seconds: float, num_right: int, costs: StepCosts) -> None:
        """A step of this work took so long, and so many tokens of its drafts were right."""
        if costs.known and not work.num_prefill_tokens:
            fitted_s = costs.predict(work._replace(num_draft_tokens=0))
            self._effort.tell(fitted_s, seconds, work.num_draft_tokens, work.num_decodes, num_right)

    def forget(self, sequence: Sequence) -> None:
        """It has ended."""
        self._promising.discard(sequence)
        if self._notes.pop(sequence, None) is not None:
            for drafter in self._drafters:
                drafter.forget(sequence)

    def _chosen(self, sequences: list[Sequence], nums: list[int]) -> list[tuple[Sequence, int, Draft, list[float]]]:
        """Of each sequence that has any, the draft of which most is expected, and whose it is."""
        best: dict[Sequence, tuple[float, int, Draft, list[float]]] = {}
        for index in range(len(self._drafters)):
            survival = self._survivals[index]
            for sequence, draft in self._ask(index, sequences, nums):
                if not draft.token_ids:
                    continue
                own = self._notes[sequence].own[index]
                chances = survival.expected(draft.strength, len(draft.token_ids), own)
                value = sum(chances)
                if sequence not in best or value > best[sequence][0]:
                    best[sequence] = (value, index, draft, chances)
        return [(sequence, index, draft, chances) for sequence, (_, index, draft, chances) in best.items()]

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
            request_id = sequence.request.request_id
            log.warning("drafter %s is switched off for request %s", drafter.name, request_id, exc_info=error)
            self._notes[sequence].off.add(index)
            self.num_faults[drafter.name] += 1
            drafter.forget(sequence)
            return []


def _weight(sequence: Sequence, now: float) -> float:
    return BEHIND_WEIGHT if sequence.tpot_s is not None and sequence.token_due_at < now else 1.0
