"""What models need of memory, by their files."""

from __future__ import annotations

import os
from functools import partial

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import demo
from gateway.memory import PROCESS_BYTES, Need, budget_of, free_bytes, need_of
from policies import settings


def weights(engine: settings.Engine, path) -> int:
    return need_of(path, engine).weights_bytes


@pytest.fixture
def checkpoint(tmp_path):
    """A matrix of 1,000,000 values and a norm of 100."""
    tensors = {"matrix": torch.zeros(1000, 1000, dtype=torch.bfloat16), "norm": torch.zeros(100, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("engine", "num_bytes"),
    [
        (settings.Engine(dtype="bfloat16"), 2_000_200),
        (settings.Engine(dtype="float32"), 4_000_400),
        (settings.Engine(dtype="bfloat16", quantize="int8"), 1_050_200),
        (settings.Engine(dtype="bfloat16", quantize="int4"), 600_200),
    ],
)
def test_weights_count_in_the_form_that_they_are_loaded_in(checkpoint, engine, num_bytes):
    assert weights(engine, checkpoint) == num_bytes


def test_a_pipe_in_place_of_a_file_counts_as_nothing(checkpoint):
    os.mkfifo(checkpoint / "other.safetensors")
    assert weights(settings.Engine(dtype="bfloat16"), checkpoint) == 2_000_200


def test_an_embedding_stays_as_it_is_and_a_tied_head_is_another_copy_where_it_is_multiplied_otherwise(tmp_path):
    table = torch.zeros(1000, 100, dtype=torch.bfloat16)
    save_file({"model.embed_tokens.weight": table}, tmp_path / "model.safetensors")
    for engine, num_bytes in (
        (settings.Engine(dtype="float32"), 600_000),
        (settings.Engine(dtype="bfloat16"), 400_000),
        (settings.Engine(dtype="bfloat16", device="cuda"), 200_000),
        (settings.Engine(dtype="bfloat16", quantize="int8"), 305_000),
        (settings.Engine(dtype="float32", quantize="int4"), 460_000),
    ):
        assert weights(engine, tmp_path) == num_bytes
    save_file({"lm_head.weight": table}, tmp_path / "head.safetensors")
    assert weights(settings.Engine(dtype="bfloat16"), tmp_path) == 400_000
    assert weights(settings.Engine(dtype="bfloat16", quantize="int8"), tmp_path) == 305_000


def a_gguf(path, tensors, max_tensors=0):
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=max_tensors)
    for name, kind in tensors.items():
        raw = gguf.quants.quantize(np.ones((1000, 256), np.float32), gguf.GGMLQuantizationType[kind])
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("engine", "tensors", "bytes_each"),
    [
        (settings.Engine(dtype="bfloat16"), {"token_embd.weight": "Q8_0", "output.weight": "F16"}, 2 + 2),
        (settings.Engine(dtype="float32"), {"token_embd.weight": "F16", "output.weight": "Q5_0"}, 4 + 1),
        (settings.Engine(dtype="bfloat16"), {"token_embd.weight": "Q4_0", "ffn_up.weight": "F32"}, 2 + 0.75 + 2),
        (settings.Engine(dtype="float32", quantize="int8"), {"a.weight": "F16", "b.weight": "Q4_1"}, 1.05 + 0.75),
        (settings.Engine(dtype="bfloat16"), {"ffn_up_exps.weight": "MXFP4"}, 2),
    ],
)
def test_a_gguf_counts_in_the_forms_that_it_is_loaded_in(tmp_path, engine, tensors, bytes_each):
    a_gguf(tmp_path / "model.gguf", tensors)
    assert weights(engine, tmp_path / "model.gguf") == int(256_000 * bytes_each)


def test_a_gguf_in_parts_counts_with_all_of_them(tmp_path):
    tensors = {"token_embd.weight": "F16", "ffn_up.weight": "Q8_0", "output.weight": "F16"}
    a_gguf(tmp_path / "model.gguf", tensors, max_tensors=1)
    first, second, _ = sorted(tmp_path.iterdir())
    assert weights(settings.Engine(dtype="float32"), first) == 256_000 * (4 + 1 + 4)
    num_bytes = sum(path.stat().st_size for path in tmp_path.iterdir()) - second.stat().st_size
    second.unlink()
    assert weights(settings.Engine(dtype="float32"), first) == num_bytes


def test_what_is_quantised_in_the_file_stays_so(tmp_path):
    save_file({"packed": torch.zeros(1000, 100, dtype=torch.int32)}, tmp_path / "model.safetensors")
    assert weights(settings.Engine(dtype="float32"), tmp_path) == 400_000


def test_a_damaged_file_counts_as_what_it_has_and_a_missing_one_as_nothing(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 1000)
    (tmp_path / "model.gguf").write_bytes(b"GGUF" * 10)
    assert weights(settings.Engine(), tmp_path) == 1000
    assert weights(settings.Engine(), tmp_path / "model.gguf") == 40
    assert weights(settings.Engine(), tmp_path / "nowhere") == 0


def test_the_demo_model_needs_what_its_file_says():
    assert weights(settings.Engine(dtype="bfloat16"), demo.MODEL_DIR) > 1 << 20


def test_kv_is_what_the_settings_bound_or_a_share_of_what_is_left():
    need = Need(weights_bytes=1000, max_kv_bytes=0, kv_share=0.5)
    assert need.least_bytes == PROCESS_BYTES + 1000
    assert need.kv_bytes(PROCESS_BYTES + 1000 + 600) == 300
    bounded = Need(weights_bytes=1000, max_kv_bytes=50, kv_share=0.5)
    assert bounded.least_bytes == PROCESS_BYTES + 1050
    assert bounded.kv_bytes(1 << 40) == 50


def test_each_rank_is_a_process(checkpoint):
    need = need_of(
        checkpoint, settings.Engine(dtype="bfloat16", tensor_parallel=2, pipeline_parallel=2, max_kv_bytes=50)
    )
    assert need.least_bytes == 4 * PROCESS_BYTES + 2_000_200 + 50
    shared = Need(weights_bytes=1000, max_kv_bytes=0, kv_share=0.5, num_ranks=2)
    assert shared.kv_bytes(2 * PROCESS_BYTES + 1000 + 600) == 300


def test_the_budget_is_the_settings_or_what_is_free(tmp_path):
    assert budget_of(settings.Settings(memory=settings.Memory(budget_bytes=7))) == 7
    on_cuda = {"m": settings.Model(engine=settings.Engine(device="cuda"))}
    assert budget_of(settings.Settings(models=on_cuda)) is None
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  100 kB\nMemAvailable:  64 kB\n")
    assert free_bytes(meminfo, tmp_path, tmp_path / "none") == 64 << 10
    assert free_bytes(tmp_path / "none", tmp_path, tmp_path / "none") is None


@pytest.mark.parametrize(
    ("membership", "group", "limit", "used"),
    [
        ("0::/\n", "", "memory.max", "memory.current"),
        ("0::/docker/abc\n", "", "memory.max", "memory.current"),  # it sees its own group as the root
        ("0::/system.slice/penstock.service\n", "system.slice/penstock.service", "memory.max", "memory.current"),
        ("0::/kubepods/pod/box\n", "kubepods/pod", "memory.max", "memory.current"),
        ("4:memory:/docker/abc\n0::/\n", "memory/docker/abc", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
def test_what_is_free_is_within_the_limit_of_whichever_group_has_one(tmp_path, membership, group, limit, used):
    (tmp_path / "meminfo").write_text("MemAvailable:  64 kB\n")
    (tmp_path / "cgroup").write_text(membership)
    directory = tmp_path / "root" / group
    directory.mkdir(parents=True)
    (directory / limit).write_text("50000\n")
    (directory / used).write_text("30000\n")
    (directory / "memory.stat").write_text("anon 1\ninactive_file 4000\nactive_file 6000\n")
    free = partial(free_bytes, tmp_path / "meminfo", tmp_path / "root", tmp_path / "cgroup")
    assert free() == 30_000
    (directory / limit).write_text("max\n" if limit == "memory.max" else f"{(1 << 63) - 4096}\n")
    assert free() == 64 << 10
