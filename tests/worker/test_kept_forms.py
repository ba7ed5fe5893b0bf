"""What has to be rounded of checkpoints that others quantised, of GGUF files and of stacked experts is rounded once."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from policies import settings
from tests.worker import gguf_files, tiny
from tests.worker.quantised_files import METHODS, Method, logits_of, write, write_mxfp4
from tests.worker.test_mixtures import GPT_OSS, SIZES
from tests.worker.test_quantized_cache import as_it_is, kept, products, rounded_again
from worker.inputs import Span
from worker.models import Layout, Shard, fitting, load, quantized_cache, read_architecture, sources
from worker.models.gguf import GgufFile, GgufSource, blocks
from worker.models.importers import Mxfp4
from worker.models.quantized_cache import QuantizingSource, name_of
from worker.models.weights import Checkpoint
from worker.runner import Runner

TOKEN_IDS = [3, 14, 15, 92, 65]


@pytest.fixture(autouse=True)
def however_small(monkeypatch):
    monkeypatch.setattr(load, "LEAST_PARAMETERS", 0)


@pytest.fixture
def nothing_is_rounded(monkeypatch) -> Callable[[], None]:
    """From now on."""

    def nothing_packed(_: Mxfp4, checkpoint: Checkpoint, name: str, *__: object) -> None:
        assert f"{name}_blocks" not in checkpoint

    def begin() -> None:
        for place in (sources, blocks):
            monkeypatch.setattr(place, "fitted", rounded_again)
        monkeypatch.setattr(Mxfp4, "stack", nothing_packed)
        for place in (load, quantized_cache):
            monkeypatch.setattr(place, "quantized", as_it_is)

    return begin


def logits(path: Path, kind: settings.Quantization = "none") -> torch.Tensor:
    engine = settings.Engine(
        dtype="float32", quantize=kind, attention="torch", block_size=tiny.BLOCK_SIZE, max_kv_bytes=1 << 20
    )
    return Runner.load(str(path), engine).forward([Span(TOKEN_IDS, 0, [0], 1)])


def names(cache: Path) -> set[str]:
    """Of the matrices that are kept."""
    (place,) = kept(cache)
    return {file.stem for file in (cache / place).glob("*.safetensors")}


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if not method.exact])
def test_a_checkpoint_whose_form_has_no_place_here_is_rounded_once(cache, tmp_path, name, nothing_is_rounded):
    write(tmp_path / "model", METHODS[name])
    first = logits_of(tmp_path / "model")
    assert "layers.1.mlp.down_proj" in names(cache)
    assert "lm_head" not in names(cache)
    nothing_is_rounded()
    assert torch.equal(logits_of(tmp_path / "model"), first)


@pytest.mark.parametrize("name", ["awq", "gptq, by rank", "W4A16 by group", "W8A8 by channel", "FP8 by tensor"])
def test_what_stays_as_it_was_published_is_not_kept(cache, tmp_path, name):
    write(tmp_path / "model", METHODS[name])
    logits_of(tmp_path / "model")
    assert kept(cache) == []


def test_what_others_left_plain_is_rounded_once_where_that_is_wanted(cache, tmp_path, monkeypatch):
    write(tmp_path / "model", METHODS["W4A16 by group"])
    first = logits(tmp_path / "model", "int8")
    assert names(cache) == {"lm_head"}
    assert not torch.equal(first, logits(tmp_path / "model"))
    for place in (load, quantized_cache):
        monkeypatch.setattr(place, "quantized", as_it_is)
    assert torch.equal(logits(tmp_path / "model", "int8"), first)


def test_a_bias_of_zeros_is_no_bias_at_the_second_start_either(cache, tmp_path):
    write(tmp_path / "model", METHODS["gptq in 8 bits"])
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.bias"] = torch.zeros(384)
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    first = logits_of(tmp_path / "model")
    assert "layers.0.mlp.up_proj" in names(cache)
    assert torch.equal(logits_of(tmp_path / "model"), first)


def test_what_becomes_floats_first_is_rounded_once(cache, tmp_path, nothing_is_rounded):
    """Where eight bits a row lose too much, and are asked for all the same."""
    blockwise = METHODS["fp8, by blocks of 128"]

    def quantise(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        weight = weight.clone()
        weight[:, 1:] *= 0.01  # beside the first of a row the others vanish
        return blockwise.quantise(name, weight)

    write(tmp_path / "model", Method(blockwise.config, quantise, blockwise.form))
    first = logits(tmp_path / "model")
    assert kept(cache) == []
    rounded = logits(tmp_path / "model", "int4")
    assert not torch.equal(first, rounded)
    nothing_is_rounded()
    assert torch.equal(logits(tmp_path / "model", "int4"), rounded)


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("in_mxfp4", [True, False], ids=["MXFP4", "floats"])
def test_experts_that_lie_in_one_tensor_are_rounded_once(cache, tmp_path, kind, in_mxfp4, nothing_is_rounded):
    if in_mxfp4:
        write_mxfp4(tmp_path / "model", **SIZES)
    else:
        tiny.checkpoint(tmp_path / "model", "GptOssForCausalLM", **SIZES, **GPT_OSS)
    first = logits(tmp_path / "model", kind)
    assert {f"layers.1.mlp.experts.{matrix}_proj.3" for matrix in ("gate_up", "down")} <= names(cache)
    nothing_is_rounded()
    assert torch.equal(logits(tmp_path / "model", kind), first)


def test_experts_are_floats_where_nothing_else_is_wanted(cache, tmp_path):
    write_mxfp4(tmp_path / "model", **SIZES)
    logits(tmp_path / "model")
    assert kept(cache) == []


@pytest.mark.parametrize("harm", ["gone", "another matrix"])
def test_an_expert_that_cannot_be_used_is_made_anew(cache, tmp_path, harm):
    write_mxfp4(tmp_path / "model", **SIZES)
    first = logits(tmp_path / "model", "int8")
    (place,) = kept(cache)
    victim = cache / place / "layers.1.mlp.experts.gate_up_proj.2.safetensors"
    if harm == "gone":
        victim.unlink()
    else:
        # Whose size is right, so that it is found out in the middle of a stack.
        victim.write_bytes(b"\xff" * victim.stat().st_size)
    assert torch.equal(logits(tmp_path / "model", "int8"), first)
    assert torch.equal(logits(tmp_path / "model", "int8"), first)
    assert kept(cache) == [place]
    assert victim.exists()


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(pipeline=2)], ids=["tensor", "pipeline"])
@pytest.mark.parametrize("model", ["MXFP4", "fp8, by blocks of 128", "gptq in 8 bits by rank"])
def test_each_rank_rounds_its_part_once(cache, tmp_path, layout, model, nothing_is_rounded):
    if model == "MXFP4":
        write_mxfp4(tmp_path / "model", **{**SIZES, "intermediate_size": 128})
    else:
        write(tmp_path / "model", METHODS[model])
    kind: settings.Quantization = "int8" if model == "MXFP4" else "none"
    first = products(tmp_path / "model", layout, kind)
    places = kept(cache)
    assert len(places) == layout.num_ranks
    nothing_is_rounded()
    for before, after in zip(first, products(tmp_path / "model", layout, kind), strict=True):
        assert torch.equal(before, after)
    assert kept(cache) == places


@pytest.fixture
def a_gguf(tmp_path) -> Callable[..., Path]:
    def make(kinds: dict[str, str] | str, seed: int = 0) -> Path:
        path = tmp_path / "model.gguf"
        gguf_files.write(path, "llama", gguf_files.a_model("llama", seed, tie_word_embeddings=True), kinds)
        return path

    return make


@pytest.mark.parametrize(
    ("kinds", "kind"),
    [("F16", "int8"), ("BF16", "int4"), ("F32", "fp8"), ("Q8_0", "none"), ("Q6_K", "none"), ("Q5_K", "int8")],
)
def test_a_gguf_is_rounded_once(cache, a_gguf, kinds, kind, nothing_is_rounded):
    path = a_gguf(kinds)
    first = logits(path, kind)
    assert {"embed_tokens", "layers.2.self_attn.q_proj"} <= names(cache)
    nothing_is_rounded()
    assert torch.equal(logits(path, kind), first)


@pytest.mark.parametrize(("kinds", "kind"), [("MXFP4", "int8"), ("MXFP4", "int4"), ("Q8_0", "none")])
def test_stacked_experts_of_a_gguf_are_rounded_once(cache, tmp_path, kinds, kind, nothing_is_rounded):
    path = tmp_path / "model.gguf"
    gguf_files.write_gpt_oss(path, kinds)
    first = logits(path, kind)
    assert {f"layers.1.mlp.experts.{matrix}_proj.3" for matrix in ("gate_up", "down")} <= names(cache)
    nothing_is_rounded()
    assert torch.equal(logits(path, kind), first)


def test_stacked_experts_of_a_gguf_that_stay_as_they_are_are_not_kept(cache, tmp_path):
    path = tmp_path / "model.gguf"
    gguf_files.write_gpt_oss(path, {"experts": "MXFP4"})
    logits(path)
    assert kept(cache) == []


def test_of_a_gguf_with_several_kinds_those_are_kept_that_are_rounded(cache, a_gguf, monkeypatch):
    path = a_gguf({"": "Q4_K", "attn_output": "Q6_K", "ffn_down": "F16"})
    first = logits(path, "int8")
    assert {name.rpartition(".")[2] for name in names(cache)} == {"o_proj", "down_proj"}
    monkeypatch.setattr(blocks, "fitted", rounded_again)
    assert torch.equal(logits(path, "int8"), first)


@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2)], ids=["alone", "shared"])
def test_what_unlike_forms_become_together_is_rounded_once(cache, a_gguf, layout, monkeypatch):
    path = a_gguf({"": "Q4_K", "attn_v": "Q6_K"})
    first = products(path, layout, "none")
    for place in (cache / each for each in kept(cache)):
        of_kinds = {file.stem.rpartition(".")[2] for file in place.glob("*.safetensors")}
        assert of_kinds == {"q_proj", "k_proj", "v_proj"}
    monkeypatch.setattr(fitting, "fitted", rounded_again)
    monkeypatch.setattr(blocks, "fitted", rounded_again)
    for before, after in zip(first, products(path, layout, "none"), strict=True):
        assert torch.equal(before, after)


def test_a_gguf_in_the_place_of_another_is_rounded_anew(cache, a_gguf):
    first, before = logits(a_gguf("F16"), "int8"), kept(cache)
    fresh = logits(a_gguf("F16", seed=1), "int8")
    assert not torch.equal(fresh, first)
    assert len(kept(cache)) == 1
    assert kept(cache) != before


def test_where_one_part_of_a_gguf_is_another_it_is_rounded_anew(cache, tmp_path):
    parts = []
    for seed in (0, 1):
        (tmp_path / str(seed)).mkdir()
        model = gguf_files.a_model("llama", seed)
        gguf_files.write(tmp_path / str(seed) / "model.gguf", "llama", model, "F16", max_tensors=10)
        parts.append(sorted((tmp_path / str(seed)).iterdir()))
    first, before = logits(parts[0][0], "int8"), kept(cache)
    shutil.copy(parts[1][-1], parts[0][-1])
    assert not torch.equal(logits(parts[0][0], "int8"), first)
    assert len(kept(cache)) == 1
    assert kept(cache) != before


@pytest.mark.parametrize(("kinds", "all_are_kept"), [("F16", True), ({"": "F16", "ffn_down": "Q4_K"}, False)])
def test_a_model_s_own_files_are_read_ahead_where_matrices_still_come_from_them(cache, a_gguf, kinds, all_are_kept):
    path = a_gguf(kinds)
    logits(path, "int8")
    architecture = read_architecture(path)
    source = GgufSource(GgufFile(path), architecture, torch.float32, torch.device("cpu"))
    with QuantizingSource(source, name_of(path, "int8", torch.float32, Shard.of(architecture)), "int8") as found:
        *of_cache, last = found.paths([path])
    assert (last != path) is all_are_kept
    (place,) = kept(cache)
    assert {file.parent for file in of_cache} == {cache / place}
