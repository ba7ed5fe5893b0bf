"""The sampler beside the plain way, on the same logits in the same run: `python benchmarks/engine_sampler.py`.

The plain way is transformers' warpers in torch (one pass over the vocabulary for each, a sort for top-p), softmax and
multinomial, all rows with the same settings, which suits it best. Prints medians in ms a step, and the ratio.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from policies.terms import Sampling
from worker.sampler import Row, Sampler

CASES: dict[str, dict[str, float | int]] = {
    "greedy": {"temperature": 0},
    "temperature 0.7": {"temperature": 0.7},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 50": {"top_k": 50},
    "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9},
    "min_p 0.05": {"min_p": 0.05},
}


def model_like(num_rows: int, vocab_size: int) -> Tensor:
    """Logits as a trained model has them: a head that falls by a power law, at random ids, over a bulk far below."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 2 - 17
    head = -1.2 * torch.log(torch.arange(1, 2001).float())
    for row in logits:
        row[torch.randperm(vocab_size, generator=generator)[:2000]] = head
    return logits


def plain(logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1)
    if temperature != 1.0:
        logits = logits / temperature
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    if top_p < 1.0:
        ascending, at = logits.sort(-1)
        dropped = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
        dropped[:, -1] = False
        logits = logits.masked_fill(dropped.scatter(1, at, dropped), -torch.inf)
    if min_p:
        probabilities = logits.softmax(-1)
        logits = logits.masked_fill(probabilities < min_p * probabilities.amax(-1, keepdim=True), -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1)[:, 0]


def main() -> None:
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; ms a step: ours, plain, plain / ours")
    for vocab_size in (32_000, 151_936):
        for num_rows in (1, 8, 32):
            logits = model_like(num_rows, vocab_size)
            for name, case in CASES.items():
                ours, theirs = race(logits, case)
                print(f"{vocab_size:7,} x {num_rows:2}  {name:20} {ours:8.2f} {theirs:8.2f} {theirs / ours:6.1f} x")


def race(logits: Tensor, case: dict[str, float | int], num_rounds: int = 15) -> list[float]:
    """Medians in ms of ours and of the plain way, in turn."""
    num_rows, vocab_size = logits.shape
    sampler = Sampler(vocab_size, ())
    rows = [Row(Sampling(max_tokens=1, **case), seed, range(100), []) for seed in range(num_rows)]
    contenders: list[Callable[[], object]] = [lambda: sampler.sample(logits, rows), lambda: plain(logits, **case)]
    taken: list[list[float]] = [[], []]
    for _ in range(num_rounds):
        for contender, times in zip(contenders, taken, strict=True):
            began_at = time.perf_counter()
            contender()
            times.append(1e3 * (time.perf_counter() - began_at))
    return [statistics.median(times[2:]) for times in taken]


if __name__ == "__main__":
    main()
