"""Our decoder says what transformers says, for every family, however a sequence is cut and whoever is beside it."""

from __future__ import annotations

import torch

from policies import settings
from tests.worker.tiny import checkpoint, oracle_logits
from worker.inputs import Span
from worker.runner import Runner

PLAIN = settings.Engine(dtype="float32", block_size=8, max_kv_bytes=8 << 20, attention="reference")


def test_a_llama_in_two_chunks_matches_transformers(tmp_path):
    model = checkpoint(tmp_path, "LlamaForCausalLM")
    runner = Runner.load(str(tmp_path), PLAIN)
    token_ids = torch.randint(0, 97, (40,)).tolist()
    block_ids = [7, 2, 5, 11, 3]
    first = runner.forward([Span(token_ids[:17], 0, block_ids, 17)])
    second = runner.forward([Span(token_ids[17:], 17, block_ids, 23)])
    torch.testing.assert_close(torch.cat((first, second)), oracle_logits(model, token_ids), atol=1e-4, rtol=0)
