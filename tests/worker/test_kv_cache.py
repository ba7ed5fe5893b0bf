"""The pool takes what is really free: the machine's memory, or what the tightest control group leaves of it."""

from __future__ import annotations

import torch

from policies import settings
from worker.kv_cache import KVCache, KVShape, _available, _cgroup_room, budget_bytes, free_bytes

CPU = torch.device("cpu")


def written(directory, **files):
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("__", ".", 1)).write_text(text)


def test_a_share_of_what_is_free_under_the_ceiling():
    free = free_bytes(CPU)
    assert 0 < budget_bytes(settings.Engine(kv_memory_share=0.5), CPU) < free
    assert budget_bytes(settings.Engine(max_kv_bytes=1 << 20), CPU) == 1 << 20


def test_memory_that_the_kernel_calls_available(tmp_path):
    written(tmp_path, meminfo="MemTotal: 10 kB\nMemFree: 1 kB\nMemAvailable:   7 kB\n")
    assert _available(tmp_path / "meminfo") == 7 << 10
    assert _available(tmp_path / "nowhere") == 2 << 30


def test_the_tightest_group_above_this_process_counts_and_page_cache_is_free(tmp_path):
    written(tmp_path, cgroup="0::/slice/unit\n")
    written(tmp_path / "root", memory__stat="inactive_file 5\nactive_file 5\n")
    written(tmp_path / "root" / "slice", memory__max="1000\n", memory__current="400\n")
    stat = "anon 300\ninactive_file 60\nactive_file 40\n"
    written(tmp_path / "root" / "slice" / "unit", memory__max="max\n", memory__current="380\n", memory__stat=stat)
    assert _cgroup_room(tmp_path / "root", tmp_path / "cgroup") == 600
    written(tmp_path / "root" / "slice" / "unit", memory__max="500\n")
    assert _cgroup_room(tmp_path / "root", tmp_path / "cgroup") == 500 - 380 + 100


def test_a_container_sees_its_own_group_as_the_root(tmp_path):
    written(tmp_path, cgroup="0::/docker/abc\n")
    written(tmp_path / "root", memory__max="900\n", memory__current="100\n")
    assert _cgroup_room(tmp_path / "root", tmp_path / "cgroup") == 800


def test_the_older_control_groups_are_read_too(tmp_path):
    written(tmp_path, cgroup="5:cpu:/a\n4:memory:/a\n")
    group = tmp_path / "root" / "memory" / "a"
    written(group, memory__limit_in_bytes="700\n", memory__usage_in_bytes="50\n")
    assert _cgroup_room(tmp_path / "root", tmp_path / "cgroup") == 650


def test_no_groups_no_limit(tmp_path):
    assert _cgroup_room(tmp_path, tmp_path / "nowhere") > 1 << 60


def test_a_block_counts_keys_and_values_of_all_layers():
    shape = KVShape(num_layers=3, num_kv_heads=2, head_dim=16)
    cache = KVCache(shape, 5, 8, torch.bfloat16, CPU)
    assert shape.block_bytes(8, torch.bfloat16) * 5 == sum(t.numel() * 2 for t in (*cache.keys, *cache.values))


def test_a_block_of_int8_counts_its_scales_too():
    shape = KVShape(num_layers=3, num_kv_heads=2, head_dim=16)
    cache = KVCache(shape, 5, 8, torch.int8, CPU, scaled=True)
    kept = (*cache.keys, *cache.values, *cache.key_scales, *cache.value_scales)
    assert shape.block_bytes(8, torch.int8, scaled=True) * 5 == sum(t.numel() * t.itemsize for t in kept)
