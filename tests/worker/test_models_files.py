"""What a checkpoint's files may look like, and what is said about those that cannot be served."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from policies import settings
from tests.worker.tiny import BLOCK_SIZE, SIZES, VOCAB_SIZE, checkpoint, oracle_logits
from worker.attention import ReferenceAttention, Scores
from worker.budget import OutOfMemory
from worker.inputs import Span
from worker.kv_cache import KVCache, KVShape
from worker.models import ModelError, TorchOps, load_decoder, read_architecture
from worker.models.architecture import Activation
from worker.runner import Runner

ENGINE = settings.Engine(device="cpu", dtype="float32", num_threads=1, block_size=BLOCK_SIZE, max_kv_bytes=8 << 20)
TOKEN_IDS = [(7 * place + 3) % VOCAB_SIZE for place in range(30)]


def logits_of(directory: Path, engine: settings.Engine = ENGINE) -> torch.Tensor:
    return Runner.load(str(directory), engine).forward([Span(TOKEN_IDS, 0, [4, 1, 2, 9], len(TOKEN_IDS))])


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def rewrite_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    checkpoint(tmp_path, "LlamaForCausalLM")
    return tmp_path


def test_a_checkpoint_in_shards_is_the_same_model(tmp_path):
    model = checkpoint(tmp_path, "Qwen2ForCausalLM", shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    torch.testing.assert_close(logits_of(tmp_path), oracle_logits(model, TOKEN_IDS), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["linear", "llama3", "gemma3"])
def test_files_written_before_transformers_5_are_read_alike(tmp_path, kind):
    scaling = {"linear": {"factor": 2.0}, "gemma3": {"factor": 8.0}}.get(
        kind,
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    )
    scaling["rope_type"] = "llama3" if kind == "llama3" else "linear"
    if kind == "gemma3":
        ropes = {"full_attention": {**scaling, "rope_theta": 5e5}, "sliding_attention": {"rope_type": "default"}}
        ropes["sliding_attention"]["rope_theta"] = 2e4
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        model = checkpoint(
            tmp_path, "Gemma3ForCausalLM", rope_parameters=ropes, head_dim=16, sliding_window=9, layer_types=kinds
        )
    else:
        model = checkpoint(tmp_path, "LlamaForCausalLM", rope_parameters={**scaling, "rope_theta": 5e5})

    def as_before(content: dict[str, Any]) -> None:
        del content["rope_parameters"]
        content["torch_dtype"] = content.pop("dtype")
        content.update(
            rope_theta=5e5, rope_scaling={"type" if key == "rope_type" else key: scaling[key] for key in scaling}
        )
        if kind == "gemma3":
            del content["layer_types"]
            content.update(rope_local_base_freq=2e4, sliding_window_pattern=2)

    rewrite(tmp_path / "config.json", as_before)
    torch.testing.assert_close(logits_of(tmp_path), oracle_logits(model, TOKEN_IDS), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("ropes", "is_refused"),
    [
        ({"rope_parameters": {}, "rope_theta": 5e5}, False),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 5e5}}, False),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, True),
        ({"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5e5}}, True),
    ],
)
def test_ropes_that_are_stretched_in_two_places_are_stretched_alike_or_refused(llama, ropes, is_refused):
    scaling = {"type": "linear", "factor": 2.0}
    rewrite(llama / "config.json", lambda content: content.update(**ropes, rope_scaling=scaling))
    if is_refused:
        with pytest.raises(ModelError, match="has both rope_parameters and rope_scaling, which say different things"):
            read_architecture(llama)
    else:
        (rope,) = read_architecture(llama).ropes
        assert (rope.kind, rope.factor, rope.theta) == ("linear", 2.0, 5e5)


@pytest.mark.parametrize("family", ["MistralForCausalLM", "MixtralForCausalLM", "Phi3ForCausalLM"])
@pytest.mark.parametrize("said", [{"sliding_window": None}, {"sliding_window": 9}, {}])
def test_a_window_that_is_not_spoken_of_is_the_family_s_own(tmp_path, family, said):
    kind = getattr(transformers, family).config_class
    config = {"model_type": kind.model_type, **SIZES, "num_local_experts": 4}
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": [family], **said}))
    meant = transformers.AutoConfig.from_pretrained(tmp_path).sliding_window or 0
    assert read_architecture(tmp_path).windows == (meant,) * 3


def test_a_tied_head_that_is_in_the_file_is_the_embedding_or_refused(tmp_path):
    """transformers takes such a head for what it is, whatever is tied."""
    model = checkpoint(tmp_path, "LlamaForCausalLM", tie_word_embeddings=True)
    table = model.model.embed_tokens.weight.detach()
    rewrite_tensors(tmp_path, lambda tensors: tensors.update({"lm_head.weight": table.clone()}))
    torch.testing.assert_close(logits_of(tmp_path), oracle_logits(model, TOKEN_IDS), atol=1e-4, rtol=0)
    rewrite_tensors(tmp_path, lambda tensors: tensors.update({"lm_head.weight": table + 1}))
    with pytest.raises(ModelError, match=r"has an lm_head\.weight that is not model\.embed_tokens\.weight, which"):
        logits_of(tmp_path)


@pytest.mark.parametrize("caps", [{"attn_logit_softcapping": None}, {"final_logit_softcapping": None}])
def test_a_cap_that_is_null_is_none(tmp_path, caps):
    """Gemma 2 has them where config.json does not speak of them."""
    checkpoint(tmp_path, "Gemma2ForCausalLM", head_dim=16, sliding_window=9)
    rewrite(tmp_path / "config.json", lambda content: content.update(caps))
    model = transformers.Gemma2ForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    torch.testing.assert_close(logits_of(tmp_path), oracle_logits(model, TOKEN_IDS), atol=1e-4, rtol=0)


def test_the_language_model_of_a_multimodal_gemma_3_is_served(tmp_path):
    torch.manual_seed(0)
    config = transformers.Gemma3Config(
        text_config={**SIZES, "head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 24},
        vision_config={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        image_token_index=90,
    )
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = model.model.language_model(torch.tensor([TOKEN_IDS])).last_hidden_state[0] @ model.lm_head.weight.T
    torch.testing.assert_close(logits_of(tmp_path), expected, atol=1e-4, rtol=0)


def test_long_prompts_of_a_longrope_model_turn_by_its_long_factors(tmp_path):
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 2.5, 3.0, 4.0]}
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, **factors}
    model = checkpoint(tmp_path, "Phi3ForCausalLM", original_max_position_embeddings=16, rope_parameters=rope)
    torch.testing.assert_close(logits_of(tmp_path), oracle_logits(model, TOKEN_IDS), atol=1e-4, rtol=0)


def test_a_dynamic_rope_stretches_as_a_sequence_grows_past_its_context(tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    model = checkpoint(tmp_path, "LlamaForCausalLM", max_position_embeddings=16, rope_parameters=rope)
    runner = Runner.load(str(tmp_path), ENGINE)
    assert runner.max_model_tokens == 64
    cache, expected = None, []
    with torch.inference_mode():
        for token_id in TOKEN_IDS:
            answer = model(torch.tensor([[token_id]]), past_key_values=cache, use_cache=True)
            cache = answer.past_key_values
            expected.append(answer.logits[0, 0])
    logits = runner.forward([Span(TOKEN_IDS, 0, [4, 1, 2, 9], len(TOKEN_IDS))])
    torch.testing.assert_close(logits, torch.stack(expected), atol=1e-4, rtol=0)


def test_end_tokens_come_from_the_generation_config_first(llama):
    assert Runner.load(str(llama), ENGINE).eos_token_ids == (1,)
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 1, 8]}))
    assert Runner.load(str(llama), ENGINE).eos_token_ids == (5, 1, 8)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_says_nearly_the_same(llama, dtype):
    exact = logits_of(llama)
    near = logits_of(llama, settings.Engine(dtype=dtype, num_threads=1, block_size=BLOCK_SIZE, max_kv_bytes=8 << 20))
    assert (near - exact).abs().max() < (0.6 if dtype == "bfloat16" else 0.1)


def test_only_the_rows_that_are_asked_for_come_back(llama):
    runner = Runner.load(str(llama), ENGINE)
    assert runner.forward([Span(TOKEN_IDS[:9], 0, [3, 5], 0)]).shape == (0, VOCAB_SIZE)
    logits = runner.forward([Span(TOKEN_IDS[9:], 9, [3, 5, 6, 0], 2), Span(TOKEN_IDS[:4], 0, [7], 1)])
    whole = logits_of(llama)
    torch.testing.assert_close(logits, torch.stack((whole[28], whole[29], whole[3])), atol=1e-4, rtol=0)


def test_a_copied_block_holds_what_its_source_holds(llama):
    runner = Runner.load(str(llama), ENGINE)
    runner.forward([Span(TOKEN_IDS[:12], 0, [3, 5], 0)])
    runner.copy_block(5, 8)
    own = runner.forward([Span(TOKEN_IDS[12:14], 12, [3, 8], 2)])
    runner.forward([Span([1, 2], 12, [3, 5], 0)])
    torch.testing.assert_close(runner.forward([Span(TOKEN_IDS[13:14], 13, [3, 8], 1)]), own[1:], atol=1e-4, rtol=0)


class GreedyOps(TorchOps):
    """Asks for more memory than there is on any machine."""

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        return torch.empty(1 << 55, dtype=torch.uint8)


def test_a_pass_that_runs_out_of_memory_says_so(llama):
    architecture = read_architecture(llama)
    model = load_decoder(llama, architecture, torch.float32, torch.device("cpu"), 128)
    cache = KVCache(KVShape(3, 2, 8), 16, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    scores = Scores(architecture.attention_scale, architecture.windows)
    runner = Runner(model, cache, ReferenceAttention(cache, scores), GreedyOps(), 128)
    with pytest.raises(OutOfMemory, match=r"a step of 30 tokens ran out of memory: .*can't allocate memory"):
        runner.forward([Span(TOKEN_IDS, 0, [4, 1, 2, 9], len(TOKEN_IDS))])


def test_context_is_what_the_pool_can_hold(llama):
    tight = Runner.load(str(llama), settings.Engine(dtype="float32", block_size=32, max_kv_bytes=1 << 20))
    assert tight.max_model_tokens == 128
    with pytest.raises(ModelError, match=r"KV for 128 tokens takes 0.05 MiB, but .* leave 0.00 MiB"):
        Runner.load(str(llama), settings.Engine(dtype="float32", block_size=32, max_kv_bytes=1000))
    with pytest.raises(ModelError, match=r"max_model_tokens is 4096, but this LlamaForCausalLM reaches 128"):
        Runner.load(str(llama), settings.Engine(max_model_tokens=4096))


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "an unknown architecture": (
        lambda at: rewrite(at / "config.json", lambda c: c.update(architectures=["NobodyForCausalLM"])),
        "the architecture NobodyForCausalLM is not supported: transformers .* knows no causal language model",
    ),
    "an architecture of another type": (
        lambda at: rewrite(at / "config.json", lambda c: c.update(architectures=["GPT2LMHeadModel"])),
        "config.json says model_type llama, but a GPT2LMHeadModel is gpt-sw3 or gpt2",
    ),
    "no architecture": (
        lambda at: rewrite(at / "config.json", lambda c: c.pop("architectures")),
        "does not name its architectures",
    ),
    "an unknown quantisation": (
        lambda at: rewrite(at / "config.json", lambda c: c.update(quantization_config={"quant_method": "hqq"})),
        "this LlamaForCausalLM is quantised by hqq, which is not supported; supported are compressed-tensors, awq, ",
    ),
    "an unknown rope": (
        lambda at: rewrite(at / "config.json", lambda c: c["rope_parameters"].update(rope_type="spiral")),
        "the RoPE scaling spiral of this LlamaForCausalLM",
    ),
    "an unknown activation": (
        lambda at: rewrite(at / "config.json", lambda c: c.update(hidden_act="xielu")),
        "the activation xielu",
    ),
    "a missing size": (
        lambda at: rewrite(at / "config.json", lambda c: c.pop("hidden_size")),
        "config.json of this LlamaForCausalLM lacks hidden_size",
    ),
    "a size that is text": (
        lambda at: rewrite(at / "config.json", lambda c: c.update(hidden_size="32")),
        "impossible hidden_size: 32",
    ),
    "a billion layers": (
        lambda at: rewrite(at / "config.json", lambda c: c.update(num_hidden_layers=10**9)),
        "impossible num_hidden_layers",
    ),
    "heads that cannot share": (
        lambda at: rewrite(at / "config.json", lambda c: c.update(num_key_value_heads=3)),
        "the 4 attention heads of this LlamaForCausalLM cannot share 3 key-value heads",
    ),
    "no config": (lambda at: (at / "config.json").unlink(), "has no config.json"),
    "a config that is no JSON": (
        lambda at: (at / "config.json").write_text('{"architectures": ['),
        "config.json cannot be read: ",
    ),
    "a config that is a list": (lambda at: (at / "config.json").write_text("[]"), "is not a JSON object"),
    "a config that is no text": (
        lambda at: (at / "config.json").write_bytes(b"\xff\xfe\x00"),
        "config.json cannot be read: ",
    ),
    "a config that is a pipe": (
        lambda at: ((at / "config.json").unlink(), os.mkfifo(at / "config.json")),
        "config.json cannot be read: it is no regular file",
    ),
    "an index that is a pipe": (
        lambda at: os.mkfifo(at / "model.safetensors.index.json"),
        "model.safetensors.index.json cannot be read: it is no regular file",
    ),
    "no weights": (
        lambda at: (at / "model.safetensors").unlink(),
        "has neither model.safetensors nor model.safetensors.index.json",
    ),
    "weights of another kind": (
        lambda at: (at / "model.safetensors").rename(at / "pytorch_model.bin"),
        r"\(pytorch_model.bin is not a safetensors file\)",
    ),
    "weights cut short": (
        lambda at: (at / "model.safetensors").write_bytes((at / "model.safetensors").read_bytes()[:5000]),
        "model.safetensors is not a whole safetensors file: ",
    ),
    "empty weights": (
        lambda at: (at / "model.safetensors").write_bytes(b""),
        "model.safetensors is not a whole safetensors file: ",
    ),
    "a missing tensor": (
        lambda at: rewrite_tensors(at, lambda t: t.pop("model.layers.1.mlp.up_proj.weight")),
        "has no tensor model.layers.1.mlp.up_proj.weight",
    ),
    "a tensor of another shape": (
        lambda at: rewrite_tensors(at, lambda t: t.update({"model.norm.weight": torch.ones(31)})),
        "tensor model.norm.weight of .* is 31, not 32",
    ),
    "a tensor of integers": (
        lambda at: rewrite_tensors(at, lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)})),
        "tensor model.norm.weight of .* is int8, not a floating type",
    ),
    "a tensor too many": (
        lambda at: rewrite_tensors(at, lambda t: t.update({"model.layers.0.self_attn.q_proj.lora_A": torch.ones(2)})),
        "holds tensor model.layers.0.self_attn.q_proj.lora_A, which this architecture does not use",
    ),
    "an index without its files": (
        lambda at: (at / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}'),
        "gone.safetensors is missing",
    ),
    "an index that points outside": (
        lambda at: (at / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x.safetensors"}}'),
        "names a file outside its directory",
    ),
    "an index of names that cannot be": (
        lambda at: (at / "model.safetensors.index.json").write_text(f'{{"weight_map": {{"a": "{5000 * "a"}"}}}}'),
        "a is not a whole safetensors file: .*too long",
    ),
    "an index of nothing": (
        lambda at: (at / "model.safetensors.index.json").write_text("{}"),
        "has no weight_map",
    ),
    "an index that lies": (
        lambda at: (at / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model.safetensors"}}'),
        "lacks tensor a, which model.safetensors.index.json places there",
    ),
    "an empty directory": (
        lambda at: (shutil.rmtree(at), at.mkdir()),
        "has no config.json",
    ),
    "no directory": (shutil.rmtree, "there is no directory .* and it is no hub id"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_model_that_cannot_be_served_is_refused_in_one_sentence(llama, what):
    spoil, sentence = REFUSED[what]
    spoil(llama)
    with pytest.raises(ModelError, match=sentence) as refusal:
        Runner.load(str(llama), ENGINE)
    assert "\n" not in str(refusal.value)


def test_old_buffers_that_nobody_needs_are_no_reason_to_refuse(llama):
    before = logits_of(llama)
    rewrite_tensors(llama, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    torch.testing.assert_close(logits_of(llama), before)


def test_a_hub_id_without_a_network_is_refused_in_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"there is no directory nobody/nothing, and the hub cannot be reached"):
        Runner.load("nobody/nothing", ENGINE)
