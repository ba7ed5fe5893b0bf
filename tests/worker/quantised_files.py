"""Checkpoints quantised as others do it, beside the model that their weights mean."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from policies import settings
from tests.worker.tiny import BLOCK_SIZE, checkpoint
from worker.inputs import Span
from worker.models.fitting import fitted
from worker.models.forms import Form, Fp8, Int4, Int8
from worker.models.importers import importer_of
from worker.models.weights import Checkpoint
from worker.runner import Runner

ENGINE = settings.Engine(
    device="cpu", dtype="float32", num_threads=1, block_size=BLOCK_SIZE, max_kv_bytes=8 << 20, attention="reference"
)
"""Without the kernels, which round activations to eight bits as well."""
SIZES = {"hidden_size": 256, "intermediate_size": 384, "vocab_size": 96, "num_hidden_layers": 2}
TOKEN_IDS = [(7 * place + 3) % 96 for place in range(30)]
Quantise = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]
"""A module's name and weight to its tensors in the file, by the ends of their names, and to what they mean."""


@dataclass(frozen=True)
class Method:
    """One way to publish a checkpoint."""

    config: dict[str, Any]
    quantise: Quantise
    form: type
    exact: bool = True
    """Our form holds it without a loss."""


def groups_of(weight: Tensor, group: int, bits: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [out, in], scales and zero points [out, groups], both from 0 on; w = (code - zero) * scale."""
    parts = weight.unflatten(1, (-1, group))
    top = 2**bits - 1
    if symmetric:
        scales, zeros = parts.abs().amax(2) / (top // 2), torch.full(parts.shape[:2], (top + 1) // 2)
    else:
        least, most = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
        scales = (most - least) / top
        zeros = (-least / scales).round().clamp(0, top)
    scales = scales.half().float()
    codes = (parts / scales[:, :, None] + zeros[:, :, None]).round().clamp(0, top)
    return codes.flatten(1).int(), scales, zeros.int()


def words_of(codes: Tensor, bits: int = 4) -> Tensor:
    """Neighbours in a row to one word of 32 bits, the first lowest."""
    each = 32 // bits
    shifts = torch.arange(each) * bits
    return (codes.long().unflatten(-1, (-1, each)) << shifts).sum(-1).to(torch.int32)


def gptq(bits: int = 4, group: int = 128, version: int = 1, symmetric: bool = False, order: str = "") -> Method:
    """``order``: "" (none is written), "plain", "act" (groups of inputs by rank), "ragged" (of unlike sizes)."""

    def quantise(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        num_inputs = weight.shape[1]
        size = num_inputs if group == -1 else group
        torch.manual_seed(num_inputs)
        places = torch.randperm(num_inputs) if order == "act" else torch.arange(num_inputs)
        g_idx = torch.empty(num_inputs, dtype=torch.int32)
        g_idx[places] = (torch.arange(num_inputs) // size).int()
        if order == "ragged":
            g_idx[size] = 0
        by_group, scales, zeros = groups_of(weight[:, places], size, bits, symmetric)
        codes = torch.empty_like(by_group)
        codes[:, places] = by_group
        meant = (codes - zeros[:, g_idx.long()]) * scales[:, g_idx.long()]
        stored = (zeros - 1) & (2**bits - 1) if version == 1 else zeros
        tensors = {
            "qweight": words_of(codes, bits).t().contiguous(),
            "qzeros": words_of(stored.t().contiguous(), bits),
            "scales": scales.t().half().contiguous(),
        }
        return tensors | ({"g_idx": g_idx} if order else {}), meant

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": order == "act", "sym": symmetric}
    if version == 2:
        config["checkpoint_format"] = "gptq_v2"
    is_even = bits == 4 and order != "ragged"
    return Method(config, quantise, Int4 if is_even else Int8, exact=is_even)


def awq(group: int = 128) -> Method:
    def quantise(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        size = weight.shape[1] if group == -1 else group
        codes, scales, zeros = groups_of(weight, size, 4, symmetric=False)
        order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

        def packed(columns: Tensor) -> Tensor:
            return words_of(columns.unflatten(1, (-1, 8))[:, :, order].flatten(1))

        tensors = {
            "qweight": packed(codes.t()),
            "qzeros": packed(zeros.t()),
            "scales": scales.t().half().contiguous(),
        }
        converter = AutoAWQConverter(group_size=size)
        theirs, their_scales, their_zeros = converter._convert_gemm_module(
            tensors["qweight"], tensors["scales"], tensors["qzeros"]
        )
        assert their_zeros is not None
        meant = (theirs - their_zeros.repeat_interleave(size, 1)) * their_scales.float().repeat_interleave(size, 1)
        return tensors, meant

    return Method({"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}, quantise, Int4)


def compressed(layout: str, form: type, exact: bool = True, acts: bool = False, **weights: Any) -> Method:
    args = QuantizationArgs(**weights)
    activations = QuantizationArgs(num_bits=8, type=args.type, strategy="token", dynamic=True) if acts else None
    scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=activations)

    def quantise(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        state = {"weight": weight, **_measured(weight, args)}
        compressor = BaseCompressor.get_value_from_registry(layout)
        written = compressor.compress(state, scheme)
        return dict(written), compressor.decompress(dict(written), scheme)["weight"].float()

    group = {"targets": ["Linear"], "weights": json.loads(args.model_dump_json()), "input_activations": None}
    config = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
        "kv_cache_scheme": None,
    }
    return Method(config, quantise, form, exact)


def _measured(weight: Tensor, args: QuantizationArgs) -> dict[str, Tensor]:
    """Scales and zero points as an observer of least and largest has them."""
    num_outputs, num_inputs = weight.shape
    match args.strategy:
        case "tensor":
            parts = weight.reshape(1, 1, -1)
        case "channel":
            parts = weight[:, None]
        case "block":
            height, width = args.block_structure
            parts = weight.reshape(num_outputs // height, height, num_inputs // width, width).transpose(1, 2).flatten(2)
        case _:
            parts = weight.unflatten(1, (-1, args.group_size))
    if args.type == "float":
        scales = parts.abs().amax(2) / 448
        return {"weight_scale": scales.view(1) if scales.numel() == 1 else scales}
    top = 2**args.num_bits - 1
    if args.symmetric:
        scales = parts.abs().amax(2) / (top // 2)
        zeros = torch.zeros_like(scales)
    else:
        least, most = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
        scales = (most - least) / top
        zeros = (-least / scales).round() - (top + 1) // 2
    return {
        name: values.view(1) if values.numel() == 1 else values
        for name, values in (("weight_scale", scales), ("weight_zero_point", zeros.to(torch.int8)))
    }


def fp8(block: tuple[int, int] | None, scales: tuple[str, str] = ("weight_scale", "input_scale")) -> Method:
    """``scales``: the names of those of a whole matrix and of its inputs."""

    def quantise(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        if block is None:
            scale = weight.abs().max() / 448
            codes = (weight / scale).to(torch.float8_e4m3fn)
            return {"weight": codes, scales[0]: scale, scales[1]: torch.tensor(0.5)}, codes.float() * scale
        height, width = block
        rows, columns = -(-weight.shape[0] // height), -(-weight.shape[1] // width)
        sizes = torch.rand(rows, columns) * 0.001 + 0.0005
        wide = sizes.repeat_interleave(height, 0)[: weight.shape[0]].repeat_interleave(width, 1)[:, : weight.shape[1]]
        codes = (weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale_inv": sizes}, codes.float() * wide

    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    if block is None:
        return Method(config, quantise, Fp8)
    return Method({**config, "weight_block_size": list(block)}, quantise, Int8, exact=False)


def modelopt(by_row: bool) -> Method:
    def quantise(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        scale = (weight.abs().amax(1) if by_row else weight.abs().max()) / 448
        codes = (weight / scale.view(-1, 1)).to(torch.float8_e4m3fn)
        tensors = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.5)}
        return tensors, codes.float() * scale.view(-1, 1)

    algorithm = "FP8_PER_CHANNEL_PER_TOKEN" if by_row else "FP8"
    return Method({"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}, quantise, Fp8)


W4: dict[str, Any] = {"num_bits": 4, "type": "int"}
W8: dict[str, Any] = {"num_bits": 8, "type": "int"}
F8: dict[str, Any] = {"num_bits": 8, "type": "float"}
METHODS: dict[str, Method] = {
    "gptq": gptq(order="plain"),
    "gptq, no g_idx": gptq(),
    "gptq v2": gptq(version=2, order="plain"),
    "gptq, symmetric": gptq(symmetric=True, order="plain"),
    "gptq, groups of 32 by rank": gptq(group=32, order="act"),
    "gptq, by rank": gptq(order="act"),
    "gptq, a group a row": gptq(group=-1, order="plain"),
    "gptq, groups of 16": Method(gptq(group=16).config, gptq(group=16).quantise, Int8, exact=False),
    "gptq, groups of unlike sizes": gptq(order="ragged"),
    "gptq in 8 bits": gptq(bits=8, order="plain"),
    "gptq in 8 bits by rank": gptq(bits=8, order="act"),
    "awq": awq(),
    "awq, groups of 64": awq(64),
    "awq, a group a row": awq(-1),
    "W4A16 by group": compressed("pack-quantized", Int4, **W4, strategy="group", group_size=128),
    "W4A16 by group of 32, asymmetric": compressed(
        "pack-quantized", Int4, **W4, strategy="group", group_size=32, symmetric=False
    ),
    "W4A16 by channel": compressed("pack-quantized", Int4, **W4, strategy="channel"),
    "W4A16 by channel, asymmetric": compressed("pack-quantized", Int4, **W4, strategy="channel", symmetric=False),
    "W4A16 by tensor": compressed("pack-quantized", Int4, **W4, strategy="tensor"),
    "W8A16 by channel": compressed("pack-quantized", Int8, **W8, strategy="channel"),
    "W8A16 by group": compressed("pack-quantized", Int8, exact=False, **W8, strategy="group", group_size=64),
    "W8A8 by channel": compressed("int-quantized", Int8, acts=True, **W8, strategy="channel"),
    "W8A8 by tensor": compressed("int-quantized", Int8, acts=True, **W8, strategy="tensor"),
    "W8A8 asymmetric": compressed(
        "int-quantized", Int8, exact=False, acts=True, **W8, strategy="channel", symmetric=False
    ),
    "W4 unpacked": compressed("int-quantized", Int4, acts=True, **W4, strategy="group", group_size=128),
    "FP8 by channel": compressed("float-quantized", Fp8, acts=True, **F8, strategy="channel"),
    "FP8 by tensor": compressed("float-quantized", Fp8, acts=True, **F8, strategy="tensor"),
    "FP8 by block": compressed(
        "float-quantized", Int8, exact=False, acts=True, **F8, strategy="block", block_structure=[64, 128]
    ),
    "fp8, by blocks of 128": fp8((128, 128)),
    "fp8, by blocks that fit nowhere": fp8((48, 80)),
    "fp8, by tensor": fp8(None),
    "modelopt, by tensor": modelopt(by_row=False),
    "modelopt, by row": modelopt(by_row=True),
    "fp8, by tensor, as transformers writes it": fp8(None, ("weight_scale_inv", "activation_scale")),
}
LINEAR = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj(_with_mqa)?")
WITH_HEAD = re.compile(rf"{LINEAR.pattern}|lm_head")


def write(
    directory: Path,
    method: Method,
    architecture: str = "LlamaForCausalLM",
    modules: re.Pattern[str] = LINEAR,
    **changes: Any,
) -> Any:
    """A checkpoint by this method, and the model of transformers with the weights that it means."""
    model = checkpoint(directory, architecture, **{**SIZES, **changes})
    tensors = load_file(directory / "model.safetensors")
    for name, module in model.named_modules():
        if modules.fullmatch(name):
            weight = module.weight.detach() * 0.3  # so that what a rounding adds is not blown up by wide layers
            written, meant = method.quantise(name, weight)
            del tensors[f"{name}.weight"]
            tensors |= {f"{name}.{end}": tensor for end, tensor in written.items()}
            module.weight.data.copy_(meant)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    rewrite(directory, quantization_config=method.config)
    return model


def write_mxfp4(directory: Path, **changes: Any) -> Any:
    """A gpt-oss of four experts in MXFP4, and the model of transformers with the weights that it means."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9}
    model = checkpoint(directory, "GptOssForCausalLM", **experts, **changes)
    tensors = load_file(directory / "model.safetensors")
    for name, parameter in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            num_experts, num_inputs, num_outputs = tensors.pop(name).shape
            groups = (num_experts, num_outputs, num_inputs // 32)
            blocks = torch.randint(256, (*groups, 16), dtype=torch.uint8)
            scales = torch.randint(121, 127, groups, dtype=torch.uint8)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            parameter.data.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    save_file(tensors, directory / "model.safetensors")
    unpacked = ["model.layers.*.self_attn"]
    rewrite(directory, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": unpacked})
    return model


def rewrite(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def logits_of(directory: Path) -> Tensor:
    return Runner.load(str(directory), ENGINE).forward([Span(TOKEN_IDS, 0, [4, 1, 2, 9], len(TOKEN_IDS))])


def form_of(directory: Path, name: str, shape: tuple[int, int]) -> Form:
    importer = importer_of(directory)
    assert importer is not None
    with Checkpoint(directory) as tensors:
        form = importer.matrix(tensors, name, shape, partial(fitted, dtype=torch.bfloat16))
    assert form is not None
    return form
