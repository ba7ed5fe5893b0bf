"""The runner of a model that transformers computes: its own pools, a backend for each group of alike layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from policies import settings
from policies.devices import ALONE, Turn
from worker.adapters import Adapter, AdapterError
from worker.attention import Backend, GatheredAttention, NativeAttention, ReferenceAttention, SegmentAttention
from worker.attention.grouped import Group, GroupedAttention, Pools, groups_of
from worker.attention.kept import Kept
from worker.inputs import Laid, Span, planned
from worker.kv_cache import KVCache
from worker.loading import refuse_files_too_large, settle
from worker.means import kernels_of
from worker.models import Foreign, ModelError, TorchOps, load_foreign, read_facts
from worker.room import kv_type_of, max_model_tokens_of, num_blocks_of
from worker.runner import Runner
from worker.triton import has_triton


class ForeignRunner(Runner):
    """A Runner whose model is a Foreign."""

    takes_adapters = False

    def __init__(self, model: Foreign, pools: Pools, attention: GroupedAttention | Kept, max_model_tokens: int) -> None:
        # What the base does with these, it does through what they have in common with its own.
        alike: tuple[Any, Any, Any] = model, pools, attention
        super().__init__(*alike, TorchOps(), max_model_tokens)
        self._foreign = model
        self.pooling, self.scores_prompts = None, False

    @classmethod
    def load_from(cls, path: Path, engine: settings.Engine, turn: Turn = ALONE) -> ForeignRunner:
        """From a directory. Raises ModelError, a sentence."""
        facts = read_facts(path)
        if engine.quantize != "none":
            raise ModelError(
                f"{facts.name} is served by way of transformers, which engine.quantize = {engine.quantize} does not"
                " reach"
            )
        if engine.deterministic:
            raise ModelError(
                f"{facts.name} is served by way of transformers, whose sums engine.deterministic does not reach"
            )
        device, dtype = settle(engine, facts, turn)
        kv_type = kv_type_of(engine, dtype, device)
        if kv_type.is_scaled or kv_type.dtype is not dtype:
            raise ModelError(
                f"{facts.name} is served by way of transformers, which engine.kv_dtype = {engine.kv_dtype} does not"
                " reach"
            )
        refuse_files_too_large(path, facts, dtype, device)
        max_model_tokens = max_model_tokens_of(engine, facts)
        model = load_foreign(path, facts, dtype, device, max_model_tokens)
        groups = groups_of(model.kinds)
        size = sum(group.shape.block_bytes(engine.block_size, dtype) for group in groups)
        num_blocks = num_blocks_of(engine, size, max_model_tokens, device)
        pools = Pools(groups, num_blocks, engine.block_size, dtype, device)
        attention = (
            Kept(model.kinds, groups, pools)
            if model.attends_itself
            else GroupedAttention(model.kinds, groups, pools, lambda group, cache: _backend(engine, group, cache))
        )
        return cls(model, pools, attention, min(max_model_tokens, num_blocks * engine.block_size))

    @property
    def attends_itself(self) -> bool:
        """See Foreign."""
        return self._foreign.attends_itself

    def load_adapter(self, adapter_id: str, source: str, max_bytes: int, digest: str = "") -> Adapter:
        """Raises AdapterError, always."""
        name = self._foreign.architecture.name
        raise AdapterError(
            f"adapter {adapter_id}: {name} is served by way of transformers, which adapters do not reach"
        )

    @torch.inference_mode()
    def _compute(self, spans: Sequence[Span], laid: Laid, sampled_before: Tensor | None) -> Tensor:
        inputs, plan = planned(laid, self.attention, self._foreign.device, sampled_before)
        return self._foreign.forward(inputs.token_ids, inputs.positions, inputs.rows, plan)


def _backend(engine: settings.Engine, group: Group, cache: KVCache) -> Backend:
    """The fastest that serves such layers."""
    scores, device = group.scores, cache.keys[0].device
    if engine.attention == "reference":
        return ReferenceAttention(cache, scores)
    if any(window < 0 for window in scores.windows):
        return GatheredAttention(cache, scores)
    if device.type != "cpu":
        if engine.attention == "auto" and has_triton(device):
            from worker.attention.paged import TritonAttention

            if TritonAttention.serves(cache, group.num_heads):
                return TritonAttention(cache, scores, group.num_heads)
        return GatheredAttention(cache, scores)
    kernels = kernels_of(engine, device)
    if kernels is None or not NativeAttention.serves(cache):
        return SegmentAttention(cache, scores)
    return NativeAttention(cache, scores, kernels, group.num_heads)
