"""The experts of one layer alone: against the bytes of those chosen, dense products of as many rows, and one expert
after another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks.engine_gpu.device import seconds
from benchmarks.engine_gpu.report import OfExperts
from benchmarks.engine_gpu.weights import decoder
from policies.settings import Quantization
from worker.models.architecture import Architecture
from worker.models.ops import Ops, TorchOps
from worker.recording import CudaRecord
from worker.triton import has_triton

_TIMES = 20


class Layer:
    """The first of a mixture with random weights, which choose about evenly."""

    def __init__(self, architecture: Architecture, device: torch.device, quantization: Quantization) -> None:
        own = dataclasses.replace(architecture, num_layers=1, layer_ropes=(0,), windows=(0,), vocab_size=512)
        experts = decoder(own, device, quantization).layers[0].experts
        assert experts is not None
        self._architecture, self._device, self._experts = own, device, experts
        self._bytes_a_weight = {"none": 2.0, "int8": 1.0, "fp8": 1.0, "int4": 0.5 + 4 / 64}[quantization]
        self._ops: Ops = TorchOps()
        if has_triton(device):
            from worker.models.triton_ops import TritonOps

            self._ops = TritonOps()
        sizes = ((2 * own.intermediate_size, own.hidden_size), (own.hidden_size, own.intermediate_size))
        self._dense = [torch.randn(size, dtype=torch.bfloat16, device=device) for size in sizes]

    @torch.inference_mode()
    def measured(self, num_tokens: int) -> OfExperts:
        """Where it can be recorded, as it is replayed."""
        own, experts, mixture = self._architecture, self._experts, self._experts.mixture
        x = torch.randn((num_tokens, own.hidden_size), dtype=torch.bfloat16, device=self._device)
        rows = torch.randn((num_tokens * mixture.num_chosen, own.hidden_size), dtype=x.dtype, device=self._device)
        num_chosen = len(experts.router.wide(x).topk(mixture.num_chosen).indices.unique())
        apart = dataclasses.replace(experts, together=None)

        def call() -> None:
            experts(x, self._ops, own.activation, 0)

        def dense() -> None:
            F.linear(self._ops.gate(F.linear(rows, self._dense[0]), own.activation), self._dense[1])

        return OfExperts(
            1e6 * self._seconds(call, experts.together is not None),
            1e6 * seconds(lambda: apart(x, self._ops, own.activation, 0), self._device, _TIMES),
            1e6 * self._seconds(dense, True),
            int(num_chosen * 3 * own.hidden_size * own.intermediate_size * self._bytes_a_weight),
        )

    def _seconds(self, call: Callable[[], None], is_recorded: bool) -> float:
        replay = CudaRecord()(call) if is_recorded and self._device.type == "cuda" else call
        return seconds(replay, self._device, _TIMES)
