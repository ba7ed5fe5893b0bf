"""Whole mixtures whose experts are computed in a few launches say what transformers says, and ranks together what one
says alone.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from policies.settings import Engine
from tests.kernels.device import DEVICE
from tests.kernels.graphs import MIXTURE
from tests.worker.tiny import BLOCK_SIZE, VOCAB_SIZE, Walk, checkpoint, oracle_logits
from worker.models.architecture import Mixture
from worker.models.decoder import Decoder
from worker.models.load import build_decoder
from worker.models.ops import TorchOps
from worker.models.shard import Layout, Shard
from worker.models.sources import PlainSource
from worker.runner import Runner

LATENT: dict[str, Any] = {
    **{"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8},
    **{"v_head_dim": 12, "n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    **{"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7},
}
NORMED = {"num_experts_per_tok": 3, "norm_topk_prob": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {"num_local_experts": 4},
    "Qwen3MoeForCausalLM": {"head_dim": 16, "num_experts": 5, "moe_intermediate_size": 20, **NORMED},
    "OlmoeForCausalLM": {"num_experts": 6, "num_experts_per_tok": 4},
    "GptOssForCausalLM": {"head_dim": 16, "sliding_window": 9, "num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV2ForCausalLM": {**LATENT, "topk_method": "group_limited_greedy"},
    "DeepseekV3ForCausalLM": LATENT,
}


@pytest.fixture(autouse=True)
def _together(monkeypatch):
    monkeypatch.setattr("worker.models.load.goes_together", lambda device: True)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_mixture_says_what_transformers_says(family, tmp_path):
    oracle = checkpoint(tmp_path, family, **FAMILIES[family])
    engine = Engine(
        device=DEVICE.type, dtype="float32", attention="reference", block_size=BLOCK_SIZE, max_kv_bytes=4 << 20
    )
    runner = Runner.load(str(tmp_path), engine)
    assert of_layers(runner)
    chance = random.Random(3)
    prompts = [[chance.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (30, 1, 9)]
    walk = Walk(runner, prompts, 2, chance)
    for token_ids, logits in zip(walk.token_ids, walk.logits, strict=True):
        expected = oracle_logits(oracle, token_ids[: len(logits)])
        torch.testing.assert_close(torch.stack(logits).cpu(), expected, atol=2e-4, rtol=1e-3)


def of_layers(runner: Runner) -> bool:
    """Whether all experts are computed so."""
    model: Any = runner._model
    experts = [layer.experts for layer in model.layers if layer.experts is not None]
    return bool(experts) and all(each.together is not None for each in experts)


MIXTURES = (
    Mixture(6, 2, True),
    Mixture(4, 2, True, "mlp.router", is_stacked=True),
    Mixture(8, 3, True, shared_size=48, scores="sigmoid", num_groups=4, num_chosen_groups=2, scale=2.5),
)


def build(mixture: Mixture, layout: Layout, rank: int) -> Decoder:
    def take(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        seed = torch.Generator().manual_seed(sum(map(ord, name)))
        return (torch.randn(shape, generator=seed) * 0.2).to(DEVICE)

    whole = replace(MIXTURE, mixture=mixture, activation="clamped_swiglu" if mixture.is_stacked else "silu")
    return build_decoder(Shard.of(whole, layout, rank), PlainSource(take), torch.float32, DEVICE, 64)


@torch.inference_mode()
@pytest.mark.parametrize("mixture", MIXTURES, ids=["plain", "stacked", "shared"])
def test_what_ranks_say_sums_to_what_one_says_alone(mixture):
    torch.manual_seed(0)
    x = torch.randn(9, MIXTURE.hidden_size).to(DEVICE)

    def said(layout: Layout, rank: int) -> torch.Tensor:
        model = build(mixture, layout, rank)
        experts = model.layers[1].experts
        assert experts is not None
        assert experts.together is not None
        activation = model.architecture.activation
        together = experts(x, TorchOps(), activation, 1)
        torch.testing.assert_close(together, replace(experts, together=None)(x, TorchOps(), activation, 1))
        return together

    alone = said(Layout(), 0)
    torch.testing.assert_close(sum(said(Layout(2), rank) for rank in range(2)), alone, atol=1e-4, rtol=1e-4)


def test_their_matrices_are_held_once():
    model = build(MIXTURES[0], Layout(), 0)
    for layer in model.layers:
        experts: Any = layer.experts
        for linears, stack in ((experts.gate_up, experts.together._gate_up), (experts.down, experts.together._down)):
            at, each = stack.matrices.data_ptr(), stack.matrices[0].nbytes
            assert [linear._weight.data_ptr() for linear in linears] == [at + each * num for num in range(6)]
