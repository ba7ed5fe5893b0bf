"""What a token sees: from a mask function of transformers to a window of ours, by asking it."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.models.foreign.interface import MaskFunction

NUM_ASKED = 64
"""So many positions are asked about, spread over all of them, beside the first ones."""


def window_of(mask: MaskFunction, num_positions: int, device: torch.device | str) -> int | None:
    """As in Scores: 0, a window, or minus the length of a chunk. None: it is something else, not causal for example.
    ``device``: where it is asked. Raises what the function raises.
    """
    asked = _asked(num_positions)
    keys = torch.arange(num_positions, device=device)
    zero = torch.zeros((), dtype=torch.long, device=device)
    firsts = []
    for position in asked.tolist():
        seen = torch.as_tensor(mask(zero, zero, torch.tensor(position, device=device), keys)).expand(num_positions)
        places = seen.nonzero().flatten()
        if not len(places) or int(places[-1]) != position or len(places) != position + 1 - int(places[0]):
            return None
        firsts.append(int(places[0]))
    first = torch.tensor(firsts)
    if not first.any():
        return 0
    window = int((asked - first).max()) + 1
    if torch.equal(first, (asked - window + 1).clamp(min=0)):
        return window
    begun = int(first[first > 0].min())
    return -begun if torch.equal(first, asked // begun * begun) else None


def _asked(num_positions: int) -> Tensor:
    few = torch.arange(min(NUM_ASKED, num_positions))
    spread = torch.linspace(0, num_positions - 1, NUM_ASKED).long()
    # In the second chunk, however long chunks are, there is a power of two: so its beginning is found.
    doubled = 2 ** torch.arange(num_positions.bit_length() - 1) if num_positions > 1 else few
    return torch.cat((few, spread, doubled)).unique()  # type: ignore[no-any-return, no-untyped-call]
