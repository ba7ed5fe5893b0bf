"""What the sampler should do, written the slow and obvious way: float64, the whole vocabulary, one row, full sorts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from policies.terms import Sampling
from worker.sampler import Row
from worker.sampling import race
from worker.sampling.tiles import WIDTH


def processed(logits: np.ndarray, row: Row, eos_token_ids: Sequence[int] = ()) -> np.ndarray:
    """The logits after everything but the draw, -inf where a token may not be drawn. Temperature 0 is left at 1."""
    s, x = row.sampling, logits.astype(np.float64).copy()
    output = list(row.output_token_ids)
    for token_id in {*row.prompt_token_ids, *output}:
        x[token_id] = x[token_id] * s.repetition_penalty if x[token_id] < 0 else x[token_id] / s.repetition_penalty
    for token_id in set(output):
        x[token_id] -= s.presence_penalty + s.frequency_penalty * output.count(token_id)
    for token_id, bias in s.logit_bias.items():
        x[token_id] += bias
    unwanted = set(range(len(x))).difference(s.allowed_token_ids) if s.allowed_token_ids else set()
    unwanted |= {word[-1] for word in s.bad_words if (*output, word[-1])[-len(word) :] == word}
    x[sorted(unwanted)] -= 1e4
    if len(output) < s.min_tokens:
        x[[*s.stop_token_ids, *([] if s.ignore_eos else eos_token_ids)]] = -np.inf
    x /= s.temperature or 1.0
    if s.top_k:
        x[x < np.sort(x)[-min(s.top_k, len(x))]] = -np.inf
    if s.top_p < 1.0:
        p = probabilities(x)
        falling = np.sort(p)[::-1]
        # What is likelier than a token is all in front of its first equal.
        above = np.concatenate([[0.0], falling.cumsum()])[np.searchsorted(-falling, -p)]
        x[(above >= s.top_p) & (above > 0)] = -np.inf
    if s.min_p:
        p = probabilities(x)
        x[p < s.min_p * p.max() * (1 - 1e-9)] = -np.inf
    return x


def probabilities(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def noise(seed: int, position: int, vocab_size: int) -> np.ndarray:
    """Minus the logarithm of every token's clock: Gumbel noise, [vocab_size] f64."""
    starts = race.streams([(seed, position)], torch.device("cpu"))
    clocks = race.clocks(starts, torch.arange(-(-vocab_size // WIDTH))[None])
    return -np.log(clocks.double().numpy().ravel()[:vocab_size])


def token(logits: np.ndarray, row: Row, eos_token_ids: Sequence[int] = ()) -> int:
    """The token that ``row`` must sample."""
    x = processed(logits, row, eos_token_ids)
    if row.sampling.temperature == 0:
        return int(x.argmax())
    position = len(row.prompt_token_ids) + len(row.output_token_ids)
    return int((x + noise(row.seed, position, len(x))).argmax())


def row(seed: int = 0, prompt: Sequence[int] = (1, 2, 3), output: Sequence[int] = (), **sampling: object) -> Row:
    return Row(Sampling(**{"max_tokens": 100, **sampling}), seed, list(prompt), list(output))
