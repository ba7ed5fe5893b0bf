"""Adapters on tiny random models: what PEFT says, whoever is beside them; and what is wrong with a file is named."""

import json
import os
import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from policies import settings
from tests.worker.peft_files import ATTENTION, EVERY, adapter_files
from tests.worker.tiny import BLOCK_SIZE, VOCAB_SIZE, Walk, checkpoint, oracle_logits
from worker.adapters import AdapterError
from worker.adapters.files import CONFIG, TENSORS
from worker.inputs import Span
from worker.runner import Runner

MAX_BYTES = 1 << 24
KINDS = {
    "all matrices": {},
    "queries and values": {"r": 8, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]},
    "rank-stabilised": {"use_rslora": True, "r": 3, "target_modules": ATTENTION},
    "ranks and alphas of their own": {
        "rank_pattern": {"down_proj": 2, r"layers\.1\.self_attn\.q_proj": 7},
        "alpha_pattern": {"v_proj": 3, "layers.0.mlp.up_proj": 5},
    },
    "one layer": {"layers_to_transform": [1], "layers_pattern": "layers"},
    "by an expression": {"target_modules": r".*mlp\.(up|down)_proj"},
}
FUSED = {"all": {"target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}}
FAMILIES = {
    "llama": ("LlamaForCausalLM", {}, KINDS),
    "gemma2": ("Gemma2ForCausalLM", {"head_dim": 16, "sliding_window": 9}, {"all": {"target_modules": EVERY}}),
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}, {"all": {}, "few": KINDS["one layer"]}),
    "phi3": ("Phi3ForCausalLM", {"partial_rotary_factor": 0.5}, FUSED),
}


class Bench:
    """A base on our runner, its adapters, and each as PEFT has it."""

    def __init__(self, directory, architecture, changes, kinds, **engine):
        self.base = checkpoint(directory / "base", architecture, **changes)
        asked = {"dtype": "float32", "num_threads": 1, "block_size": BLOCK_SIZE, "max_kv_bytes": 8 << 20, **engine}
        self.runner = Runner.load(str(directory / "base"), settings.Engine(device="cpu", **asked))
        self.adapters, self.oracles = [None], [self.base]
        for seed, (name, config) in enumerate(kinds.items()):
            files = directory / f"adapter-{seed}"
            self.oracles.append(adapter_files(files, self.base, seed, **config))
            self.adapters.append(self.runner.load_adapter(name, str(files), MAX_BYTES))


@pytest.fixture(scope="module", params=FAMILIES)
def bench(request, tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("family"), *FAMILIES[request.param])


@pytest.mark.parametrize("seed", range(4))
def test_adapters_in_one_batch_say_what_peft_says_however_they_are_cut(bench, seed):
    chance = random.Random(seed)
    chosen = [chance.randrange(len(bench.adapters)) for _ in range(6)]
    prompts = [[chance.randrange(3, VOCAB_SIZE) for _ in range(chance.randint(1, 30))] for _ in chosen]
    walk = Walk(bench.runner, prompts, 6, chance, [bench.adapters[index] for index in chosen])
    for index, token_ids, logits in zip(chosen, walk.token_ids, walk.logits, strict=True):
        expected = oracle_logits(bench.oracles[index], token_ids[:-1])
        torch.testing.assert_close(torch.stack(logits), expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("bench", ["llama"], indirect=True)
def test_an_adapter_changes_the_same_whether_the_prompt_is_scored_or_not(bench):
    assert_scored_alike(bench)


def assert_scored_alike(bench):
    """Rows whose hidden states are wanted come behind those of the logits, and a prompt's last row is in both."""
    first, second = bench.adapters[1:3]
    prompt, scored = [5, 6, 7, 8, 9, 10], [11, 12, 13]
    told = []
    for num_hidden in (0, len(scored)):
        spans = [Span(scored, 0, [1], 1, adapter=first, num_hidden=num_hidden), Span(prompt, 0, [2], 1, adapter=second)]
        logits = bench.runner.forward(spans).clone()
        told.append(logits)
        if num_hidden:
            (hidden,) = bench.runner.take_hidden(spans[:1])
            told.append(torch.stack((bench.runner.logits_of(hidden)[-1], logits[1])))
    for other in told[1:]:
        assert ((other - told[0]).square().mean(1).sqrt() < 0.06 * told[0].std()).all()


def test_an_adapter_changes_what_is_said(bench):
    base = oracle_logits(bench.base, [5, 6, 7])
    assert all((oracle_logits(oracle, [5, 6, 7]) - base).abs().max() > 0.01 for oracle in bench.oracles[1:])


@pytest.mark.parametrize("attention", ["auto", "torch"])
def test_in_bfloat16_the_compiled_kernels_and_torch_are_near_what_peft_says(tmp_path, attention):
    kinds = {**KINDS, "rank 33": {"r": 33}}
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 2,
        "head_dim": 32,
        "num_key_value_heads": 1,
    }
    bench = Bench(tmp_path, "LlamaForCausalLM", sizes, kinds, dtype="bfloat16", attention=attention)
    chance = random.Random(0)
    chosen = [index % len(bench.adapters) for index in range(2 * len(bench.adapters))]
    prompts = [[chance.randrange(3, VOCAB_SIZE) for _ in range(chance.randint(1, 60))] for _ in chosen]
    walk = Walk(bench.runner, prompts, 6, chance, [bench.adapters[index] for index in chosen])
    base = bench.base
    for index, token_ids, logits in zip(chosen, walk.token_ids, walk.logits, strict=True):
        expected, got = oracle_logits(bench.oracles[index], token_ids[:-1]), torch.stack(logits)
        scale = float(expected.std())
        assert float((got - expected).square().mean().sqrt()) < 0.06 * scale
        if index:
            assert float((got - oracle_logits(base, token_ids[:-1])).square().mean().sqrt()) > 0.3 * scale
    assert_scored_alike(bench)


class Files:
    """An adapter's files, to be broken."""

    def __init__(self, directory, runner):
        self.directory, self.runner = directory, runner

    def config(self, **changes):
        path = self.directory / CONFIG
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    def tensors(self, change):
        tensors = load_file(self.directory / TENSORS)
        change(tensors)
        save_file(tensors, self.directory / TENSORS)

    def refusal(self, **options):
        with pytest.raises(AdapterError) as caught:
            self.runner.load_adapter("broken", str(self.directory), options.pop("max_bytes", MAX_BYTES), **options)
        return str(caught.value)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("llama"), "LlamaForCausalLM", {}, {})


@pytest.fixture
def files(tmp_path, llama):
    adapter_files(tmp_path / "adapter", llama.base, 0)
    return Files(tmp_path / "adapter", llama.runner)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"something_new": {"a": 1}}, "something_new"),
        ({"init_lora_weights": "pissa"}, "changes the base too"),
        ({"r": 0}, "r is 0"),
        ({"r": 4.5}, "r is 4.5, and a rank is a whole number"),
        ({"r": 10**400}, "r is 1000"),
        ({"rank_pattern": {"q_proj": 3.5}}, "q_proj is 3.5, and a rank is a whole number"),
        ({"alpha_pattern": {"q_proj": 10**400}}, "q_proj is 1000"),
        ({"use_rslora": "false"}, "use_rslora is 'false', neither true nor false"),
        ({"lora_alpha": "eight"}, "lora_alpha is 'eight'"),
        ({"rank_pattern": {"(": 3}}, "no regular expression"),
        ({"rank_pattern": {"a{99999999999}": 3}}, "no regular expression"),
        ({"rank_pattern": {"(?:(?:a{1000}){1000}){1000}": 3}}, "no regular expression"),
        ({"rank_pattern": {"(?i)q_proj": 3}}, "no regular expression"),
        ({"rank_pattern": {r"(\w|\w\w|.)+[!?]": 3}}, r"take too long to match, as '(.*\\.)?((\\w|\\w\\w|.)+[!?])"),
        ({"r": 5}, "takes 5x48"),
        ({"half a \ud800\n": 1}, "half a ?? is set"),
    ],
)
def test_a_configuration_that_is_not_served_is_refused_by_name(files, changes, named):
    files.config(**changes)
    assert named in files.refusal()


def renamed(old, new):
    def change(tensors):
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


def replaced(part, tensor):
    def change(tensors):
        name = next(name for name in tensors if part in name)
        tensors[name] = tensor(tensors[name])

    return change


def dropped(part):
    return lambda tensors: tensors.pop(next(name for name in tensors if part in name))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (renamed("q_proj", "query_key_value"), "self_attn.query_key_value"),
        (renamed("layers.2.", "layers.7."), "has 3 layers"),
        (renamed("lora_A", "lora_magnitude_vector"), "DoRA"),
        (replaced("q_proj.lora_A", lambda tensor: tensor[:, :16].contiguous()), "another base"),
        (replaced("q_proj.lora_B", lambda tensor: tensor / 0), "no finite numbers"),
        (replaced("q_proj.lora_B", lambda tensor: tensor.to(torch.int8)), "not a float"),
        (dropped("v_proj.lora_B"), "has no tensor"),
        (lambda tensors: tensors.clear(), "holds no tensors"),
    ],
)
def test_tensors_that_are_not_of_this_base_are_refused_by_name(files, change, named):
    files.tensors(change)
    assert named in files.refusal()


def test_a_broken_missing_or_swapped_file_is_refused_by_name(files):
    digest = files.runner.load_adapter("whole", str(files.directory), MAX_BYTES).digest
    assert "engine.max_adapter_bytes" in files.refusal(max_bytes=1 << 14)
    files.tensors(replaced("q_proj.lora_B", lambda tensor: tensor * 2))
    assert "have changed" in files.refusal(digest=digest)
    path = files.directory / TENSORS
    path.write_bytes(path.read_bytes()[:-9])
    assert "not a whole safetensors file" in files.refusal()
    path.rename(files.directory / "adapter_model.bin")
    assert "pickle" in files.refusal()
    (files.directory / "adapter_model.bin").unlink()
    assert "has no adapter_model.safetensors" in files.refusal()
    (files.directory / CONFIG).write_text("[")
    assert "is not JSON" in files.refusal() or "has no" in files.refusal()
    (files.directory / TENSORS).write_bytes(b"")
    (files.directory / CONFIG).write_text(f'{{"r": {5000 * "1"}}}')
    assert "is not JSON: Exceeds the limit" in files.refusal()


@pytest.mark.parametrize("name", [CONFIG, TENSORS])
def test_a_pipe_in_place_of_a_file_is_refused_by_name(files, name):
    (files.directory / name).unlink()
    os.mkfifo(files.directory / name)
    assert f"{name} cannot be read: it is no regular file" in files.refusal()


def test_the_base_goes_on_after_a_refusal(files, llama):
    files.config(use_dora=True)
    files.refusal()
    walk = Walk(llama.runner, [[5, 6, 7]], 3, random.Random(0))
    expected = oracle_logits(llama.base, walk.token_ids[0][:-1])
    torch.testing.assert_close(torch.stack(walk.logits[0]), expected, atol=2e-3, rtol=2e-3)
