"""Mixtures of experts by our own decoder: rounded, on several ranks, and where it must leave them to transformers."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from policies import settings
from tests.worker.tiny import BLOCK_SIZE, VOCAB_SIZE, Walk, checkpoint, oracle_logits
from worker.foreign import ForeignRunner
from worker.models import Layout, ModelError, Shard, read_architecture
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


def test_experts_are_not_cut_for_ranks(tmp_path):
    checkpoint(tmp_path, "Qwen3MoeForCausalLM", **SIZES, **QWEN)
    architecture = read_architecture(tmp_path)
    with pytest.raises(ModelError, match="the experts of this Qwen3MoeForCausalLM are not shared among ranks"):
        Shard.of(architecture, Layout(tensor=2, pipeline=1), 0)
    parts = [Shard.of(architecture, Layout(tensor=1, pipeline=3), rank) for rank in range(3)]
    assert sum(part.num_parameters for part in parts) == architecture.num_parameters


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


def test_experts_in_mxfp4_are_read_as_transformers_reads_them(tmp_path):
    oracle = checkpoint(tmp_path, "GptOssForCausalLM", **SIZES, **GPT_OSS)
    packed = load_file(tmp_path / "model.safetensors")
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                continue
            num_experts, num_inputs, num_outputs = packed.pop(name).shape
            groups = (num_experts, num_outputs, num_inputs // 32)
            blocks = torch.randint(256, (*groups, 16), dtype=torch.uint8)
            scales = torch.randint(121, 127, groups, dtype=torch.uint8)
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            parameter.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    save_file(packed, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    prompt = [random.Random(place).randrange(VOCAB_SIZE) for place in range(30)]
    torch.testing.assert_close(logits_of(load(tmp_path), prompt), oracle_logits(oracle, prompt), atol=2e-4, rtol=0)
