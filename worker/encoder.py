"""The runner of an encoder: whole texts in one step each, nothing kept from one step to the next."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from policies import settings
from policies.devices import ALONE, Turn
from policies.wire import Pooling
from worker.adapters import Adapter, AdapterError
from worker.inputs import Laid, Span
from worker.loading import refuse_files_too_large, settle
from worker.models import Encoder, ModelError, TorchOps, load_encoder, pooling_of, read_encoder
from worker.room import max_model_tokens_of
from worker.runner import Runner


class EncoderRunner(Runner):
    """A Runner that has no KV: the blocks that its sequences hold stand for places in a step."""

    writes = scores_prompts = takes_adapters = False

    def __init__(self, encoder: Encoder, pooling: Pooling | None, engine: settings.Engine) -> None:
        max_model_tokens = max_model_tokens_of(engine, encoder.architecture)
        num_blocks = engine.max_sequences * -(-max_model_tokens // engine.block_size)
        blocks = SimpleNamespace(num_blocks=num_blocks, block_size=engine.block_size)
        model = SimpleNamespace(
            architecture=encoder.architecture, windows=(0,), dtype=encoder.dtype, device=encoder.device
        )
        # What the base does with these, it does through what they have in common with its own.
        alike: tuple[Any, Any, Any] = model, blocks, None
        super().__init__(*alike, TorchOps(), max_model_tokens)
        self._encoder = encoder
        self._hidden: list[Tensor] = []
        self.overlaps = False
        self.pooling, self.num_dimensions, self.scores = pooling, encoder.hidden_size, encoder.scores

    @classmethod
    def load_from(cls, path: Path, engine: settings.Engine, turn: Turn = ALONE) -> EncoderRunner:
        """From a directory. Raises ModelError, a sentence."""
        facts = read_encoder(path)
        for name, is_asked in (("quantize", engine.quantize != "none"), ("deterministic", engine.deterministic)):
            if is_asked:
                raise ModelError(f"{facts.name} is an encoder, which engine.{name} does not reach")
        device, dtype = settle(engine, facts, turn)
        refuse_files_too_large(path, facts, dtype, device)
        encoder = load_encoder(path, facts, dtype, device)
        return cls(encoder, pooling_of(path, Pooling("mean")), engine)

    def load_adapter(self, adapter_id: str, source: str, max_bytes: int, digest: str = "") -> Adapter:
        """Raises AdapterError, always."""
        raise AdapterError(f"adapter {adapter_id}: {self._encoder.architecture.name} is an encoder, which adapters"
                           " do not reach")  # fmt: skip

    def take_hidden(self, spans: Sequence[Span]) -> Sequence[Tensor]:
        """As ``Runner.take_hidden``; of a score, one row of one number."""
        hidden, self._hidden = self._hidden, []
        return hidden

    def copy_block(self, source: int, target: int) -> None:
        """There is nothing in them."""

    @torch.inference_mode()
    def _compute(self, spans: Sequence[Span], laid: Laid, sampled_before: Tensor | None) -> Tensor:
        texts = [span.token_ids for span in spans]
        seconds_at = [span.pooling.second_at if span.pooling else 0 for span in spans]
        scored = [span.pooling is not None and span.pooling.kind == "score" for span in spans]
        found: dict[int, Tensor] = {}
        for is_scored, compute in ((False, self._encoder.hidden), (True, self._encoder.score)):
            places = [place for place, each in enumerate(scored) if each is is_scored]
            if places:
                computed = compute([texts[place] for place in places], [seconds_at[place] for place in places])
                found.update(zip(places, computed, strict=True))
        self._hidden = [found[place][-span.num_hidden :] for place, span in enumerate(spans)]
        return torch.empty((0, self.vocab_size))
