"""transformers as the peer: the same weights, the same prompts, the same number of tokens, in the same process."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from worker.bench import measures
from worker.bench.measures import Round, Timeline

Prompts = list[list[int]]


class PeerError(Exception):
    """The peer cannot be measured here; the message says why."""


@contextmanager
def _by_any_attention() -> Iterator[None]:
    """Whichever of torch's it would take if no worker were here, who goes without one: see device_of."""
    was_enabled = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_enabled)


class Transformers:
    """One model of transformers and its two ways to write several answers. Greedy; end tokens do not stop it."""

    def __init__(self, directory: Path, dtype: str, device: str, max_total_tokens: int) -> None:
        """``max_total_tokens``: of the largest batch, prompts and outputs; sizes the paged cache. Raises PeerError."""
        try:
            transformers: Any = importlib.import_module("transformers")
        except ImportError:
            raise PeerError("--peer needs transformers, which is not installed: pip install 'penstock[test]'") from None
        transformers.logging.set_verbosity_error()
        self._transformers = transformers
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
        self._model.to(device).eval()
        self._model.generation_config.eos_token_id = None
        self._num_blocks = 2 * -(-max_total_tokens // _PAGE) + 2
        self.version: str = transformers.__version__

    @_by_any_attention()
    def generate(self, prompts: Prompts, num_output_tokens: int) -> Round:
        """One static batch of prompts of equal length."""
        input_ids = torch.tensor(prompts, device=self._model.device)
        token_ats: list[float] = []

        def note(ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            token_ats.append(perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        began_at = perf_counter()
        output = self._model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            generation_config=self._config(num_output_tokens),
            stopping_criteria=[note],
        )
        duration_s = perf_counter() - began_at
        assert output.shape == (len(prompts), input_ids.shape[1] + num_output_tokens)
        timelines = [Timeline(began_at, token_ats) for _ in prompts]
        return measures.round_of(timelines, duration_s, len(prompts) * num_output_tokens)

    @_by_any_attention()
    def generate_batch(self, prompts: Prompts, num_output_tokens: int) -> Round:
        """Its continuous batching, the manager kept between rounds."""
        began_at = perf_counter()
        outputs = self._model.generate_batch(
            prompts,
            generation_config=self._config(num_output_tokens),
            continuous_batching_config=self._transformers.ContinuousBatchingConfig(
                page_size=_PAGE, num_blocks=self._num_blocks, max_batch_tokens=_MAX_BATCH_TOKENS
            ),
            progress_bar=False,
            persistent_manager=True,
        )
        duration_s = perf_counter() - began_at
        num_tokens = sum(len(output.generated_tokens) for output in outputs.values())
        if num_tokens != len(prompts) * num_output_tokens:
            raise PeerError(f"generate_batch wrote {num_tokens} of {len(prompts) * num_output_tokens} tokens")
        return measures.round_of([], duration_s, num_tokens)

    def close(self) -> None:
        """Ends the thread behind generate_batch."""
        self._model.destroy_cached_continuous_batching_manager()

    def _config(self, num_output_tokens: int) -> Any:
        return self._transformers.GenerationConfig(
            max_new_tokens=num_output_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )


_PAGE = 256
_MAX_BATCH_TOKENS = 8192
"""Its own default where it cannot size itself from a GPU's memory."""
