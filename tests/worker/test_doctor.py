"""The doctor as its own program, on this machine and on one without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from gateway.doctor import ENGINE_S
from tests.worker.peer import PATIENCE_S
from worker import doctor
from worker.native import build, trusted

ROOT = Path(__file__).parents[2]


def run(*arguments: str, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), str(ROOT)])}
    return subprocess.run(
        [sys.executable, "-m", "worker.doctor", *arguments],
        capture_output=True,
        text=True,
        env=environ,
        timeout=PATIENCE_S,
    )


def test_the_doctor_of_the_gateway_waits_for_kernels_to_be_compiled_and_tried():
    assert ENGINE_S > build.TIMEOUT_S + trusted.TIMEOUT_S


def test_the_facts_are_json_and_name_torch_and_the_cpu():
    done = run("--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["facts"]["torch"] == torch.__version__
    assert found["facts"]["num_physical_cores"] >= 1
    assert found["facts"]["fast_paths"].keys() >= {"onednn", "cpu_packed_bf16_linear", "cpu_flash_attention"}
    assert found["facts"]["parallel"].keys() == {"gloo", "nccl", "max_cuda_ranks"}
    assert {finding["severity"] for finding in found["findings"]} <= {"slow", "note"}


def test_without_torch_it_says_so_and_exits_1(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('No module named torch')")
    done = run(path=tmp_path)
    assert done.returncode == 1
    assert "cannot run: torch cannot be loaded" in done.stdout
    assert "Traceback" not in done.stderr


def test_the_report_has_a_line_for_each_finding():
    found = doctor.examine()
    found.find("slow", "the moon is in the wrong phase.")
    assert "slow: the moon is in the wrong phase." in doctor.report(found).splitlines()


def test_a_quota_is_kept_to_and_told(monkeypatch):
    monkeypatch.setattr(doctor, "cpu_quota", lambda: 0.5)
    found = doctor.examine()
    assert (found.facts["cpu_quota"], found.facts["num_threads"]) == (0.5, 1)
    assert any("may use 0.5 CPUs" in each.text and "takes 1 thread," in each.text for each in found.findings)
    assert not any("num_threads" in each.text for each in found.findings)
    assert ", 0.5 CPUs by quota\n" in doctor.report(found)


def test_the_compiler_that_it_names_is_the_one_that_kernels_are_made_by(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert doctor.examine().facts["compiler"] is None
