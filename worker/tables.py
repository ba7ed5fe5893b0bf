"""Block tables: what each sequence holds in the pool, from what is found there to what is given back.

Where every layer has a window, a sequence lets go of the blocks that lie before all of them each time that it takes a
new one. What has a name goes at once or not at all, since whoever uses a block uses its ancestors; so that this is
soon, only the prompt's blocks and those of the first window get names. Where only some layers have windows, what these
need lies in a pool apart (``worker.windows``), and what was computed is of use as far as their windows reach there.
"""

from __future__ import annotations

from collections.abc import Callable

from worker.blocks import NO_PARENT, Pool
from worker.sequence import Sequence
from worker.windows import Windows


class Tables:
    """Those of the sequences that run. Whoever asks for blocks has planned that they are there."""

    def __init__(
        self, pool: Pool, windows: Windows, block_size: int, window: int, copy_block: Callable[[int, int], None]
    ) -> None:
        """``window``: the tokens, its own among them, that a token looks back on in any layer; 0: all."""
        self._pool = pool
        self._windows = windows
        self._block_size = block_size
        self._window = window
        self._copy_block = copy_block

    # More of them

    def take_hits(self, sequence: Sequence, now: float) -> None:
        """What the cache has of it becomes the end of its table."""
        sequence.held(now)
        self._pool.acquire(sequence.hits)
        sequence.block_ids += sequence.hits
        sequence.hits = []
        sequence.num_sealed = len(sequence.block_ids)
        sequence.num_computed = sequence.num_sealed * self._block_size
        self._windows.hold(sequence)

    def fill(self, sequence: Sequence, now: float) -> None:
        """Blocks for all of its tokens, behind those that it has."""
        sequence.held(now)
        block_ids = sequence.block_ids
        block_ids += self._pool.allocate(self.num_missing(sequence), block_ids[-1] if block_ids else NO_PARENT)

    def grow(self, sequence: Sequence, now: float) -> None:
        """A block to write the next token in, or all that it has lost; or a copy of a tail that others still read."""
        block_ids = sequence.block_ids
        num_missing = self.num_missing(sequence)
        if num_missing:
            self.let_go(sequence, now)
            sequence.held(now)
            block_ids += self._pool.allocate(num_missing, block_ids[-1])
        else:
            shared = block_ids[-1]
            (own,) = self._pool.allocate(1, block_ids[-2] if len(block_ids) > 1 else NO_PARENT)
            self._windows.use(own)
            self._copy_block(shared, own)
            self._windows.drop(shared)
            self._pool.release((shared,))
            block_ids[-1] = own
        sequence.may_share_tail = False

    def make_room(self, sequence: Sequence, num_tokens: int, num_kept: int, now: float) -> int:
        """Blocks to compute a draft in behind its last token, while ``num_kept`` stay available. How many tokens there
        is room for, at most so many."""
        num_free = len(sequence.block_ids) * self._block_size - len(sequence.token_ids)
        if num_tokens > num_free:
            num_spare = self._pool.num_available - num_kept
            num_more = min(-(-(num_tokens - num_free) // self._block_size), num_spare)
            if num_more > 0:
                sequence.held(now)
                sequence.block_ids += self._pool.allocate(num_more, sequence.block_ids[-1])
                num_free += num_more * self._block_size
        num_tokens = min(num_tokens, num_free)
        self._windows.hold(sequence, 1 + num_tokens)
        return num_tokens

    def share(self, leader: Sequence, sequence: Sequence, now: float) -> None:
        """It goes on from what its leader has computed, on the same blocks."""
        self._pool.acquire(leader.block_ids)
        sequence.held(now)
        sequence.block_ids = list(leader.block_ids)
        sequence.num_computed = leader.num_computed
        sequence.num_sealed = leader.num_sealed
        sequence.chain = leader.chain.fork() if leader.chain else None
        self._windows.hold(sequence)

    # What is computed in them

    def seal(self, sequence: Sequence) -> None:
        """Blocks filled by known tokens get their names."""
        num_tokens = min(sequence.num_computed, sequence.num_known)
        if self._window:
            num_tokens = min(num_tokens, max(sequence.num_prompt_tokens, self._window))
        chain, num_full = sequence.chain, num_tokens // self._block_size
        if chain is None or num_full <= sequence.num_sealed:
            return
        links = chain.extend(sequence.known_token_ids)
        block_ids = sequence.block_ids
        for position in range(sequence.num_sealed, num_full):
            parent = block_ids[position - 1] if position else NO_PARENT
            sealed = self._pool.seal(block_ids[position], parent, links[position], chain.key)
            if sealed is None:
                sequence.chain = None
                return
            if sealed != block_ids[position]:
                self._windows.replace(sequence, position, sealed)
                block_ids[position] = sealed
            sequence.num_sealed += 1

    def catch_up(self, sequence: Sequence, found: list[int]) -> None:
        """Step over blocks that another sequence has filled with the same tokens since."""
        first, num_sealed = sequence.num_sealed, sequence.num_sealed + len(found)
        self._windows.release(sequence)
        self._pool.acquire(found)
        self._pool.release(sequence.block_ids[first:num_sealed])
        sequence.block_ids[first:num_sealed] = found
        sequence.num_sealed, sequence.num_computed = num_sealed, num_sealed * self._block_size
        self._windows.hold(sequence)

    # Fewer of them

    def num_left(self, sequence: Sequence, num_wanted: int) -> int:
        """Of its blocks, when so many of the last ones have gone that ``num_wanted`` more are available."""
        num_kept = len(sequence.block_ids)
        num_found = 0
        while num_found < num_wanted:
            num_kept -= 1
            num_found += self._pool.num_users(sequence.block_ids[num_kept]) == 1
        return num_kept

    def num_usable(self, sequence: Sequence, num_kept: int) -> int:
        """Of its first so many blocks, those with which it can go on without the others; 0: it has to begin again."""
        if num_kept * self._block_size < sequence.num_computed:
            num_kept = self._windows.reach(sequence.block_ids[:num_kept])
        # Before the end that it lost, it has nothing to look back on; and what is pooled is pooled from its beginning.
        return 0 if sequence.num_gone or sequence.pooling is not None else num_kept

    def cut(self, sequence: Sequence, num_kept: int, now: float) -> None:
        """Only its first so many stay; what was computed in the others is computed again."""
        sequence.held(now)
        sequence.num_computed = min(sequence.num_computed, num_kept * self._block_size)
        sequence.num_sealed = min(sequence.num_sealed, num_kept)
        self._windows.hold(sequence)
        self._pool.release(sequence.block_ids[num_kept:])
        del sequence.block_ids[num_kept:]
        sequence.may_share_tail = False

    def trim(self, sequence: Sequence, now: float) -> None:
        """What lies behind its last token, of a draft that was not accepted, is given back, and what no token will look
        back on."""
        self._windows.hold(sequence)
        num_needed = -(-len(sequence.token_ids) // self._block_size)
        if len(sequence.block_ids) > num_needed:
            sequence.held(now)
            self._pool.release(sequence.block_ids[num_needed:])
            del sequence.block_ids[num_needed:]
        self.let_go(sequence, now)

    def let_go(self, sequence: Sequence, now: float) -> None:
        """Of the blocks that no token will look back on; not while it catches up, as some may still get names."""
        if not self._window or not sequence.has_output or sequence.num_pending > 1:
            return
        num_seen = min(sequence.num_computed, sequence.num_known) - 1  # a token may be computed once more
        num_gone = min(num_seen - self._window + 1, sequence.num_computed) // self._block_size
        if num_gone > sequence.num_gone and num_gone >= sequence.num_sealed:
            sequence.held(now)
            self._pool.release(sequence.block_ids[sequence.num_gone : num_gone])
            sequence.num_gone = num_gone
            # So that whoever reads the whole table reads nobody else's: the first of its own stands for what is gone.
            sequence.block_ids[:num_gone] = [sequence.block_ids[num_gone]] * num_gone

    def release(self, sequence: Sequence, now: float) -> None:
        """All of it."""
        sequence.held(now)
        self._windows.release(sequence)
        self._pool.release(sequence.held_block_ids)
        sequence.block_ids = []
        sequence.num_gone = 0

    def num_missing(self, sequence: Sequence) -> int:
        """Blocks that its tokens would fill, or begin, beside those that it has; negative: it has more."""
        return -(-len(sequence.token_ids) // self._block_size) - len(sequence.block_ids)
