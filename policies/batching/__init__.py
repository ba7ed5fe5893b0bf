"""This step's plan: how many tokens for which sequence, who joins, who pauses, and who gives up blocks.

There is no prefill phase and no decode phase: a sequence has tokens that are known and not computed yet, one while it
decodes and many while it prefills, and it catches up with them under a budget of tokens and of seconds a step (as in
vLLM V1 and Sarathi-Serve, arXiv 2403.02310; the length of chunks by what was promised as in Niyama, arXiv 2503.22562).
Order is the place (``claims``): by class, then by when the first token is due, which ages by itself, then by arrival.

Whatever is short, the cheapest remedy comes first. Where time is short for the more important, others pause while their
own promise lets them (``pace``). Where places are, the last in order pause and keep their KV (``room``). Where memory
is, whoever can wait does; then the last in order lose their ends, and only then all (``memory``).

What keeps it from thrashing: a waiting sequence puts others aside only for a promise that this keeps; it is let in only
with room for all of its tokens beside one more block for every sequence already there, and never in a step in which
somebody lost blocks; one that was put back too often is immune; and the first in order takes what it needs from all, so
the oldest of the most important always runs to its end. One that does not fit is overtaken at most ``MAX_OVERTAKES``
times, and only while its promise allows it; then what falls free is kept for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from policies.batching.claims import Claim, Limits, Place, Plan, limits_of, raised, token_due_at
from policies.batching.memory import Blocks, Freed, victims
from policies.batching.pace import MIN_CHUNK, Pace, pausing_above
from policies.batching.room import Room, parked
from policies.batching.turns import Turns, W, in_turn, party_of
from policies.costs import StepCosts

__all__ = [
    "MAX_OVERTAKES",
    "MIN_CHUNK",
    "Claim",
    "Limits",
    "Place",
    "Plan",
    "Turns",
    "limits_of",
    "party_of",
    "pausing_above",
    "plan",
    "raised",
    "token_due_at",
    "victims",
]

MAX_OVERTAKES = 8
MAX_SKIPPED = 4
"""Of those who wait and do not fit, in one step: looking at more of them takes time."""


def plan(
    running: Sequence[Claim],
    waiting: Sequence[W],
    num_available_blocks: int,
    limits: Limits,
    *,
    claim: Callable[[W], Claim | None],
    freed: Freed,
    due: Callable[[int], float],
    costs: StepCosts | None = None,
    turns: Turns | None = None,
    now: float = 0.0,
) -> Plan:
    """The next step. ``running`` and ``waiting`` are in order.

    ``num_available_blocks``: blocks that can be given out, free ones and those kept for reuse only. ``claim`` of one
    that waits, asked once for each that is looked at; None: it does not want to be let in. ``freed``: see
    ``memory.Freed``; ``due``: when the next token of the sequence at an index of ``running`` is due
    (``token_due_at``). ``costs``: what steps took so far; without it, or before it knows, only the limits in tokens
    hold. ``turns``: what tenants were given; without it all are one.
    """
    pace = Pace(limits, costs, now)
    unseated = parked(running, (), 0, limits.max_sequences)
    blocks = Blocks(running, num_available_blocks, freed, pace.again_s)
    blocks.grow(unseated, lambda index: due(index) > now)

    seated = [index for index in range(len(running)) if index not in unseated and not blocks.is_out(index)]
    decodes = [index for index in seated if running[index].num_pending == 1][: limits.max_step_tokens]
    prefills = [(index, running[index]) for index in seated if running[index].num_pending > 1]
    if len(decodes) == limits.max_step_tokens:
        # There are fewer places than tokens, but where memory ran out in larger steps.
        first = min([each.place for _, each in prefills[:1]] + [each.place for each in waiting[:1]], default=None)
        if first is not None:
            num_before = sum([running[index].place < first for index in decodes])
            decodes = decodes[: max(num_before, (len(decodes) + 1) // 2)]
    timed = pace.pausing(running, decodes, due) if decodes else set()
    if timed:
        blocks.take_back(timed)
        decodes = [index for index in decodes if index not in timed]
    chunks: list[tuple[int, int]] = []
    admitted: list[int] = []
    overtaken: list[int] = []
    room = Room(running, blocks, pace, limits)
    if waiting and (room.is_closed or not room.may_fit(waiting[0].place)):
        waiting = ()
    if prefills or waiting:
        pace.begin(running, decodes, due, len(prefills) + len(waiting))
        candidates = in_turn(prefills, waiting, turns, pace.token_s)
        chunks = _prompts(candidates, running, claim, room, pace, admitted, overtaken)
        if admitted:
            unseated = parked(running, blocks.preempted, room.num_newcomer_slots, limits.max_sequences)

    def name(index: int) -> int:
        return running[index].place[2]

    def is_idle(index: int) -> bool:
        return index in unseated or blocks.is_out(index)

    is_disturbed = bool(unseated or blocks.denied or blocks.has_taken)
    if is_disturbed:
        decodes = [index for index in decodes if not is_idle(index)]
        gone = {name(index) for index in range(len(running)) if is_idle(index)}
        chunks = [chunk for chunk in chunks if chunk[0] not in gone]
    paused: list[int] = []
    if is_disturbed or len(decodes) + len(prefills) < len(running):
        busy = {*decodes, *blocks.preempted, *(index for index, _ in prefills if not is_idle(index))}
        paused = [name(index) for index, one in enumerate(running) if one.num_pending and index not in busy]
    return Plan(
        preempted=[name(index) for index in blocks.preempted],
        cut=[(name(index), num_blocks) for index, num_blocks in blocks.cuts.items()],
        grown=[name(index) for index in blocks.grown],
        admitted=admitted,
        grants=[(name(index), 1) for index in decodes] + chunks,
        paused=paused,
        overtaken=overtaken,
        num_displacing=room.num_displacing,
    )


def _prompts(
    candidates: Any,
    running: Sequence[Claim],
    claim_of: Callable[[Any], Claim | None],
    room: Room,
    pace: Pace,
    admitted: list[int],
    overtaken: list[int],
) -> list[tuple[int, int]]:
    """The chunks of prompts, in turn; adds to ``admitted`` and ``overtaken``."""
    chunks: list[tuple[int, int]] = []
    skipped: list[int] = []
    is_open = True
    ahead_s = 0.0
    for index, each in candidates:
        if index < 0:
            if not is_open:
                continue
            claim = claim_of(each)
            if claim is None:
                continue
            if claim.num_pending and not pace.chunk(claim):
                is_open = False  # nobody is let in who would only sit there
                continue
            if not claim.num_pending and skipped:
                continue  # it waits for a beginning that perhaps one computes who did not fit
            if not room.let_in(claim, ahead_s):
                skipped.append(claim.arrival)
                # What falls free is kept for one that was overtaken often, or whose promise does not allow it.
                is_open = len(skipped) < MAX_SKIPPED and claim.num_overtaken < MAX_OVERTAKES
                is_open = is_open and (claim.ttft_s is None or not pace.would_save(claim, ahead_s))
                continue
            admitted.append(claim.arrival)
            overtaken += skipped
        elif room.is_out(index):
            continue  # put aside a moment ago for one who comes before it
        else:
            claim = running[index]
        num_tokens = pace.chunk(claim)
        ahead_s += pace.work_s(claim)
        if num_tokens:
            pace.spend(claim, num_tokens)
            chunks.append((claim.arrival, num_tokens))
    return chunks
