"""Our engine, as a worker sets it up, less its socket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import talk

from worker.process import prepare

prepare()

FORMS = {"bf16": {}, "int8": {"quantize": "int8"}, "int4": {"quantize": "int4"}}


class Penstock:
    def prepare(self, checkpoint: Path, made: Path, form: str) -> None:
        if form not in FORMS:
            raise ValueError(f"no form {form}")

    def load(self, checkpoint: Path, made: Path, form: str, facts: dict[str, Any]) -> dict[str, Any]:
        import torch

        from policies import settings
        from policies.terms import Sampling
        from worker.bench.ours import Ours
        from worker.native import build
        from worker.runner import Runner

        kept = {}
        if facts.get("keeps_to_avx2"):
            build.FLAGS = tuple("-march=x86-64-v3" if flag == "-march=native" else flag for flag in build.FLAGS)
            kept["dtype"] = "float32"  # as such a processor computes by itself
        engine = settings.Engine(
            num_threads=facts["num_threads"],
            max_model_tokens=facts["input_tokens"] + facts["output_tokens"],
            max_sequences=facts["max_sequences"],
            max_kv_bytes=1 << 30,
            **kept,
            **FORMS[form],
        )
        runner = Runner.load(str(checkpoint), engine)
        self._ours = Ours(runner, engine, Sampling(max_tokens=1, temperature=0.0, ignore_eos=True))
        return {"version": facts["commit"], "threads": torch.get_num_threads()}

    def run(self, prompts: talk.Prompts, num_output_tokens: int) -> list[list[int]]:
        self._ours.batch(prompts, num_output_tokens)
        return self._ours.written


if __name__ == "__main__":
    talk.serve(Penstock())
