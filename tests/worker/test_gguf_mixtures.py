"""The experts of a GGUF file: side by side in one tensor, or each in one of its own, whole and on several ranks."""

from __future__ import annotations

import pytest
import torch

from tests.worker import gguf_files
from tests.worker.peer import WorkerProcess
from tests.worker.test_gguf import MODELS, TOKEN_IDS, logits_of
from tests.worker.tiny import oracle_logits


@pytest.mark.parametrize(
    ("name", "kind", "are_apart"),
    [
        ("mixtral", "F32", True),
        ("mixtral", "Q4_0", False),
        ("mixtral", "Q4_K", True),
        ("qwen3moe", "BF16", False),
        ("qwen3moe", "Q4_K", False),
        ("qwen3moe", "Q4_1", True),
    ],
)
def test_experts_are_read_without_a_loss_side_by_side_and_apart(tmp_path, name, kind, are_apart):
    architecture, changes = MODELS[name]
    if kind == "Q4_K" and name == "qwen3moe":
        changes = {**changes, "moe_intermediate_size": 256}
    model = gguf_files.a_model(architecture, **changes)
    gguf_files.write(tmp_path / "model.gguf", architecture, model, {"": "F32", "experts": kind}, None, None, are_apart)
    torch.testing.assert_close(logits_of(tmp_path / "model.gguf"), oracle_logits(model, TOKEN_IDS), atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", ["mixtral", "qwen3moe"])
def test_ranks_share_the_experts_of_a_file(tmp_path, name):
    architecture, changes = MODELS[name]
    path = tmp_path / "model.gguf"
    gguf_files.write(path, architecture, gguf_files.a_model(architecture, **changes), {"": "F32", "experts": "Q4_0"})
    told = []
    for ranks in ({}, {"tensor_parallel": 2}, {"pipeline_parallel": 2}):
        with WorkerProcess(path, **ranks) as worker, worker.connect() as gateway:
            gateway.submit("a", TOKEN_IDS, 12)
            told.append(gateway.finish("a"))
    assert told[0] == told[1] == told[2]
