"""How many tokens an answer had: what the server says, held against what was counted here."""

from __future__ import annotations

from typing import Literal, NamedTuple

CountedBy = Literal["upstream", "gateway"]
"""Whose count is billed."""

BYTES_A_TOKEN = 4
"""Of UTF-8: the estimate where there is no tokenizer. English has about so many in common vocabularies; other
languages and code have fewer, so the estimate errs on the side of too few tokens there."""
ROOM = 16
"""Tokens that a template or an end may make a difference of."""
EXACT_SHARE, ROUGH_SHARE = 0.05, 1.0
"""By how much of the smaller count two may differ, where ours is a tokenizer's and where it is an estimate."""


class Counts(NamedTuple):
    """Of one request's answer."""

    num_prompt_tokens: int
    num_completion_tokens: int


class Verdict(NamedTuple):
    """What is billed, and whether the counts agreed."""

    counted_by: CountedBy
    agrees: bool


def estimated(num_bytes: int) -> int:
    """Tokens of so many bytes of text."""
    return -(-num_bytes // BYTES_A_TOKEN)


def verdict(told: Counts | None, counted: Counts, is_exact: bool, max_prompt: int, max_completion: int) -> Verdict:
    """``told``: by the server, None where it said nothing. What it says is billed, unless it cannot be: none where
    there are some, as of servers that do not count, or more than the prompt has bytes or than was asked for.
    ``max_prompt`` and ``max_completion`` are those bounds; ``is_exact``: a tokenizer has counted here."""
    if told is None:
        return Verdict("gateway", True)
    for said, ours, most in zip(told, counted, (max_prompt, max_completion), strict=True):
        if not min(1, ours) <= said <= most:
            return Verdict("gateway", False)
    share = EXACT_SHARE if is_exact else ROUGH_SHARE
    agrees = all(abs(a - b) <= ROOM + share * min(a, b) for a, b in zip(told, counted, strict=True))
    return Verdict("upstream", agrees)
