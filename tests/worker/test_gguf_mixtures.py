"""The experts of a GGUF file: side by side in one tensor, or each in one of its own, whole and on several ranks. Beside
them what gpt-oss has, whose experts have biases, and DeepSeek, whose heads have their keys and values of one latent."""

from __future__ import annotations

from itertools import accumulate

import msgspec
import numpy as np
import pytest
import torch

from tests.worker import gguf_files
from tests.worker.gguf_models import MODELS
from tests.worker.peer import WorkerProcess
from tests.worker.test_gguf import ENGINE, TOKEN_IDS, logits_of
from tests.worker.tiny import oracle_logits
from worker.models import ModelError, read_architecture
from worker.runner import Runner


@pytest.mark.parametrize(
    ("name", "kind", "are_apart"),
    [
        ("mixtral", "F32", True),
        ("mixtral", "Q4_0", False),
        ("mixtral", "Q4_K", True),
        ("qwen3moe", "BF16", False),
        ("qwen3moe", "Q4_K", False),
        ("qwen3moe", "Q4_1", True),
        ("gpt-oss", "MXFP4", False),
        ("gpt-oss", "Q4_0", False),
        ("deepseek2", "Q4_0", False),
        ("deepseek3", "Q4_1", True),
    ],
)
def test_experts_are_read_without_a_loss_side_by_side_and_apart(tmp_path, name, kind, are_apart):
    architecture, changes = MODELS[name]
    if kind == "Q4_K" and name == "qwen3moe":
        changes = {**changes, "moe_intermediate_size": 256}
    model = gguf_files.a_model(architecture, **changes)
    gguf_files.write(tmp_path / "model.gguf", architecture, model, {"": "F32", "experts": kind}, None, None, are_apart)
    torch.testing.assert_close(logits_of(tmp_path / "model.gguf"), oracle_logits(model, TOKEN_IDS), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("mixtral", "Q4_0"), ("qwen3moe", "Q4_0"), ("gpt-oss", "MXFP4"), ("deepseek3", "Q4_0"), ("qwen2moe", "Q4_0")],
)
def test_ranks_share_the_experts_of_a_file(tmp_path, name, kind):
    architecture, changes = MODELS[name]
    path = tmp_path / "model.gguf"
    gguf_files.write(path, architecture, gguf_files.a_model(architecture, **changes), {"": "F32", "experts": kind})
    told = []
    for ranks in ({}, {"tensor_parallel": 2}, {"pipeline_parallel": 2}):
        with WorkerProcess(path, **ranks) as worker, worker.connect() as gateway:
            gateway.submit("a", TOKEN_IDS, 12)
            told.append(gateway.finish("a"))
    assert told[0] == told[1] == told[2]


def test_gates_and_what_they_open_may_be_of_different_kinds(tmp_path):
    model = gguf_files.a_model("gpt-oss", **gguf_files.GPT_OSS)
    gguf_files.write(tmp_path / "model.gguf", "gpt-oss", model, {"ffn_gate_exps": "MXFP4", "ffn_up_exps": "Q4_0"})
    torch.testing.assert_close(logits_of(tmp_path / "model.gguf"), oracle_logits(model, TOKEN_IDS), atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", ["mixtral", "deepseek2", "deepseek3"])
def test_gates_and_what_they_open_may_be_one_tensor(tmp_path, name):
    architecture, changes = MODELS[name]
    model = gguf_files.a_model(architecture, **changes)
    gguf_files.write(tmp_path / "model.gguf", architecture, model, {"ffn_gate_up_exps": "Q4_0"})
    torch.testing.assert_close(logits_of(tmp_path / "model.gguf"), oracle_logits(model, TOKEN_IDS), atol=1e-3, rtol=0)


def test_a_message_of_gpt_oss_ends_no_answer(tmp_path):
    tokens = ["<|endoftext|>", "<|return|>", "<|end|>", "<|call|>", "<|start|>"] + [f"t{i}" for i in range(91)]
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [3] * 5 + [1] * 91}
    model = gguf_files.a_model("gpt-oss", **gguf_files.GPT_OSS)
    gguf_files.write(tmp_path / "model.gguf", "gpt-oss", model, "F32", metadata)
    assert read_architecture(tmp_path / "model.gguf").eos_token_ids == (1, 0, 3)


@pytest.mark.parametrize("name", ["gpt-oss", "gemma2", "gemma3"])
def test_what_is_too_large_for_float16_is_not_computed_in_it_whatever_its_file_is_in(tmp_path, name):
    architecture, changes = MODELS[name]
    gguf_files.write(tmp_path / "model.gguf", architecture, gguf_files.a_model(architecture, **changes), "F16")
    assert read_architecture(tmp_path / "model.gguf").dtype == "bfloat16"


@pytest.mark.parametrize(
    ("pattern", "windows"), [(2, (9, 0, 9)), (3, (9, 9, 0)), (1, (0, 0, 0)), ([False, True, True], (0, 9, 9))]
)
def test_a_file_may_say_which_layers_have_windows(tmp_path, pattern, windows):
    metadata = {"attention.sliding_window_pattern": pattern}
    assert read_architecture(gguf_files.write_gpt_oss(tmp_path / "model.gguf", **metadata)).windows == windows


def test_experts_in_mxfp4_are_never_whole_in_float32_while_they_are_loaded(tmp_path):
    sizes = {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 2, "num_local_experts": 8}
    model = gguf_files.a_model("gpt-oss", **{**gguf_files.GPT_OSS, **sizes})
    num_values = sum(parameter.numel() for parameter in model.parameters())
    gguf_files.write(tmp_path / "model.gguf", "gpt-oss", model, {"experts": "MXFP4", "": "BF16"})
    engine = msgspec.structs.replace(ENGINE, dtype="bfloat16", max_kv_bytes=1 << 20, max_model_tokens=64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        Runner.load(str(tmp_path / "model.gguf"), engine)
    taken = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    # Two bytes each, and what is in work.
    assert 2 * num_values < max(accumulate(taken)) < 2.6 * num_values


@pytest.mark.parametrize(
    ("metadata", "name", "sentence"),
    [
        ({"expert_feed_forward_length": 128}, "", "tensor blk.0.ffn_gate_exps.bias of .* is 4x256, not 4x128"),
        ({"embedding_length": 128, "attention.head_count": 2}, "", "tensor .* of .* is 96x256, not 96x128"),
        ({}, "blk.1.ffn_up_exps.bias", "has no tensor blk.1.ffn_up_exps.bias"),
        ({}, "blk.1.attn_sinks.weight", "has no tensor blk.1.attn_sinks.weight"),
        ({}, "blk.2.post_attention_norm.weight", "has no tensor blk.2.post_attention_norm.weight"),
        ({}, "blk.0.attn_q.bias", "has no tensor blk.0.attn_q.bias"),
        ({}, "gpt-oss.expert_count", "cannot be read as GGUF: it lacks gpt-oss.expert_count"),
        ({}, "gpt-oss.expert_used_count", "cannot be read as GGUF: it lacks gpt-oss.expert_used_count"),
    ],
)
def test_what_gpt_oss_lacks_is_named(tmp_path, metadata, name, sentence):
    """``name``: of what goes by another one in the file."""
    path = gguf_files.write_gpt_oss(tmp_path / "model.gguf", {"experts": "MXFP4"}, **metadata)
    if name:
        path.write_bytes(path.read_bytes().replace(name.encode(), name[:-1].encode() + b"_"))
    with pytest.raises(ModelError, match=sentence):
        Runner.load(str(path), ENGINE)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("deepseek2", {"attn_kv_b": "Q8_0"}),
        ("deepseek3", {"attn_k_b": "Q8_0", "attn_v_b": "Q4_0"}),
        ("deepseek3", {"attn_q_b": "Q4_0", "ffn_up_shexp": "Q4_1", "ffn_gate_shexp": "Q4_1", "ffn_down": "Q4_0"}),
    ],
)
def test_what_of_deepseek_is_quantised_loses_nothing_more(tmp_path, name, kinds):
    architecture, changes = MODELS[name]
    model = gguf_files.a_model(architecture, **changes)
    gguf_files.write(tmp_path / "model.gguf", architecture, model, kinds)
    torch.testing.assert_close(logits_of(tmp_path / "model.gguf"), oracle_logits(model, TOKEN_IDS), atol=1e-3, rtol=0)


def test_layers_of_deepseek_that_guess_ahead_are_left_out(tmp_path):
    architecture, changes = MODELS["deepseek3"]
    model = gguf_files.a_model(architecture, **changes)
    metadata = {"deepseek2.block_count": 4, "deepseek2.nextn_predict_layers": 1}
    extra = {f"blk.3.{name}.weight": np.ones((4, 256), "f4") for name in ("nextn.eh_proj", "attn_q_a")}
    gguf_files.write(tmp_path / "model.gguf", architecture, model, "F32", metadata, extra)
    torch.testing.assert_close(logits_of(tmp_path / "model.gguf"), oracle_logits(model, TOKEN_IDS), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("metadata", "name", "sentence"),
    [
        ({}, "blk.0.attn_v_b.weight", "has no tensor blk.0.attn_v_b.weight"),
        ({}, "blk.1.exp_probs_b.bias", "has no tensor blk.1.exp_probs_b.bias"),
        ({}, "blk.2.ffn_up_shexp.weight", "has no tensor blk.2.ffn_up_shexp.weight"),
        ({}, "deepseek2.attention.kv_lora_rank", "cannot be read as GGUF: it lacks deepseek2.attention.kv_lora_rank"),
        ({"rope.dimension_count": 100}, "", "has an impossible qk_nope_head_dim: -4"),
        ({"attention.value_length_mla": 64}, "", "tensor blk.0.attn_v_b.weight of .* is 4x32x96, not 4x64x96"),
        ({"attention.temperature_scale": 0.1}, "", "scales attention by the position, which is not supported"),
    ],
)
def test_what_deepseek_lacks_is_named(tmp_path, metadata, name, sentence):
    """``name``: of what goes by another one in the file."""
    path, (architecture, changes) = tmp_path / "model.gguf", MODELS["deepseek3"]
    model, metadata = (
        gguf_files.a_model(architecture, **changes),
        {f"deepseek2.{key}": metadata[key] for key in metadata},
    )
    gguf_files.write(path, architecture, model, "F32", metadata)
    if name:
        path.write_bytes(path.read_bytes().replace(name.encode(), name[:-1].encode() + b"_"))
    with pytest.raises(ModelError, match=sentence):
        Runner.load(str(path), ENGINE)
