"""Quantised weights are made once, found again, and made anew where they cannot be trusted."""

from __future__ import annotations

import logging
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file, save_file

from policies import settings
from tests.worker import tiny
from tests.worker.test_models import LATENT
from worker.inputs import Span
from worker.models import Layout, ModelError, Shard, load, load_decoder, quantized_cache, read_architecture
from worker.models.forms import Plain
from worker.models.load import build_decoder
from worker.models.quantized_cache import QuantizingSource, name_of
from worker.models.sources import CheckpointSource
from worker.models.weights import Checkpoint
from worker.runner import Runner


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(load, "LEAST_PARAMETERS", 0)
    return tmp_path / "cache" / "penstock"


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def model(request, tmp_path):
    directory = tmp_path / "model"
    tiny.checkpoint(
        directory, "LlamaForCausalLM", hidden_size=64, intermediate_size=128, tie_word_embeddings=request.param
    )
    return directory


def logits(model, kind: str) -> torch.Tensor:
    # Without compiled kernels, which would be kept in the same place.
    engine = settings.Engine(
        dtype="float32", quantize=kind, attention="torch", block_size=tiny.BLOCK_SIZE, max_kv_bytes=1 << 20
    )
    return Runner.load(str(model), engine).forward([Span([3, 14, 15, 92, 65], 0, [0], 1)])


def kept(cache) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if not path.name.startswith("kernels-"))


def products(model, layout: Layout, kind: settings.Quantization) -> list[torch.Tensor]:
    """Of each rank's matrices with the same numbers."""
    architecture, made = read_architecture(model), []
    for rank in range(layout.num_ranks):
        shard = Shard.of(architecture, layout, rank)
        of_rank = load_decoder(
            model, architecture, torch.float32, torch.device("cpu"), 64, quantization=kind, shard=shard
        )
        linears = [linear for each in of_rank.layers for linear in (each.qkv, each.output, each.gate_up, each.down)]
        experts = [each.experts for each in of_rank.layers if each.experts is not None]
        linears += [linear for each in experts for linear in (*each.gate_up, *each.down)]
        for linear in [*linears, of_rank.head]:
            if linear is not None:
                x = torch.randn(3, linear.in_features, generator=torch.Generator().manual_seed(1))
                made.append(linear(x))
    return made


def rounded_again(*_):
    raise AssertionError("the cache has these")


def as_it_is(form, _):
    assert not isinstance(form, Plain)
    return form


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_a_model_is_rounded_once(cache, model, kind, monkeypatch):
    first = logits(model, kind)
    (place,) = kept(cache)
    assert place.startswith(f"weights-{kind}-float32-")

    monkeypatch.setattr(quantized_cache, "quantized", rounded_again)
    assert torch.equal(logits(model, kind), first)
    assert kept(cache) == [place]


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(pipeline=2), Layout(2, 2)])
def test_each_rank_rounds_its_part_once(cache, model, layout, monkeypatch):
    logits(model, "int8")
    whole = kept(cache)
    first = products(model, layout, "int8")
    places = kept(cache)
    assert len(places) == layout.num_ranks + 1
    assert set(whole) < set(places)
    monkeypatch.setattr(quantized_cache, "quantized", rounded_again)
    monkeypatch.setattr(load, "quantized", as_it_is)
    for before, after in zip(first, products(model, layout, "int8"), strict=True):
        assert torch.equal(before, after)
    assert kept(cache) == places


def test_what_is_never_multiplied_by_itself_is_not_rounded(cache, tmp_path, monkeypatch):
    """As where nothing is kept."""
    directory = tmp_path / "latent"
    tiny.checkpoint(directory, "DeepseekV3ForCausalLM", **LATENT)
    first = logits(directory, "int8")
    (place,) = kept(cache)
    names = {file.name for file in (cache / place).iterdir()}
    assert any("kv_a_proj" in name for name in names)
    assert not any("kv_b_proj" in name for name in names)
    assert torch.equal(logits(directory, "int8"), first)
    monkeypatch.setattr(load, "LEAST_PARAMETERS", 1 << 60)
    assert torch.equal(logits(directory, "int8"), first)


def test_each_kind_has_its_own_and_none_is_kept_unasked(cache, model):
    assert not torch.equal(logits(model, "int8"), logits(model, "int4"))
    assert len(kept(cache)) == 2
    logits(model, "none")
    assert len(kept(cache)) == 2


def test_other_weights_replace_what_was_kept(cache, model):
    logits(model, "int8")
    before = kept(cache)
    changed = tiny.checkpoint(model, "LlamaForCausalLM", hidden_size=64, intermediate_size=128, seed=1)
    assert changed is not None
    os.utime(model / "model.safetensors", ns=(1, 1))
    fresh = logits(model, "int8")
    after = kept(cache)
    assert len(before) == len(after) == 1
    assert before != after
    assert torch.equal(logits(model, "int8"), fresh)


def test_other_weights_are_found_out_where_files_are_as_large_and_as_old(cache, model):
    file = model / "model.safetensors"
    first = logits(model, "int8")
    before, status = kept(cache), file.stat()
    tensors = load_file(file)
    tensors["model.layers.2.mlp.down_proj.weight"].neg_()
    save_file(tensors, file, metadata={"format": "pt"})
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    fresh = logits(model, "int8")
    assert not torch.equal(fresh, first)
    assert kept(cache) != before
    assert torch.equal(logits(model, "int8"), fresh)


@pytest.mark.parametrize("when", ["before they are opened", "after that"])
def test_weights_that_come_while_files_are_opened_are_mixed_with_none_that_are_kept(
    cache, model, tmp_path, monkeypatch, when
):
    file, other, of_others = model / "model.safetensors", tmp_path / "other", Checkpoint._open
    tiny.checkpoint(other, "LlamaForCausalLM", hidden_size=64, intermediate_size=128, seed=1)
    (other / "config.json").write_bytes((model / "config.json").read_bytes())
    tensors = load_file(other / "model.safetensors")
    if "lm_head.weight" not in load_file(file):
        del tensors["lm_head.weight"]
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    first, second = logits(model, "int8"), logits(other, "int8")

    def opening(files, name):
        if when == "after that":
            names = of_others(files, name)
            os.replace(other / "model.safetensors", file)
            return names
        os.replace(other / "model.safetensors", file)
        return of_others(files, name)

    with monkeypatch.context() as patched:
        patched.setattr(Checkpoint, "_open", opening)
        assert torch.equal(logits(model, "int8"), first if when == "after that" else second)
    assert torch.equal(logits(model, "int8"), second)


@contextmanager
def starting(model) -> Iterator[QuantizingSource]:
    with Checkpoint(model) as files:
        source = CheckpointSource(files, "model.", torch.float32, torch.device("cpu"))
        shard = Shard.of(read_architecture(model))
        with QuantizingSource(source, name_of(model, "int8", torch.float32, shard), "int8") as found:
            yield found


def build(model, source: QuantizingSource) -> None:
    shard = Shard.of(read_architecture(model))
    build_decoder(shard, source, torch.float32, torch.device("cpu"), 64, quantization="int8")


def test_of_two_starts_at_once_the_first_to_finish_is_kept_and_can_be_read_at_once(cache, model, monkeypatch):
    with starting(model) as first, starting(model) as second:
        build(model, first)
        build(model, second)
        first.finish()
        (place,) = [name for name in kept(cache) if not name.startswith(".")]
        monkeypatch.setattr(quantized_cache, "quantized", rounded_again)
        inode = (cache / place).stat().st_ino
        with starting(model) as third:
            second.finish()
            build(model, third)
        assert (cache / place).stat().st_ino == inode
    assert kept(cache) == [place]


def test_what_a_killed_start_left_is_swept_away_after_a_day(cache, model):
    old, fresh = cache / ".making-old", cache / ".making-fresh"
    for left in (old, fresh):
        left.mkdir(parents=True)
        (left / "layers.0.mlp.down_proj.safetensors").write_text("half")
    cache.chmod(0o700)
    os.utime(old, (1, 1))
    logits(model, "int8")
    assert not old.exists()
    assert fresh.exists()


def test_what_nobody_has_used_for_long_goes_when_something_else_is_written(cache, model, tmp_path):
    other, third = (shutil.copytree(model, tmp_path / name) for name in ("other", "third"))
    logits(model, "int8")
    (old,) = kept(cache)
    logits(other, "int8")
    (used,) = set(kept(cache)) - {old}
    for place in (old, used):
        os.utime(cache / place / "matrices.json", (1, 1))
    logits(other, "int8")  # is used again
    assert set(kept(cache)) == {old, used}
    logits(third, "int8")
    assert old not in kept(cache)
    assert used in kept(cache)


def test_what_another_start_puts_in_its_place_meanwhile_is_in_nobody_s_way(cache, model):
    cache.mkdir(parents=True, exist_ok=True)
    gone = cache / ".making-gone"
    gone.symlink_to(cache / "nowhere")  # listed, and not there when it is looked at
    logits(model, "int8")
    gone.unlink()
    (place,) = kept(cache)
    assert place.startswith("weights-int8-")


@pytest.mark.parametrize("harm", ["cut", "gone", "no list", "another matrix", "not a file"])
def test_what_cannot_be_used_is_made_anew(cache, model, harm, caplog):
    caplog.set_level(logging.INFO)
    first = logits(model, "int8")
    (place,) = kept(cache)
    victim = cache / place / "layers.1.mlp.down_proj.safetensors"
    match harm:
        case "cut":
            victim.write_bytes(victim.read_bytes()[:100])
        case "gone":
            victim.unlink()
        case "no list":
            (cache / place / "matrices.json").unlink()
        case "another matrix":
            other = cache / place / "layers.1.mlp.up_proj.safetensors"
            data = other.read_bytes()
            victim.write_bytes(data)
        case "not a file":
            victim.write_bytes(b"\xff" * victim.stat().st_size)
    assert torch.equal(logits(model, "int8"), first)
    assert sum("cannot be used" in record.message for record in caplog.records) == 1
    assert torch.equal(logits(model, "int8"), first)
    assert kept(cache) == [place]
    assert victim.exists()


def test_a_model_that_is_refused_leaves_nothing_behind(cache, model):
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.2.mlp.down_proj.weight"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="down_proj"):
        logits(model, "int8")
    assert kept(cache) == []


def test_without_a_place_to_write_a_model_is_served_all_the_same(tmp_path, monkeypatch, model, caplog):
    caplog.set_level(logging.INFO)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(load, "LEAST_PARAMETERS", 0)
    assert logits(model, "int8").isfinite().all()
    assert any("not kept on disk" in record.message for record in caplog.records)


def test_where_a_disk_fills_up_meanwhile_a_model_is_served_and_nothing_is_left(cache, model, caplog):
    caplog.set_level(logging.INFO)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, hard))  # bytes a file: attention has room, and then nothing
    try:
        first = logits(model, "int8")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert kept(cache) == []
    assert sum("not kept on disk" in record.message for record in caplog.records) == 1
    assert torch.equal(logits(model, "int8"), first)
    assert len(kept(cache)) == 1


def test_small_models_are_not_kept(tmp_path, monkeypatch, model):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    logits(model, "int8")
    assert not (tmp_path / "cache").exists() or kept(tmp_path / "cache" / "penstock") == []
