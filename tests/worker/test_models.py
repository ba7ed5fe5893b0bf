"""Our decoder says what transformers says, for every family, however a sequence is cut and whoever is beside it."""

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
from tests.worker.tiny import BLOCK_SIZE, VOCAB_SIZE, Walk, checkpoint, oracle_logits
from worker.runner import Runner


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **fields}}


ATOL = 1e-4
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 2.5, 3.0, 4.0]}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama, tied, biased, one KV head, wide heads": (
        "LlamaForCausalLM",
        {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "num_key_value_heads": 1,
            "head_dim": 20,
        },
    ),
    "llama, a KV head each": ("LlamaForCausalLM", {"num_key_value_heads": 4, "hidden_act": "gelu"}),
    "llama, another family's word": ("LlamaForCausalLM", {"hidden_activation": "gelu_pytorch_tanh"}),
    "llama, linear rope": ("LlamaForCausalLM", rope("linear", factor=4.0)),
    "llama, dynamic rope": ("LlamaForCausalLM", rope("dynamic", factor=4.0)),
    "llama, llama3 rope": (
        "LlamaForCausalLM",
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
    ),
    "llama, yarn": ("LlamaForCausalLM", rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    "llama, yarn with everything said": (
        "LlamaForCausalLM",
        rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=32,
            mscale=0.7,
            mscale_all_dim=0.9,
            beta_fast=16,
            beta_slow=2,
            truncate=False,
        ),
    ),
    "llama, proportional rope": ("LlamaForCausalLM", rope("proportional", partial_rotary_factor=0.5)),
    "mistral": ("MistralForCausalLM", {"sliding_window": None}),
    "mistral, sliding": ("MistralForCausalLM", {"sliding_window": 9}),
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen2, sliding above": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}),
    "gemma2": ("Gemma2ForCausalLM", {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 24}),
    "gemma3": (
        "Gemma3ForCausalLM",
        {
            "head_dim": 16,
            "sliding_window": 9,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3": ("Phi3ForCausalLM", {"partial_rotary_factor": 0.5}),
    "phi3, sliding": ("Phi3ForCausalLM", {"sliding_window": 11}),
    "phi3, long rope, short": (
        "Phi3ForCausalLM",
        {"original_max_position_embeddings": 128, "max_position_embeddings": 512, **rope("longrope", **FACTORS)},
    ),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4, "sliding_window": 9}),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        {
            "head_dim": 16,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "moe_intermediate_size": 20,
        },
    ),
    "olmoe": ("OlmoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2}),
    "gpt-oss": (
        "GptOssForCausalLM",
        {"head_dim": 16, "sliding_window": 9, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "deepseek-v2": ("DeepseekV2ForCausalLM", {**LATENT, "q_lora_rank": None, "kv_lora_rank": 24}),
    "deepseek-v2, groups of experts": (
        "DeepseekV2ForCausalLM",
        {**LATENT, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7},
    ),
    "deepseek-v3": ("DeepseekV3ForCausalLM", {**LATENT, "n_group": 2, "topk_group": 1}),
    "deepseek-v3, in halves, yarn": (
        "DeepseekV3ForCausalLM",
        {
            **LATENT,
            **rope("yarn", factor=4.0, original_max_position_embeddings=32, mscale=0.7, mscale_all_dim=0.9),
            "rope_interleave": False,
            "attention_bias": True,
            "norm_topk_prob": False,
            "kv_lora_rank": 24,
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
        engine = config.Engine(
            device="cpu",
            dtype="float32",
            num_threads=1,
            block_size=BLOCK_SIZE,
            max_model_tokens=128,
            max_kv_bytes=8 << 20,
            attention=attention,
        )
        return Runner.load(str(self.directory / name), engine)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def prompt_of(length: int, seed: int) -> list[int]:
    return [random.Random(seed + place).randrange(VOCAB_SIZE) for place in range(length)]


@pytest.mark.parametrize("attention", ["reference", "torch", "auto"])
@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=4, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=4),
    num_new=st.integers(1, 6),
    seed=st.integers(0, 1 << 20),
)
def test_any_cut_and_any_company_gives_the_logits_of_transformers(models, name, attention, lengths, num_new, seed):
    prompts = [prompt_of(length, seed + index) for index, length in enumerate(lengths)]
    walk = Walk(models.runner(name, attention), prompts, num_new, random.Random(seed))
    for token_ids, logits in zip(walk.token_ids, walk.logits, strict=True):
        assert_said(models.oracle(name), token_ids, torch.stack(logits))


def test_where_two_groups_of_experts_are_as_good_either_will_do_and_nothing_else_is_let_pass(models):
    name, seed = "deepseek-v2, groups of experts", 4570
    prompts = [prompt_of(1, seed), prompt_of(34, seed + 1)]
    walk = Walk(models.runner(name, "auto"), prompts, 3, random.Random(seed))
    token_ids, logits, oracle = walk.token_ids[1], torch.stack(walk.logits[1]), models.oracle(name)
    assert_said(oracle, token_ids, logits)
    # There a token's second and third group differ by a thirty-millionth, and all others by far more.
    assert set(undecided(oracle, token_ids).nonzero().flatten().tolist()) <= {35, 36}
    logits[20, 7] += 2e-4
    with pytest.raises(AssertionError):
        assert_said(oracle, token_ids, logits)


def assert_said(oracle: Any, token_ids: list[int], logits: torch.Tensor) -> None:
    """By transformers, of these tokens; where it would hardly say so itself, something else may be."""
    is_off = ~((logits - oracle_logits(oracle, token_ids)[:-1]).abs().amax(1) <= ATOL)
    if is_off.any():
        assert not (is_off & ~undecided(oracle, token_ids)[:-1]).any(), is_off.nonzero()


@torch.inference_mode()
def undecided(oracle: Any, token_ids: list[int]) -> torch.Tensor:
    """[num_tokens]: whether logits jump when what is embedded moves by a millionth, as they do where a router holds two
    experts for as good."""
    embedded = oracle.get_input_embeddings()(torch.tensor([token_ids]))
    plain = oracle(inputs_embeds=embedded).logits[0]
    jumps = torch.zeros(len(token_ids), dtype=torch.bool)
    for seed in range(8):
        noise = torch.randn(embedded.shape, generator=torch.Generator().manual_seed(seed))
        moved = oracle(inputs_embeds=embedded + 1e-6 * embedded.abs().mean() * noise).logits[0]
        jumps |= (moved - plain).abs().amax(1) > ATOL
    assert jumps.float().mean() < 0.2, "it says nothing for sure"
    return jumps


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_generate(models, name):
    prompt = prompt_of(23, seed=5)
    expected = models.oracle(name).generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, 23), do_sample=False, max_new_tokens=20, eos_token_id=None
    )
    walk = Walk(models.runner(name, "auto"), [prompt, prompt_of(9, seed=6)], 20, random.Random(7))
    assert walk.token_ids[0] == expected[0].tolist()
