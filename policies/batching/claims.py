"""What sequences ask of a step, what it may hold, and what is decided: plain values."""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from policies.engine import Engine

Place = tuple[int, float, int]
"""A sequence's (priority, instant at which its first token is due, arrival): smaller goes first, everywhere. The
arrival is unique and names the sequence."""

MAX_GAP = 10
PATIENCE_S = 30.0


class Claim(NamedTuple):
    """What one sequence asks of this step."""

    place: Place
    num_pending: int
    """Tokens known and not computed yet. 0: it wants none in this step, since another is just computing them."""
    num_new_blocks: int = 0
    """Blocks to set aside before any pending token is computed: of a waiting sequence all of its blocks, of one that
    runs the block that its next token begins, or all that were taken from its end."""
    num_slots: int = 1
    """Places in the batch: more than one while others wait to fork from it."""
    num_shared_blocks: int = 0
    """Of its new blocks, those that running sequences hold already and that it would share."""
    start: int = 0
    """Position of its first pending token."""
    tenant: bytes = b""
    ttft_s: float | None = None
    """What it was promised until its first token when it came; None: nothing, it is due at once."""
    tpot_s: float | None = None
    """For each further token; None: nothing."""
    has_output: bool = False
    is_immune: bool = False
    """It has been put back so often that it is not put back again for others' sake."""
    num_overtaken: int = 0
    """Waiting only: how often another was let in while this one did not fit."""
    weight: float = 1.0
    """Of its tenant."""
    is_idle: bool = False
    """Running only: nothing can be computed of it just now, and its places are others' meanwhile."""

    @property
    def priority(self) -> int:
        return self.place[0]

    @property
    def due_at(self) -> float:
        return self.place[1]

    @property
    def num_taken_slots(self) -> int:
        """Places that nobody else can have in this step."""
        return 0 if self.is_idle else self.num_slots

    @property
    def arrival(self) -> int:
        return self.place[2]


class Limits(msgspec.Struct, frozen=True):
    """What a step may hold."""

    max_step_tokens: int
    max_prefill_tokens_beside_decodes: int
    max_sequences: int
    """Less than max_step_tokens where that is at all possible, so that prefill has a share in every step."""
    max_slowdown: float = 0.0
    """A step may take so many times as long as its decodes alone, because of prompts; 0: no such limit."""
    max_prefill_s: float = 1.0
    """Of any step, on prompts: a cancel, a more important request and the next sign of life wait no longer."""
    max_preemptions: int = 3
    """After which a sequence is immune."""
    whole_prompts: bool = False
    """A prompt is computed in one step or not at all."""


def limits_of(engine: Engine, max_whole_tokens: int = 0) -> Limits:
    """The limits that settings mean. ``max_whole_tokens``: of a prompt, where one is computed in one step."""
    return Limits(
        max_step_tokens=max(engine.max_step_tokens, max_whole_tokens),
        max_prefill_tokens_beside_decodes=engine.max_prefill_tokens_beside_decodes,
        max_sequences=max(1, min(engine.max_sequences, engine.max_step_tokens - 1)),
        max_slowdown=engine.max_slowdown,
        max_preemptions=engine.max_preemptions,
        whole_prompts=max_whole_tokens > 0,
    )


class Plan(NamedTuple):
    """By arrival, to be carried out in this order."""

    preempted: list[int]
    """All their blocks go, and they go back among those who wait."""
    cut: list[tuple[int, int]]
    """They stay where they are and give up blocks from their end until so many are available."""
    grown: list[int]
    """They get the new blocks that they claim."""
    admitted: list[int]
    grants: list[tuple[int, int]]
    """How many tokens for whom; at least one each."""
    paused: list[int]
    """They run, could compute, and have no part in this step; what they hold they keep, unless they are cut."""
    overtaken: list[int]
    """They did not fit, and others were let in; once for each of those."""
    num_displacing: int
    """Of those admitted, the ones for whom somebody was put aside."""


def token_due_at(tpot_s: float | None, first_token_at: float | None, last_token_at: float, num_tokens: int) -> float:
    """When the next token of an answer with ``num_tokens`` is due so that its promise, a mean over all its tokens, is
    kept; but no gap is meant to be longer than ``MAX_GAP`` times what was promised for one. Without promise: at
    once."""
    if tpot_s is None or first_token_at is None:
        return -math.inf
    return min(first_token_at + num_tokens * tpot_s, last_token_at + MAX_GAP * tpot_s)


def raised(place: Place, own: int, ttft_s: float | None, moved_at: float, now: float) -> Place:
    """The place of one that waits or stands still: a class more important for each time that as long as it was
    promised, and at least ``PATIENCE_S``, has passed since its first token was due, or since it last moved. So no
    promise to others keeps it waiting for ever. ``own`` is its class's priority; it never goes back."""
    priority, due_at, arrival = place
    late_s = now - max(due_at, moved_at)
    if late_s < PATIENCE_S:
        return place
    num_classes = int(late_s / max(PATIENCE_S, ttft_s or 0.0))
    return max(min(own, 0), min(priority, own - num_classes)), due_at, arrival
