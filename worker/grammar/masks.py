"""The masks of a step: of each sequence that keeps to a grammar, the tokens that may come next, one bit each.

A mask takes as long as some fifty tokens to look at, and within a text, where nearly all may come, many times that.
Where the most likely of all tokens is taken, or each as likely as the model has it, a token that the grammar allows is
the one that would have come with the mask, too: the race that it has won (worker.sampling.race) is between tokens that
know nothing of each other. So on the host a row whose mask is not known is drawn without, and only one whose token
is not allowed gets its mask, and is drawn again; within a text those who came next in the race are looked at before.
Who is hardly ever allowed what it says gets its mask at once, but within a text, and so does everybody where few tokens
may come and the mask is known; a token that must come is not drawn (worker.grammar.places). What cuts the unlikely off,
top-k, top-p and min-p, depends on all that is allowed; and a device is not waited for more often than must be. Masks
that are needed in any case are made beside the forward pass where it leaves a core to do so (benchmarks/grammar.md).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as Run
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from llguidance import LLExecutor

from worker.grammar.aside import AsideGuide
from worker.grammar.errors import GuideLost
from worker.grammar.guide import Guide, first_line
from worker.grammar.in_time import allow, allows_others
from worker.grammar.nodes import NONE, Mask
from worker.placement import taken
from worker.sampling.masks import Bits, Masks, Words
from worker.sequence import Sequence

UNMASKED, FORCED = Bits(np.empty(0, dtype=np.int32), 0), Bits(np.empty(0, dtype=np.int32), 0)
"""In place of the mask of a row that is drawn without one, and looked at, or of which it is known what must come."""
WORTH_THREADS = 4
"""So few threads take longer to wake than the masks that they would make meanwhile."""
FIRST_ROWS = 64
"""Of the room for masks; it grows."""


@dataclass(slots=True, eq=False)
class _Held:
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
    is_ranked: bool = False
    """More than one token that it would have come to has been asked for."""

    @property
    def num_rows(self) -> int:
        return 1 + len(self.sequence.draft_token_ids)


class MaskMaker:
    """Makes them, several at a time on threads of llguidance's. What it gave out last is overwritten by the next."""

    def __init__(self, is_for_device: bool) -> None:
        """``is_for_device``: the masks go there."""
        self._is_for_device = is_for_device
        self._num_spare = taken().num_cores - torch.get_num_threads()
        """Cores that no forward pass of this model takes."""
        num_threads = self._num_spare if self._num_spare > 0 else torch.get_num_threads()
        self._executor = LLExecutor(num_threads)
        self._is_alone = num_threads < WORTH_THREADS
        self._buffer: Words = np.empty((0, 0), dtype=np.int32)
        self._num_used = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._foreseen: tuple[dict[Sequence, _Held], Future[None]] | None = None
        self.faults: dict[Sequence, Exception] = {}
        """Those sequences of the last batch that cannot go on, once it is drawn."""
        self.num_masks = 0
        self.waited_s = 0.0

    def foresee(self, sequences: Iterable[Sequence]) -> None:
        """Begins with the masks that some of these will need, of whom all tokens are known, if there is a core to do
        so; until ``make`` or ``settle`` nobody else may touch their guides."""
        if self._num_spare <= 0:
            return
        self.settle()
        asked = [each for each in sequences if each.guide and not each.guide.is_aside and not each.has_ended]
        held = [self._held(each, each.guide) for each in asked if each.guide and self._known(each, each.guide) is None]
        held = [each for each in held if not each.is_tried]
        if held:
            self.faults, self._num_used = {}, 0
            filled = self._thread.submit(self.fill, _rows_of(held))
            self._foreseen = {each.sequence: each for each in held}, filled

    def settle(self) -> dict[Sequence, _Held]:
        """What was foreseen, once it is there."""
        foreseen, self._foreseen = self._foreseen, None
        if foreseen is None:
            return {}
        foreseen[1].result()
        return foreseen[0]

    def make(self, sequences: Run[Sequence]) -> Masks | None:
        """Of the rows of a batch, as ``Sequence.rows`` has them: those of sequences that have a guide and have not
        ended. See ``faults`` once it is drawn."""
        began_at = time.perf_counter()
        masks = self._make(sequences)
        self.waited_s += time.perf_counter() - began_at
        return masks

    def _make(self, sequences: Run[Sequence]) -> Masks | None:
        foreseen = self.settle()
        if not foreseen:
            self.faults, self._num_used = {}, 0
        rows: list[int] = []
        bits: list[Bits] = []
        forced: dict[int, int] = {}
        drawn: list[tuple[int, Sequence, Guide]] = []
        held: list[_Held] = []
        ending = set[int]()
        at = 0
        for sequence in sequences:
            guide = sequence.guide
            if guide is not None and not sequence.has_ended:
                known = self._known(sequence, guide)
                if known is FORCED:
                    assert guide.node is not None
                    forced[at] = guide.node.forced
                elif known is UNMASKED:
                    drawn.append((at, sequence, guide))
                elif known is not None:
                    rows.append(at)
                    bits.append(known)
                elif isinstance(guide, AsideGuide):
                    mask, must_end = self._found(sequence, guide)
                    rows.append(at)
                    bits.append(mask)
                    if must_end:
                        ending.add(at)
                else:
                    each = foreseen.get(sequence) or self._held(sequence, guide)
                    each.row = at
                    num_left = sequence.num_left
                    each.num_left = num_left if guide.is_careful(num_left) else None
                    held.append(each)
            at += 1 + len(sequence.draft_token_ids)
        if held:
            asked = [each for each in held if not each.is_tried]
            self.fill(_rows_of([each for each in asked if each.sequence not in foreseen]))
            ending |= {each.row + nth for each in asked for nth in each.ending}
            rows += [each.row + nth for each in asked for nth in range(each.num_rows)]
            bits += [each.masks[nth] for each, nth in _rows_of(asked)]
            held = [each for each in held if each.is_tried or each.num_left is not None]
        if not (rows or forced or drawn or held):
            return None
        return Masks(rows, bits, _Check(self, drawn, held) if drawn or held else None, frozenset(ending), forced=forced)

    def _found(self, sequence: Sequence, guide: AsideGuide) -> tuple[Bits, bool]:
        """Its mask, and whether it must end there though it is shorter than it should be. One that is late is in no
        batch."""
        found = guide.found
        assert found is not None
        words = found.words.copy()
        must_end = False
        if found.error:
            words.fill(-1)
            self.faults[sequence] = GuideLost(f"its grammar cannot be followed any further: {found.error}")
        elif found.may_end:
            must_end = _finish(sequence, guide, words, 0)
        return Bits(words, words.ctypes.data), must_end

    def _known(self, sequence: Sequence, guide: Guide) -> Bits | None:
        """The mask of its next token, FORCED or UNMASKED; None: llguidance has to be asked, or an end looked for."""
        node = guide.node
        if node is None or sequence.draft_token_ids:
            return None
        # Each row of each step comes by: what is seldom so is not called.
        if guide.in_time is not None and guide.in_time.is_careful(sequence.num_left):
            return None
        if node.forced != NONE:
            return None if self._is_for_device else FORCED
        place = node.place
        mask = place.mask or guide.mask
        is_likely = place.is_wide or (mask is None and not guide.is_wayward)
        if is_likely and not self._is_for_device and len(sequence.output_token_ids) >= guide.free_from:
            return UNMASKED
        return None if mask is None else _own(mask, sequence, guide)

    def _held(self, sequence: Sequence, guide: Guide) -> _Held:
        if self._is_for_device or len(sequence.output_token_ids) < guide.free_from:
            return _Held(sequence, guide, False, False)
        is_wayward = guide.is_wayward
        # Where a token must come it is put in place of whichever is drawn.
        is_wide = is_wayward and (guide.must_go_on() or guide.is_wide())
        is_tried = not is_wayward or is_wide or guide.is_due()
        if is_tried and sequence.draft_token_ids:
            # What the grammar itself has drafted is hardly ever what would come without.
            is_tried = guide.forced() != sequence.draft_token_ids[:1]
        return _Held(sequence, guide, is_tried, not is_wide)

    def fill(self, asked: list[tuple[_Held, int]]) -> None:
        """Makes rows of some sequences, each behind so many tokens of its draft; all of one sequence, or one."""
        if not asked:
            return
        vocabulary = asked[0][0].guide.vocabulary  # one model has one
        begin = self._num_used
        self._num_used += len(asked)
        if self._num_used > len(self._buffer):
            # What was given out of the old one stays where it is.
            num_rows, num_words = max(FIRST_ROWS, 2 * self._num_used), -(-vocabulary.vocab_size // 32)
            self._buffer = np.empty((num_rows, num_words), dtype=np.int32)
        words = self._buffer[begin : self._num_used]
        self._fill(asked, words)
        eos_token_id = vocabulary.eos_token
        may_end = [word >> (eos_token_id & 31) & 1 for word in words[:, eos_token_id >> 5].tolist()]
        address, row_bytes = words.ctypes.data, 4 * words.shape[1]
        for place, ((each, nth), row, is_end) in enumerate(zip(asked, words, may_end, strict=True)):
            each.masks[nth] = Bits(row, address + place * row_bytes)
            matcher = each.guide.matcher
            if matcher.is_error():
                row.fill(-1)
                reason = first_line(matcher.get_error())
                self.faults[each.sequence] = GuideLost(f"its grammar cannot be followed any further: {reason}")
                continue
            if is_end and _finish(each.sequence, each.guide, row, nth):
                each.ending.add(nth)

    def _fill(self, asked: list[tuple[_Held, int]], words: Words) -> None:
        plain = []
        fresh: list[int] = []
        drafted = []
        behind: list[tuple[Guide, int]] = []
        for place, (each, nth) in enumerate(asked):
            matcher, draft = each.guide.matcher, each.sequence.draft_token_ids
            if draft and not each.is_tried:
                if not nth:
                    drafted.append((matcher, place, list(draft)))
                continue
            if nth:
                behind.append((each.guide, matcher.try_consume_tokens(draft[:nth])))
            elif (node := each.guide.node) is not None and node.forced == NONE and (mask := each.guide.mask):
                words[place] = mask.bits.words
                continue
            else:
                fresh.append(place)
            plain.append((matcher, place))
        self.num_masks += len(plain) + sum(1 + len(draft) for _, _, draft in drafted)
        row_bytes = 4 * words.shape[1]
        if plain and self._is_alone:
            begin = words.ctypes.data
            for matcher, place in plain:
                matcher.unsafe_compute_mask_ptr(begin + place * row_bytes, row_bytes)
        elif plain:
            self._executor.unsafe_compute_mask_ptr(plain, words.ctypes.data, row_bytes, len(words))
        if drafted:
            # Nothing is made behind what is not allowed.
            for _, place, draft in drafted:
                words[place + 1 : place + 1 + len(draft)] = -1
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, words.ctypes.data, row_bytes, len(words))
        for place in fresh:
            asked[place][0].guide.keep_mask(words[place])
        for guide, num in behind:
            guide.matcher.rollback(num)


class _Check:
    """Of the tokens of a batch that were drawn without their masks, or must leave room for an end."""

    def __init__(self, maker: MaskMaker, drawn: list[tuple[int, Sequence, Guide]], held: list[_Held]) -> None:
        """``drawn``: where a node is known, by row; ``held``: others."""
        self._maker, self._drawn, self._held = maker, drawn, held

    def refused(self, ranked: Run[list[int]]) -> Masks | None:
        """See worker.sampling.masks.Check."""
        began_at = time.perf_counter()
        masks = self._refused(ranked)
        self._maker.waited_s += time.perf_counter() - began_at
        return masks

    def _refused(self, ranked: Run[list[int]]) -> Masks | None:
        wrong: list[tuple[_Held, int]] = []
        for row, sequence, guide in self._drawn:
            if not guide.takes(ranked[row][0]):
                kept = guide.mask
                own = None if kept is None else _own(kept, sequence, guide)
                masks = {} if own is None else {0: own}
                wrong.append((_Held(sequence, guide, True, False, row, masks=masks), 0))
        self._drawn = []
        wide: list[_Held] = []
        far: list[tuple[_Held, int, int]] = []
        faults = self._maker.faults
        for each in self._held:
            if each.sequence in faults:
                continue
            if each.is_tried and each.num_left is None and not each.sequence.draft_token_ids:
                guide = each.guide
                if not guide.pick(ranked[each.row], each.is_telling and not each.is_ranked):
                    if not each.is_ranked and guide.is_wide():
                        each.is_ranked = True
                        wide.append(each)
                    else:
                        wrong.append((each, 0))
                continue
            nth, token_id = self._wrong(each, ranked)
            if nth >= 0:
                wrong.append((each, nth))
                far.append((each, nth, token_id))
        if not wrong and not wide:
            return None
        bare = [(each, nth) for each, nth in wrong if nth not in each.masks]
        self._maker.fill(bare)
        forced: dict[int, int] = {}
        for each, nth, token_id in far:
            # What the mask itself forbids was never up for an end.
            mask = each.masks[nth].words
            if each.num_left is not None and mask[token_id >> 5] >> (token_id & 31) & 1:
                assert each.guide.in_time is not None
                towards_end = each.guide.in_time.narrow(mask, token_id, _is_long_enough(each.sequence, nth))
                if towards_end >= 0:
                    forced[each.row + nth] = towards_end
        # What nothing but a mask was missing is right once that is there.
        self._held = [each for each, _, _ in far] + wide
        drawn = {each.row + nth: each.masks[nth] for each, nth in wrong if each.row + nth not in forced}
        more = [each.row for each in wide]
        return Masks([*drawn], [*drawn.values()], self if self._held else None, forced=forced, more=more)

    def _wrong(self, each: _Held, ranked: Run[list[int]]) -> tuple[int, int]:
        """The first place of its run whose token will not do, and that one; below 0: all will."""
        run = _run(each, ranked)
        nth = each.guide.num_held_to(run, each.masks) if run[-1] >= 0 else len(run)
        if each.is_tried and each.is_telling and not each.masks:
            each.guide.tried(nth == len(run))
        if nth == len(run):
            nth -= 1
            in_time, num_left = each.guide.in_time, each.num_left
            if nth or num_left is None or in_time is None or run[0] < 0 or in_time.accepts(run[0], num_left):
                return -1, 0
        return nth, run[nth]


def _own(mask: Mask, sequence: Sequence, guide: Guide) -> Bits | None:
    """What may come where it is, by the mask that is kept of it, if nothing of its own has to be added."""
    assert guide.node is not None
    guide.node.place.is_used = True
    bits, may_end = mask
    if may_end and (guide.has_own_stops or len(sequence.output_token_ids) < sequence.sampling.min_tokens):
        return None
    return bits


def _rows_of(held: list[_Held]) -> list[tuple[_Held, int]]:
    return [(each, nth) for each in held for nth in range(each.num_rows)]


def _run(each: _Held, ranked: Run[list[int]]) -> list[int]:
    """What is drawn for it: as far as its draft foresaw it, and one more."""
    draft = each.sequence.draft_token_ids
    num = 0
    while num < len(draft) and ranked[each.row + num][0] == draft[num]:
        num += 1
    return [ranked[each.row + nth][0] for nth in range(num + 1)]


def _finish(sequence: Sequence, guide: Guide, row: Words, num_drafted: int) -> bool:
    """Of where the answer may end: any of its ends will do. Whether it must, though it is shorter than it should be."""
    for token_id in guide.stop_token_ids:
        allow(row, token_id)
    return not _is_long_enough(sequence, num_drafted) and not allows_others(row, guide.stop_token_ids)


def _is_long_enough(sequence: Sequence, num_drafted: int) -> bool:
    """An end may be drawn."""
    return len(sequence.output_token_ids) + num_drafted >= sequence.sampling.min_tokens
