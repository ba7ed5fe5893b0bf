"""Latent attention by our own decoder: what it keeps, what chooses its experts, and what does not go with it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from policies import settings
from tests.worker.quantised_files import METHODS, rewrite, write
from tests.worker.test_models import LATENT
from tests.worker.tiny import BLOCK_SIZE, VOCAB_SIZE, Walk, checkpoint, oracle_logits
from worker.kv_cache import KVShape
from worker.loading import load_model
from worker.models import Layout, ModelError, Shard, load_decoder, read_architecture
from worker.runner import Runner

PROMPT = [random.Random(place).randrange(VOCAB_SIZE - 1) for place in range(40)]


def load(directory: Any, **changes: Any) -> Runner:
    fields = {"dtype": "float32", "max_kv_bytes": 4 << 20, "block_size": BLOCK_SIZE, **changes}
    return Runner.load(str(directory), settings.Engine(device="cpu", num_threads=1, **fields))


def logits_of(runner: Runner) -> torch.Tensor:
    return torch.stack(Walk(runner, [PROMPT], 1, random.Random(1)).logits[0])


def test_a_token_leaves_one_vector_a_layer_which_is_kept_once(tmp_path):
    checkpoint(tmp_path, "DeepseekV3ForCausalLM", **LATENT)
    cache = load(tmp_path).cache
    assert cache.keys[0].shape == (1, cache.num_blocks * BLOCK_SIZE, 16 + 8)
    assert [keys.data_ptr() for keys in cache.keys] == [values.data_ptr() for values in cache.values]
    assert KVShape(3, 1, 24, is_shared=True).block_bytes(BLOCK_SIZE, torch.float32) == 3 * BLOCK_SIZE * 24 * 4


def test_the_bias_beside_the_router_chooses_experts_and_is_not_rounded(tmp_path):
    oracle = checkpoint(tmp_path, "DeepseekV3ForCausalLM", **{**LATENT, "n_group": 4, "topk_group": 2})
    without = logits_of(load(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    torch.manual_seed(3)
    for name, bias in oracle.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.copy_(100 + torch.rand(8))  # which bfloat16 cannot tell apart
            tensors[name] = bias.clone()
    save_file(tensors, tmp_path / "model.safetensors")
    expected = oracle_logits(oracle, PROMPT)
    torch.testing.assert_close(logits_of(load(tmp_path)), expected, atol=1e-4, rtol=0)
    assert (without - expected).abs().max() > 0.1
    chosen = load_model(str(tmp_path), settings.Engine(device="cpu", dtype="bfloat16")).layers[1].experts
    assert chosen is not None
    assert torch.equal(chosen.correction, oracle.model.layers[1].mlp.gate.e_score_correction_bias)


@pytest.mark.parametrize(
    ("changes", "most"), [({"dtype": "bfloat16"}, 0.12), ({"quantize": "int8"}, 0.25), ({"kv_dtype": "int8"}, 0.12)]
)
def test_a_rounded_model_says_nearly_what_it_says_in_full(tmp_path, changes, most):
    oracle = checkpoint(tmp_path, "DeepseekV3ForCausalLM", **{**LATENT, "hidden_size": 64, "kv_lora_rank": 24})
    expected = oracle_logits(oracle, PROMPT)
    off = (logits_of(load(tmp_path, **changes)) - expected).square().mean(1).sqrt() / expected.std(1)
    # A token near the border between two experts may get the other one.
    assert float(off.median()) < most


def test_a_checkpoint_in_fp8_by_blocks_means_what_transformers_reads(tmp_path):
    method = METHODS["fp8, by blocks of 128"]
    oracle = write(tmp_path, method, "DeepseekV3ForCausalLM", **LATENT)
    floats = ["mlp.experts", "mlp.shared_experts"]
    rewrite(tmp_path, quantization_config={**method.config, "modules_to_not_convert": floats})
    expected = oracle_logits(oracle, PROMPT)
    off = (logits_of(load(tmp_path, attention="reference")) - expected).square().mean(1).sqrt() / expected.std(1)
    assert float(off.median()) < 0.05


def test_stages_have_all_layers_the_dense_ones_too_and_every_number_is_counted(tmp_path):
    oracle = checkpoint(tmp_path, "DeepseekV3ForCausalLM", **{**LATENT, "num_hidden_layers": 4})
    architecture = read_architecture(tmp_path)
    assert architecture.num_parameters == sum(each.numel() for each in oracle.parameters() if each.dim() > 1)
    shards = [Shard.of(architecture, Layout(pipeline=4), rank) for rank in range(4)]
    assert sum(shard.num_parameters for shard in shards) == architecture.num_parameters
    dense = []
    for shard in shards:
        decoder = load_decoder(tmp_path, architecture, torch.float32, torch.device("cpu"), 64, shard=shard)
        dense += [layer.experts is None for layer in decoder.layers]
    assert dense == [False, False, False, True]  # rank 0 has the last layer


def test_layers_that_guess_ahead_are_not_needed(tmp_path):
    checkpoint(tmp_path, "DeepseekV3ForCausalLM", **LATENT)
    expected = logits_of(load(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    guessing = {"model.layers.3.eh_proj.weight": torch.zeros(32, 64), "model.layers.3.enorm.weight": torch.zeros(32)}
    save_file(tensors | guessing, tmp_path / "model.safetensors")
    rewrite(tmp_path, num_nextn_predict_layers=1)
    torch.testing.assert_close(logits_of(load(tmp_path)), expected)
    rewrite(tmp_path, num_nextn_predict_layers=0)
    with pytest.raises(
        ModelError, match=r"layers\.3\.eh_proj\.weight and 1 more, which this architecture does not use"
    ):
        load(tmp_path)


@pytest.mark.parametrize("family", ["DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"])
@pytest.mark.parametrize("attention", ["auto", "torch"])
def test_answers_that_repeat_to_the_bit_are_those_of_transformers(tmp_path, family, attention):
    oracle = checkpoint(tmp_path, family, **LATENT)
    logits = logits_of(load(tmp_path, attention=attention, deterministic=True))
    torch.testing.assert_close(logits, oracle_logits(oracle, PROMPT), atol=1e-4, rtol=0)


def test_groups_that_experts_do_not_fill_are_refused(tmp_path):
    checkpoint(tmp_path, "DeepseekV3ForCausalLM", **LATENT)
    rewrite(tmp_path, n_group=3)
    with pytest.raises(ModelError, match="impossible n_group: 3"):
        load(tmp_path)
