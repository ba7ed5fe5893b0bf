"""The pool of KV blocks: allocate, share, free, evict. It owns which block is whose; the tensors are kv_cache.py's.

A block is in exactly one state. *Used*: in the table of one or more sequences, counted. *Cached*: full, named by its
chain link, in nobody's table, kept until its room is wanted. *Free*. Cached and used blocks that have a name form a
tree, parent before child; whoever uses a block uses its ancestors too, so a cached block never has a used descendant,
and all cached blocks can be had by taking leaves, least recently used first.

A hit compares the parent block, the salt's key and the tokens themselves: colliding digests cost a hit, never a
neighbour's KV.

Attention on a CPU is fastest over physically contiguous blocks. So a new sequence starts in the largest gap of free
ones, a few more behind its last are its *room*, which others take only when nothing else is free, and it grows into
that.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from policies.prefix import Link

NO_PARENT = -1
MAX_ROOM = 8
"""Free blocks that stay beside the last of a sequence while others can be had elsewhere."""
EVICTION_BOUND = 2
"""So many times the blocks wanted may be evicted in order to have them in one run."""


class Pool:
    """``num_blocks`` blocks. O(log n) a block for every operation but ``audit``.

    Every misuse is an AssertionError: the pool is then not to be trusted, and the worker stops.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 1
        self.num_blocks = num_blocks
        self.num_free = 0
        self.num_cached = 0
        self._num_users = [0] * num_blocks
        self._links: list[Link | None] = [None] * num_blocks
        self._keys: list[bytes] = [b""] * num_blocks
        self._parents = [NO_PARENT] * num_blocks
        self._num_children = [0] * num_blocks
        self._released_at = [0] * num_blocks
        self._index: dict[bytes, int] = {}
        self._moved: dict[bytes, bool] = {}
        """Digests that gained or lost their block since they were last told, and whether they have one now."""
        self._leaves: list[
            tuple[int, int]
        ] = []  # heap of (released_at, block); an entry that no longer holds is skipped
        self._now = 0
        self._max_room = min(MAX_ROOM, num_blocks // 16)
        self._num_room = 0
        self._room_ends: dict[int, int] = {}  # room [start, end) of the block before start
        self._gap_ends: dict[int, int] = {}  # gap [start, end) by start
        self._gap_starts: dict[int, int] = {}  # and by end
        self._gaps: list[tuple[int, int]] = []  # heap of (-length, start), skipped likewise
        self._add_gap(0, num_blocks)

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated: free and cached."""
        return self.num_free + self.num_cached

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free - self.num_cached

    def num_users(self, block_id: int) -> int:
        """Tables that hold the block."""
        return self._num_users[block_id]

    def is_named(self, block_id: int) -> bool:
        """A prompt could find it."""
        return self._links[block_id] is not None

    # Taking and giving back

    def allocate(self, num_wanted: int, after: int = NO_PARENT) -> list[int]:
        """``num_wanted`` blocks, each now used once; they follow block ``after`` and each other where that can be."""
        assert 0 <= num_wanted <= self.num_available, f"{num_wanted} blocks wanted, {self.num_available} available"
        if not num_wanted:
            return []
        has_room = after != NO_PARENT and self._room_ends.get(after + 1, after) - after > num_wanted
        if not has_room:
            self._evict(num_wanted + self._max_room)
        block_ids: list[int] = []
        while len(block_ids) < num_wanted:
            start = after + 1
            if after == NO_PARENT or start not in self._room_ends:
                if after == NO_PARENT or start not in self._gap_ends:
                    start = self._largest_gap()
                self._make_room(start, num_wanted - len(block_ids) + self._max_room)
            end = self._remove_room(start)
            after = min(end, start + num_wanted - len(block_ids)) - 1
            block_ids += range(start, after + 1)
            if after + 1 < end:
                self._add_room(after + 1, end)
        for block_id in block_ids:
            self._num_users[block_id] = 1
        return block_ids

    def acquire(self, block_ids: Sequence[int]) -> None:
        """One more user for each; they are used or cached."""
        for block_id in block_ids:
            if self._num_users[block_id] == 0:
                assert self._links[block_id] is not None, f"block {block_id} is free and cannot be shared"
                self.num_cached -= 1
            self._num_users[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """One user less for each, children before parents; a block with a name stays as cache, others are free."""
        self._now += 1
        for block_id in reversed(block_ids):
            num_users = self._num_users[block_id] - 1
            assert num_users >= 0, f"block {block_id} is released more often than taken"
            self._num_users[block_id] = num_users
            if num_users == 0:
                if self._links[block_id] is None:
                    self._free(block_id, block_id + 1)
                else:
                    if block_id + 1 in self._room_ends:
                        self._free(block_id + 1, self._remove_room(block_id + 1))
                    self.num_cached += 1
                    self._released_at[block_id] = self._now
                    self._offer(block_id)

    # The prefix cache

    def find(self, link: Link, parent: int, key: bytes) -> int | None:
        """The block that holds exactly this link's tokens after exactly ``parent``'s history under this key, if there
        is one.
        """
        block_id = self._index.get(link.digest)
        if block_id is None or self._parents[block_id] != parent or self._keys[block_id] != key:
            return None
        held = self._links[block_id]
        return block_id if held is not None and held.token_bytes == link.token_bytes else None

    def match(
        self, links: Sequence[Link], key: bytes, max_blocks: int, first: int = 0, parent: int = NO_PARENT
    ) -> list[int]:
        """The blocks of the longest known prefix of ``links``, at most ``max_blocks``; not yet acquired. From link
        ``first`` on, when the one before it is in block ``parent``."""
        block_ids: list[int] = []
        for link in links[first:max_blocks]:
            found = self.find(link, parent, key)
            if found is None:
                break
            block_ids.append(found)
            parent = found
        return block_ids

    def seal(self, block_id: int, parent: int, link: Link, key: bytes) -> int | None:
        """Give a full block, used once, its name under ``parent`` (sealed and used, or NO_PARENT).

        Returns the block to use from now on: this one; or its equal that was there before, acquired, while this one is
        released. None: another content holds the same digest, so this block and all that follow it stay without names.
        """
        assert self._num_users[block_id] == 1, f"block {block_id} is written by several"
        assert self._links[block_id] is None, f"block {block_id} is sealed already"
        assert parent == NO_PARENT or (self._links[parent] is not None and self._num_users[parent] > 0)
        found = self.find(link, parent, key)
        if found is not None:
            self.acquire((found,))
            self.release((block_id,))
            return found
        if link.digest in self._index:
            return None
        self._index[link.digest] = block_id
        self._moved[link.digest] = True
        self._links[block_id], self._keys[block_id], self._parents[block_id] = link, key, parent
        if parent != NO_PARENT:
            self._num_children[parent] += 1
        return block_id

    def doubt(self, block_ids: Sequence[int]) -> None:
        """What is in those of one table that no other uses is no good: nobody finds them any more, nor what goes on
        behind them. O(blocks)."""
        children: dict[int, list[int]] = {}
        for block_id, parent in enumerate(self._parents):
            children.setdefault(parent, []).append(block_id)
        left = [each for each in block_ids if self._num_users[each] == 1 and self._links[each] is not None]
        while left:
            block_id = left.pop()
            if self._links[block_id] is not None:
                left += children.get(block_id, ())
                self._unname(block_id)
                if not self._num_users[block_id]:
                    self.num_cached -= 1
                    self._free(block_id, block_id + 1)

    def named(self) -> list[bytes]:
        """The digests of all blocks that have a name."""
        return list(self._index)

    def take_moved(self) -> tuple[list[bytes], list[bytes]]:
        """Digests that have a block now and those that have none any more, of all that changed since the last call."""
        moved, self._moved = self._moved, {}
        stored = [digest for digest, is_held in moved.items() if is_held]
        return stored, [digest for digest, is_held in moved.items() if not is_held]

    def _offer(self, block_id: int) -> None:
        """Put a cached block that is a leaf where eviction looks."""
        if self._num_children[block_id] == 0:
            heapq.heappush(self._leaves, (self._released_at[block_id], block_id))
            if len(self._leaves) > 2 * self.num_blocks + 64:
                self._leaves = sorted({leaf for leaf in self._leaves if self._is_evictable(*leaf)})

    def _is_evictable(self, released_at: int, block_id: int) -> bool:
        return (
            self._links[block_id] is not None
            and self._num_users[block_id] == 0
            and self._num_children[block_id] == 0
            and self._released_at[block_id] == released_at
        )

    def _evict(self, num_wanted: int) -> None:
        """Free cached leaves, least recently used first, until ``num_wanted`` blocks are free and nobody's room.

        It goes on until as many lie in one gap, within bounds: what was used together mostly lies together, so a run is
        soon found, and without looking for one all tables would end in pieces. (At 32 sequences of 21 blocks on a pool
        of 2000 that is full of cache, a table has 1.1 runs; it had 10 to 13.)
        """
        num_spare = EVICTION_BOUND * num_wanted if self._max_room else 0
        max_free = max(num_wanted, self.num_free - self._num_room + num_spare)
        while self.num_cached:
            num_free = self.num_free - self._num_room
            if num_free >= num_wanted and (num_free >= max_free or self._longest_gap() >= num_wanted):
                break
            leaf = heapq.heappop(self._leaves)
            while not self._is_evictable(*leaf):
                leaf = heapq.heappop(self._leaves)
            block_id = leaf[1]
            parent = self._unname(block_id)
            self.num_cached -= 1
            self._free(block_id, block_id + 1)
            if parent != NO_PARENT and self._num_users[parent] == 0:
                self._offer(parent)

    def _unname(self, block_id: int) -> int:
        """Its parent, which has a child less."""
        link, parent = self._links[block_id], self._parents[block_id]
        assert link is not None
        del self._index[link.digest]
        self._moved[link.digest] = False
        self._links[block_id], self._keys[block_id], self._parents[block_id] = None, b"", NO_PARENT
        if parent != NO_PARENT:
            self._num_children[parent] -= 1
        return parent

    # Free blocks: gaps, and rooms to grow into

    def _add_gap(self, start: int, end: int) -> None:
        self._gap_ends[start] = end
        self._gap_starts[end] = start
        self.num_free += end - start
        heapq.heappush(self._gaps, (start - end, start))
        if len(self._gaps) > 2 * self.num_blocks + 64:
            self._gaps = sorted((start - end, start) for start, end in self._gap_ends.items())

    def _remove_gap(self, start: int) -> int:
        end = self._gap_ends.pop(start)
        del self._gap_starts[end]
        self.num_free -= end - start
        return end

    def _add_room(self, start: int, end: int) -> None:
        self._room_ends[start] = end
        self._num_room += end - start
        self.num_free += end - start

    def _remove_room(self, start: int) -> int:
        end = self._room_ends.pop(start)
        self._num_room -= end - start
        self.num_free -= end - start
        return end

    def _make_room(self, start: int, max_blocks: int) -> None:
        """The first blocks of the gap at ``start`` become the room of whoever uses the block before it, or is about
        to.
        """
        end = self._remove_gap(start)
        middle = min(end, start + max_blocks)
        self._add_room(start, middle)
        if middle < end:
            self._add_gap(middle, end)

    def _free(self, start: int, end: int) -> None:
        """Blocks that are in no list go back into the gaps, together with the room that the last of them had."""
        if end in self._room_ends:
            end = self._remove_room(end)
        if start in self._gap_starts:
            start = self._gap_starts[start]
            self._remove_gap(start)
        if end in self._gap_ends:
            end = self._remove_gap(end)
        self._add_gap(start, end)

    def _longest_gap(self) -> int:
        """The length of the gap that heads the heap."""
        while self._gaps:
            negative_length, start = self._gaps[0]
            if self._gap_ends.get(start) == start - negative_length:
                return -negative_length
            heapq.heappop(self._gaps)
        return 0

    def _largest_gap(self) -> int:
        """Where it starts. When there is none, the oldest room becomes one."""
        if not self._gap_ends:
            start = next(iter(self._room_ends))
            self._free(start, self._remove_room(start))
        assert self._longest_gap()
        return self._gaps[0][1]

    # The audit

    def audit(self, tables: Iterable[Sequence[int]]) -> None:
        """Check everything against the tables of all sequences; O(blocks). Raises AssertionError naming the first
        fault.
        """
        num_users = [0] * self.num_blocks
        for table in tables:
            assert len(set(table)) == len(table), f"a table holds a block twice: {list(table)}"
            for position, block_id in enumerate(table):
                num_users[block_id] += 1
                if self._links[block_id] is not None:
                    parent = table[position - 1] if position else NO_PARENT
                    assert self._parents[block_id] == parent, f"block {block_id} follows another parent in a table"
        assert num_users == self._num_users, "user counts differ from the tables"
        is_free = [False] * self.num_blocks
        num_free = 0
        for start, end in self._gap_ends.items():
            assert self._gap_starts[end] == start, f"the gap at {start} is broken"
            assert end not in self._gap_ends, f"the gap at {start} is not merged with the next"
            for block_id in range(start, end):
                assert not is_free[block_id], f"block {block_id} is in two gaps"
                is_free[block_id] = True
                num_free += 1
        assert len(self._gap_starts) == len(self._gap_ends)
        num_room = 0
        for start, end in self._room_ends.items():
            assert start < end, f"the room at {start} is empty"
            assert num_users[start - 1], f"the room at {start} is nobody's"
            for block_id in range(start, end):
                assert not is_free[block_id], f"block {block_id} is room, and free besides"
                is_free[block_id] = True
                num_room += 1
        assert num_room == self._num_room
        num_free += num_room
        num_children = [0] * self.num_blocks
        num_cached = num_named = 0
        leaves = set(self._leaves)
        for block_id, link in enumerate(self._links):
            if link is None:
                assert is_free[block_id] == (num_users[block_id] == 0), f"block {block_id} is lost, or free and used"
                continue
            assert not is_free[block_id], f"block {block_id} is free and has a name"
            assert self._index.get(link.digest) == block_id, f"block {block_id} is not in the index"
            num_named += 1
            num_cached += num_users[block_id] == 0
            parent = self._parents[block_id]
            if parent != NO_PARENT:
                assert self._links[parent] is not None, f"the parent of block {block_id} has no name"
                assert num_users[parent] >= num_users[block_id], f"block {block_id} is used without its parent"
                num_children[parent] += 1
        assert num_children == self._num_children, "child counts are wrong"
        for block_id, link in enumerate(self._links):
            if link is not None and num_users[block_id] == 0 and num_children[block_id] == 0:
                assert (self._released_at[block_id], block_id) in leaves, f"cached leaf {block_id} cannot be evicted"
        assert (num_free, num_cached, num_named) == (self.num_free, self.num_cached, len(self._index))
