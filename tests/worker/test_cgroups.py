"""The quota is that of the tightest group which this process is in, on machines that are folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker.cgroups import cpu_quota


def quota(path: Path, membership: str, files: dict[str, str]) -> float | None:
    """On a machine where these files say so; each below the place where control groups are mounted."""
    (path / "cgroup").write_text(membership)
    for name, text in files.items():
        (path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (path / "root" / name).write_text(text)
    return cpu_quota(path / "root", path / "cgroup")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"slice/unit/cpu.max": "400000 100000\n"}, 4.0),
        ({"slice/unit/cpu.max": "max 100000\n", "slice/cpu.max": "250000 100000\n"}, 2.5),
        ({"slice/unit/cpu.max": "50000 50000\n", "slice/cpu.max": "300000 100000\n"}, 1.0),
        ({"slice/unit/cpu.max": "900000 100000\n", "slice/cpu.max": "300000 100000\n"}, 3.0),
        ({"slice/other/cpu.max": "100000 100000\n", "slice/cpu.max": "max 100000\n"}, None),
    ],
)
def test_of_its_own_group_and_of_those_around_it_the_least_counts(tmp_path, files, expected):
    assert quota(tmp_path, "0::/slice/unit\n", files) == expected


def test_a_container_sees_its_own_group_as_the_root(tmp_path):
    assert quota(tmp_path, "0::/docker/abc\n", {"cpu.max": "150000 100000\n"}) == 1.5


def test_nothing_above_the_mount_is_read(tmp_path):
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert quota(tmp_path, "0::/unit\n", {"unit/cpu.max": "200000 100000\n"}) == 2.0


@pytest.mark.parametrize(
    ("own", "around", "expected"),
    [("-1", "600000", 6.0), ("200000", "-1", 2.0), ("300000", "200000", 2.0), ("-1",) * 2 + (None,)],
)
def test_the_older_groups_are_read_too(tmp_path, own, around, expected):
    files = {}
    for group, us in (("a", around), ("a/b", own)):
        files |= {f"cpu/{group}/cpu.cfs_quota_us": f"{us}\n", f"cpu/{group}/cpu.cfs_period_us": "100000\n"}
    assert quota(tmp_path, "5:cpu,cpuacct:/a/b\n4:memory:/a\n", files) == expected


def test_where_there_are_both_the_least_counts(tmp_path):
    files = {"a/cpu.max": "300000 100000\n", "cpu/b/cpu.cfs_quota_us": "250000\n", "cpu/b/cpu.cfs_period_us": "50000\n"}
    assert quota(tmp_path, "2:cpu:/b\n0::/a\n", files) == 3.0


def test_no_groups_no_quota(tmp_path):
    assert cpu_quota(tmp_path, tmp_path / "nowhere") is None
    assert quota(tmp_path, "0::/\nnonsense\n", {}) is None
    assert quota(tmp_path, "0::/\n", {"cpu.max": "unreadable"}) is None
