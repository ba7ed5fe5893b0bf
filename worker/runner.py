"""The forward pass: a model, its KV pool and its attention, on one device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from policies import settings
from policies.devices import ALONE, Turn
from policies.wire import Pooling
from worker.adapters import Adapter, NativeAdditions, TorchAdditions, groups_of, read_adapter
from worker.attention import (
    Backend,
    NativeAttention,
    TwoPools,
    WindowedAttention,
)
from worker.budget import OutOfMemory
from worker.device import DeviceLost, is_lost, is_out_of_memory
from worker.fresh_pages import FreshPages
from worker.graphs import StepGraphs
from worker.inputs import Laid, Span, lay_out, planned
from worker.kv_cache import KVCache
from worker.loading import load_model
from worker.means import kernels_of, means_of, whole_of
from worker.models import (
    Decoder,
    Ops,
    Whole,
    is_encoder,
    is_native,
    path_of,
    pooling_of,
)
from worker.models.additions import Additions
from worker.native import Library
from worker.room import kv_of, max_model_tokens_of
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
        self.graphs, self.whole, self._kernels, self._is_repeatable = graphs, whole, kernels, is_repeatable
        self._found: tuple[Callable[[], Tensor | None], Tensor | None] = (lambda: None), None
        self.fresh_pages: FreshPages | None = None
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
    def load(cls, source: str, engine: settings.Engine, turn: Turn = ALONE, may_part: bool = False) -> Runner:
        """From a directory in Hugging Face layout, a GGUF file, a hub id, or "demo". Raises ModelError, a sentence.

        ``turn``: this process's among those that compute on this machine, which says where it runs and on how many
        threads; ``may_part``: the steps come from an Engine, and layers with windows may have a pool apart.
        """
        path = path_of(source)
        if is_encoder(path):
            from worker.encoder import EncoderRunner

            return EncoderRunner.load_from(path, engine, turn)
        if is_native(path):
            runner = cls.of(load_model(source, engine, turn=turn), engine, may_part=may_part)
            runner.pooling = pooling_of(path, Pooling("last"))
            return runner
        from worker.foreign import ForeignRunner

        return ForeignRunner.load_from(path, engine, turn)

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
        kernels = kernels_of(engine, model.device)
        attention, ops = means_of(engine, model, cache, kernels)
        max_model_tokens = min(max_model_tokens, cache.num_blocks * engine.block_size)
        graphs = StepGraphs.of(engine, model, attention, ops, max_model_tokens)
        whole, is_repeatable = whole_of(model, cache, kernels), engine.deterministic
        return cls(model, cache, attention, ops, max_model_tokens, graphs, whole, kernels, is_repeatable)

    def forward(self, spans: Sequence[Span], sampled_before: Tensor | None = None) -> Tensor:
        """One step over all spans: their keys and values are written, and the logits they ask for come back, in span
        order.

        ``sampled_before`` as for ``Laid.sent``. Returns [sum of num_logits, vocab_size] f32 on the device. Raises
        OutOfMemory, and DeviceLost where nothing can be computed any more.
        """
        try:
            laid = lay_out(spans, self.block_size)
            if self.fresh_pages is not None:
                self.fresh_pages.reach(max(laid.slots) // self.block_size + 1)
            return self._compute(spans, laid, sampled_before)
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
        if additions is not None and not isinstance(additions, NativeAdditions):
            return None
        if whole.adds_to_sums and additions and self._is_repeatable:
            # Where a neighbour wants hidden states it does not serve, and an adapter's row would have other bits.
            return None
        steps = attention.steps(laid.extents, laid.slots)
        if not steps:
            return None
        logits, maxima = whole.forward(laid.token_ids, laid.positions, laid.rows, steps, additions)
        self._found = weakref.ref(logits), maxima
        return logits

    @torch.inference_mode()
    def _compute_one_by_one(self, laid: Laid, additions: Additions | None, sampled_before: Tensor | None) -> Tensor:
        num_hidden = laid.num_hidden
        logits = None if self.graphs is None or additions or num_hidden else self.graphs.run(laid, sampled_before)
        if logits is not None:
            return logits
        inputs, plan = planned(laid, self.attention, self._model.device, sampled_before)
        return self._model.forward(
            inputs.token_ids, inputs.positions, inputs.rows, plan, self._ops, additions, num_hidden
        )

    def have_pages_ready(self) -> None:
        """From the next step on, those of the pool that are written next, where it is the CPU's."""
        if isinstance(self.cache, KVCache | TwoPools) and self._model.device.type == "cpu":
            self.fresh_pages = FreshPages(self.cache.caches[0])

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
        self.graphs = None
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
