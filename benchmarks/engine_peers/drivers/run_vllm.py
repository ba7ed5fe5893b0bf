"""vLLM's CPU build, in this process; its compiled graphs are kept in its own cache between starts.

int8 is W8A8, activations by token as they come: the checkpoint rewritten as compressed-tensors says, which leaves the
embedding and the head in bfloat16.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import talk


class VLLM:
    def prepare(self, checkpoint: Path, made: Path, form: str) -> None:
        if form == "int8" and not (made / "config.json").exists():
            write_int8(checkpoint, made)

    def load(self, checkpoint: Path, made: Path, form: str, facts: dict[str, Any]) -> dict[str, Any]:
        # Read when vLLM is imported. Left to itself it takes all cores, and is faster than told to take them.
        cpus = sorted(os.sched_getaffinity(0))
        if facts["num_threads"] < len(cpus):
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cpus[: facts["num_threads"]]))
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        os.environ["HF_HUB_OFFLINE"] = "1"
        import torch
        import vllm

        self._vllm = vllm
        self._engine = vllm.LLM(
            model=str(made if form == "int8" else checkpoint),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=facts["input_tokens"] + facts["output_tokens"],
            max_num_seqs=facts["max_sequences"],
        )
        said = {"version": vllm.__version__, "threads": torch.get_num_threads()}
        if form == "int8":
            said["weight_bytes"] = (made / "model.safetensors").stat().st_size
        return said

    def run(self, prompts: talk.Prompts, num_output_tokens: int) -> list[list[int]]:
        sampling = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=num_output_tokens, ignore_eos=True, detokenize=False
        )
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        done = self._engine.generate(given, sampling, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in done]


def write_int8(checkpoint: Path, made: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = {}
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            rows = tensor.float()
            scales = rows.abs().amax(dim=1, keepdim=True) / 127
            tensors[name] = (rows / scales).round().char()
            tensors[f"{name}_scale"] = scales.to(tensor.dtype)
        else:
            tensors[name] = tensor
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    values = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**values, "strategy": "channel", "dynamic": False},
        "input_activations": {**values, "strategy": "token", "dynamic": True},
    }
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    (made / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    talk.serve(VLLM())
