"""The forward pass: a model, its KV pool and its attention, on one device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from policies import settings
from policies.wire import Pooling
from worker import placement
from worker.adapters import Adapter, NativeAdditions, TorchAdditions, groups_of, read_adapter
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
from worker.budget import OutOfMemory
from worker.device import DeviceLost, is_lost, is_out_of_memory, refuse_unrepeatable
from worker.devices import device_of
from worker.graphs import StepGraphs
from worker.inputs import Laid, Span, lay_out, planned
from worker.kv_cache import KVCache, free_bytes
from worker.models import (
    Architecture,
    Decoder,
    Facts,
    Layout,
    Means,
    ModelError,
    NativeOps,
    Ops,
    RepeatableOps,
    Shard,
    TorchOps,
    Whole,
    bytes_per_parameter,
    is_encoder,
    is_native,
    load_decoder,
    packs_bfloat16,
    path_of,
    pooling_of,
    read_architecture,
)
from worker.models.additions import Additions
from worker.native import Library, library
from worker.room import kv_of, kv_type_of, max_model_tokens_of, mib
from worker.triton import has_triton
from worker.windows import Apart


class Runner:
    """One model on one device; not safe for two threads."""

    writes, scores, scores_prompts = True, False, True
    """Whether it continues texts, whether it has a head that scores them, and whether it says how likely a prompt's own
    tokens are."""
    takes_adapters = True

    def __init__(
        self,
        model: Decoder,
        cache: KVCache | TwoPools,
        attention: Backend,
        ops: Ops,
        max_model_tokens: int,
        graphs: StepGraphs | None = None,
        whole: Whole | None = None,
        kernels: Library | None = None,
        is_repeatable: bool = False,
    ) -> None:
        """``whole``: computes a step at once, where it can be; ``kernels``: that adapters may be packed for;
        ``is_repeatable``: a row gets the same bits in any company, and attention and operations are such."""
        self._model, self.cache, self.attention, self._ops = model, cache, attention, ops
        self._graphs, self.whole, self._kernels, self._is_repeatable = graphs, whole, kernels, is_repeatable
        self._found: tuple[Callable[[], Tensor | None], Tensor | None] = (lambda: None), None
        self.max_model_tokens = max_model_tokens
        self.num_blocks, self.block_size = cache.num_blocks, cache.block_size
        self.vocab_size = model.architecture.vocab_size
        self.pooling: Pooling | None = Pooling("last")
        """How its vectors are meant to be made; None: it gives none."""
        self.num_dimensions = getattr(model.architecture, "hidden_size", 0)
        """Of its vectors."""
        self.eos_token_ids = model.architecture.eos_token_ids
        windows = model.windows
        self.window = max(windows) if min(windows) > 0 else 0
        """See Scheduler."""
        two = cache if isinstance(cache, TwoPools) else None
        self.apart = Apart(two.num_windowed_blocks, two.window, two.companions.numpy()) if two else None
        self.device = str(model.device)
        self.overlaps = model.device.type == "cuda"
        """The device computes a step while the host plans the next one."""
        self.dtype = str(model.dtype).removeprefix("torch.")

    @classmethod
    def load(cls, source: str, engine: settings.Engine, replica: int = 0, may_part: bool = False) -> Runner:
        """From a directory in Hugging Face layout, a GGUF file, a hub id, or "demo". Raises ModelError, a sentence.

        ``replica``: on a CPU with several memory nodes, this process keeps to the one that is its turn; ``may_part``:
        the steps come from an Engine, and layers with windows may have a pool apart.
        """
        path = path_of(source)
        if is_encoder(path):
            from worker.encoder import EncoderRunner

            return EncoderRunner.load_from(path, engine, replica)
        if is_native(path):
            runner = cls.of(load_model(source, engine, replica), engine, may_part=may_part)
            runner.pooling = pooling_of(path, Pooling("last"))
            return runner
        from worker.foreign import ForeignRunner

        return ForeignRunner.load_from(path, engine, replica)

    @classmethod
    def of(
        cls,
        model: Decoder,
        engine: settings.Engine,
        num_blocks: int | None = None,
        num_windowed_blocks: int = 0,
        may_part: bool = False,
    ) -> Runner:
        """From a decoder in memory; ``num_blocks`` None sizes the pool, or both, from free memory. Raises
        ModelError."""
        max_model_tokens = max_model_tokens_of(engine, model.architecture)
        cache = kv_of(model, engine, num_blocks, num_windowed_blocks, may_part)
        attention, ops = _means(engine, model, cache)
        max_model_tokens = min(max_model_tokens, cache.num_blocks * engine.block_size)
        graphs = StepGraphs.of(engine, model, attention, ops, max_model_tokens)
        kernels = kernels_of(engine, model.device)
        whole, is_repeatable = _whole(engine, model, cache), engine.deterministic
        return cls(model, cache, attention, ops, max_model_tokens, graphs, whole, kernels, is_repeatable)

    def forward(self, spans: Sequence[Span], sampled_before: Tensor | None = None) -> Tensor:
        """One step over all spans: their keys and values are written, and the logits they ask for come back, in span
        order.

        ``sampled_before`` as for ``Laid.sent``. Returns [sum of num_logits, vocab_size] f32 on the device. Raises
        OutOfMemory, and DeviceLost where nothing can be computed any more.
        """
        try:
            return self._compute(spans, lay_out(spans, self.block_size), sampled_before)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                if is_lost(self._model.device):
                    raise DeviceLost(f"the device is lost: {error}") from error
                raise
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
        # Outside of the handler, whose traceback would keep the pass's tensors alive.
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()
        raise OutOfMemory(f"a step of {sum(len(span.token_ids) for span in spans)} tokens ran out of memory: {reason}")

    def _compute(self, spans: Sequence[Span], laid: Laid, sampled_before: Tensor | None) -> Tensor:
        additions = self._additions(spans, laid)
        logits = self._compute_at_once(laid, additions)
        return self._compute_one_by_one(laid, additions, sampled_before) if logits is None else logits

    def _compute_at_once(self, laid: Laid, additions: Additions | None) -> Tensor | None:
        """None where that is not possible."""
        whole, attention = self.whole, self.attention
        if whole is None or laid.num_hidden or not isinstance(attention, NativeAttention | WindowedAttention):
            return None
        if whole.adds_to_sums and additions and self._is_repeatable:
            # Where a neighbour wants hidden states it does not serve, and an adapter's row would have other bits.
            return None
        steps = attention.steps(laid.extents, laid.slots)
        if not steps:
            return None
        assert additions is None or isinstance(additions, NativeAdditions)
        logits, maxima = whole.forward(laid.token_ids, laid.positions, laid.rows, steps, additions)
        self._found = weakref.ref(logits), maxima
        return logits

    @torch.inference_mode()
    def _compute_one_by_one(self, laid: Laid, additions: Additions | None, sampled_before: Tensor | None) -> Tensor:
        num_hidden = laid.num_hidden
        logits = None if self._graphs is None or additions or num_hidden else self._graphs.run(laid, sampled_before)
        if logits is not None:
            return logits
        inputs, plan = planned(laid, self.attention, self._model.device, sampled_before)
        return self._model.forward(
            inputs.token_ids, inputs.positions, inputs.rows, plan, self._ops, additions, num_hidden
        )

    def take_hidden(self, spans: Sequence[Span]) -> Sequence[Tensor]:
        """Of each of these spans of the last step, which are all that wanted some: [num_hidden, hidden_size]."""
        hidden, self._model.pooled = self._model.pooled, None
        assert hidden is not None
        parts: Sequence[Tensor] = torch.split(hidden, [span.num_hidden for span in spans])
        return parts

    @torch.inference_mode()
    def logits_of(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size], as taken -> [n, vocab_size] f32."""
        return self._model.logits_of(hidden)

    def keep_hidden(self) -> Decoder:
        """What leaves Decoder.hidden behind from now on; so no step is computed by a graph."""
        self._model.keeps_hidden = True
        self._graphs = None
        return self._model

    def keep_up(self, spans: Sequence[Span], num_done: int) -> None:
        """See Decoder.keep_up."""
        num_tokens = sum(len(span.token_ids) for span in spans)
        self._model.keep_up(num_tokens, sum(span.num_logits for span in spans), num_done)

    def load_adapter(self, adapter_id: str, source: str, max_bytes: int, digest: str = "") -> Adapter:
        """From a directory in PEFT's layout; ``digest`` as for read_adapter. May run beside a step.

        Raises AdapterError.
        """
        model, directory = self._model, Path(source).expanduser()
        return read_adapter(
            adapter_id, directory, model.shard, model.dtype, model.device, max_bytes, digest, self._kernels
        )

    def _additions(self, spans: Sequence[Span], laid: Laid) -> Additions | None:
        if not any(span.adapter for span in spans):
            return None
        groups = [group for group in groups_of(spans) if not group[0].changes_nothing]
        if not groups:
            return None
        if self._is_repeatable:
            # Of one row at a time it does not matter how many have the same adapter.
            groups = [(adapter, [row]) for adapter, rows in groups for row in rows]
        if self._kernels is not None and groups[0][0].packed is not None:
            return NativeAdditions.of(groups, self._kernels, self._model.architecture)
        return TorchAdditions.of(groups, self._model.device, laid.rows)

    def maxima_of(self, logits: Tensor) -> Tensor | None:
        """The largest of each 32 (see Library.maxima), if these are the logits of the last step, and its head has found
        them on its way.
        """
        owner, maxima = self._found
        return maxima if owner() is logits else None

    @torch.inference_mode()
    def copy_block(self, source: int, target: int) -> None:
        """Keys and values of all layers."""
        self.cache.copy_block(source, target)


def load_model(
    source: str, engine: settings.Engine, replica: int = 0, layout: Layout | None = None, rank: int = 0
) -> Decoder:
    """One rank's part of a model, in its device's memory; see ``Runner.load``. Raises ModelError, one sentence."""
    layout = layout or Layout()
    path = path_of(source)
    architecture = read_architecture(path)
    shard = Shard.of(architecture, layout, rank)
    device = device_of(engine, layout, rank)
    refuse_unrepeatable(engine, device)
    num_nodes = placement.num_nodes()
    if device.type == "cpu":
        placement.keep_to_a_node(replica * layout.num_ranks + rank)
    set_num_threads(engine, -(-layout.num_ranks // num_nodes))
    dtype = dtype_of(engine, device, architecture)
    kv_type_of(engine, dtype, device)  # refused before anything is loaded
    max_model_tokens = max_model_tokens_of(engine, architecture)
    # On the CPU all ranks take of the same memory; one asks for them all, before the others have begun to load.
    asking = range(layout.num_ranks) if device.type == "cpu" and rank == 0 else (rank,)
    num_parameters = sum(Shard.of(architecture, layout, other).num_parameters for other in asking)
    refuse_too_large(source, num_parameters * bytes_per_parameter(path, architecture, dtype), dtype, device)
    means = Means(kernels_of(engine, device), engine.quantize_activations, engine.deterministic)
    return load_decoder(path, architecture, dtype, device, max_model_tokens, means, engine.quantize, shard)


def refuse_too_large(source: str, needed: float, dtype: torch.dtype, device: torch.device) -> None:
    """Raises ModelError where the device has not so many bytes left."""
    free = free_bytes(device)
    if needed > free:
        raise ModelError(
            f"the weights of {source} take {mib(needed)} MiB in {str(dtype).removeprefix('torch.')},"
            f" but {mib(free)} MiB of memory are free"
        )


def set_num_threads(engine: settings.Engine, num_sharing: int = 1) -> int:
    """Of torch, in this process: as configured, or its part of as many as there is room for."""
    num_threads = engine.num_threads or max(1, placement.num_threads() // num_sharing)
    torch.set_num_threads(num_threads)
    return num_threads


def dtype_of(engine: settings.Engine, device: torch.device, architecture: Architecture | Facts) -> torch.dtype:
    """As configured, or bfloat16 where the device multiplies it natively, else float16 (CUDA, a float16 checkpoint) or
    float32.
    """
    if engine.dtype != "auto":
        return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[engine.dtype]
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) >= (8, 0):
            return torch.bfloat16
        return torch.float16 if architecture.dtype == "float16" else torch.float32
    has_instructions = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if has_instructions and packs_bfloat16() else torch.float32


def kernels_of(engine: settings.Engine, device: torch.device) -> Library | None:
    return library() if device.type == "cpu" and engine.attention == "auto" else None


def _means(engine: settings.Engine, model: Decoder, cache: KVCache | TwoPools) -> tuple[Backend, Ops]:
    """Attention, of each pool its own, and small operations."""
    architecture = model.architecture
    sinks = tuple(layer.sinks for layer in model.layers if layer.sinks is not None)
    scores = Scores(architecture.attention_scale, architecture.windows, architecture.attention_softcap, sinks)
    if not isinstance(cache, TwoPools):
        return _means_of(engine, model, cache, scores)
    pairs = zip(cache.caches, cache.layers, strict=True)
    (full, ops), (windowed, _) = (_means_of(engine, model, pool, scores.of(layers)) for pool, layers in pairs)
    if isinstance(full, Fixing) and isinstance(windowed, Fixing):
        return FixingWindows(full, windowed, cache, engine.deterministic), ops
    return WindowedAttention(full, windowed, cache, engine.deterministic), ops


def _means_of(engine: settings.Engine, model: Decoder, cache: KVCache, scores: Scores) -> tuple[Backend, Ops]:
    """Attention and small operations: the compiled ones where they serve, torch's elsewhere and for comparison."""
    architecture = model.architecture
    if engine.deterministic:
        return _repeatable_means(engine, model, cache, scores)
    if engine.attention == "reference":
        return ReferenceAttention(cache, scores), TorchOps()
    if model.device.type != "cpu":
        if engine.attention == "auto" and has_triton(model.device):
            from worker.attention.paged import TritonAttention
            from worker.models.triton_ops import TritonOps

            if TritonAttention.serves(cache, architecture.num_heads):
                return TritonAttention(cache, scores, architecture.num_heads), TritonOps()
            return GatheredAttention(cache, scores), TritonOps()
        return GatheredAttention(cache, scores), TorchOps()
    kernels = kernels_of(engine, model.device)
    if kernels is None:
        return SegmentAttention(cache, scores), TorchOps()
    attends, operates = NativeAttention.serves(cache, model.dtype), NativeOps.serves(architecture, model.dtype)
    return (
        NativeAttention(cache, scores, kernels, architecture.num_heads) if attends else SegmentAttention(cache, scores),
        NativeOps(kernels) if operates else TorchOps(),
    )


def _repeatable_means(engine: settings.Engine, model: Decoder, cache: KVCache, scores: Scores) -> tuple[Backend, Ops]:
    """Those with which a row gets the same bits in any company."""
    num_heads = model.architecture.num_heads
    if model.device.type != "cpu":
        from worker.attention.paged import TritonAttention
        from worker.models.triton_ops import TritonOps

        if TritonAttention.serves(cache, num_heads):
            return TritonAttention(cache, scores, num_heads, is_repeatable=True), TritonOps()
        return RepeatableAttention(cache, scores), TritonOps()
    kernels = kernels_of(engine, model.device)
    attends = kernels is not None and NativeAttention.serves(cache, model.dtype)
    operates = kernels is not None and NativeOps.serves(model.architecture, model.dtype)
    return (
        NativeAttention(cache, scores, kernels, num_heads, is_repeatable=True)
        if kernels is not None and attends
        else RepeatableAttention(cache, scores),
        NativeOps(kernels) if kernels is not None and operates else RepeatableOps(),
    )


def _whole(engine: settings.Engine, model: Decoder, cache: KVCache | TwoPools) -> Whole | None:
    kernels = kernels_of(engine, model.device)
    pool = cache.caches[0] if isinstance(cache, TwoPools) else cache
    if kernels is None or not NativeAttention.serves(pool, model.dtype) or not Whole.serves(model, kernels):
        return None
    return Whole(model, cache, kernels)
