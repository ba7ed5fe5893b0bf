"""The sampler beside the plain way, on the same logits in the same run: `python -P benchmarks/engine_sampler.py`.

The plain way is transformers' warpers in torch (one pass over the vocabulary for each, a sort for top-p), softmax and
multinomial, all rows with the same settings, which suits it best. Prints medians in ms a step, and the ratio: of ours
with the maxima of the logits known, as the head of a model leaves them, and without. The logits have just been written,
as by a head. Then what log-probabilities and penalties cost, in CPU time, which other work on the machine disturbs
less, by compiled kernels and by torch; then what the maxima cost the head.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from policies.terms import Sampling
from worker.native import Library, PackedMatrix, library
from worker.sampler import Row, Sampler

CASES: dict[str, dict[str, float | int]] = {
    "greedy": {"temperature": 0},
    "temperature 0.7": {"temperature": 0.7},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 50": {"top_k": 50},
    "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9},
    "min_p 0.05": {"min_p": 0.05},
}

BESIDES: dict[str, tuple[dict[str, float | int], int]] = {
    "nothing": ({}, 100),
    "logprobs": ({"num_logprobs": 0}, 100),
    "top_logprobs 20": ({"num_logprobs": 20}, 100),
    "repetition_penalty, 100,000 tokens": ({"repetition_penalty": 1.1}, 100_000),
    "frequency_penalty, 10,000 of output": ({"frequency_penalty": 0.1}, 100),
}
"""What is asked for besides temperature 1, and the length of each prompt."""


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
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; ms a step")
    print(f"{'':34} {'known':>8} {'not':>8} {'plain':>8} plain / known")
    for vocab_size in (151_936, 32_000):
        for num_rows in (32, 8, 1):
            logits = model_like(num_rows, vocab_size)
            for name, case in CASES.items():
                known, unknown, theirs = race(logits, case)
                times = f"{known:8.3f} {unknown:8.3f} {theirs:8.2f} {theirs / known:6.1f} x"
                print(f"{vocab_size:7,} x {num_rows:2}  {name:20} {times}", flush=True)
    for name, (case, num_prompt_tokens) in BESIDES.items():
        ours, theirs = besides(model_like(64, 151_936), case, num_prompt_tokens)
        print(
            f"151,936 x 64  {name:40} ms of CPU {ours:8.2f}, by torch {theirs:8.2f} {theirs / ours:6.1f} x", flush=True
        )
    kernels = library()
    if kernels is not None and kernels.has_linear:
        for num_rows in (1, 32):
            alone, fused, apart = medians(head(kernels, num_rows, 151_936, 896), 25)
            print(
                f"head 896 x 151,936, {num_rows:2} rows: {alone:.2f}, with maxima {fused:.2f}, then maxima {apart:.2f}"
            )


def race(logits: Tensor, case: dict[str, Any], num_rounds: int = 15) -> list[float]:
    """Medians in ms of ours with maxima known, ours without, and the plain way, in turn."""
    num_rows, vocab_size = logits.shape
    sampler, kernels = Sampler(vocab_size, ()), library()
    maxima = None if kernels is None else kernels.maxima(logits)
    written = logits.clone()
    rows = [Row(Sampling(max_tokens=1, **case), seed, range(100), []) for seed in range(num_rows)]
    ways = (
        lambda: sampler.sample(logits, rows, maxima),
        lambda: sampler.sample(logits, rows),
        lambda: plain(logits, **case),
    )
    return medians(ways, num_rounds, lambda: logits.copy_(written))


def besides(logits: Tensor, case: dict[str, Any], num_prompt_tokens: int, num_rounds: int = 7) -> list[float]:
    """The least CPU time in ms of a step, all threads together: of ours with maxima known, and by torch."""
    num_rows, vocab_size = logits.shape
    generator, kernels = torch.Generator().manual_seed(0), library()
    prompt = torch.randint(vocab_size, (num_prompt_tokens,), generator=generator).tolist()
    output = torch.randint(vocab_size, (10_000,), generator=generator).tolist()
    written, known = logits.clone(), None if kernels is None else kernels.maxima(logits)
    least = []
    for is_compiled in (True, False):
        sampler = Sampler(vocab_size, (), is_compiled)
        rows = [Row(Sampling(max_tokens=1, **case), seed, prompt, output) for seed in range(num_rows)]
        taken = []
        for _ in range(num_rounds):
            logits.copy_(written)
            maxima = known.clone() if known is not None and is_compiled else None
            began_at = time.process_time()
            sampler.sample(logits, rows, maxima)
            taken.append(1e3 * (time.process_time() - began_at))
        least.append(min(taken))
    return least


def head(kernels: Library, num_rows: int, vocab_size: int, size: int) -> Sequence[Callable[[], object]]:
    """A product with a head of a model: alone, with maxima, and with a pass for the maxima after it."""
    generator = torch.Generator().manual_seed(0)
    matrix = PackedMatrix(torch.randn(vocab_size, size, generator=generator).bfloat16(), None, gated=False)
    x = torch.randn(num_rows, size, generator=generator).bfloat16()
    maxima = torch.empty((num_rows, vocab_size // 64, 2))
    return (
        lambda: kernels.linear(x, matrix, torch.float32),
        lambda: kernels.linear(x, matrix, torch.float32, maxima),
        lambda: kernels.maxima(kernels.linear(x, matrix, torch.float32)),
    )


def medians(
    ways: Sequence[Callable[[], object]], num_rounds: int, prepare: Callable[[], object] = lambda: None
) -> list[float]:
    """In ms, the ways in turn, each prepared for."""
    taken: list[list[float]] = [[] for _ in ways]
    for _ in range(num_rounds):
        for way, times in zip(ways, taken, strict=True):
            prepare()
            began_at = time.perf_counter()
            way()
            times.append(1e3 * (time.perf_counter() - began_at))
    return [statistics.median(times[2:]) for times in taken]


if __name__ == "__main__":
    main()
