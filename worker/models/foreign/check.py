"""Whether a foreign model says on our KV, in pieces and beside another sequence, what it says alone and at once.

Tried on a few tokens each time that one is loaded: what a family does that no rule foresaw is found here, before it
answers anybody.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from worker.attention import Extent, ReferenceAttention
from worker.attention.grouped import GroupedAttention, Pools, groups_of
from worker.attention.kept import Kept
from worker.models.errors import ModelError
from worker.models.foreign.manners import logits_of
from worker.models.foreign.model import Foreign
from worker.models.foreign.past import past_of_one

Expected = list[tuple[int, Sequence[list[int]], list[Tensor]]]
"""Where positions begin, two sequences, and the logits of each."""
NUM_TRIED = 12
"""Tokens of each."""
BLOCK_SIZE = 4
MAX_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Of a row's logits, root mean square over their own deviation; of the median row, since an expert that is chosen or
not by rounding moves a few rows far."""


def check(model: Foreign, expected: Expected) -> None:
    """Raises ModelError, without the model's name, and whatever the model raises."""
    for shift, (first, second), wanted in expected:
        for logits, right in zip(_in_pieces(model, first, second, shift), wanted, strict=True):
            error = _error(logits, right)
            if not error <= MAX_ERROR[model.dtype]:
                raise ModelError(
                    "computed in pieces, on paged KV, it gives other logits than at once (off by"
                    f" {error:.2g} of their deviation)"
                )


def expected_of(model: Any, vocab_size: int, max_model_tokens: int) -> Expected:
    """By transformers' own plain attention, which the model is set to; at the first positions and, where it can begin
    there, at the last ones.
    """
    num_tokens = min(NUM_TRIED, max_model_tokens)
    chance = random.Random(7)
    both = tuple([chance.randrange(vocab_size) for _ in range(num_tokens)] for _ in range(2))
    found: Expected = [(0, both, [_at_once(model, token_ids, 0) for token_ids in both])]
    shift = max_model_tokens - num_tokens
    try:
        found.append((shift, both, [_at_once(model, token_ids, shift) for token_ids in both]))
    except ModelError:
        raise
    except Exception:  # what it makes of so long a past is its own affair
        return found
    return found


def _at_once(model: Any, token_ids: list[int], shift: int) -> Tensor:
    """[num_tokens, vocab_size]"""
    places = torch.arange(len(token_ids), device=model.device)
    with torch.inference_mode():
        past = past_of_one(shift, 0, _as_they_are) if shift else None
        return logits_of(model, torch.tensor(token_ids, device=model.device), places + shift, places, past)


def unlike_generate(model: Any, expected: Expected) -> str:
    """Why not to serve it: transformers' own cache, token by token as generate goes on, gives other logits than the
    model at once, with whom ours agrees. Empty where it gives the same, or cannot be asked. Set as for expected_of.
    """
    _, (token_ids, *_), (at_once, *_) = expected[0]
    num_prompt_tokens = len(token_ids) // 2
    try:
        error = _error(_token_by_token(model, token_ids, num_prompt_tokens), at_once[num_prompt_tokens:])
    except Exception:  # what its own cache does not do is its own affair
        return ""
    if error <= MAX_ERROR[model.dtype]:
        return ""
    return (
        "with transformers' own cache, token by token, it gives other logits than at once, so that they depend on how a"
        f" prompt is cut (off by {error:.2g} of their deviation)"
    )


def _token_by_token(model: Any, token_ids: list[int], num_prompt_tokens: int) -> Tensor:
    """[num_tokens - num_prompt_tokens, vocab_size]: as generate goes on behind so long a prompt."""
    from transformers import DynamicCache

    past, ends = DynamicCache(config=model.config), range(num_prompt_tokens, len(token_ids) + 1)
    found = []
    with torch.inference_mode():
        for start, end in zip((0, *ends), ends, strict=False):
            own = torch.tensor(token_ids[start:end], device=model.device)
            places = torch.arange(start, end, device=model.device)
            found.append(logits_of(model, own, places, places - start, past))
    return torch.cat(found[1:])


def _as_they_are(keys: Tensor, values: Tensor, _: int) -> tuple[Tensor, Tensor]:
    return keys, values


def _in_pieces(model: Foreign, first: list[int], second: list[int], shift: int) -> tuple[Tensor, Tensor]:
    """Three steps, each with a piece of both."""
    groups = groups_of(model.kinds)
    num_blocks = -(-len(first) // BLOCK_SIZE)
    pools = Pools(groups, 2 * num_blocks, BLOCK_SIZE, model.dtype, model.device)
    attention = (
        Kept(model.kinds, groups, pools)
        if model.attends_itself
        else GroupedAttention(model.kinds, groups, pools, lambda group, cache: ReferenceAttention(cache, group.scores))
    )
    tables = [[2 * block + number for block in range(num_blocks)] for number in range(2)]
    third = len(first) // 3
    steps = [((0, third + 1), (0, third)), ((third + 1, third + 2), (third, 2 * third))]
    steps.append(((third + 2, len(first)), (2 * third, len(second))))
    found: tuple[list[Tensor], list[Tensor]] = [], []
    for pieces in steps:
        extents: list[Extent] = []
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for tokens, table, (start, end) in zip((first, second), tables, pieces, strict=True):
            extents.append(Extent(len(token_ids), end - start, start, table))
            token_ids += tokens[start:end]
            positions += range(start, end)
            slots += [table[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE for place in range(start, end)]
        of_step = torch.tensor((token_ids, positions, slots), device=model.device)
        plan = attention.plan([extent for extent in extents if extent.num_tokens], of_step[2])
        rows = torch.arange(len(token_ids), device=model.device)
        logits = model.forward(of_step[0], of_step[1] + shift, rows, plan)
        found[0].append(logits[: extents[1].row])
        found[1].append(logits[extents[1].row :])
    return torch.cat(found[0]), torch.cat(found[1])


def _error(logits: Tensor, wanted: Tensor) -> float:
    off = (logits - wanted).square().mean(1).sqrt() / wanted.std(1).clamp(min=1e-6)
    return float(off.median())
