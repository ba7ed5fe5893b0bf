"""vLLM's CPU build, in this process; its compiled graphs are kept in its own cache between starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import talk


class VLLM:
    def prepare(self, checkpoint: Path, made: Path, form: str) -> None:
        if form != "bf16":
            raise ValueError(f"no form {form}")

    def load(self, checkpoint: Path, made: Path, form: str, facts: dict[str, Any]) -> dict[str, Any]:
        # Read when vLLM is imported. Its default would leave a core to a server that there is none of here.
        cpus = sorted(os.sched_getaffinity(0))[: facts["num_threads"]]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cpus))
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        os.environ["HF_HUB_OFFLINE"] = "1"
        import torch
        import vllm

        self._vllm = vllm
        self._engine = vllm.LLM(
            model=str(checkpoint),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=facts["input_tokens"] + facts["output_tokens"],
            max_num_seqs=facts["max_sequences"],
        )
        return {"version": vllm.__version__, "threads": torch.get_num_threads()}

    def run(self, prompts: talk.Prompts, num_output_tokens: int) -> list[list[int]]:
        sampling = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=num_output_tokens, ignore_eos=True, detokenize=False
        )
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        done = self._engine.generate(given, sampling, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in done]


if __name__ == "__main__":
    talk.serve(VLLM())
