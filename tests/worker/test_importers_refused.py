"""Quantised checkpoints that cannot be read are refused in a sentence that says what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.worker.quantised_files import (
    ENGINE,
    METHODS,
    rewrite,
    write,
)
from worker.models import ModelError
from worker.runner import Runner


def spoiled(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], object]:
    def spoil(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors")

    return spoil


def said(**changes: Any) -> Callable[[Path], object]:
    def spoil(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())["quantization_config"]
        rewrite(directory, quantization_config={**config, **changes})

    return spoil


def weights(**changes: Any) -> dict[str, Any]:
    group = METHODS["W4A16 by group"].config["config_groups"]["group_0"]
    return {"group_0": {**group, "weights": {**group["weights"], **changes}}}


Q = "model.layers.0.self_attn.q_proj"
REFUSED: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "no tensor of codes": ("gptq", spoiled(lambda t: t.pop(f"{Q}.qweight")), f"has no tensor {Q}.qweight"),
    "no tensor of scales": ("awq", spoiled(lambda t: t.pop(f"{Q}.scales")), f"has no tensor {Q}.scales"),
    "no packed weights": (
        "W4A16 by group",
        spoiled(lambda t: t.update({f"{Q}.weight": t.pop(f"{Q}.weight_packed")})),
        f"has no tensor {Q}.weight_packed",
    ),
    "codes of another shape": (
        "gptq",
        spoiled(lambda t: t.update({f"{Q}.qweight": torch.zeros(32, 255, dtype=torch.int32)})),
        f"tensor {Q}.qweight of .* is 32x255, not 32x256",
    ),
    "scales of another shape": (
        "W4A16 by group",
        spoiled(lambda t: t.update({f"{Q}.weight_scale": torch.ones(256, 3)})),
        f"tensor {Q}.weight_scale of .* is 256x3, not 256x2",
    ),
    "a zero point a row, for several groups": (
        "W4A16 by group of 32, asymmetric",
        spoiled(lambda t: t.update({f"{Q}.weight_zero_point": torch.zeros(256, dtype=torch.int8)})),
        f"tensor {Q}.weight_zero_point of .* is 256, not 32x8",
    ),
    "packed zero points of another type": (
        "W4A16 by group of 32, asymmetric",
        spoiled(lambda t: t.update({f"{Q}.weight_zero_point": t[f"{Q}.weight_zero_point"].float()})),
        f"the packed zero points of {Q} are float32, not int32",
    ),
    "codes of another type": (
        "W8A8 by channel",
        spoiled(lambda t: t.update({f"{Q}.weight": torch.zeros(256, 256)})),
        f"tensor {Q}.weight of .* is float32, not int8",
    ),
    "a matrix of another shape": (
        "W4A16 by group",
        spoiled(lambda t: t.update({f"{Q}.weight_shape": torch.tensor([255, 256])})),
        f"the matrix of {Q} is 255x256, not 256x256",
    ),
    "a group past the last": (
        "gptq",
        spoiled(lambda t: t[f"{Q}.g_idx"].fill_(2)),
        f"{Q} places an input in a group past the 2 that it has",
    ),
    "a code that is no number": (
        "fp8, by tensor",
        spoiled(lambda t: t[f"{Q}.weight"].view(torch.uint8)[255, 3].fill_(0xFF)),
        f"tensor {Q}.weight holds values that are no numbers",
    ),
    "a tensor too many": (
        "awq",
        spoiled(lambda t: t.update({f"{Q}.lora_A": torch.ones(2)})),
        f"holds tensor {Q}.lora_A, which this architecture does not use",
    ),
    "three bits": ("gptq", said(bits=3), "the 3 bits of this GPTQ LlamaForCausalLM are not supported, but 4 and 8"),
    "no bits": ("gptq", said(bits=None), "quantization_config of this LlamaForCausalLM lacks bits"),
    "another layout of GPTQ": ("gptq", said(checkpoint_format="marlin"), "the GPTQ format marlin of this"),
    "unlike modules": ("gptq", said(dynamic={"+:.*mlp.*": {"bits": 8}}), "is quantised module by module"),
    "modules that are no list": (
        "gptq",
        said(modules_in_block_to_quantize=5),
        "has an impossible modules_in_block_to_quantize: 5",
    ),
    "groups that do not divide": ("gptq", said(group_size=100), "groups of 100 and words of 8 codes do not divide"),
    "a group of text": ("gptq", said(group_size="128"), "has an impossible group_size: 128"),
    "eight bits of AWQ": ("awq", said(bits=8), "the 8 bits of this AWQ LlamaForCausalLM are not supported, but 4"),
    "another layout of AWQ": ("awq", said(version="gemv"), "the AWQ layout gemv of this LlamaForCausalLM is not"),
    "another format": ("W4A16 by group", said(format="marlin-24"), "the compressed-tensors format marlin-24 of this"),
    "five bits": ("W4A16 by group", said(config_groups=weights(num_bits=5)), r"weights of 5 bits \(int\) in this"),
    "four bits of float": ("W4A16 by group", said(config_groups=weights(type="float")), r"weights of 4 bits \(float\)"),
    "scales by something": ("W4A16 by group", said(config_groups=weights(strategy="row")), "scales by row in this"),
    "groups that are no table": ("W4A16 by group", said(config_groups=[1]), "has an impossible config_groups"),
    "an ignore that is no expression": ("W4A16 by group", said(ignore=["re:("]), "has an impossible ignore"),
    "an ignore of a count too large": (
        "W4A16 by group",
        said(ignore=["re:a{99999999999}"]),
        r"has an impossible ignore: re:a\{9",
    ),
    "an ignore of all ways to divide a name": (
        "W4A16 by group",
        said(ignore=[r"re:(\w|\w\w|.)+[!?]"]),
        "groups take too long to match, as ",
    ),
    "modules of all ways to divide a name": (
        "gptq",
        said(dynamic={r"-:(\w|\w\w|.)+[!?]": {}}),
        "in dynamic of this LlamaForCausalLM take too long to match, as ",
    ),
    "a module of brackets alone": ("gptq", said(dynamic={f"-:{5000 * '('}": {}}), r"has an impossible dynamic: -:\("),
    "sparse too": ("W4A16 by group", said(sparsity_config={"format": "sparse-24-bitmask"}), "is sparse as well"),
    "turned too": ("W4A16 by group", said(transform_config={"config_groups": {}}), "is transformed as well"),
    "another float": ("fp8, by tensor", said(fmt="e5m2"), "the FP8 format e5m2 of this LlamaForCausalLM"),
    "a block of nothing": ("fp8, by tensor", said(weight_block_size=[0, 1]), "has an impossible weight_block_size"),
    "another method": (
        "awq",
        said(quant_method="bitsandbytes"),
        "is quantised by bitsandbytes, which is not",
    ),
    "no method": ("awq", lambda at: rewrite(at, quantization_config={"bits": 4}), "lacks quant_method"),
    "a configuration of text": (
        "awq",
        lambda at: rewrite(at, quantization_config="awq"),
        "has an impossible quantiz",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_read_is_refused_in_one_sentence(tmp_path, what):
    method, spoil, sentence = REFUSED[what]
    write(tmp_path, METHODS[method], num_hidden_layers=1)
    spoil(tmp_path)
    with pytest.raises(ModelError, match=sentence) as refusal:
        Runner.load(str(tmp_path), ENGINE)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("method", ["gptq", "fp8, by tensor"])
def test_what_transformers_does_not_load_of_its_families_is_told_by_how_it_is_quantised(tmp_path, method):
    write(tmp_path, METHODS[method], "StableLmForCausalLM", num_hidden_layers=1)
    own = METHODS[method].config["quant_method"]
    with pytest.raises(ModelError, match=f"this StableLmForCausalLM is quantised by {own}, .*; take its checkpoint in"):
        Runner.load(str(tmp_path), ENGINE)
