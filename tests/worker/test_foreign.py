"""What our decoder does not compute, transformers' own model computes on our KV, and says the same as it does alone."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import settings as config
from policies.settings import WorkerSettings
from tests.worker.test_models import LATENT
from tests.worker.tiny import BLOCK_SIZE, VOCAB_SIZE, Walk, checkpoint, oracle_logits
from worker.adapters import AdapterError
from worker.models import ModelError
from worker.parallel.runner import ParallelRunner
from worker.runner import Runner

LOOPS = {"n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1, "head_dim": 8, "sliding_window": 9}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt-neox": ("GPTNeoXForCausalLM", {}),
    "opt": ("OPTForCausalLM", {"ffn_dim": 48, "word_embed_proj_dim": 32, "num_hidden_layers": 2}),
    "phi": ("PhiForCausalLM", {}),
    "cohere2, windows": ("Cohere2ForCausalLM", {"sliding_window": 9, "head_dim": 16}),
    "gpt-oss, sinks and windows": (
        "GptOssForCausalLM",
        {"sliding_window": 9, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 6.0},
    ),
    "deepseek-v2, latent, biased": ("DeepseekV2ForCausalLM", {**LATENT, "mlp_bias": True}),
    "bloom, in turn": ("BloomForCausalLM", {"seq_length": 128}),
    "gpt-j": ("GPTJForCausalLM", {"rotary_dim": 4}),
    "dory, layers gone through twice": ("DoryForCausalLM", LOOPS),
    "doge, masks of its own, in turn": ("DogeForCausalLM", {}),
    "llama 4, chunks": (
        "Llama4ForCausalLM",
        {
            "attention_chunk_size": 8,
            "head_dim": 8,
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "floor_scale": 16,
            "no_rope_layers": [1, 1, 0],
        },
    ),
}


class Models:
    """Each model once, as transformers has it and as we load it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.oracle = cache(self._oracle)
        self.runner = cache(self._runner)

    def _oracle(self, name: str) -> Any:
        architecture, changes = MODELS[name]
        return checkpoint(self.directory / name, architecture, **changes)

    def _runner(self, name: str, attention: Literal["auto", "torch", "reference"]) -> Runner:
        self.oracle(name)
        return load(self.directory / name, attention=attention)


def load(directory: Path, **changes: Any) -> Runner:
    fields = {"max_model_tokens": 128, "max_kv_bytes": 8 << 20, **changes}
    engine = config.Engine(device="cpu", dtype="float32", num_threads=1, block_size=BLOCK_SIZE, **fields)
    return Runner.load(str(directory), engine)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("attention", ["reference", "torch", "auto"])
@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=4, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=4),
    num_new=st.integers(1, 6),
    seed=st.integers(0, 1 << 20),
)
def test_any_cut_and_any_company_gives_the_logits_of_transformers(models, name, attention, lengths, num_new, seed):
    chance = random.Random(seed)
    prompts = [[chance.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]
    walk = Walk(models.runner(name, attention), prompts, num_new, chance)
    for token_ids, logits in zip(walk.token_ids, walk.logits, strict=True):
        expected = oracle_logits(models.oracle(name), token_ids)
        # Layers that are gone through several times round as often.
        torch.testing.assert_close(torch.stack(logits), expected[:-1], atol=3e-4 if "twice" in name else 1e-4, rtol=0)


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "a state": ("MambaForCausalLM", {}, {}, r"its MambaModel \(backbone\) carries a state from token to token"),
    "an indexer": ("HYV4ForCausalLM", {"num_key_value_heads": 4}, {}, "it chooses what to attend to by an indexer"),
    "both directions": ("BertLMHeadModel", {}, {}, "its BertSelfAttention lets tokens see neither all"),
    "what depends on how a prompt is cut": (
        "DoryForCausalLM",
        {**LOOPS, "recurrent_kv_cache_mode": "last_loop"},
        {},
        "with transformers' own cache, token by token, it gives other logits than at once",
    ),
    "quantised here": ("GPT2LMHeadModel", {}, {"quantize": "int8"}, "which engine.quantize = int8 does not reach"),
    "KV in int8": ("GPT2LMHeadModel", {}, {"kv_dtype": "int8"}, "which engine.kv_dtype = int8 does not reach"),
    "longer than it is": ("GPT2LMHeadModel", {}, {"max_model_tokens": 129}, "this GPT2LMHeadModel reaches 128"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_served_is_refused_by_name(tmp_path, what):
    architecture, changes, engine, sentence = REFUSED[what]
    checkpoint(tmp_path, architecture, **changes)
    with pytest.raises(ModelError, match=sentence) as refusal:
        load(tmp_path, **engine)
    assert "\n" not in str(refusal.value)


def test_several_ranks_are_refused_by_name(tmp_path):
    checkpoint(tmp_path, "GPT2LMHeadModel")
    asked = WorkerSettings("one", "model", str(tmp_path), "tcp:127.0.0.1:0", engine=config.Engine(pipeline_parallel=2))
    with pytest.raises(ModelError, match="GPT2LMHeadModel is served by way of transformers, on one rank"):
        ParallelRunner.load(asked, lambda reason: None)


def test_adapters_are_refused_by_name(models):
    runner = models.runner("gpt2", "auto")
    assert not runner.takes_adapters
    with pytest.raises(AdapterError, match="adapter one: GPT2LMHeadModel is served by way of transformers"):
        runner.load_adapter("one", "anywhere", 1 << 20)


def test_a_tensor_that_is_missing_is_named(tmp_path):
    from safetensors.torch import load_file, save_file

    checkpoint(tmp_path, "GPT2LMHeadModel")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["transformer.ln_f.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"has missing keys: transformer\.ln_f\.weight"):
        load(tmp_path)
