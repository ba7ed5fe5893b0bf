"""Claims and plans, sensible unless you say otherwise."""

import math

from policies import batching
from policies.batching import Claim, Limits
from policies.costs import StepCosts, Work, pairs

LIMITS = Limits(max_step_tokens=64, max_prefill_tokens_beside_decodes=16, max_sequences=4)


def decoding(arrival, priority=0, blocks=0, **more):
    return Claim((priority, 0.0, arrival), 1, blocks, has_output=True, **more)


def prefilling(arrival, tokens, priority=0, due_at=0.0, **more):
    return Claim((priority, due_at, arrival), tokens, **more)


def newcomer(arrival, tokens, priority=0, blocks=1, slots=1, shared=0, due_at=0.0, **more):
    return Claim((priority, due_at, arrival), tokens, blocks, slots, shared, **more)


def plan(running, waiting, available, limits=LIMITS, costs=None, frees=1, due=-math.inf, num_shared=0, **more):
    """``frees``: the blocks that each that runs would free, or a list of it; ``due``: when its next token is due,
    likewise. ``num_shared``: what each holds besides and others do as well."""

    def freed(order):
        nums = [frees[index] if isinstance(frees, list) else frees for index in order]
        return [(num, num + num_shared) for num in nums]

    return batching.plan(
        running,
        waiting,
        available,
        limits,
        claim=lambda claim: claim,
        freed=freed,
        due=lambda index: due[index] if isinstance(due, list) else due,
        costs=costs,
        **more,
    )


def a_machine_that_takes(decode_s, token_s, pair_s=0.0):
    """Fitted on a noiseless machine: decode_s a step for each decode, token_s and pair_s for prompts."""
    costs = StepCosts()
    for turn in range(400):
        decodes, chunk, start = turn % 5, 32 * (turn % 7), 500 * (turn % 3)
        if decodes or chunk:
            work = Work(chunk, decodes, 0, pairs(chunk, start))
            costs.observe(work, 1e-4 + decode_s * decodes + token_s * chunk + pair_s * pairs(chunk, start))
    return costs
