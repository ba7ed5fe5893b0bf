"""Checkpoints that others quantised mean here what their own tools read in them."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.worker.quantised_files import (
    ENGINE,
    METHODS,
    TOKEN_IDS,
    Method,
    form_of,
    fp8,
    logits_of,
    rewrite,
    write,
)
from tests.worker.tiny import oracle_logits
from worker.inputs import Span
from worker.models import ModelError
from worker.models.forms import Fp8, Int4, Int8, Plain
from worker.runner import Runner


@pytest.mark.parametrize("name", METHODS)
def test_a_quantised_checkpoint_computes_what_its_weights_mean(tmp_path, name):
    method = METHODS[name]
    model = write(tmp_path, method)
    form = form_of(tmp_path, "model.layers.1.mlp.down_proj", (256, 384))
    assert isinstance(form, method.form)
    meant = model.model.layers[1].mlp.down_proj.weight
    near, exact = logits_of(tmp_path), oracle_logits(model, TOKEN_IDS)
    if method.exact:
        torch.testing.assert_close(form.dense(torch.float32), meant, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(near, exact, atol=2e-3, rtol=0)
    else:
        assert (form.dense(torch.float32) - meant).norm() < 0.02 * meant.norm()
        assert (near - exact).std() < 0.06 * exact.std()


@torch.inference_mode()
@pytest.mark.parametrize("name", ["gptq, by rank", "awq", "W4A16 by group", "W8A8 by channel", "FP8 by channel"])
def test_greedy_tokens_are_those_of_transformers(tmp_path, name):
    model = write(tmp_path, METHODS[name], "Qwen2ForCausalLM")
    expected = model.generate(torch.tensor([TOKEN_IDS[:10]]), max_new_tokens=20, do_sample=False, eos_token_id=None)
    runner, token_ids = Runner.load(str(tmp_path), ENGINE), TOKEN_IDS[:10]
    for _ in range(20):
        token_ids = [*token_ids, int(runner.forward([Span(token_ids, 0, [4, 1, 2, 9], 1)])[0].argmax())]
    assert token_ids == expected[0].tolist()


def test_fused_matrices_of_a_checkpoint_are_read_alike(tmp_path):
    model = write(tmp_path, METHODS["awq"], "Phi3ForCausalLM")
    torch.testing.assert_close(logits_of(tmp_path), oracle_logits(model, TOKEN_IDS), atol=2e-3, rtol=0)


def test_ignored_modules_are_read_as_they_are(tmp_path):
    method = METHODS["W4A16 by group"]

    def quantise(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        if name.endswith(("o_proj", "v_proj")) or name == "model.layers.1.mlp.down_proj":
            return {"weight": weight}, weight
        return method.quantise(name, weight)

    ignore = ["lm_head", "model.layers.1.mlp.down_proj", r"re:.*\.self_attn\.[ov]_proj$"]
    model = write(tmp_path, Method({**method.config, "ignore": ignore}, quantise, Int4))
    torch.testing.assert_close(logits_of(tmp_path), oracle_logits(model, TOKEN_IDS), atol=2e-3, rtol=0)


@pytest.mark.parametrize("names_first", [True, False])
def test_modules_may_be_quantised_in_different_ways(tmp_path, names_first):
    four, eight = METHODS["W4A16 by group"], METHODS["W8A8 by channel"]

    def quantise(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        return (eight if name.endswith(("down_proj", "v_proj")) else four).quantise(name, weight)

    groups = {
        "group_0": {
            **eight.config["config_groups"]["group_0"],
            "targets": [r"re:.*(down|v)_proj$"],
            "format": "int-quantized",
        },
        "group_1": {**four.config["config_groups"]["group_0"], "format": "pack-quantized"},
    }
    if not names_first:
        groups = dict(reversed(groups.items()))
    config = {**four.config, "format": "mixed-precision", "config_groups": groups}
    model = write(tmp_path, Method(config, quantise, Int4))
    near, exact = logits_of(tmp_path), oracle_logits(model, TOKEN_IDS)
    assert (near - exact).std() < 0.06 * exact.std()


@pytest.mark.parametrize("name", ["FP8 by tensor", "fp8, by tensor"])
def test_what_was_measured_of_activations_is_not_needed(tmp_path, name):
    model = write(tmp_path, METHODS[name])
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.input_scale"] = torch.tensor(0.5)
    tensors["model.layers.0.self_attn.k_scale"] = torch.tensor(0.5)
    tensors["model.layers.1.self_attn.kv_scale"] = torch.tensor(0.5)
    save_file(tensors, tmp_path / "model.safetensors")
    torch.testing.assert_close(logits_of(tmp_path), oracle_logits(model, TOKEN_IDS), atol=2e-3, rtol=0)


def test_a_bias_of_zeros_is_no_bias(tmp_path):
    model = write(tmp_path, METHODS["gptq"])
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.bias"] = torch.zeros(384)
    save_file(tensors, tmp_path / "model.safetensors")
    torch.testing.assert_close(logits_of(tmp_path), oracle_logits(model, TOKEN_IDS), atol=2e-3, rtol=0)
    tensors["model.layers.0.mlp.up_proj.bias"] = torch.ones(384)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"holds tensor model.layers.0.mlp.up_proj.bias, which"):
        logits_of(tmp_path)


def test_modules_that_gptq_left_out_are_read_as_they_are(tmp_path):
    method = METHODS["gptq"]

    def quantise(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        return ({"weight": weight}, weight) if "mlp" in name else method.quantise(name, weight)

    for more in (
        {"dynamic": {r"-:.*\.mlp\..*": {}}},
        {"modules_in_block_to_quantize": [["self_attn.q_proj", "self_attn.k_proj"], ["self_attn.v_proj"], ["o_proj"]]},
    ):
        model = write(tmp_path, Method({**method.config, **more}, quantise, Int4))
        torch.testing.assert_close(logits_of(tmp_path), oracle_logits(model, TOKEN_IDS), atol=2e-3, rtol=0)


def test_blocks_of_scales_may_be_said_to_be_larger_than_any_matrix(tmp_path):
    write(tmp_path, fp8((384, 384)))
    whole = logits_of(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    rewrite(tmp_path, quantization_config={**config, "weight_block_size": [1 << 31, 10**30]})
    assert torch.equal(logits_of(tmp_path), whole)


def test_what_modelopt_says_may_be_in_a_file_of_its_own(tmp_path):
    method = METHODS["modelopt, by tensor"]

    def quantise(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        is_left_out = "layers.1.mlp" in name or name.endswith("o_proj")
        return ({"weight": weight}, weight) if is_left_out else method.quantise(name, weight)

    model = write(tmp_path, Method({}, quantise, Fp8))
    rewrite(tmp_path, quantization_config=None)
    said = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "*.1.mlp*", "o_proj"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": said}))
    torch.testing.assert_close(logits_of(tmp_path), oracle_logits(model, TOKEN_IDS), atol=2e-3, rtol=0)
    said["quant_algo"] = "NVFP4"
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": said}))
    with pytest.raises(ModelError, match="the NVFP4 of this LlamaForCausalLM, quantised by modelopt, is not"):
        logits_of(tmp_path)


@pytest.mark.parametrize("name", ["gptq, by rank", "awq, groups of 64"])
def test_old_checkpoints_say_how_they_are_quantised_in_a_file_of_its_own(tmp_path, name):
    model = write(tmp_path, METHODS[name])
    said = {**METHODS[name].config}
    del said["quant_method"]
    rewrite(tmp_path, quantization_config=None)
    if name.startswith("awq"):
        said = {"w_bit": said["bits"], "q_group_size": said["group_size"], "zero_point": True, "version": "GEMM"}
        (tmp_path / "quant_config.json").write_text(json.dumps(said))
    else:
        said |= {"damp_percent": 0.01, "model_name_or_path": None, "is_marlin_format": False}
        (tmp_path / "quantize_config.json").write_text(json.dumps(said))
        (tmp_path / "model.safetensors").rename(tmp_path / "gptq_model-4bit-128g.safetensors")
    torch.testing.assert_close(logits_of(tmp_path), oracle_logits(model, TOKEN_IDS), atol=2e-3, rtol=0)


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({}, "quantize_config.json of this LlamaForCausalLM lacks bits"),
        ({"bits": 3}, "the 3 bits of this GPTQ LlamaForCausalLM are not supported, but 4 and 8"),
        ({"bits": 4, "is_marlin_format": True}, "the GPTQ format marlin of this LlamaForCausalLM is not supported"),
    ],
)
def test_what_a_file_of_its_own_says_may_be_refused(tmp_path, said, sentence):
    write(tmp_path, METHODS["gptq"], num_hidden_layers=1)
    rewrite(tmp_path, quantization_config=None)
    (tmp_path / "quantize_config.json").write_text(json.dumps(said))
    with pytest.raises(ModelError, match=sentence):
        logits_of(tmp_path)


def test_every_form_is_one_of_ours():
    assert {method.form for method in METHODS.values()} | {Plain} == {Plain, Int8, Int4, Fp8}
