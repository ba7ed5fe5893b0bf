"""Places of a grammar and its nodes, as worker.grammar.places finds them, and the masks that are kept of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from threading import Lock
from typing import NamedTuple
from weakref import ref

from worker.grammar.lengths import Lengths
from worker.sampling.masks import Bits

NONE = -1
"""In place of a token: there is a choice."""
MAX_MASK_BYTES = 32 << 20
"""Of those that are kept, of all grammars together."""


class Mask(NamedTuple):
    """Of the tokens that may come."""

    bits: Bits
    may_end: bool
    """The answer, with the model's own end."""


class Place:
    """One of a grammar's."""

    __slots__ = (
        "__weakref__",
        "by_cut",
        "by_kind",
        "by_limit",
        "by_token",
        "is_used",
        "is_wide",
        "kinds",
        "lengths",
        "like",
        "limit",
        "mask",
        "must",
        "node",
        "room",
        "same",
        "state",
        "tells",
        "widest",
    )

    def __init__(
        self,
        state: Hashable | None,
        tells: bool,
        kinds: bytes,
        room: int | None = None,
        like: Place | None = None,
        lengths: Lengths | None = None,
        limit: int = 0,
    ) -> None:
        self.state = state
        """None: nowhere."""
        self.room = room
        """See Reader."""
        self.like = like or self
        """The same may come next there, though not behind it; what is known of that it knows alone, but for masks where
        there is a limit."""
        self.lengths = lengths
        """Where there is a limit."""
        self.limit = limit
        """Of them; none is longer, if it is as long as the longest."""
        self.by_limit: dict[int, Place] | None = None
        """Of those that are like this one and have limits, the first one of each."""
        self.same = self.like
        """Which knows what may come here, as it may come there: where there is a limit, one that has the same one."""
        if lengths is not None:
            if self.like.by_limit is None:
                self.like.by_limit = {}
            self.same = self.like.by_limit.setdefault(limit, self)
        self.widest: Place | None = None
        """Of those, the one with the highest limit that has a mask, as far as is known."""
        self.tells = tells
        """Wherever two answers are here, the same may follow."""
        self.kinds = kinds
        """Of bytes."""
        self.by_kind: dict[int, Place] = {}
        self.node: Node | None = None
        """Of all answers that are here, if no bytes must come."""
        self.by_token: dict[int, Node] = {}
        """If some must: by the token before."""
        self.must = b""
        """Those bytes, as far as is known."""
        self.by_cut: dict[tuple[int, ...], Node] = {}
        """If some must: by the tokens that they are behind the one before."""
        self.is_wide = False
        """Much may come, as within a text; as far as is known before there is a mask."""
        self.mask: Mask | None = None
        """Of what may come where no token must."""
        self.is_used = False
        """The mask, since somebody looked for one to let go of."""


NOWHERE = Place(None, False, bytes(256))
"""From where no byte leads anywhere else."""


class Node:
    """A place, and what must come there."""

    __slots__ = ("after", "after_plain", "at", "forced", "is_whole", "place")

    def __init__(self, at: Place, forced: int, is_whole: bool) -> None:
        self.at = at
        self.place = at.same
        """Which knows what may come."""
        self.forced = forced
        """The token that comes next in any case, or NONE."""
        self.is_whole = is_whole
        """Nothing can be added."""
        self.after: dict[int, Node] = {}
        """By token, as far as answers have gone."""
        self.after_plain: dict[int, Node] = {}
        """Within a text, of tokens of nothing but plain characters: by how many, as far as answers have gone."""


class KeptMasks:
    """The masks of places; who was not used for a while goes first. They keep no grammar that nobody else keeps."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._places: deque[tuple[ref[Place], int]] = deque()
        """With the bytes of their masks."""
        self._num_bytes = 0

    def keep(self, place: Place, mask: Mask) -> None:
        """Of one that has none."""
        num_bytes = mask.bits.words.nbytes
        with self._lock:
            place.mask, place.is_used = mask, True
            self._places.append((ref(place), num_bytes))
            self._num_bytes += num_bytes
            while self._num_bytes > MAX_MASK_BYTES:
                known, num_bytes = self._places.popleft()
                oldest = known()
                if oldest is not None and oldest.is_used:
                    oldest.is_used = False
                    self._places.append((known, num_bytes))
                    continue
                self._num_bytes -= num_bytes
                if oldest is not None:
                    oldest.mask = None
