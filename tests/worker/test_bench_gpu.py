"""The GPU benchmark runs anywhere, tiny, so that it runs where a GPU is; its figures are taken for nothing."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks.engine_gpu.__main__ import main
from benchmarks.engine_gpu.bench import PARTS
from benchmarks.engine_gpu.device import covered
from benchmarks.engine_gpu.report import Report, read
from benchmarks.engine_gpu.weights import TINY_MIXTURE, decoder
from policies.settings import Engine
from worker.graphs import FARTHEST
from worker.inputs import Span
from worker.models.architecture import Mixture
from worker.runner import Runner


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
    assert report["experts"].keys() == {"1", "20"}
    assert report["mixed_steps"]["2 decodes of 10 tokens and a chunk of 5"]["launched_ms"] > 0
    assert "ours is" in done.output
    assert notes.read_text().count(f"## {report['date']}, {report['commit']}, ") == 1
    assert report["done"] == list(PARTS)


def test_a_mixture_is_measured_beside_the_same_mixtures(tmp_path):
    pytest.importorskip("transformers")
    target = tmp_path / "report.json"
    parts = [word for part in ("single", "transformers", "loop") for word in ("--part", part)]
    options = ["--device", "cpu", "--shape", "tiny-mixture", "--no-compile", "--json", str(target), *parts]
    done = CliRunner().invoke(main, options, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    report = json.loads(target.read_text())
    assert report["failures"] == {}
    assert report["loop_decode_tokens_per_s"]
    # A token reads two of eight experts: attention, router, experts; and the head.
    layer = 64 * ((8 + 4) * 16 + 8 + 2 * 3 * 32)
    assert report["weight_bytes"] == 2 * (2 * layer + 320 * 64)


def test_a_deep_mixture_says_the_same_however_it_is_rounded():
    """Else its graphs would be taken for wrong, and it would be measured without."""
    num_layers, place = 24, torch.device("cpu")
    sizes = {"num_layers": num_layers, "hidden_size": 128, "intermediate_size": 256, "mixture": Mixture(64, 2, True)}
    deep = replace(TINY_MIXTURE, **sizes, layer_ropes=(0,) * num_layers, windows=(0,) * num_layers)
    model, said = decoder(deep, place, "none"), []
    for attention in ("reference", "auto"):
        engine = Engine(device="cpu", attention=attention, num_threads=1, max_model_tokens=64, max_sequences=1)
        runner = Runner.of(model, engine, num_blocks=4)
        said.append(runner.forward([Span(list(range(40)), 0, [0, 1, 2, 3], 40)]).clone())
    apart = (said[0] - said[1]).square().mean(-1).sqrt() / said[0].std(-1)
    # A shape that is measured is larger in every way, and more of what is rounded comes out.
    assert apart.max() < FARTHEST / 10


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


def test_a_part_whose_process_ends_is_named_and_the_others_are_measured(tmp_path, monkeypatch):
    """As where an error of CUDA has ended it."""
    run, died = subprocess.run, []

    def run_until_it_dies(command, **how):
        if command[1:3] != ["-m", "benchmarks.engine_gpu"] or died:
            return run(command, **how)
        died.append(command)
        path = Path(command[command.index("--into") + 1])
        report = read(path)
        report.doing, report.done = "single", ["correct"]
        report.save(path)
        return subprocess.CompletedProcess(command, -6)

    monkeypatch.setattr(subprocess, "run", run_until_it_dies)
    parts = ["--part", "correct", "--part", "single", "--part", "attention"]
    done = CliRunner().invoke(main, ["--device", "cpu", "--shape", "tiny", *parts], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "not measured: single: its process ended with -6" in done.output
    assert "attention of decode" in done.output


def test_each_way_to_compute_few_rows_is_told_with_its_share_of_the_copy():
    report = Report("today", "abc", "cpu", "2", "tiny", "none", 8_000_000, copy_gb_per_s=4.0)
    report.few_rows_s = {"1": {"as ever": 0.004, "fused": 0.0025}}
    told = "a step of 1, of copying the weights' bytes: as ever 4.00 ms, 0.50; fused 2.50 ms, 0.80"
    assert told in report.lines()


def test_notes_are_written_anew_and_what_stood_before_them_stays(tmp_path):
    path = tmp_path / "notes.md"
    path.write_text("Words.\n")
    report = Report("today", "abc", "cpu", "2", "tiny", "none", 8)
    for rate in (1.0, 2.0):
        report.copy_gb_per_s = rate
        report.note(path)
    assert (
        path.read_text()
        == "Words.\n\n## today, abc, cpu, torch 2, tiny, quantize none\n\n- copy: 2 GB/s read and written\n"
    )
