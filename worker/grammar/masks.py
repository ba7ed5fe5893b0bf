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

No mask is made here of a grammar that takes too long (worker.grammar.aside). Where that turns out in the middle of a
step, the answers that would need one are drawn once more, when their masks are there.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Set
from collections.abc import Sequence as Run
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from llguidance import LLExecutor

from worker.grammar.aside import SLOW_S, AsideGuide
from worker.grammar.check import Check, Held, finish, is_long_enough, own_mask, rows_of
from worker.grammar.errors import GuideLost
from worker.grammar.guide import Guide, first_line
from worker.grammar.nodes import NONE
from worker.placement import taken
from worker.sampling.masks import Bits, Masks, Words
from worker.sequence import Sequence

UNMASKED, FORCED = Bits(np.empty(0, dtype=np.int32), 0), Bits(np.empty(0, dtype=np.int32), 0)
"""In place of the mask of a row that is drawn without one, and looked at, or of which it is known what must come."""
WORTH_THREADS = 4
"""So few threads take longer to wake than the masks that they would make meanwhile."""
FIRST_ROWS = 64
"""Of the room for masks; it grows."""
NOBODY: Set[Sequence] = frozenset()


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
        self._foreseen: tuple[dict[Sequence, Held], Future[None]] | None = None
        self.faults: dict[Sequence, Exception] = {}
        """Those sequences of the last batch that cannot go on, once it is drawn."""
        self.late: set[Sequence] = set()
        """Those of which nothing can be drawn yet, see ``take_late``."""
        self.num_masks = 0
        self.waited_s = 0.0

    def take_late(self, sequences: Iterable[Sequence]) -> Set[Sequence]:
        """Those of the last batch, which is these, for which nothing was drawn, whatever it seems to be."""
        if not self.late:
            return NOBODY
        late, self.late = {each for each in self.late & set(sequences) if not each.has_ended}, set()
        for sequence in late:
            guide = sequence.guide
            if guide is not None and not guide.is_aside:
                sequence.guide = AsideGuide.of(guide, sequence.tenant, sequence.sampling.max_tokens)
        return late

    def foresee(self, sequences: Iterable[Sequence]) -> None:
        """Begins with the masks that some of these will need, of whom all tokens are known, if there is a core to do
        so; until ``make`` or ``settle`` nobody else may touch their guides."""
        if self._num_spare <= 0:
            return
        self.settle()
        asked = [each for each in sequences if each.guide and not each.guide.is_leaving and not each.has_ended]
        held = [self._held(each, each.guide) for each in asked if each.guide and self._known(each, each.guide) is None]
        held = [each for each in held if not each.is_tried and not each.guide.is_leaving]
        if held:
            self._begin()
            try:
                filled = self._thread.submit(self.fill, rows_of(held))
            except RuntimeError:  # no thread can be had: they are made in the step, and not by the next one that can
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
            else:
                self._foreseen = {each.sequence: each for each in held}, filled

    def _begin(self) -> None:
        self.faults, self.late, self._num_used = {}, set(), 0

    def settle(self) -> dict[Sequence, Held]:
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
            self._begin()
        rows: list[int] = []
        bits: list[Bits] = []
        forced: dict[int, int] = {}
        drawn: list[tuple[int, Sequence, Guide]] = []
        held: list[Held] = []
        aside: list[tuple[int, Sequence, AsideGuide]] = []
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
                    mask, must_end, towards_end = self._found(sequence, guide)
                    if towards_end >= 0:
                        forced[at] = towards_end
                    else:
                        rows.append(at)
                        bits.append(mask)
                        if guide.is_careful(sequence.num_left):
                            aside.append((at, sequence, guide))
                    if must_end:
                        ending.add(at)
                else:
                    each = foreseen.get(sequence) or self._held(sequence, guide)
                    each.row = at
                    num_left = sequence.num_left
                    each.num_left = num_left if guide.is_careful(num_left) else None
                    if guide.is_leaving:
                        self.late.add(sequence)
                    else:
                        held.append(each)
            at += 1 + len(sequence.draft_token_ids)
        if held:
            asked = [each for each in held if not each.is_tried]
            self.fill(rows_of([each for each in asked if each.sequence not in foreseen]))
            ending |= {each.row + nth for each in asked for nth in each.ending}
            rows += [each.row + nth for each in asked for nth in range(each.num_rows)]
            bits += [each.masks[nth] for each, nth in rows_of(asked)]
            held = [each for each in held if each.is_tried or each.num_left is not None]
        if not (rows or forced or drawn or held):
            return None
        check = Check(self, drawn, held, aside) if drawn or held or aside else None
        return Masks(rows, bits, check, frozenset(ending), forced=forced)

    def _found(self, sequence: Sequence, guide: AsideGuide) -> tuple[Bits, bool, int]:
        """Its mask, whether it must end there though it is shorter than it should be, and the token that must come
        whatever the mask says, or NONE. One that is late is in no batch."""
        found = guide.found
        assert found is not None
        words = found.words.copy()
        must_end, towards_end = False, NONE
        if found.error:
            words.fill(-1)
            error = found.error
            if isinstance(error, str):
                error = GuideLost(f"its grammar cannot be followed any further: {error}")
            self.faults[sequence] = error
        elif found.may_end:
            must_end = finish(sequence, guide, words, 0)
        for num, token_id in enumerate(guide.refused, 1):
            assert guide.in_time is not None
            towards_end = guide.in_time.narrow(words, token_id, num, is_long_enough(sequence, 0))
        return Bits(words, words.ctypes.data), must_end, towards_end

    def _known(self, sequence: Sequence, guide: Guide) -> Bits | None:
        """The mask of its next token, FORCED or UNMASKED; None: llguidance has to be asked, or an end looked for."""
        node = guide.node
        if node is None or sequence.draft_token_ids:
            return None
        # Each row of each step comes by: what is seldom so is not called.
        if guide.in_time is not None and guide.is_careful(sequence.num_left):
            return None
        if node.forced != NONE:
            return None if self._is_for_device else FORCED
        place = node.place
        mask = place.mask or guide.mask
        is_likely = place.is_wide or (mask is None and not guide.is_wayward)
        if is_likely and not self._is_for_device and len(sequence.output_token_ids) >= guide.free_from:
            return UNMASKED
        return None if mask is None else own_mask(mask, sequence, guide)

    def _held(self, sequence: Sequence, guide: Guide) -> Held:
        if self._is_for_device or len(sequence.output_token_ids) < guide.free_from:
            return Held(sequence, guide, False, False)
        is_wayward = guide.is_wayward
        # Where a token must come it is put in place of whichever is drawn.
        is_wide = is_wayward and (guide.must_go_on() or guide.is_wide())
        is_tried = not is_wayward or is_wide or guide.is_due()
        if is_tried and sequence.draft_token_ids:
            # What the grammar itself has drafted is hardly ever what would come without.
            is_tried = guide.forced() != sequence.draft_token_ids[:1]
        return Held(sequence, guide, is_tried, not is_wide)

    def fill(self, asked: list[tuple[Held, int]]) -> None:
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
            if each.sequence in self.late:
                row.fill(-1)
                continue
            matcher = each.guide.matcher
            if matcher.is_error():
                row.fill(-1)
                reason = first_line(matcher.get_error())
                self.faults[each.sequence] = GuideLost(f"its grammar cannot be followed any further: {reason}")
                continue
            if is_end and finish(each.sequence, each.guide, row, nth):
                each.ending.add(nth)

    def _fill(self, asked: list[tuple[Held, int]], words: Words) -> None:
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
        begin, row_bytes = words.ctypes.data, 4 * words.shape[1]
        alone, together = plain, []
        if not self._is_alone:
            alone = [each for each in plain if asked[each[1]][0].guide.is_doubted]
            together = [each for each in plain if not asked[each[1]][0].guide.is_doubted]
        for matcher, place in alone:
            each = asked[place][0]
            if each.guide.is_leaving:
                self.late.add(each.sequence)
                continue
            began_at = time.thread_time()
            matcher.unsafe_compute_mask_ptr(begin + place * row_bytes, row_bytes)
            each.guide.took(time.thread_time() - began_at)
        if together:
            began_at = time.perf_counter()
            self._executor.unsafe_compute_mask_ptr(together, begin, row_bytes, len(words))
            self._doubt(together, asked, time.perf_counter() - began_at)
        if drafted:
            # Nothing is made behind what is not allowed.
            for _, place, draft in drafted:
                words[place + 1 : place + 1 + len(draft)] = -1
            began_at = time.perf_counter()
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, begin, row_bytes, len(words))
            self._doubt(drafted, asked, time.perf_counter() - began_at)
        for place in fresh:
            if asked[place][0].sequence not in self.late:
                asked[place][0].guide.keep_mask(words[place])
        for guide, num in behind:
            guide.matcher.rollback(num)

    def _doubt(self, rows: Iterable[tuple[Any, ...]], asked: list[tuple[Held, int]], seconds: float) -> None:
        """Made together, they took so long: next time each by itself, to see which."""
        for _, place, *_ in rows if seconds > SLOW_S else ():
            rules = asked[place][0].guide.rules
            if rules is not None:
                rules.is_doubted = True
