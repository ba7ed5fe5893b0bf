"""What was drawn in a step without a mask, or must leave room for an end, looked at: see worker.grammar.masks."""

from __future__ import annotations

import time
from collections.abc import Sequence as Run
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from worker.grammar.aside import AsideGuide
from worker.grammar.guide import Guide
from worker.grammar.in_time import allow, allows_others
from worker.grammar.nodes import Mask
from worker.sampling.masks import Bits, Masks, Words
from worker.sequence import Sequence

if TYPE_CHECKING:
    from worker.grammar.masks import MaskMaker


@dataclass(slots=True, eq=False)
class Held:
    """A sequence of the batch that is held to a grammar."""

    sequence: Sequence
    guide: Guide
    is_tried: bool
    """Drawn without masks at first."""
    is_telling: bool
    """Whether that goes well says whether it would elsewhere."""
    row: int = -1
    """Of the batch: where its next token is drawn, and behind it what follows each token of its draft."""
    num_left: int | None = None
    """Where its next token has to be one after which an end is known."""
    masks: dict[int, Bits] = field(default_factory=dict)
    """By the number of draft tokens before: those of its rows that are made."""
    ending: set[int] = field(default_factory=set)
    """Of those, the ones that let it do nothing but end, though it is shorter than it should be."""
    num_refused: int = 0
    """Tokens that were drawn next, and after which no end is known."""
    is_ranked: bool = False
    """More than one token that it would have come to has been asked for."""

    @property
    def num_rows(self) -> int:
        return 1 + len(self.sequence.draft_token_ids)


class Check:
    """Of the tokens of a batch that were drawn without their masks, or must leave room for an end."""

    def __init__(
        self,
        maker: MaskMaker,
        drawn: list[tuple[int, Sequence, Guide]],
        held: list[Held],
        aside: list[tuple[int, Sequence, AsideGuide]],
    ) -> None:
        """``drawn``: where a node is known, by row; ``aside``: those whose ends are looked for there; ``held``:
        others."""
        self._maker, self._drawn, self._held, self._aside = maker, drawn, held, aside

    def refused(self, ranked: Run[list[int]]) -> Masks | None:
        """See worker.sampling.masks.Check."""
        began_at = time.perf_counter()
        masks = self._refused(ranked)
        self._maker.waited_s += time.perf_counter() - began_at
        return masks

    def _refused(self, ranked: Run[list[int]]) -> Masks | None:
        wrong: list[tuple[Held, int]] = []
        late, faults = self._maker.late, self._maker.faults
        for row, sequence, aside in self._aside:
            if sequence not in faults and ranked[row][0] >= 0 and not aside.may_take(ranked[row][0]):
                late.add(sequence)
        self._aside = []
        for row, sequence, guide in self._drawn:
            if not guide.takes(ranked[row][0]):
                kept = guide.mask
                own = None if kept is None else own_mask(kept, sequence, guide)
                masks = {} if own is None else {0: own}
                wrong.append((Held(sequence, guide, True, False, row, masks=masks), 0))
        self._drawn = []
        wide: list[Held] = []
        far: list[tuple[Held, int, int]] = []
        for each in self._held:
            if each.sequence in faults or each.sequence in late:
                continue
            began_at = time.thread_time()
            if each.is_tried and each.num_left is None and not each.sequence.draft_token_ids:
                guide = each.guide
                is_picked = guide.pick(ranked[each.row], each.is_telling and not each.is_ranked)
                guide.took(time.thread_time() - began_at)
                if not is_picked:
                    if not each.is_ranked and guide.is_wide():
                        each.is_ranked = True
                        wide.append(each)
                    else:
                        wrong.append((each, 0))
                continue
            nth, token_id = self._wrong(each, ranked)
            if each.num_left is None:
                each.guide.took(time.thread_time() - began_at)
            elif each.guide.is_leaving:
                late.add(each.sequence)
                continue
            if nth >= 0:
                wrong.append((each, nth))
                far.append((each, nth, token_id))
        if not wrong and not wide:
            return None
        bare = [(each, nth) for each, nth in wrong if nth not in each.masks]
        self._maker.fill(bare)
        forced: dict[int, int] = {}
        far = [each for each in far if each[0].sequence not in late]
        for each, nth, token_id in far:
            # What the mask itself forbids was never up for an end.
            mask = each.masks[nth].words
            if each.num_left is not None and mask[token_id >> 5] >> (token_id & 31) & 1:
                assert each.guide.in_time is not None
                each.num_refused += 1
                is_enough = is_long_enough(each.sequence, nth)
                towards_end = each.guide.in_time.narrow(mask, token_id, each.num_refused, is_enough)
                if towards_end >= 0:
                    forced[each.row + nth] = towards_end
        # What nothing but a mask was missing is right once that is there.
        self._held = [each for each, _, _ in far] + wide
        drawn = {each.row + nth: each.masks[nth] for each, nth in wrong if each.row + nth not in forced}
        more = [each.row for each in wide]
        return Masks([*drawn], [*drawn.values()], self if self._held else None, forced=forced, more=more)

    def _wrong(self, each: Held, ranked: Run[list[int]]) -> tuple[int, int]:
        """The first place of its run whose token will not do, and that one; below 0: all will."""
        run = _run(each, ranked)
        nth = each.guide.num_held_to(run, each.masks) if run[-1] >= 0 else len(run)
        if each.is_tried and each.is_telling and not each.masks:
            each.guide.tried(nth == len(run))
        if nth == len(run):
            nth -= 1
            num_left = each.num_left
            if nth or num_left is None or run[0] < 0 or each.guide.accepts(run[0], num_left):
                return -1, 0
        return nth, run[nth]


def own_mask(mask: Mask, sequence: Sequence, guide: Guide) -> Bits | None:
    """What may come where it is, by the mask that is kept of it, if nothing of its own has to be added."""
    assert guide.node is not None
    guide.node.place.is_used = True
    bits, may_end = mask
    if may_end and (guide.has_own_stops or len(sequence.output_token_ids) < sequence.sampling.min_tokens):
        return None
    return bits


def rows_of(held: list[Held]) -> list[tuple[Held, int]]:
    return [(each, nth) for each in held for nth in range(each.num_rows)]


def _run(each: Held, ranked: Run[list[int]]) -> list[int]:
    """What is drawn for it: as far as its draft foresaw it, and one more."""
    draft = each.sequence.draft_token_ids
    num = 0
    while num < len(draft) and ranked[each.row + num][0] == draft[num]:
        num += 1
    return [ranked[each.row + nth][0] for nth in range(num + 1)]


def finish(sequence: Sequence, guide: Guide, row: Words, num_drafted: int) -> bool:
    """Of where the answer may end: any of its ends will do. Whether it must, though it is shorter than it should be."""
    for token_id in guide.stop_token_ids:
        allow(row, token_id)
    return not is_long_enough(sequence, num_drafted) and not allows_others(row, guide.stop_token_ids)


def is_long_enough(sequence: Sequence, num_drafted: int) -> bool:
    """An end may be drawn."""
    return len(sequence.output_token_ids) + num_drafted >= sequence.sampling.min_tokens
