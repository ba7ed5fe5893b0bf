"""The engine's benchmark at its smallest: every mode runs, counts right and draws its picture."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch
from click.testing import CliRunner

from benchmarks import engine_coded, engine_host, engine_probe
from tests.worker import tiny
from worker.bench import checkpoint, measures
from worker.bench.command import main
from worker.bench.measures import Round, Timeline
from worker.bench.peer import Transformers
from worker.models import SHAPES, ModelError, load_decoder, read_architecture
from worker.native import library
from worker.runner import Runner

TINY = dataclasses.replace(
    SHAPES["S"],
    vocab_size=320,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    max_positions=2048,
    attention_scale=0.25,
    ropes=(dataclasses.replace(SHAPES["S"].ropes[0], rotary_dim=16, max_positions=2048),),
    layer_ropes=(0, 0),
    windows=(0, 0),
)


@pytest.fixture(autouse=True)
def tiny_shape(monkeypatch):
    monkeypatch.setitem(SHAPES, "S", TINY)


def bench(*arguments: str) -> dict:
    done = CliRunner().invoke(main, ["--shape", "S", "--json", "--rounds", "2", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_peer_computes_by_what_torch_chooses_whatever_a_worker_does(tmp_path):
    pytest.importorskip("transformers")
    tiny.checkpoint(tmp_path, "LlamaForCausalLM")
    peer, seen, choice = Transformers(tmp_path, "float32", "cpu", 16), [], torch.backends.cuda
    peer._model.register_forward_pre_hook(lambda *_: seen.append(choice.cudnn_sdp_enabled()))
    choice.enable_cudnn_sdp(False)
    peer.generate([[3, 4], [5, 6]], 2)
    assert seen == [True, True]
    assert not choice.cudnn_sdp_enabled()


def test_a_race_against_transformers_counts_every_token_and_draws_its_picture(tmp_path):
    pytest.importorskip("transformers")
    picture = tmp_path / "race.png"
    report = bench(
        *("--input-tokens", "40", "--output-tokens", "5", "--concurrency", "1,3", "--dtype", "float32"),
        *("--peer", "transformers", "--plot", str(picture)),
    )
    assert [(result["contender"], result["concurrency"]) for result in report["results"]] == [
        (contender, concurrency)
        for concurrency in (1, 3)
        for contender in ("penstock", "transformers generate", "transformers generate_batch")
    ]
    for result in report["results"]:
        middle = result["median"]
        assert middle["output_tokens_per_s"] in result["rounds_output_tokens_per_s"]
        if result["contender"] != "transformers generate_batch":
            assert middle["ttft_ms"]["num"] == result["concurrency"]
            assert middle["itl_ms"]["num"] == 4 * result["concurrency"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_stall_is_shown_in_chunks_and_whole(tmp_path):
    picture = tmp_path / "stall.png"
    report = bench("--stall", "--stall-tokens", "600", "--input-tokens", "20", "--plot", str(picture))
    assert report["stall_chunked"]["itl_ms"]["num"] > 8
    assert report["stall_whole"]["itl_ms"]["num"] == 8
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_prompts_that_begin_alike_are_measured_after_a_cold_one():
    found = bench("--shared-prefix", "--shared-tokens", "400")["shared_prefix"]
    assert found["shared_tokens"] == 400
    assert (found["alone_ttft_ms"]["num"], found["together_ttft_ms"]["num"]) == (31, 31)
    assert found["cold_ttft_ms"] > 0
    assert found["alone_ttft_ms"]["p50"] > 0


def test_a_report_is_readable_and_a_sampled_run_works():
    done = CliRunner().invoke(
        main, ["--shape", "S", "--rounds", "1", "--input-tokens", "8", "--output-tokens", "3", "--temperature", "1"]
    )
    assert done.exit_code == 0, done.output
    assert "penstock" in done.output
    assert "8 tokens in, 3 out" in done.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "/nowhere"], "penstock bench: there is no directory /nowhere"),
        (["--model", "demo", "--shape", "S"], "two ways to say what to run"),
        (["--concurrency", "1,x"], "is no list of numbers"),
        (["--concurrency", "0"], "at least 1"),
    ],
)
def test_what_cannot_run_is_one_sentence_and_exit_code_2(arguments, sentence):
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2
    assert sentence in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize("shape", ["S", "M"])
def test_a_shape_written_as_a_checkpoint_reads_back_as_itself(shape, tmp_path, monkeypatch):
    import torch

    wanted = dataclasses.replace(
        TINY, name=SHAPES[shape].name, qkv_bias=SHAPES[shape].qkv_bias, eos_token_ids=(2,), dtype="bfloat16"
    )
    monkeypatch.setitem(SHAPES, shape, wanted)
    checkpoint.write(shape, tmp_path)
    assert read_architecture(tmp_path) == wanted
    load_decoder(tmp_path, wanted, torch.float32, torch.device("cpu"), 64)


def test_an_unknown_shape_is_refused_by_name(tmp_path):
    with pytest.raises(ModelError, match=r"there is no shape XXL; there are S, M"):
        checkpoint.write("XXL", tmp_path)


def test_figures_are_those_of_their_definitions():
    lines = [Timeline(10.0, [11.0, 11.5, 12.5]), Timeline(10.0, [10.5, 10.7, 11.1])]
    ran = measures.round_of(lines, duration_s=2.5, num_tokens=6)
    assert ran.output_tokens_per_s == pytest.approx(2.4)
    assert ran.ttft_ms.p50 == pytest.approx(750)
    assert ran.tpot_ms.max == pytest.approx(750)
    assert (ran.itl_ms.num, ran.itl_ms.max) == (4, pytest.approx(1000))


def test_of_several_rounds_the_middle_one_counts():
    rounds = [Round(rate, None, None, None) for rate in (5.0, 1.0, 3.0, 4.0)]
    assert measures.median(rounds).output_tokens_per_s == 3.0


def test_a_stall_compares_the_gaps_beside_the_prompt_with_those_before_it():
    stream = Timeline(0.0, [1.0, 2.0, 3.0, 6.0, 10.0, 11.0])
    stall = measures.stall_of([stream], Timeline(3.5, [10.0, 11.0]))
    assert (stall.quiet_itl_ms.p50, stall.itl_ms.num, stall.itl_ms.max) == (1000, 2, 4000)
    assert stall.worst_to_median == pytest.approx(4.0)
    assert stall.ttft_ms == pytest.approx(6500)
    assert stall.gaps[0] == pytest.approx((-1.5, 1000))


def test_predictions_are_held_against_steps_of_each_kind():
    done = CliRunner().invoke(engine_probe.main, ["--shape", "demo", "--rounds", "1"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found = re.findall(r"(alone|8 decoding|chunks beside them) ([\d.]+) \(", done.stdout)
    assert [kind for kind, _ in found] == ["alone", "8 decoding", "chunks beside them"]
    assert all(float(ratio) > 0 for _, ratio in found)


def test_weights_in_twelve_bits_are_held_against_the_same_in_sixteen():
    arguments = ["--shape=demo", "--rounds=1", "--sequences=1,2", "--input-tokens=20", "--output-tokens=6"]
    done = CliRunner().invoke(engine_coded.main, arguments, catch_exceptions=False)
    kernels = library()
    if kernels is None or not kernels.has_linear:
        assert "no matrix of this model is coded on this machine" in done.output
        return
    assert done.exit_code == 0, done.output
    kinds = re.findall(r"(.*): 16 bits [\d.]+ ms, 12 bits [\d.]+ ms, [\d.]+ \([\d.]+ to [\d.]+\) times", done.stdout)
    assert kinds == ["prompt", "1 decoding", "2 decoding"]


def test_a_step_is_taken_apart():
    done = CliRunner().invoke(
        engine_host.main,
        ["--shape", "S", "--sequences", "2", "--input-tokens", "9", "--output-tokens", "6", "--json"],
        catch_exceptions=False,
    )
    assert done.exit_code == 0, done.output
    figures = json.loads(done.stdout)["none"]
    assert figures["num_steps"] >= 2
    assert 0 < figures["planner"] < figures["host"] < 1
    assert figures["of_forward"] is None or 0 < figures["of_forward"] < 1
    assert "timed" not in Runner.forward.__qualname__
