"""transformers' own continuous batching, with its model on the same device."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch

from benchmarks.engine_gpu.weights import transformers_model
from worker.models import Architecture


class ContinuousBatching:
    """Greedy; end tokens do not stop it; the manager is kept between calls. Raises ImportError."""

    def __init__(self, architecture: Architecture, device: torch.device) -> None:
        import transformers

        transformers.logging.set_verbosity_error()
        self._transformers = transformers
        self._model = transformers_model(architecture, device)
        # Left to itself it takes what the device has free; elsewhere than on a GPU it has to be told.
        told = {"page_size": 256, "num_blocks": 64, "max_batch_tokens": 2048}
        self._sizes: dict[str, Any] = {} if device.type == "cuda" else told
        self.version = str(transformers.__version__)

    def batch_s(self, prompts: list[list[int]], num_output_tokens: int) -> float:
        """Seconds for so many tokens of each."""
        began_at = perf_counter()
        outputs = self._model.generate_batch(
            prompts,
            generation_config=self._transformers.GenerationConfig(
                max_new_tokens=num_output_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
            ),
            continuous_batching_config=self._transformers.ContinuousBatchingConfig(**self._sizes),
            progress_bar=False,
            persistent_manager=True,
        )
        duration_s = perf_counter() - began_at
        num_tokens = sum(len(output.generated_tokens) for output in outputs.values())
        if num_tokens != len(prompts) * num_output_tokens:
            raise RuntimeError(f"generate_batch wrote {num_tokens} of {len(prompts) * num_output_tokens} tokens")
        return duration_s

    def end_manager(self) -> None:
        """The next call starts another one, sized for its own requests."""
        self._model.destroy_cached_continuous_batching_manager()

    def close(self) -> None:
        """Ends the thread behind it and gives its memory back."""
        self.end_manager()
        del self._model
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
