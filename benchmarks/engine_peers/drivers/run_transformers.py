"""transformers: a static batch of `generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import talk
import torch
import transformers


class Transformers:
    def prepare(self, checkpoint: Path, made: Path, form: str) -> None:
        if form != "bf16":
            raise ValueError(f"no form {form}")

    def load(self, checkpoint: Path, made: Path, form: str, facts: dict[str, Any]) -> dict[str, Any]:
        torch.set_num_threads(facts["num_threads"])
        transformers.logging.set_verbosity_error()
        self._model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
        self._model.generation_config.eos_token_id = None
        return {"version": transformers.__version__}

    def run(self, prompts: talk.Prompts, num_output_tokens: int) -> list[list[int]]:
        input_ids = torch.tensor(prompts)
        config = transformers.GenerationConfig(
            max_new_tokens=num_output_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        output = self._model.generate(input_ids, attention_mask=torch.ones_like(input_ids), generation_config=config)
        return output[:, input_ids.shape[1] :].tolist()


if __name__ == "__main__":
    talk.serve(Transformers())
