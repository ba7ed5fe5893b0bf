"""Lines of a batch: in which class they are served and what they cost, what is theirs of a limit, how many may be under
way, and which of them begin alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import ROUND_HALF_EVEN, Decimal
from hashlib import blake2b

import msgspec

from policies.policy import Policy
from policies.pricing import NUM_DISCOUNT_DIGITS
from policies.settings import SlaClass

AHEAD = 8
"""Requests that may wait in a model's line before no more lines are sent there: enough that a place which falls free is
taken at once, and so few that whoever is more important never finds the line full of them."""
LEAD = 4
"""So many more lines than another batch one may have under way, while that one could do with more."""
SHARE_OF_LIMITS = 0.8
"""Of each ceiling of a tenant lines take at most so much; the rest is left to requests that somebody waits for."""
PREFIX_BYTES = 1024
"""Of what a line says, by which it is put beside its like; lines that have as much in common share a prompt's
beginning."""
SMALLEST_SHARE = Decimal(1).scaleb(-NUM_DISCOUNT_DIGITS)


def policy_for_lines(policy: Policy, classes: Mapping[str, SlaClass]) -> Policy:
    """As a tenant with this policy has it for the lines of its batches: the least important class there is, whichever
    tier they ask for, and the batch's discount on what the policy's own leaves of a price."""
    lowest = max(classes, key=lambda name: classes[name].priority)
    paid = (1 - policy.discount) * (1 - policy.batch_discount)
    paid = max(paid.quantize(SMALLEST_SHARE, ROUND_HALF_EVEN), SMALLEST_SHARE)
    return msgspec.structs.replace(policy, sla_class=lowest, sla_classes=(lowest,), discount=1 - paid)


def may_send(
    num_under_way: int, most_under_way: int, num_own: int, num_of_others: Sequence[int], num_in_line: int
) -> bool:
    """Whether a batch may have one more line under way.

    ``num_under_way``: of all batches; ``num_own``: of this one; ``num_of_others``: of each other that could do with
    more; ``num_in_line``: requests of anybody that wait for the model. A batch that has none under way may always send
    one, so that it gets what its class is guaranteed however long the line is.
    """
    if num_under_way >= most_under_way:
        return False
    if not num_own:
        return True
    return num_in_line < AHEAD and num_own <= min(num_of_others, default=num_own) + LEAD


def lines_share(ceiling: int) -> int:
    """What lines may use of it; of a ceiling of one, that one."""
    return max(1, int(ceiling * SHARE_OF_LIMITS))


def likeness(model: str, *parts: bytes) -> tuple[str, bytes, bytes]:
    """By which lines are sorted: those with the same beginning follow each other, also where that is longer than what
    is looked at. ``parts``: what the line says, in the order in which a prompt has it."""
    said = b"".join(parts)
    return model, said[:PREFIX_BYTES], blake2b(parts[0] if parts else b"", digest_size=8).digest()
