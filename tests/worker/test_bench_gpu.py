"""The GPU benchmark runs anywhere, tiny, so that it runs where a GPU is; its figures are taken for nothing."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from benchmarks.engine_gpu.__main__ import main
from benchmarks.engine_gpu.device import covered


def test_every_part_measures_something_on_a_cpu(tmp_path):
    pytest.importorskip("transformers")
    target = tmp_path / "report.json"
    notes = tmp_path / "notes.md"
    options = ["--device", "cpu", "--shape", "tiny", "--no-compile", "--json", str(target), "--notes", str(notes)]
    done = CliRunner().invoke(main, options, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    report = json.loads(target.read_text())
    assert report["failures"] == {}
    # Only a device that computes by itself can be idle.
    assert [name for name, value in report.items() if value is None] == ["busy_share"]
    assert report["ours_tokens_per_s"].keys() == report["transformers_tokens_per_s"].keys() == {"16/4"}
    assert report["forms_decode_tokens_per_s"].keys() == {"int8", "int4", "fp8"}
    assert "ours is" in done.output
    assert f"## {report['date']}, {report['commit']}, " in notes.read_text()


def test_what_would_begin_too_late_is_named_instead(tmp_path):
    options = ["--device", "cpu", "--shape", "tiny", "--minutes", "0"]
    done = CliRunner().invoke(main, options, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "not measured: correct: 0 minutes were over" in done.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_it_says_so():
    done = CliRunner().invoke(main, [])
    assert done.exit_code == 1
    assert "there is no CUDA device here" in done.output


def test_kernels_beside_each_other_count_once():
    assert covered([(0.0, 2.0), (5.0, 6.0), (1.0, 3.0), (1.5, 2.5)]) == pytest.approx(4.0)
    assert covered([]) == 0.0
