"""What files of some architectures have otherwise than most: tensors in one, rows in another order, other ends."""

from __future__ import annotations

import copy
import struct

import pytest
import torch

from tests.worker import gguf_files
from tests.worker.gguf_models import MODELS
from tests.worker.test_gguf import ENGINE, TOKEN_IDS, logits_of
from tests.worker.tiny import oracle_logits
from worker.models import ModelError, read_architecture
from worker.runner import Runner


@pytest.mark.parametrize("name", ["chatglm", "qwen2, tied"])
def test_queries_keys_and_values_may_be_one_tensor(tmp_path, name):
    architecture, changes = MODELS[name]
    model = gguf_files.a_model(architecture, **changes)
    gguf_files.write(tmp_path / "model.gguf", architecture, model, {"attn_qkv": "F32"})
    torch.testing.assert_close(logits_of(tmp_path / "model.gguf"), oracle_logits(model, TOKEN_IDS), atol=1e-3, rtol=0)


def test_glm_that_sees_has_its_rows_apart(tmp_path):
    model = gguf_files.a_model("glm4", head_dim=64, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5})
    apart = copy.deepcopy(model)
    for name, parameter in apart.named_parameters():
        if ".q_proj." in name or ".k_proj." in name:
            turning, others = parameter.view(-1, 64, *parameter.shape[1:]).split(32, 1)
            rows = torch.cat((turning[:, 0::2], turning[:, 1::2], others), 1)
            parameter.data = rows.reshape(parameter.shape).contiguous()
    metadata = {"glm4.rope.dimension_sections": [8, 12, 12, 0]}
    gguf_files.write(tmp_path / "model.gguf", "glm4", apart, metadata=metadata)
    torch.testing.assert_close(logits_of(tmp_path / "model.gguf"), oracle_logits(model, TOKEN_IDS), atol=1e-3, rtol=0)


def test_whoever_speaks_next_ends_an_answer_of_glm(tmp_path):
    tokens = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|observation|>"] + [f"t{i}" for i in range(92)]
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [3] * 4 + [1] * 92}
    model = gguf_files.a_model("glm4", eos_token_id=0, num_hidden_layers=1)
    gguf_files.write(tmp_path / "model.gguf", "glm4", model, metadata=metadata)
    assert read_architecture(tmp_path / "model.gguf").eos_token_ids == (0, 1, 3)


def test_queries_that_grow_with_the_position_are_served_where_they_do_not_yet(tmp_path):
    architecture, changes = MODELS["mistral3"]
    model = gguf_files.a_model(architecture, **changes)
    gguf_files.write(tmp_path / "model.gguf", architecture, model)
    assert read_architecture(tmp_path / "model.gguf").max_positions == 32
    gguf_files.write(
        tmp_path / "model.gguf", architecture, model, metadata={"mistral3.attention.temperature_scale": 0.0}
    )
    assert read_architecture(tmp_path / "model.gguf").max_positions == 128


def test_layers_may_be_counted_one_by_one_where_they_are_alike(tmp_path):
    model, path = gguf_files.a_model("granite"), tmp_path / "model.gguf"
    gguf_files.write(path, "granite", model, metadata={"granite.attention.head_count_kv": [2, 2, 2]})
    torch.testing.assert_close(logits_of(path), oracle_logits(model, TOKEN_IDS), atol=1e-3, rtol=0)
    gguf_files.write(path, "granite", model, metadata={"granite.attention.head_count_kv": [2, 0, 2]})
    with pytest.raises(ModelError, match=r"differ in their granite\.attention\.head_count_kv, which is not supported"):
        Runner.load(str(path), ENGINE)


@pytest.mark.parametrize(
    ("name", "metadata", "gone", "sentence"),
    [
        ("glm4", {"rope.dimension_count": 66}, "", "turns 66 of the 64 dimensions of a head"),
        ("glm4", {"rope.dimension_count": 31}, "", "turns 31 of the 64 dimensions of a head"),
        ("glm4", {"feed_forward_length": 128}, "", "tensor blk.0.ffn_up.weight of .* is 512x256, not 256x256"),
        ("glm4", {}, "blk.1.ffn_up.weight", "has no tensor blk.1.ffn_up.weight"),
        ("glm4", {}, "blk.1.post_ffw_norm.weight", "has no tensor blk.1.post_ffw_norm.weight"),
        ("glm4, biased", {}, "blk.1.attn_k.bias", "has no tensor blk.1.attn_k.bias"),
        ("granitemoe", {"expert_shared_feed_forward_length": 0}, "", "holds tensor blk.0.ffn_down_shexp.weight and 8"),
        ("granitemoe", {"expert_used_count": 7}, "", "has an impossible num_experts_per_tok: 7"),
        ("qwen2moe", {}, "blk.2.ffn_gate_inp_shexp.weight", "has no tensor blk.2.ffn_gate_inp_shexp.weight"),
        ("qwen2moe", {"expert_shared_feed_forward_length": 64}, "", "tensor blk.0.ffn_.*_shexp.weight of .* is 96x256"),
    ],
)
def test_what_they_lack_is_named(tmp_path, name, metadata, gone, sentence):
    """``gone``: what goes by another name in the file."""
    path, (architecture, changes) = tmp_path / "model.gguf", MODELS[name]
    said = {f"{architecture}.{key}": metadata[key] for key in metadata}
    gguf_files.write(path, architecture, gguf_files.a_model(architecture, **changes), metadata=said)
    if gone:
        path.write_bytes(path.read_bytes().replace(gone.encode(), gone[:-1].encode() + b"_"))
    with pytest.raises(ModelError, match=sentence):
        Runner.load(str(path), ENGINE)


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.0.attn_norm.weight"])
def test_a_row_in_blocks_of_codes_is_refused(tmp_path, name):
    path = tmp_path / "model.gguf"
    gguf_files.write(path, "llama", gguf_files.a_model("llama", attention_bias=True))
    place = name.encode() + struct.pack("<IQ", 1, 256)
    path.write_bytes(path.read_bytes().replace(place + struct.pack("<I", 0), place + struct.pack("<I", 8)))
    with pytest.raises(
        ModelError, match=f"tensor {name} of .* is stored as Q8_0, which is not supported; .* F32, F16, BF16"
    ):
        Runner.load(str(path), ENGINE)
