"""What the machine itself can do, measured beside the engines: reading memory, and multiplying matrices.

`python -m benchmarks.engine_peers.limits NUM_THREADS BYTES` prints Limits as JSON. A process of its own, started anew
for each round, so that it holds no memory and no thread while an engine is measured.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

import msgspec

SOURCE = Path(__file__).with_name("bandwidth.cpp")
BIG_BYTES = 1 << 30
"""Larger than any cache that one tenant of a machine has to itself."""
GEMM = (512, 9728, 896)
"""Tokens, outputs, inputs: the widest product of shape M's prefill."""
MAX_GEMM_S = 0.5
MAX_ROW_S = 0.05
"""For one row, what is made on first use included."""


class Limits(msgspec.Struct):
    """None: not measured here."""

    read_gb_per_s: float | None
    """Of a gibibyte: from memory."""
    weights_gb_per_s: float | None
    """Of as many bytes as the model's weights in bfloat16, read again and again: a small model's stay in the cache."""
    bf16_tflop_per_s: float | None
    int8_tflop_per_s: float | None
    """oneDNN's, through torch; 2 x multiplications a second."""


def best(limits: Sequence[Limits], name: str) -> float | None:
    """The greatest of one of them: a limit is what the machine can do, not what it did beside something else."""
    values = [getattr(each, name) for each in limits]
    return max((value for value in values if value is not None), default=None)


def best_of(limits: Sequence[Limits]) -> Limits:
    """The greatest of each."""
    return Limits(**{name: best(limits, name) for name in Limits.__struct_fields__})


def measure(num_threads: int, weight_bytes: int) -> Limits:
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    big, own = bandwidth((BIG_BYTES, weight_bytes))
    return Limits(big, own, *gemm(num_threads))


def bandwidth(sizes: tuple[int, ...]) -> list[float | None]:
    """GB/s of the fastest pass over each size; None where there is no compiler."""
    from worker.native.build import FLAGS

    compiler = shutil.which(os.environ.get("CXX") or "g++")
    if compiler is None:
        return [None for _ in sizes]
    with tempfile.TemporaryDirectory(prefix="bandwidth-") as folder:
        made = Path(folder) / "bandwidth.so"
        subprocess.run([compiler, *FLAGS, "-o", str(made), str(SOURCE)], check=True, capture_output=True)
        loop = ctypes.CDLL(str(made)).fastest_pass_s
    loop.restype, loop.argtypes = ctypes.c_double, (ctypes.c_size_t, ctypes.c_int)
    found: list[float | None] = []
    for size in sizes:
        took_s = loop(size, max(5, min(200, (4 * BIG_BYTES) // size)))
        found.append(size / took_s / 1e9 if took_s > 0 else None)
    return found


def gemm(num_threads: int) -> tuple[float | None, float | None]:
    import torch

    torch.set_num_threads(num_threads)
    num_tokens, num_outputs, num_inputs = GEMM
    x = torch.randn(num_tokens, num_inputs, dtype=torch.bfloat16)
    weight = torch.randn(num_outputs, num_inputs, dtype=torch.bfloat16)
    plain = _tflop_per_s(lambda: torch.nn.functional.linear(x, weight))
    try:
        codes = torch.randint(-127, 128, (num_outputs, num_inputs), dtype=torch.int8)
        packed = torch.ops.onednn.qlinear_prepack(codes, [num_tokens, num_inputs])
        rows = torch.randint(-127, 128, (num_tokens, num_inputs), dtype=torch.int8)
        scales, zeros = torch.ones(num_outputs), torch.zeros(num_outputs, dtype=torch.int64)

        def multiply(count: int = num_tokens) -> object:
            return torch.ops.onednn.qlinear_pointwise(
                rows[:count], 0.01, 0, packed, scales, zeros, None, 1.0, 0, torch.bfloat16, "none", [], ""
            )

        # Where there is no AMX it may take a way that takes a minute for all rows, and is no limit of anything.
        began_at = perf_counter()
        multiply(1)
        whole = _tflop_per_s(multiply) if perf_counter() - began_at < MAX_ROW_S else None
    except (AttributeError, RuntimeError):
        whole = None
    return plain, whole


def _tflop_per_s(multiply: Callable[[], object]) -> float:
    """Of the fastest call within half a second."""
    multiply()
    best_s, until = float("inf"), perf_counter() + MAX_GEMM_S
    while (began_at := perf_counter()) < until:
        multiply()
        best_s = min(best_s, perf_counter() - began_at)
    num_tokens, num_outputs, num_inputs = GEMM
    return 2 * num_tokens * num_outputs * num_inputs / best_s / 1e12


if __name__ == "__main__":
    print(msgspec.json.encode(measure(int(sys.argv[1]), int(sys.argv[2]))).decode())
