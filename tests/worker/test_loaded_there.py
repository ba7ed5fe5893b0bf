"""Whatever a model is stored as, it is loaded onto a CUDA device whole, and says there what it says on the CPU."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from tests.worker import gguf_files
from tests.worker.pretended import There, pretended
from tests.worker.quantised_files import ENGINE, METHODS, TOKEN_IDS, write, write_mxfp4
from tests.worker.test_foreign import MODELS
from tests.worker.tiny import checkpoint
from worker.foreign import ForeignRunner
from worker.inputs import Span
from worker.runner import Runner

SPANS = [Span(TOKEN_IDS, 0, [4, 1, 2, 9], len(TOKEN_IDS))]
MIXED = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K", "": "Q4_K"}
"""As most files are that llama.cpp calls Q4_K_M: what is one matrix here is two kinds there."""


def assert_loaded_there(path: Path) -> Runner:
    with pretended():
        runner = Runner.load(str(path), msgspec.structs.replace(ENGINE, device="cuda"))
        logits = runner.forward(SPANS)
        assert isinstance(logits, There)
    torch.testing.assert_close(logits.here, Runner.load(str(path), ENGINE).forward(SPANS), atol=1e-4, rtol=1e-4)
    return runner


@pytest.mark.parametrize("kinds", [MIXED, {"attn_v": "Q8_0", "": "Q4_0"}], ids=["Q4_K_M", "Q4_0"])
def test_a_gguf_file(tmp_path, kinds):
    gguf_files.write(tmp_path / "model.gguf", "llama", gguf_files.a_model("llama"), kinds)
    assert_loaded_there(tmp_path / "model.gguf")


@pytest.mark.parametrize("kind", ["MXFP4", "Q8_0"])
def test_stacked_experts_of_a_gguf_file(tmp_path, kind):
    gguf_files.write_gpt_oss(tmp_path / "model.gguf", kind)
    assert_loaded_there(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    "name", ["gptq, by rank", "gptq in 8 bits by rank", "awq", "W8A8 asymmetric", "fp8, by blocks of 128"]
)
def test_a_quantised_checkpoint(tmp_path, name):
    write(tmp_path, METHODS[name])
    assert_loaded_there(tmp_path)


def test_experts_in_mxfp4(tmp_path):
    write_mxfp4(tmp_path, hidden_size=64, intermediate_size=96, head_dim=16)
    assert_loaded_there(tmp_path)


def test_a_model_of_transformers_whose_masks_have_numbers_there(tmp_path):
    architecture, changes = MODELS["llama 4, chunks"]
    checkpoint(tmp_path, architecture, **changes)
    runner = assert_loaded_there(tmp_path)
    assert isinstance(runner, ForeignRunner)
    assert not runner.attends_itself
