"""This step's plan: how many tokens for which sequence, who joins, and who is preempted.

There is no prefill phase and no decode phase: a sequence has tokens that are known and not computed yet, one while it
decodes and many while it prefills, and it catches up with them under a budget of tokens a step (as in vLLM V1 and
Sarathi-Serve, arXiv 2403.02310). Order is (priority, arrival), smaller first, everywhere: for blocks, for slots, for
tokens.

Three rules keep preemption from thrashing. A running sequence that lacks a block takes it from the last in order,
which may be itself. A waiting one displaces only strictly lower priorities, for blocks and for slots alike, and only
if that lets it in. It is let in only with room for all of its tokens beside one more block for every sequence already
there, and never in a step in which blocks ran out. A preempted sequence keeps its arrival, so the oldest of the most
important always runs to its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import merge
from typing import NamedTuple

import msgspec

from policies.costs import StepCosts, Work
from policies.settings import Engine

MIN_CHUNK = 16
"""Tokens that the first prompt in order gets in any step, however dear: it must arrive one day."""


class Claim(NamedTuple):
    """What one sequence asks of this step; ``arrival`` names it."""

    priority: int
    arrival: int
    """Unique."""
    num_pending: int
    """Tokens known and not computed yet. 0: it wants none in this step, since another is just computing them."""
    num_new_blocks: int
    """Blocks to set aside before any pending token is computed; of a waiting sequence, all of its blocks."""
    num_freed_blocks: int = 0
    """Running only: the blocks that its preemption, after that of all behind it in order, makes available."""
    num_slots: int = 1
    """Places in the batch: more than one while others wait to fork from it."""
    num_shared_blocks: int = 0
    """Waiting only: of its new blocks, those that running sequences hold already and that it would share."""
    start: int = 0
    """Position of its first pending token."""


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


BURST_WEIGHT = 8
"""Of several who wait for a first token, each but the first counts as much as so many who wait for their next one."""


class Plan(NamedTuple):
    """By arrival: whom to preempt, then whom to admit, then how many tokens for whom (in order; at least one each)."""

    preempted: list[int]
    admitted: list[int]
    grants: list[tuple[int, int]]


def limits_of(engine: Engine) -> Limits:
    """The limits that settings mean."""
    return Limits(
        max_step_tokens=engine.max_step_tokens,
        max_prefill_tokens_beside_decodes=engine.max_prefill_tokens_beside_decodes,
        max_sequences=max(1, min(engine.max_sequences, engine.max_step_tokens - 1)),
        max_slowdown=engine.max_slowdown,
    )


def plan(
    running: Sequence[Claim],
    waiting: Iterable[Claim],
    num_available_blocks: int,
    limits: Limits,
    costs: StepCosts | None = None,
    num_waiting: int = 0,
) -> Plan:
    """The next step. ``running`` and ``waiting`` are in order; ``waiting`` is read only as far as sequences are let in.

    ``num_available_blocks``: blocks that can be given out, free ones and those kept for reuse only. ``costs``: what
    steps took so far; without it, or before it knows, only the limits in tokens hold. ``num_waiting``: how many
    sequences wait in all.
    """
    num_staying, available = _grow(running, num_available_blocks)
    preempted = [claim.arrival for claim in running[num_staying:]]
    decode_starts = [claim.start for claim in running[:num_staying] if claim.num_pending == 1]
    num_behind = sum(claim.num_pending > 1 for claim in running[:num_staying]) + num_waiting
    budget = _Budget(decode_starts, num_behind, limits, costs)

    prefills = [(index, claim) for index, claim in enumerate(running[:num_staying]) if claim.num_pending > 1]
    newcomers = () if preempted else ((-1, claim) for claim in waiting)
    num_free_slots = limits.max_sequences - sum(claim.num_slots for claim in running[:num_staying])
    num_taken_for_shared = 0
    admitted: list[int] = []
    chunks: list[tuple[int, int]] = []
    blocked = False
    for index, claim in merge(prefills, newcomers, key=lambda pair: pair[1][:2]):
        if claim.num_pending and not budget.chunk(claim):
            break
        if index >= num_staying:
            continue  # displaced a moment ago by a more important newcomer
        if index < 0:
            if blocked:
                continue
            # A fork that finds no slot later waits like any other; a whole batch is all that can be asked for.
            num_slots = min(claim.num_slots, limits.max_sequences)
            # What it would share may belong to those who have just been displaced: then nothing is taken for granted.
            num_shared = 0 if preempted else claim.num_shared_blocks
            room = _make_room(
                running[:num_staying],
                claim,
                num_slots,
                num_free_slots,
                available,
                num_shared,
                num_taken_for_shared,
                len(admitted),
            )
            if room is None:
                blocked = True  # nobody overtakes: what it waits for is freed by those who run
                continue
            preempted += [displaced.arrival for displaced in running[room.num_staying : num_staying]]
            num_staying, num_free_slots, available = room
            num_taken_for_shared = 0 if preempted else num_taken_for_shared + num_shared
            admitted.append(claim.arrival)
        num_tokens = budget.chunk(claim)
        if num_tokens:
            budget.spend(claim, num_tokens)
            chunks.append((claim.arrival, num_tokens))

    decodes = [(claim.arrival, 1) for claim in running[:num_staying] if claim.num_pending == 1]
    return Plan(preempted, admitted, decodes[: limits.max_step_tokens] + chunks)


class _Budget:
    """What the step has left for prompts: tokens, and once costs are known also seconds."""

    def __init__(self, decode_starts: Sequence[int], num_behind: int, limits: Limits, costs: StepCosts | None) -> None:
        num_decodes = len(decode_starts)
        self._num_tokens = max(0, limits.max_step_tokens - num_decodes)
        self._seconds: float | None = None
        self._is_first = True
        if num_decodes:
            self._num_tokens = min(self._num_tokens, limits.max_prefill_tokens_beside_decodes)
        if costs is not None and costs.known:
            self._seconds = limits.max_prefill_s
            self._price = costs.chunk_price
            if num_decodes and limits.max_slowdown:
                alone_s = costs.predict(Work(0, num_decodes, sum(decode_starts) + num_decodes))
                # One prompt keeps to its share; sparing a few streams from a burst of prompts would make the many wait.
                patience = max(1.0, BURST_WEIGHT * (num_behind - 1) / num_decodes)
                self._seconds = min(self._seconds, alone_s * (limits.max_slowdown - 1.0) * patience)

    def chunk(self, claim: Claim) -> int:
        """The tokens that this one may compute now."""
        num_tokens = min(claim.num_pending, self._num_tokens)
        if self._seconds is None or not num_tokens:
            return num_tokens
        least = MIN_CHUNK if self._is_first else 0
        return min(num_tokens, max(least, self._price.tokens_within(self._seconds, claim.start)))

    def spend(self, claim: Claim, num_tokens: int) -> None:
        self._is_first = False
        self._num_tokens -= num_tokens
        if self._seconds is not None:
            self._seconds -= self._price.seconds(num_tokens, claim.start)


def _grow(running: Sequence[Claim], available: int) -> tuple[int, int]:
    """How many of ``running``, from the front, stay once each of them has its new blocks; and the blocks then left."""
    num_staying = len(running)
    for index, claim in enumerate(running):
        if index == num_staying:
            break
        while available < claim.num_new_blocks and num_staying > index:
            num_staying -= 1
            available += running[num_staying].num_freed_blocks
        if num_staying > index:
            available -= claim.num_new_blocks
    return num_staying, available


class _Room(NamedTuple):
    num_staying: int
    num_free_slots: int
    num_available_blocks: int


def _make_room(
    running: Sequence[Claim],
    claim: Claim,
    num_slots: int,
    num_free_slots: int,
    available: int,
    num_shared: int,
    num_taken_for_shared: int,
    num_admitted: int,
) -> _Room | None:
    """What is left once ``claim`` is in and the fewest strictly lower priorities have gone for it; None if it cannot
    be.
    """
    num_staying = len(running)
    while True:
        num_others = num_staying + num_admitted
        spare = available - claim.num_new_blocks + num_shared
        if num_free_slots >= num_slots and spare >= num_others:
            return _Room(num_staying, num_free_slots - num_slots, spare)
        if num_staying == 0 or running[num_staying - 1].priority <= claim.priority:
            return None
        num_staying -= 1
        # What it frees may be what newcomers before this one count on sharing: then it is free for nobody.
        available -= num_taken_for_shared
        num_shared = num_taken_for_shared = 0
        available += running[num_staying].num_freed_blocks + running[num_staying].num_new_blocks
        num_free_slots += running[num_staying].num_slots
