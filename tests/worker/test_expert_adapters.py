"""Adapters of experts, of their router and of what is beside them: in each layout that PEFT reads, they say what PEFT
says.
"""

import copy
import itertools
import json
import random

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.worker.peft_files import adapter_files
from tests.worker.test_adapters import MAX_BYTES, Bench
from tests.worker.test_models import LATENT
from tests.worker.tiny import VOCAB_SIZE, Walk, oracle_logits
from worker.adapters import AdapterError
from worker.adapters.files import CONFIG, TENSORS

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
KINDS = {
    "every matrix": {"target_modules": "all-linear"},
    "experts and router": {"target_modules": [], "target_parameters": [*EXPERTS, "gate.weight", "router.weight"]},
    "gates alone": {"target_modules": [], "target_parameters": EXPERTS[:1], "r": 3},
    "downs of one layer": {"target_modules": ["q_proj"], "target_parameters": [f"layers.1.{EXPERTS[1]}"]},
    "ranks of their own": {
        "target_modules": ["o_proj"],
        "target_parameters": EXPERTS,
        "rank_pattern": {"gate_up_proj": 2, r"layers\.1\.mlp\.experts\.down_proj": 7},
        "alpha_pattern": {"mlp.experts.down_proj": 3},
        "use_rslora": True,
    },
    "beside the experts": {
        "target_modules": ["o_proj"],
        "target_parameters": [
            *(f"mlp.shared_experts.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")),
            *(f"layers.0.mlp.{name}.weight" for name in ("up_proj", "down_proj")),
        ],
    },
}
QWEN = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MIXTURES = {
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", QWEN),
    "olmoe": ("OlmoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2}),
    "gpt-oss": ("GptOssForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}),
    "deepseek-v2": ("DeepseekV2ForCausalLM", {**LATENT, "n_routed_experts": 4, "q_lora_rank": None}),
    "deepseek-v3": ("DeepseekV3ForCausalLM", {**LATENT, "n_routed_experts": 4}),
}
MODULES = {
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
    "qwen3-moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
    "olmoe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
}
"""Names of experts that are modules, each for itself, as before transformers 5."""


@pytest.fixture(scope="module")
def benches(tmp_path_factory):
    """Each family with all kinds, made when it is asked for first."""
    made = {}

    def bench(family):
        if family not in made:
            made[family] = Bench(tmp_path_factory.mktemp(family), *MIXTURES[family], KINDS)
        return made[family]

    return bench


def assert_like_peft(runner, adapters, oracles, seed):
    """All of them in one batch, however it is cut."""
    chance = random.Random(seed)
    prompts = [[chance.randrange(3, VOCAB_SIZE) for _ in range(chance.randint(1, 30))] for _ in adapters]
    walk = Walk(runner, prompts, 4, chance, adapters)
    for oracle, token_ids, logits in zip(oracles, walk.token_ids, walk.logits, strict=True):
        torch.testing.assert_close(torch.stack(logits), oracle_logits(oracle, token_ids[:-1]), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("family", MIXTURES)
def test_adapters_of_experts_in_one_batch_with_the_base_say_what_peft_says(benches, family):
    bench = benches(family)
    assert_like_peft(bench.runner, [*bench.adapters, bench.adapters[1]], [*bench.oracles, bench.oracles[1]], 1)
    base = oracle_logits(bench.base, [5, 6, 7])
    assert all((oracle_logits(oracle, [5, 6, 7]) - base).abs().max() > 0.01 for oracle in bench.oracles[1:])


def write_by_module(directory, family, base):
    """An adapter with a module for each expert, of which the last is left as it is."""
    generator = torch.Generator().manual_seed(0)
    at, names = MODULES[family]
    _, num_out, num_in = base.model.layers[0].mlp.experts.down_proj.shape
    tensors = {}
    for layer in range(base.config.num_hidden_layers):
        module = f"base_model.model.model.layers.{layer}.{at}"
        modules = [(f"{module}.gate", num_out, 4)]
        for expert, name in itertools.product(range(4), names):
            sizes = (num_in, num_out) if name == names[-1] else (num_out, num_in)
            modules.append((f"{module}.experts.{expert}.{name}", *sizes))
        for name, width_in, width_out in modules:
            scale = 0.0 if ".experts.3." in name else 0.15
            tensors[f"{name}.lora_A.weight"] = torch.randn((5, width_in), generator=generator) * 0.15
            tensors[f"{name}.lora_B.weight"] = torch.randn((width_out, 5), generator=generator) * scale
    directory.mkdir()
    save_file(tensors, directory / TENSORS)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=5, lora_alpha=10, target_modules=["gate", *names])
    config.save_pretrained(directory)


@pytest.mark.parametrize("family", MODULES)
def test_experts_that_are_modules_each_say_what_peft_says(benches, tmp_path, family):
    bench, directory = benches(family), tmp_path / "adapter"
    write_by_module(directory, family, bench.base)
    oracle = peft.PeftModel.from_pretrained(copy.deepcopy(bench.base), str(directory)).eval()
    tensors = load_file(directory / TENSORS)
    save_file({name: tensor for name, tensor in tensors.items() if ".experts.3." not in name}, directory / TENSORS)
    adapter = bench.runner.load_adapter("by module", str(directory), MAX_BYTES)
    assert_like_peft(bench.runner, [adapter, None, bench.adapters[1]], [oracle, bench.base, bench.oracles[1]], 2)
    assert (oracle_logits(oracle, [5, 6, 7]) - oracle_logits(bench.base, [5, 6, 7])).abs().max() > 0.01


@pytest.mark.parametrize("attention", ["auto", "torch"])
@pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])
def test_in_bfloat16_the_compiled_kernels_and_torch_are_near_what_peft_says(tmp_path, family, attention):
    architecture, changes = MIXTURES[family]
    kinds = {"experts and router": {**KINDS["experts and router"], "r": 17}}
    changes = {**changes, "hidden_size": 64, "head_dim": 32, "num_key_value_heads": 1}
    bench = Bench(tmp_path, architecture, changes, kinds, dtype="bfloat16", attention=attention)
    prompts = [[place % VOCAB_SIZE for place in range(first, 2 * first)] for first in (40, 31, 9)]
    walk = Walk(bench.runner, prompts, 3, random.Random(0), [bench.adapters[1], None, bench.adapters[1]])
    for place, oracle in enumerate((bench.oracles[1], bench.base, bench.oracles[1])):
        token_ids, got = walk.token_ids[place][:-1], torch.stack(walk.logits[place])
        other = bench.base if oracle is not bench.base else bench.oracles[1]
        near, far = (
            (got - oracle_logits(model, token_ids)).square().mean(1).sqrt() / got.std(1) for model in (oracle, other)
        )
        # A token near the border between two experts may get the other one.
        assert float(near.median()) < 0.12
        assert float(far.median()) > 0.3


def test_in_deterministic_mode_rows_with_experts_of_their_own_are_the_same_in_any_company(tmp_path):
    bench = Bench(tmp_path, *MIXTURES["mixtral"], {"every matrix": KINDS["every matrix"]}, deterministic=True)
    adapters = [bench.adapters[place] for place in (0, 1, 1)]
    prompts = [[place % VOCAB_SIZE for place in range(first, 2 * first)] for first in (20, 31, 9)]
    one, other = (Walk(bench.runner, prompts, 3, random.Random(seed), adapters) for seed in (0, 1))
    assert all(torch.equal(torch.stack(a), torch.stack(b)) for a, b in zip(one.logits, other.logits, strict=True))


def refusal(runner, directory):
    with pytest.raises(AdapterError) as caught:
        runner.load_adapter("broken", str(directory), MAX_BYTES)
    return str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("experts.3.w1", "experts.4.w1", "has 4 experts"),
        ("experts.3.w1", "experts.3.w4", "changes model.layers.0.block_sparse_moe.experts.3.w4"),
        ("experts.3.w1", "shared_experts.up_proj", "shared_experts.up_proj, which this MixtralForCausalLM does not"),
    ],
)
def test_modules_of_experts_that_the_base_does_not_have_are_refused_by_name(benches, tmp_path, old, new, named):
    write_by_module(tmp_path / "adapter", "mixtral", benches("mixtral").base)
    tensors = load_file(tmp_path / "adapter" / TENSORS)
    save_file({name.replace(old, new): tensors[name] for name in tensors}, tmp_path / "adapter" / TENSORS)
    assert named in refusal(benches("mixtral").runner, tmp_path / "adapter")


@pytest.mark.parametrize(
    ("parameters", "changes", "named"),
    [
        (EXPERTS[:1], {"target_parameters": None}, "it changes model.layers.0.mlp.experts, which"),
        (EXPERTS, {"target_parameters": EXPERTS[:1]}, "it changes model.layers.0.mlp.experts.base_layer, which"),
        (EXPERTS, {"target_parameters": "experts"}, "target_parameters is no list of names"),
        (EXPERTS, {"rank_pattern": {"down_proj": 3}}, "takes 12x48"),
        ([*EXPERTS, "gate_up_proj_bias"], {}, "it changes model.layers.0.mlp.experts.gate_up_proj_bias, which"),
    ],
)
def test_parameters_that_are_not_as_the_configuration_says_are_refused_by_name(
    benches, tmp_path, parameters, changes, named
):
    bench = benches("gpt-oss")
    adapter_files(tmp_path, bench.base, 0, target_modules=[], target_parameters=parameters)
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps({**config, **changes}))
    assert named in refusal(bench.runner, tmp_path)
    assert_like_peft(bench.runner, [None, bench.adapters[1]], [bench.base, bench.oracles[1]], 3)


def test_experts_of_another_base_are_refused_by_name(benches, tmp_path):
    adapter_files(tmp_path, benches("olmoe").base, 0, target_modules="all-linear")
    reason = "experts.base_layer.lora_B.weight is 96x32, and this base with the rank of adapter_config.json takes 48x32"
    assert f"{reason}; is the adapter for another base?" in refusal(benches("qwen3-moe").runner, tmp_path)
