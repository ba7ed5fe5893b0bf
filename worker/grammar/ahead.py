"""Where answers will come to first, found out before any of them begins: whoever meets a place for the first time has
all others of its step wait.

From the beginning of a grammar, byte by byte, the nearest places first: where there is a choice, its mask is made, and
each byte that it lets through leads on. Of places that differ in a count alone (worker.grammar.places) one counts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from worker.grammar.lengths import Counted
from worker.grammar.nodes import NONE
from worker.grammar.places import Places
from worker.grammar.trail import Trail

MAX_S = 0.02
"""That a grammar's first request waits for it."""
YIELD_EVERY, YIELD_S = 16, 1e-5
"""Places, and how long: a step that goes on meanwhile needs the interpreter, too, which llguidance holds on to."""
MAX_PLACES = 1024
"""Of one grammar."""
MAX_BYTES = 4 << 20
"""Of their masks."""


def look_ahead(
    places: Places,
    beginning: LLMatcher,
    vocabulary: LLTokenizer,
    counted: Counted,
    now: Callable[[], float] = time.monotonic,
) -> int:
    """Of a grammar whose places nobody else knows of yet. The number of masks that it has made."""
    words = np.empty(-(-vocabulary.vocab_size // 32), dtype=np.int32)
    until, most_masks = now() + MAX_S, MAX_BYTES // words.nbytes
    of_bytes = np.array([*counted.singles], dtype=np.int64)
    singles = np.array([*counted.singles.values()], dtype=np.int64)
    word_of, bit_of = singles >> 5, singles & 31
    due = deque([(places.begin, NONE, beginning.deep_copy())])
    seen = {places.begin.like}
    num_places = num_masks = 0
    while due and now() < until:
        if len(seen) >= MAX_PLACES or num_masks >= most_masks or places.is_half_full:
            break
        place, token_id, matcher = due.popleft()
        num_places += 1
        if num_places % YIELD_EVERY == 0:
            time.sleep(YIELD_S)
        node = places.node(place, token_id, Trail(matcher)) if place.tells else None
        if node is None or node.is_whole:
            continue
        if node.forced != NONE:
            following = [node.forced]
        else:
            mask = places.mask(node.place)
            if mask is None:
                matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
                if matcher.is_error():
                    break
                places.keep(node.place, words)
                # Those that nobody comes to are the first ones to go.
                node.place.is_used = False
                num_masks += 1
            allowed = words if mask is None else mask.bits.words
            may_come = (allowed[word_of] >> bit_of & 1).astype(bool)
            kinds = np.frombuffer(place.kinds, dtype=np.uint8)[of_bytes[may_come]].tolist()
            # Of those that lead to the same place one.
            following = [*dict(zip(kinds, singles[may_come].tolist(), strict=True)).values()]
        for each in following:
            there = places.after(place, each)
            if there.like not in seen:
                seen.add(there.like)
                further = matcher.deep_copy()
                if further.consume_token(each):
                    due.append((there, each, further))
    return num_masks
