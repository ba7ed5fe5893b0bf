"""Where answers are in their grammar: what may follow depends on nothing else, so it is found out once.

Of an expression a place is a set of states of its automaton (policies.expressions), of a schema what
worker.grammar.outline makes of it, found byte by byte. Both read less than llguidance does: an answer that goes another
way is nowhere from then on, and is followed by llguidance alone. A node is a place and what must come there, which
depends on the token before as well; nodes lead to one another by tokens, so that an answer that goes where others went
is followed by one look into a dictionary, and llguidance hears of its tokens only when it is asked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from threading import Lock
from typing import Any, NamedTuple, Protocol

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from policies import wire
from policies.expressions import Expression, NotRead
from policies.grammar import read_schema, unanchored
from worker.grammar.outline import EACH_BYTE, Outline
from worker.grammar.trail import Trail
from worker.sampling.masks import Bits, Words

NONE = -1
"""In place of a token: there is a choice."""
PLAIN = bytes(byte for byte in range(0x20, 0x7F) if byte not in b'"\\')
"""Characters that any text may have as they are."""
ANY_COMMAS = 1 << 30
"""In place of how many a token has at most."""
WIDE_SHARE = 0.5
"""Of all tokens."""
MAX_WEIGHT = 50_000
"""Of all places of a grammar together, in numbers or so."""
MAX_STEPS = 20_000
"""Tokens that lead from one node of a grammar to another; with one more all are forgotten."""
MAX_MASK_BYTES = 32 << 20
"""Of those that are kept, of all grammars together."""


class Reader(Protocol):
    """Of a grammar: states that answers are in, and which lead to which."""

    def begin(self) -> Hashable: ...

    def after(self, state: Any, byte: int) -> Hashable | None:
        """None: there is none that is known."""

    def weight(self, state: Any) -> int: ...

    def tells(self, state: Any) -> bool:
        """What may follow depends on nothing else."""

    def kinds(self, state: Any) -> bytes:
        """Of each byte one of those that lead to where it does."""

    def room(self, state: Any) -> int | None:
        """Where there is a choice: of so many plain characters any may come. None: it is not known."""

    def alike(self, state: Any, num_ended: int) -> Hashable:
        """One in which the same token may come, if none ends more than so many values of a list."""


class Mask(NamedTuple):
    """Of the tokens that may come."""

    bits: Bits
    may_end: bool
    """The answer, with the model's own end."""


class Place:
    """One of a grammar's."""

    __slots__ = ("by_kind", "by_token", "is_used", "is_wide", "kinds", "like", "mask", "node", "room", "state", "tells")

    def __init__(
        self, state: Hashable | None, tells: bool, kinds: bytes, room: int | None = None, like: Place | None = None
    ) -> None:
        self.state = state
        """None: nowhere."""
        self.room = room
        """See Reader."""
        self.like = like or self
        """The same may come next there, though not behind it; what is known of that it knows alone."""
        self.tells = tells
        """Wherever two answers are here, the same may follow."""
        self.kinds = kinds
        """Of bytes."""
        self.by_kind: dict[int, Place] = {}
        self.node: Node | None = None
        """Of all answers that are here, if no bytes must come."""
        self.by_token: dict[int, Node] = {}
        """If some must: by the token before."""
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

    __slots__ = ("after", "at", "forced", "is_whole", "place")

    def __init__(self, at: Place, forced: int, is_whole: bool) -> None:
        self.at = at
        self.place = at.like
        """Which knows what may come."""
        self.forced = forced
        """The token that comes next in any case, or NONE."""
        self.is_whole = is_whole
        """Nothing can be added."""
        self.after: dict[int, Node] = {}
        """By token, as far as answers have gone."""


class KeptMasks:
    """The masks of places; who was not used for a while goes first. For the thread of the step loop."""

    def __init__(self) -> None:
        self._places: deque[Place] = deque()
        self._num_bytes = 0

    def keep(self, place: Place, mask: Mask) -> None:
        """Of one that has none."""
        place.mask, place.is_used = mask, True
        self._places.append(place)
        self._num_bytes += mask.bits.words.nbytes
        while self._num_bytes > MAX_MASK_BYTES:
            oldest = self._places.popleft()
            if oldest.is_used:
                oldest.is_used = False
                self._places.append(oldest)
            elif oldest.mask is not None:
                self._num_bytes -= oldest.mask.bits.words.nbytes
                oldest.mask = None


class Places:
    """Of one grammar."""

    def __init__(
        self, reader: Reader, vocabulary: LLTokenizer, masks: KeptMasks, probes: Sequence[int], most_commas: int
    ) -> None:
        """``probes``: as Guide has them; ``most_commas``: of one token."""
        self._reader, self._vocabulary, self._masks, self._probes = reader, vocabulary, masks, probes
        self._probe_chars = max((len(vocabulary.decode_bytes([token_id])) for token_id in probes), default=0)
        # A token that must come is cut by what comes behind it, which is no longer than another one.
        self._num_ended = 2 * most_commas + 2
        self._places: dict[Hashable, Place] = {None: NOWHERE}
        self._joined: list[Node] = []
        """Nodes that lead to others, some more than once."""
        self._weight = 0
        # An answer that comes from elsewhere is followed on another thread than the step loop's.
        self._lock = Lock()
        self.begin = self._place(reader.begin())

    def after(self, place: Place, token_id: int) -> Place:
        """Where it is with this token, too."""
        for byte in self._vocabulary.decode_bytes([token_id]):
            place = place.by_kind.get(place.kinds[byte]) or self._follow(place, byte)
        return place

    def node(self, place: Place, token_id: int, trail: Trail) -> Node | None:
        """Of an answer that is there with this token. None: it cannot be followed any further."""
        like = place.like
        known = like.node or like.by_token.get(token_id) or self._learned(like, token_id, trail)
        if known is None or place is like:
            return known
        node = Node(place, known.forced, known.is_whole)
        if known is like.node:
            place.node = node
        return node

    def _learned(self, place: Place, token_id: int, trail: Trail) -> Node | None:
        if place.room is not None:
            place.is_wide = place.room >= self._probe_chars > 0
            place.node = Node(place, NONE, False)
            return place.node
        matcher = trail.matcher
        if matcher.is_error():
            return None
        # To know the bytes that must come takes a tenth of what their tokens take.
        must_go_on = bool(matcher.compute_ff_bytes())
        forced = matcher.compute_ff_tokens() if must_go_on else []
        node = Node(place, forced[0] if forced else NONE, matcher.is_stopped())
        if not must_go_on:
            place.is_wide = is_wide(matcher, self._probes)
            place.node = node
        else:
            with self._lock:
                if self._has_room(1):
                    place.by_token[token_id] = node
        return node

    def fits(self, place: Place, token_id: int) -> bool:
        """Whether that is known of a token without asking: it is plain, and no longer than what there is room for."""
        text = self._vocabulary.decode_bytes([token_id]) if place.room else b""
        is_plain = 0 < len(text) <= (place.room or 0) and not text.translate(None, PLAIN)
        return is_plain and not self._vocabulary.is_special_token(token_id)

    def join(self, node: Node, token_id: int, following: Node) -> None:
        """That the one leads to the other."""
        with self._lock:
            if len(self._joined) >= MAX_STEPS:
                for each in self._joined:
                    each.after.clear()
                self._joined.clear()
            self._joined.append(node)
            node.after[token_id] = following

    def keep(self, place: Place, mask: Words) -> None:
        """A copy of it, if it tells of others and has none."""
        if place.tells and place.mask is None:
            own, eos_token_id = mask.copy(), self._vocabulary.eos_token
            may_end = bool(own[eos_token_id >> 5] >> (eos_token_id & 31) & 1)
            num_tokens = np.unpackbits(own.view(np.uint8)).sum()
            place.is_wide = bool(num_tokens > WIDE_SHARE * self._vocabulary.vocab_size)
            self._masks.keep(place, Mask(Bits(own, own.ctypes.data), may_end))

    def _follow(self, place: Place, byte: int) -> Place:
        if place is NOWHERE:
            return NOWHERE
        with self._lock:
            following = self._place(self._reader.after(place.state, byte))
            place.by_kind[place.kinds[byte]] = following
        return following

    def _place(self, state: Hashable | None) -> Place:
        found = self._places.get(state)
        if found is None:
            if not self._has_room(self._reader.weight(state)):
                return NOWHERE
            reader = self._reader
            alike = reader.alike(state, self._num_ended)
            like = None if alike is state else self._place(alike)
            if like is NOWHERE:
                return NOWHERE
            found = Place(state, reader.tells(state), reader.kinds(state), reader.room(state), like)
            self._places[state] = found
        return found

    def _has_room(self, weight: int) -> bool:
        if self._weight + weight > MAX_WEIGHT:
            return False
        self._weight += weight
        return True


class _Text:
    """An expression, of which ASCII is read."""

    def __init__(self, source: str) -> None:
        """Raises NotRead."""
        self._expression = Expression(f"^(?:{unanchored(source)})$")

    def begin(self) -> frozenset[int]:
        return self._expression.begin()

    def after(self, state: frozenset[int], byte: int) -> frozenset[int] | None:
        return (self._expression.after(state, chr(byte)) if byte < 0x80 else None) or None

    def weight(self, state: frozenset[int]) -> int:
        return 8 + len(state)

    def tells(self, state: frozenset[int]) -> bool:
        return True

    def kinds(self, state: frozenset[int]) -> bytes:
        return EACH_BYTE

    def room(self, state: frozenset[int]) -> None:
        return None

    def alike(self, state: frozenset[int], num_ended: int) -> frozenset[int]:
        return state


def is_wide(matcher: LLMatcher, probes: Sequence[int]) -> bool:
    """Each of them may come."""
    for token_id in probes:
        if not matcher.validate_tokens([token_id]):
            return False
    return bool(probes)


def places_of(
    grammar: wire.Grammar,
    vocabulary: LLTokenizer,
    masks: KeptMasks,
    probes: Sequence[int] = (),
    most_commas: int = ANY_COMMAS,
) -> Places | None:
    """None: it is not read here."""
    reader: Reader
    match grammar.kind:
        case "regex":
            try:
                reader = _Text(grammar.source)
            except NotRead:
                return None
        case "json_schema" | "json_object":
            outline = Outline(read_schema(grammar.source) if grammar.kind == "json_schema" else {"type": "object"})
            if not outline.is_read:
                return None
            reader = outline
        case _:
            return None
    return Places(reader, vocabulary, masks, probes, most_commas)
