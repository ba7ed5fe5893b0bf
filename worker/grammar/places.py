"""Where answers are in their grammar: what may follow depends on nothing else, so it is found out once.

Of an expression a place is a set of states of its automaton (policies.expressions), of a schema what
worker.grammar.outline makes of it, found byte by byte. Both read less than llguidance does: an answer that goes another
way is nowhere from then on, and is followed by llguidance alone. A node is a place and what must come there, which
depends on the token before as well; nodes lead to one another by tokens, so that an answer that goes where others went
is followed by one look into a dictionary, and llguidance hears of its tokens only when it is asked.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from threading import Lock
from typing import Any, Protocol

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from policies import wire
from policies.expressions import NotRead
from policies.grammar import read_schema
from worker.grammar.lengths import Counted, Lengths
from worker.grammar.matched import Matched
from worker.grammar.nodes import NONE, NOWHERE, KeptMasks, Mask, Node, Place
from worker.grammar.outline import Outline
from worker.grammar.trail import Trail
from worker.sampling.masks import Bits, Words

ANY_COMMAS = 1 << 30
"""In place of how many a token has at most."""
WIDE_SHARE = 0.5
"""Of all tokens."""
MAX_WEIGHT = 50_000
"""Of all places of a grammar together, in numbers or so."""
MAX_STEPS = 20_000
"""Tokens that lead from one node of a grammar to another; with one more all are forgotten."""


class Reader(Protocol):
    """Of a grammar: states that answers are in, and which lead to which."""

    def begin(self) -> Hashable: ...

    def after(self, state: Any, byte: int) -> Hashable | None:
        """None: there is none that is known."""

    def weight(self, state: Any) -> int: ...

    def tells(self, state: Any) -> bool:
        """What may follow depends on nothing else."""

    def kinds(self, state: Any) -> bytes:
        """Of each byte a number that those share that lead to where it does."""

    def room(self, state: Any) -> int | None:
        """Where there is a choice: of so many plain characters any may come. None: it is not known."""

    def plain(self, state: Any) -> int:
        """The characters of ASCII that may come next, one bit each; none where that is not known."""

    def limit(self, state: Any) -> tuple[str, int] | None:
        """How much more may come of what is under way: of those that are alike but for this, the same tokens may come
        but for those that are too long, see worker.grammar.lengths. None: that is not known."""

    def alike(self, state: Any, num_ended: int) -> Hashable:
        """One in which the same tokens may come, if none ends more than so many values of a list, as far as there is no
        limit."""


class Places:
    """Of one grammar."""

    def __init__(
        self,
        reader: Reader,
        vocabulary: LLTokenizer,
        masks: KeptMasks,
        probes: Sequence[int],
        counted: Counted | None,
    ) -> None:
        """``probes``: as Guide has them; ``counted``: of the vocabulary."""
        self._reader, self._vocabulary, self._masks, self._probes = reader, vocabulary, masks, probes
        self._lengths: dict[str, Lengths] = {}
        most_commas = ANY_COMMAS
        self.plain = bytes(vocabulary.vocab_size)
        """See Counted."""
        if counted is not None:
            self.plain = counted.plain
            self._lengths = {"blanks": counted.blanks, "chars": counted.chars, "escaped": counted.escaped}
            most_commas = counted.most_commas
        texts = [vocabulary.decode_bytes([token_id]) for token_id in probes]
        self._probe_chars = max(map(len, texts), default=0)
        self._probe_bits = sum(1 << byte for byte in {byte for text in texts for byte in text if byte < 0x80})
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
            if place.room is None:
                place.is_wide = like.is_wide
        return node

    def mask(self, place: Place) -> Mask | None:
        """Of where no token must come, if it is known."""
        place = place.same
        lengths, widest = place.lengths, place.like.widest
        if place.mask is not None or lengths is None or widest is None or widest.mask is None:
            return place.mask
        wide, may_end = widest.mask
        if widest.limit < place.limit or not lengths.are_known(wide.words):
            return None
        words = wide.words & lengths.up_to(place.limit)
        place.is_wide = widest.is_wide and self._leaves_much(words)
        self._keep(place, words, may_end)
        return place.mask

    def _learned(self, place: Place, token_id: int, trail: Trail) -> Node | None:
        plain = self._reader.plain(place.state)
        # It is known that there is a choice.
        if place.room is not None or place.lengths is not None or plain & plain - 1:
            if plain:
                place.is_wide = 0 < self._probe_bits == self._probe_bits & plain
            place.node = Node(place, NONE, False)
            return place.node
        cut = self._cut(place.must, token_id)
        found = None if cut is None else place.by_cut.get(cut)
        if found is None:
            matcher = trail.matcher
            if matcher.is_error():
                return None
            # To know the bytes that must come takes a tenth of what their tokens take.
            place.must = matcher.compute_ff_bytes()
            forced = matcher.compute_ff_tokens() if place.must else []
            found = Node(place, forced[0] if forced else NONE, matcher.is_stopped())
            if not place.must:
                place.is_wide = is_wide(matcher, self._probes)
                place.node = found
                return found
            cut = cut or self._cut(place.must, token_id)
        with self._lock:
            if self._has_room(1):
                place.by_token[token_id] = found
                if cut is not None:
                    place.by_cut[cut] = found
        return found

    def _cut(self, must: bytes, token_id: int) -> tuple[int, ...] | None:
        """What llguidance makes of bytes that must come behind a token, before it sees how much of that may be cut in
        another way: it takes what the text of both begins with for the token, if that is so. None: it is not known, or
        it reads marks."""
        vocabulary = self._vocabulary
        if not must or b"\xff" in must or token_id == NONE or vocabulary.is_special_token(token_id):
            return None
        both = vocabulary.tokenize_bytes(vocabulary.decode_bytes([token_id]) + must)
        return tuple(both[1:] if both[:1] == [token_id] else vocabulary.tokenize_bytes(must))

    def fits(self, place: Place, token_id: int) -> bool:
        """Whether that is known of a token without asking: it is plain, and no longer than what there is room for."""
        return 0 < self.plain[token_id] <= (place.room or 0)

    def join(self, node: Node, token_id: int, following: Node) -> None:
        """That the one leads to the other."""
        num_chars = self.plain[token_id] if node.at.room else 0
        if num_chars and following is following.at.node:
            node.after_plain[num_chars] = following
            return
        with self._lock:
            if len(self._joined) >= MAX_STEPS:
                for each in self._joined:
                    each.after.clear()
                self._joined.clear()
            self._joined.append(node)
            node.after[token_id] = following

    def keep(self, place: Place, mask: Words) -> None:
        """A copy of it, if it tells of others and has none."""
        place = place.same
        if place.tells and place.mask is None:
            eos_token_id = self._vocabulary.eos_token
            may_end = bool(mask[eos_token_id >> 5] >> (eos_token_id & 31) & 1)
            place.is_wide = self._leaves_much(mask)
            self._keep(place, mask.copy(), may_end)

    def _leaves_much(self, mask: Words) -> bool:
        return int(np.bitwise_count(mask).sum()) > WIDE_SHARE * self._vocabulary.vocab_size

    def _keep(self, place: Place, own: Words, may_end: bool) -> None:
        self._masks.keep(place, Mask(Bits(own, own.ctypes.data), may_end))
        like = place.like
        if place.lengths is not None and (
            like.widest is None or like.widest.mask is None or like.widest.limit < place.limit
        ):
            like.widest = place

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
            room, limit = reader.room(state), reader.limit(state)
            lengths = None if limit is None else self._lengths.get(limit[0])
            num = 0 if limit is None or lengths is None else min(limit[1], lengths.longest)
            found = Place(state, reader.tells(state), reader.kinds(state), room, like, lengths, num)
            found.is_wide = room is not None and room >= self._probe_chars > 0
            self._places[state] = found
        return found

    @property
    def is_half_full(self) -> bool:
        """Of what may be known."""
        return 2 * self._weight >= MAX_WEIGHT

    def _has_room(self, weight: int) -> bool:
        if self._weight + weight > MAX_WEIGHT:
            return False
        self._weight += weight
        return True


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
    counted: Counted | None = None,
) -> Places | None:
    """None: it is not read here."""
    reader: Reader
    match grammar.kind:
        case "regex":
            try:
                reader = Matched(grammar.source)
            except NotRead:
                return None
        case "json_schema" | "json_object":
            outline = Outline(read_schema(grammar.source) if grammar.kind == "json_schema" else {"type": "object"})
            if not outline.is_read:
                return None
            reader = outline
        case _:
            return None
    return Places(reader, vocabulary, masks, probes, counted)
