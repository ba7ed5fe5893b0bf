"""Mixtures of experts by our own decoder: rounded, on several ranks, and where it must leave them to transformers."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from policies import settings
from tests.worker.quantised_files import write_mxfp4
from tests.worker.test_models import LATENT
from tests.worker.tiny import BLOCK_SIZE, VOCAB_SIZE, Walk, checkpoint, oracle_logits
from worker.foreign import ForeignRunner
from worker.loading import load_model
from worker.models import Layout, ModelError
from worker.models.importers import importer_of
from worker.models.shard import Part
from worker.models.sources import CheckpointSource
from worker.models.weights import Checkpoint
from worker.runner import Runner

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
GPT_OSS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9}
QWEN: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def load(directory: Any, **changes: Any) -> Runner:
    fields = {"dtype": "float32", "max_kv_bytes": 4 << 20, "block_size": BLOCK_SIZE, **changes}
    return Runner.load(str(directory), settings.Engine(device="cpu", num_threads=1, **fields))


def logits_of(runner: Runner, prompt: list[int]) -> torch.Tensor:
    return torch.stack(Walk(runner, [prompt], 1, random.Random(1)).logits[0])


@pytest.mark.parametrize(
    ("changes", "most"),
    [({"dtype": "bfloat16"}, 0.12), ({"quantize": "int8"}, 0.25), ({"dtype": "bfloat16", "quantize": "int8"}, 0.25)],
)
@pytest.mark.parametrize("family", ["MixtralForCausalLM", "GptOssForCausalLM"])
def test_rounded_experts_say_nearly_what_they_say_in_full(tmp_path, family, changes, most):
    oracle = checkpoint(tmp_path, family, **SIZES, **GPT_OSS)
    prompt = [random.Random(place).randrange(VOCAB_SIZE) for place in range(40)]
    expected = oracle_logits(oracle, prompt)
    off = (logits_of(load(tmp_path, **changes), prompt) - expected).square().mean(1).sqrt() / expected.std(1)
    # A token near the border between two experts may get the other one.
    assert float(off.median()) < most


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("Qwen3MoeForCausalLM", {**QWEN, "mlp_only_layers": [1]}),
        ("OlmoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 0.5}),
        ("GptOssForCausalLM", {**GPT_OSS, "swiglu_limit": 5.0}),
    ],
)
def test_a_mixture_that_is_not_one_in_every_layer_or_clamps_otherwise_is_left_to_transformers(
    tmp_path, architecture, changes
):
    oracle = checkpoint(tmp_path, architecture, **{**SIZES, **changes})
    runner = load(tmp_path)
    assert isinstance(runner, ForeignRunner)
    prompt = [random.Random(place).randrange(VOCAB_SIZE) for place in range(20)]
    torch.testing.assert_close(logits_of(runner, prompt), oracle_logits(oracle, prompt), atol=1e-4, rtol=0)


def test_more_experts_for_a_token_than_there_are_is_refused(tmp_path):
    checkpoint(tmp_path, "MixtralForCausalLM", **SIZES, num_local_experts=4)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"num_experts_per_tok": 2', '"num_experts_per_tok": 9'))
    with pytest.raises(ModelError, match="impossible num_experts_per_tok: 9"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"n_group": 8, "topk_group": 4}, "impossible n_group: 8"),
        ({"n_group": 4, "topk_group": 1, "num_experts_per_tok": 3}, "impossible topk_group: 1"),
    ],
)
def test_groups_that_have_too_few_experts_are_refused(tmp_path, changes, reason):
    """A group is ranked by its best two, and a token's experts are of the groups that it may choose from."""
    checkpoint(tmp_path, "DeepseekV3ForCausalLM", **LATENT)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    with pytest.raises(ModelError, match=reason):
        load(tmp_path)


def test_experts_whose_scores_all_vanish_say_nothing(tmp_path):
    """They are chosen by their corrections, and weigh as nothing: 0 / 0 is no number."""
    oracle = checkpoint(tmp_path, "DeepseekV3ForCausalLM", **LATENT)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("mlp.gate.weight", "e_score_correction_bias"))]:
        tensors[name] = 200 * tensors[name] if name.endswith("weight") else 9 * torch.eye(8)[:2].sum(0)
        (oracle.get_buffer if name.endswith("bias") else oracle.get_parameter)(name).data.copy_(tensors[name])
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    prompt = [random.Random(place).randrange(VOCAB_SIZE) for place in range(20)]
    torch.testing.assert_close(logits_of(load(tmp_path), prompt), oracle_logits(oracle, prompt), atol=1e-4, rtol=0)


def test_experts_in_mxfp4_are_read_as_transformers_reads_them(tmp_path):
    oracle = write_mxfp4(tmp_path, **SIZES)
    prompt = [random.Random(place).randrange(VOCAB_SIZE) for place in range(30)]
    torch.testing.assert_close(logits_of(load(tmp_path), prompt), oracle_logits(oracle, prompt), atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    ("matrix", "shape", "part"),
    [
        ("gate_up_proj", (4, 64, 192), Part((range(4),), range(32, 80), 2)),
        ("down_proj", (4, 96, 64), Part((range(4),), range(32, 64))),
    ],
)
def test_a_rank_reads_no_more_of_experts_in_mxfp4_than_its_part(tmp_path, matrix, shape, part):
    write_mxfp4(tmp_path, **SIZES)

    def read(part):
        with Checkpoint(tmp_path) as files:
            source = CheckpointSource(files, "model.", torch.float32, torch.device("cpu"), importer)
            return source.tensor(f"layers.1.mlp.experts.{matrix}", shape, part), files.num_bytes_taken

    importer = importer_of(tmp_path)
    (whole, num_bytes), (own, num_own_bytes) = read(None), read(part)
    assert torch.equal(own, whole.narrow(part.dim, part.columns.start, len(part.columns)))
    assert num_own_bytes / num_bytes == len(part.columns) / shape[part.dim]


def test_a_group_of_mxfp4_that_ranks_would_share_is_refused(tmp_path):
    write_mxfp4(tmp_path, **SIZES)
    reason = r"layers\.0\.mlp\.experts\.down_proj cannot be shared among 2 ranks: columns 48 to 96 cut a group of 32"
    with pytest.raises(ModelError, match=reason):
        load_model(str(tmp_path), settings.Engine(device="cpu"), Layout(2), 1)
