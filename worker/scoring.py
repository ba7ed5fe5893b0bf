"""Log-probabilities of a prompt's own tokens: how likely the model holds each but the first, behind those before it.

A step leaves behind what the head would be given for the rows of such a prompt; the head is applied here, to a few rows
at a time, as the logits of a whole chunk of a prompt may not fit. Blocks of the prefix cache would hide rows that are
wanted, so such a prompt finds none (``Engine.add``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from policies.wire import TokenLogprob
from worker.inputs import Span
from worker.sequence import Sequence

ROWS = 128
"""That the head is given at once: 77 MB of logits for a vocabulary of 150,000."""


@torch.inference_mode()
def score(sequence: Sequence, span: Span, hidden: Tensor, logits_of: Callable[[Tensor], Tensor]) -> None:
    """Notes what this step says of the prompt. hidden [span.num_hidden, hidden_size]; ``logits_of`` as Runner's."""
    scored, num_top = sequence.request.scored, sequence.request.num_prompt_logprobs
    assert scored is not None
    end = min(span.start + len(span.token_ids), sequence.num_prompt_tokens - 1)
    start = span.start + len(span.token_ids) - span.num_hidden
    for at in range(start, end, ROWS):
        until = min(at + ROWS, end)
        logprobs = logits_of(hidden[at - start : until - start]).float().log_softmax(-1)
        token_ids = torch.tensor(sequence.token_ids[at + 1 : until + 1], device=logprobs.device)
        own = logprobs.gather(-1, token_ids[:, None])[:, 0].tolist()
        top = logprobs.topk(min(num_top, logprobs.shape[1]), dim=-1) if num_top else None
        ids = [[]] * len(own) if top is None else top.indices.tolist()
        values = [[]] * len(own) if top is None else top.values.tolist()
        scored += map(TokenLogprob, own, ids, values)
