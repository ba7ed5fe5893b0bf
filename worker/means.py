"""What computes a decoder's attention, small operations and whole steps: compiled where it serves, torch elsewhere."""

from __future__ import annotations

import torch

from policies import settings
from worker.attention import (
    Backend,
    Fixing,
    FixingWindows,
    GatheredAttention,
    NativeAttention,
    ReferenceAttention,
    RepeatableAttention,
    Scores,
    SegmentAttention,
    TwoPools,
    WindowedAttention,
)
from worker.kv_cache import KVCache
from worker.models import Decoder, NativeOps, Ops, RepeatableOps, TorchOps, Whole
from worker.native import Library, library
from worker.triton import has_triton


def kernels_of(engine: settings.Engine, device: torch.device) -> Library | None:
    """The compiled kernels, where a model on this device computes by them; None: torch computes."""
    return library() if device.type == "cpu" and engine.attention == "auto" else None


def means_of(
    engine: settings.Engine, model: Decoder, cache: KVCache | TwoPools, kernels: Library | None
) -> tuple[Backend, Ops]:
    """Attention, of each pool its own, and small operations, as ``engine`` asks and ``cache`` can be read; ``kernels``
    as ``kernels_of`` says."""
    architecture = model.architecture
    sinks = tuple(layer.sinks for layer in model.layers if layer.sinks is not None)
    scores = Scores(architecture.attention_scale, architecture.windows, architecture.attention_softcap, sinks)
    if not isinstance(cache, TwoPools):
        return _means_with(engine, model, cache, scores, kernels)
    pairs = zip(cache.caches, cache.layers, strict=True)
    (full, ops), (windowed, _) = (
        _means_with(engine, model, pool, scores.of(layers), kernels) for pool, layers in pairs
    )
    if isinstance(full, Fixing) and isinstance(windowed, Fixing):
        return FixingWindows(full, windowed, cache, engine.deterministic), ops
    return WindowedAttention(full, windowed, cache, engine.deterministic), ops


def _means_with(
    engine: settings.Engine, model: Decoder, cache: KVCache, scores: Scores, kernels: Library | None
) -> tuple[Backend, Ops]:
    """Attention and small operations: the compiled ones where they serve, torch's elsewhere and for comparison."""
    architecture = model.architecture
    if engine.deterministic:
        return _repeatable_means(model, cache, scores, kernels)
    if engine.attention == "reference":
        return ReferenceAttention(cache, scores), TorchOps()
    if model.device.type != "cpu":
        if engine.attention == "auto" and has_triton(model.device):
            from worker.attention.paged import TritonAttention
            from worker.models.triton_ops import TritonOps

            if TritonAttention.serves(cache, architecture.num_heads, model.dtype):
                return TritonAttention(cache, scores, architecture.num_heads, dtype=model.dtype), TritonOps()
            return GatheredAttention(cache, scores), TritonOps()
        return GatheredAttention(cache, scores), TorchOps()
    if kernels is None:
        return SegmentAttention(cache, scores), TorchOps()
    attends, operates = NativeAttention.serves(cache, model.dtype), NativeOps.serves(architecture, model.dtype)
    return (
        NativeAttention(cache, scores, kernels, architecture.num_heads) if attends else SegmentAttention(cache, scores),
        NativeOps(kernels) if operates else TorchOps(),
    )


def _repeatable_means(model: Decoder, cache: KVCache, scores: Scores, kernels: Library | None) -> tuple[Backend, Ops]:
    """Those with which a row gets the same bits in any company."""
    num_heads = model.architecture.num_heads
    if model.device.type != "cpu":
        from worker.attention.paged import TritonAttention
        from worker.models.triton_ops import TritonOps

        if TritonAttention.serves(cache, num_heads, model.dtype):
            return TritonAttention(cache, scores, num_heads, is_repeatable=True, dtype=model.dtype), TritonOps()
        return RepeatableAttention(cache, scores), TritonOps()
    attends = kernels is not None and NativeAttention.serves(cache, model.dtype)
    operates = kernels is not None and NativeOps.serves(model.architecture, model.dtype)
    return (
        NativeAttention(cache, scores, kernels, num_heads, is_repeatable=True)
        if kernels is not None and attends
        else RepeatableAttention(cache, scores),
        NativeOps(kernels) if kernels is not None and operates else RepeatableOps(),
    )


def whole_of(model: Decoder, cache: KVCache | TwoPools, kernels: Library | None) -> Whole | None:
    """What computes a step in one native call; None where these kernels do not serve such a model or cache."""
    pool = cache.caches[0] if isinstance(cache, TwoPools) else cache
    if kernels is None or not NativeAttention.serves(pool, model.dtype) or not Whole.serves(model, kernels):
        return None
    return Whole(model, cache, kernels)
