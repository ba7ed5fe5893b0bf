"""openvino-genai: its continuous batching, over what optimum-intel makes of the checkpoint (bf16, or int8 weights)."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import talk


class OpenVINO:
    def prepare(self, checkpoint: Path, made: Path, form: str) -> None:
        if (made / "openvino_model.xml").exists():
            return
        # Its own command, as its users make it; quantising is a part of the command, not of the library below.
        command = [
            str(Path(sys.executable).with_name("optimum-cli")),
            "export",
            "openvino",
            "--disable-convert-tokenizer",
        ]
        command += ["--model", str(checkpoint), "--task", "text-generation-with-past"]
        command += [] if form == "bf16" else ["--weight-format", form]
        subprocess.run([*command, str(made)], check=True)

    def load(self, checkpoint: Path, made: Path, form: str, facts: dict[str, Any]) -> dict[str, Any]:
        import openvino
        import openvino_genai

        self._genai, self._tensor = openvino_genai, openvino.Tensor
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 1
        scheduler.max_num_seqs = facts["max_sequences"]
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(made), scheduler, "CPU", {"INFERENCE_NUM_THREADS": facts["num_threads"]}
        )
        return {
            "version": ".".join(version("openvino-genai").split(".")[:3]),
            "weight_bytes": (made / "openvino_model.bin").stat().st_size,
        }

    def run(self, prompts: talk.Prompts, num_output_tokens: int) -> list[list[int]]:
        config = self._genai.GenerationConfig(
            max_new_tokens=num_output_tokens, do_sample=False, ignore_eos=True, eos_token_id=2
        )
        given = [self._tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        done = self._pipeline.generate(given, [config] * len(given))
        return [list(each.m_generation_ids[0]) for each in done]


if __name__ == "__main__":
    talk.serve(OpenVINO())
