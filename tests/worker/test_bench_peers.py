"""The race of engines at its smallest: a peer in its own process, both on one tiny model, figures taken for nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from benchmarks.engine_peers import environments, figures
from benchmarks.engine_peers.__main__ import main
from benchmarks.engine_peers.figures import Model, Point, Report
from benchmarks.engine_peers.limits import Limits, best_of
from worker.models import SHAPES

TINY = dataclasses.replace(
    SHAPES["S"],
    vocab_size=320,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    attention_scale=0.25,
    ropes=(dataclasses.replace(SHAPES["S"].ropes[0], rotary_dim=16),),
    layer_ropes=(0, 0),
    windows=(0, 0),
)


@pytest.fixture(autouse=True)
def tiny_shape(monkeypatch):
    monkeypatch.setitem(SHAPES, "S", TINY)


def race(tmp_path: Path, *arguments: str) -> Report:
    target = tmp_path / "report.json"
    options = ["--shape", "S", "--input-tokens", "24", "--output-tokens", "6", "--rounds", "2", "--threads", "1"]
    limits = ["--limit-s", "60", "--start-limit-s", "90", "--json", str(target)]
    done = CliRunner().invoke(main, [*options, *limits, *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return msgspec.json.decode(target.read_bytes(), type=Report)


def test_ours_and_transformers_race_on_the_same_weights_and_leave_no_process(tmp_path):
    pytest.importorskip("transformers")
    picture = tmp_path / "race.png"
    report = race(
        tmp_path,
        *("--concurrency", "1,3", "--no-limits", "--keep", str(tmp_path / "kept"), "--plot", str(picture)),
        # Something else always has a little: each run is tried as often as it may be.
        *("--max-others", "0", "--rounds", "1"),
        *("--peer", f"transformers@1,3={sys.executable}", "--peer", f"openvino={tmp_path / 'nowhere'}"),
    )
    assert [(point.concurrency, point.name, len(point.durations_s)) for point in report.points] == [
        (concurrency, name, 1) for concurrency in (1, 3) for name in ("penstock:bf16", "transformers:bf16")
    ]
    for point in report.points:
        assert point.tokens_per_s > 0
        assert (point.ttft_s is not None) == (point.concurrency == 1)
        # Random weights leave near ties, which two orders of adding up may break in two ways.
        assert point.first_tokens_alike >= 0.5
    # A peer that is not there is named with its reason, and nobody else is held up.
    assert list(report.failures) == ["S openvino:bf16"]
    assert "does not start: No such file" in report.failures["S openvino:bf16"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert drivers_of(os.getpid()) == []


@pytest.fixture
def installed(tmp_path):
    """Makes an environment with such packages and no others, which are looked for and never imported."""

    def make(name: str, **versions: str) -> str:
        place = tmp_path / "environments" / name
        for module, version in versions.items():
            (place / "site" / module).mkdir(parents=True)
            (place / "site" / module / "__init__.py").write_text("raise ImportError('it is imported')")
            told = place / "site" / f"{module}-{version}.dist-info"
            told.mkdir()
            (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: {version}\n")
            (told / "top_level.txt").write_text(module)
        return program(place / "bin" / "python", f'PYTHONPATH="{place / "site"}" exec "{sys.executable}" -S "$@"')

    return make


def program(path: Path, line: str) -> str:
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return str(path)


def test_peers_are_found_where_they_are_installed_the_first_of_each(tmp_path, installed):
    first, second = installed("a", vllm="1.2"), installed("b", vllm="1.3", openvino_genai="2026.1", optimum="2.0")
    lacking = installed("c", llama_cpp="0.3")
    broken = program(tmp_path / "environments" / "d" / "bin" / "python", "echo no such library >&2; exit 1")
    contestants, said = environments.find(tmp_path / "environments")
    assert [(each.engine, each.form, each.python) for each in contestants if each.engine != "transformers"] == [
        *(("vllm", form, first) for form in ("bf16", "int8")),
        *(("openvino", form, second) for form in ("bf16", "int8", "int4")),
    ]
    assert f"found: vLLM 1.2 in {first}: vllm, vllm:int8" in said
    assert f"left out: vLLM 1.3 in {second}, found before" in said
    assert f"not found: llama.cpp 0.3 in {lacking} lacks gguf" in said
    assert f"{broken} does not say what it has: no such library" in said
    assert "not found: vLLM" in environments.find(None)[1]


def contestants_of(*arguments: str) -> list[str]:
    done = CliRunner().invoke(main, ["--shape", "S", "--prepare-only", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return [line.removesuffix(": preparing") for line in done.output.splitlines() if line.endswith(": preparing")]


def test_a_race_that_names_no_peers_is_against_all_that_there_are_and_ours_has_as_many_bits(tmp_path, installed):
    pytest.importorskip("transformers")
    installed("a", llama_cpp="0.3", gguf="0.1")
    places = ("--environments", str(tmp_path / "environments"))
    theirs = ["transformers:bf16", "llama:q8_0", "llama:q4_0", "llama:bf16"]
    assert contestants_of(*places) == ["penstock:bf16", "penstock:int8", "penstock:int4", *theirs]
    assert contestants_of("--peer", "none") == ["penstock:bf16"]


def drivers_of(pid: int) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
            command = (process / "cmdline").read_bytes().decode(errors="replace")
            if parent == str(pid) and "/drivers/run_" in command:
                found.append(command)
    return found


MODEL = Model("X", 100, 3_000_000, 2_000_000, 2, 4, 2, 8)
LIMITS = [Limits(10.0, 20.0, 1.0, None), Limits(12.0, 18.0, 2.0, None)]


def point(engine: str, form: str, durations_s: list[float], ttfts_s: list[float]) -> Point:
    return Point("X", 1, engine, form, "1", 10, 5, durations_s, ttfts_s)


def test_figures_are_those_of_their_definitions():
    ran = point("penstock", "bf16", [1.2, 5.0, 1.0], [0.2, 1.0, 0.2])
    ran.limits = [best_of(LIMITS), Limits(2.0, 2.0, 0.1, None), LIMITS[1]]
    report = Report("now", "abc", {}, 2, {"X": MODEL}, [ran], {"X": LIMITS})
    assert ran.tokens_per_s == pytest.approx(5 / 1.2)
    assert ran.ttft_s == 0.2
    assert ran.decode_tokens_per_s == pytest.approx(4 / 1.0)
    # 12.5 tokens behind each, 2 x 2 layers x 2 heads x 8 values of two bytes; 4, 1 and 5 tokens a second, of as many
    # as 20, 2 and 18 GB/s allow: each round is held against what the machine could do then, and the median counts.
    assert report.decode_share(ran) == pytest.approx(5 * (6_000_000 + 12.5 * 128) / 18e9)
    flop = 2 * 2_000_000 * 10 + 2 * 1_000_000 + 2 * 2 * 4 * 8 * 2 * (10 * 11 / 2)
    assert report.prefill_share(ran) == pytest.approx(flop / 0.2 / 2e12)
    assert report.limit("X", "weights_gb_per_s") == 20.0


def test_what_was_not_measured_has_no_share():
    alone = point("llama", "q4_0", [1.0], [0.5])
    alone.limits = LIMITS[:1]
    several = Point("X", 8, "penstock", "int8", "1", 10, 5, [1.0])
    report = Report("now", "abc", {}, 2, {"X": MODEL}, [alone, several], {"X": LIMITS})
    assert report.decode_share(alone) is None  # it does not say how large its weights are
    assert report.prefill_share(alone) is None
    assert (several.ttft_s, several.decode_tokens_per_s) == (None, None)
    assert report.decode_share(several) is None
    no_limits = point("penstock", "bf16", [1.0], [0.5])
    assert (report.decode_share(no_limits), report.prefill_share(no_limits)) == (None, None)


def test_reports_of_one_commit_merge_their_rounds_and_others_are_refused(tmp_path):
    first = Report("2026-01-02", "abc", {}, 2, {"X": MODEL}, [point("vllm", "bf16", [1.0], [0.5])], {"X": LIMITS[:1]})
    second = msgspec.structs.replace(
        first, began="2026-01-01", points=[point("vllm", "bf16", [2.0], [0.6])], limits={"X": LIMITS[1:]}
    )
    whole = figures.merged([first, second])
    assert (whole.began, whole.points[0].durations_s, whole.limits["X"]) == ("2026-01-01", [1.0, 2.0], LIMITS)

    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, report in zip(paths, (first, msgspec.structs.replace(second, commit="def")), strict=True):
        path.write_bytes(msgspec.json.encode(report))
    done = CliRunner().invoke(main, [part for path in paths for part in ("--merge", str(path))])
    assert done.exit_code == 1
    assert "of different commits" in done.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--peer", "sglang=python"], "there is no engine sglang; there are penstock, vllm"),
        (["--peer", "vllm:int2=python"], "vllm has no form int2; it has bf16, int8"),
        (["--peer", "vllm"], "say with which interpreter: vllm=PYTHON"),
        (["--peer", "vllm@0=python"], "is no list of numbers"),
        (["--peer", "none", "--peer", "vllm=python"], "there is no engine none"),
        (["--peer", "none", "--environments", "."], "--peer says which there are"),
        (["--concurrency", "1,x"], "is no list of numbers"),
    ],
)
def test_what_cannot_run_is_one_sentence(arguments, sentence):
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2
    # The sentence may be broken over the lines of a box.
    assert sentence in " ".join(done.output.replace("│", " ").split())
