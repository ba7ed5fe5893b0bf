"""A worker of several processes, as it is started: over the wire, idle, and when one of them ends."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from policies import wire
from policies.settings import Engine as EngineSettings
from policies.settings import WorkerSettings
from policies.terms import Sampling
from tests.worker.peer import PATIENCE_S, WorkerProcess
from tests.worker.peft_files import adapter_files
from tests.worker.test_engine_models import run
from tests.worker.test_worker import PROMPT, run_worker, settings
from tests.worker.tiny import checkpoint
from worker.engine import Engine
from worker.inputs import Span
from worker.kv_cache import KVShape
from worker.models import Layout, ModelError
from worker.parallel import runner as parallel_runner
from worker.parallel.duty import Duty
from worker.parallel.runner import ParallelRunner
from worker.runner import Runner
from worker.sampler import Sampler

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    checkpoint(directory, "LlamaForCausalLM")
    return directory


@pytest.fixture(scope="module")
def alone(source):
    with WorkerProcess(source) as worker:
        yield worker


@pytest.fixture
def pair(source):
    with WorkerProcess(source, tensor_parallel=2) as worker:
        yield worker


def others_of(worker) -> list[int]:
    """Process ids of the ranks that are not 0."""
    found: list[int] = []
    for task in Path(f"/proc/{worker.process.pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            found += map(int, (task / "children").read_text().split())
    return found


def computed_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def listens_on(pid: int) -> set[str]:
    """The addresses at which a process takes TCP connections, as the kernel writes them."""
    files = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            files.add(str(file.readlink()))
    found = set()
    for kind in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in files:
                found.add(fields[1].partition(":")[0])
    return found


class Watched:
    """Processes that are expected to end, whoever their parent is by then."""

    def __init__(self, pids: list[int]) -> None:
        assert pids
        self._files = [os.pidfd_open(pid) for pid in pids]

    def end(self, seconds: float = PATIENCE_S) -> bool:
        """Whether all have ended within so long."""
        until = time.monotonic() + seconds
        try:
            return all(select.select([file], [], [], max(0.0, until - time.monotonic()))[0] for file in self._files)
        finally:
            for file in self._files:
                os.close(file)


def test_layers_with_windows_have_a_pool_apart_on_every_rank_where_it_pays(tmp_path):
    changes = {"num_hidden_layers": 4, "sliding_window": 9, "head_dim": 16}
    oracle = checkpoint(tmp_path, "Gemma2ForCausalLM", **changes)
    engine = EngineSettings(
        device="cpu",
        dtype="float32",
        num_threads=1,
        pipeline_parallel=2,
        block_size=8,
        max_sequences=2,
        max_step_tokens=16,
        max_kv_bytes=1 << 18,
    )
    prompt, ticks = [7 * place % 97 for place in range(1, 51)], itertools.count()
    whole = oracle.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12, eos_token_id=None)
    lost: list[Exception] = []
    runner = ParallelRunner.load(WorkerSettings("w", "tiny", str(tmp_path), "nowhere", engine=engine), lost.append)
    try:
        assert runner.apart is not None
        own_layers = KVShape(2, 2, 16)
        assert runner.num_blocks > engine.max_kv_bytes // 2 // own_layers.block_bytes(8, torch.float32)
        sampler = Sampler(runner.vocab_size, runner.eos_token_ids)
        asked = wire.Submit("a", prompt, Sampling(max_tokens=12, temperature=0.0, ignore_eos=True))
        answers, _ = run(Engine(runner, sampler, engine, lambda: float(next(ticks))), [(0, asked)])
        assert answers["a", 0] == whole[0, 50:].tolist()
    finally:
        runner.close()
    assert not lost


def test_two_ranks_answer_as_one_does_and_say_that_they_are_two(alone, pair):
    with alone.connect() as one, pair.connect() as two:
        assert (one.ready.tensor_parallel, one.ready.pipeline_parallel) == (1, 1)
        assert (two.ready.tensor_parallel, two.ready.pipeline_parallel) == (2, 1)
        assert two.ready.num_blocks == one.ready.num_blocks
        for gateway in (one, two):
            gateway.submit("a", PROMPT, 40, seed=5, num_sequences=2)
        assert two.finish("a") == one.finish("a")
        assert two.finish("a", 1) == one.finish("a", 1)
        two.quiet()
    ranks = Watched(others_of(pair))
    pair.terminate()
    assert pair.exit_status() == 0
    assert ranks.end()


def test_ranks_can_be_reached_from_their_own_machine_alone(pair):
    ranks = [pair.process.pid, *others_of(pair)]
    assert set[str]().union(*map(listens_on, ranks)) == {"0100007F"}


def test_adapters_come_take_turns_and_go_while_two_ranks_serve(alone, source, tmp_path):
    base = checkpoint(tmp_path / "base", "LlamaForCausalLM")
    other = checkpoint(tmp_path / "other", "LlamaForCausalLM", hidden_size=64)
    for seed, model in enumerate((base, base, other)):
        adapter_files(tmp_path / str(seed), model, seed)
    answers = []
    # One of them fits at a time.
    with (
        WorkerProcess(source, tensor_parallel=2, max_adapter_bytes=20_000) as pair,
        alone.connect() as one,
        pair.connect() as two,
    ):
        for gateway in (one, two):
            gateway.send(wire.LoadAdapter("other", str(tmp_path / "2")))
            assert "is the adapter for another base?" in gateway.next(wire.AdapterRefused, adapter="other").reason
            for adapter in ("0", "1"):
                gateway.send(wire.LoadAdapter(adapter, str(tmp_path / adapter)))
            for number, adapter in enumerate(("0", "1", "", "1", "0")):
                gateway.submit(f"{number}", PROMPT, 20, adapter=adapter)
            said = [gateway.finish(f"{number}") for number in range(5)]
            assert (said[0], said[1]) == (said[4], said[3])
            assert said[0] != said[1] != said[2]
            for adapter in ("0", "1"):
                gateway.send(wire.UnloadAdapter(adapter))
            gateway.submit("late", PROMPT, 4, adapter="0")
            assert gateway.next(wire.Failed, request_id="late").code == "adapter_unavailable"
            gateway.submit("after", PROMPT, 20)
            assert gateway.finish("after") == said[2]
            assert gateway.quiet().num_adapters == 0
            answers.append(said)
    assert answers[0] == answers[1]


def test_a_rank_that_waits_for_the_next_step_computes_nothing(pair):
    (other,) = others_of(pair)
    with pair.connect() as gateway:
        gateway.submit("a", PROMPT, 4)
        gateway.finish("a")
        gateway.quiet()
        before = computed_s(other), computed_s(pair.process.pid)
        for _ in range(3):
            gateway.next(wire.Stats)  # one a second
        after = computed_s(other), computed_s(pair.process.pid)
    assert after[0] - before[0] < 0.05
    assert after[1] - before[1] < 0.2


def test_a_rank_that_dies_ends_the_worker(pair):
    (other,) = others_of(pair)
    with pair.connect() as gateway:
        gateway.submit("a", PROMPT, 100)
        gateway.next(wire.StepOutput)
        os.kill(other, signal.SIGKILL)
        assert gateway.is_closed_by_worker()
    assert pair.exit_status() == 3


@pytest.mark.parametrize("which", range(3))
def test_whichever_of_four_ranks_dies_in_the_middle_of_a_step_is_named_and_the_others_end(source, which):
    with WorkerProcess(source, tensor_parallel=2, pipeline_parallel=2) as worker, worker.connect() as gateway:
        others = others_of(worker)
        gateway.submit("a", PROMPT, 100)
        gateway.next(wire.StepOutput)
        ranks = Watched(others)
        os.kill(others[which], signal.SIGKILL)
        assert gateway.is_closed_by_worker()
        assert worker.exit_status() == 3
        assert ranks.end()
        # Nor is it buried in what the others, and torch's collectives, have to say of it.
        (said,) = [line for line in worker.lines if " info " not in line]
        assert said.endswith(f"rank {which + 1} ended with signal 9")


def test_a_rank_that_dies_while_it_loads_is_no_reason_not_to_try_again(source):
    with contextlib.ExitStack() as stack:
        stack.push(worker := WorkerProcess(source, tensor_parallel=2))
        while not (others := others_of(worker)):
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(0.02)
        os.kill(others[0], signal.SIGKILL)
        assert worker.exit_status() == 3
        assert worker.lines == ["penstock worker: rank 1 ended with signal 9"]


def test_a_rank_that_dies_is_named_while_rank_0_still_loads(source, monkeypatch):
    lost: list[Exception] = []
    is_named = threading.Event()

    def load_without_end(*args: object, **options: object) -> None:
        assert is_named.wait(PATIENCE_S)
        raise ModelError("enough")

    monkeypatch.setattr(parallel_runner, "load_model", load_without_end)
    monkeypatch.setattr(Duty, "command", lambda duty: [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    engine = EngineSettings(device="cpu", tensor_parallel=2)
    told = WorkerSettings("w", "tiny", str(source), "nowhere", engine=engine)
    with pytest.raises(ModelError, match="enough"):
        ParallelRunner.load(told, lambda fault: (lost.append(fault), is_named.set()))
    assert [str(fault) for fault in lost] == ["rank 1 ended with signal 9"]


def test_a_rank_that_is_stopped_in_the_middle_of_a_step_is_named_and_all_end(source):
    with WorkerProcess(source, tensor_parallel=2, pipeline_parallel=2) as worker, worker.connect() as gateway:
        others = others_of(worker)
        gateway.submit("a", PROMPT, 100)
        gateway.next(wire.StepOutput)
        ranks = Watched(others)
        os.kill(others[1], signal.SIGSTOP)
        assert gateway.is_closed_by_worker()
        assert worker.exit_status() == 3
        assert ranks.end()
        (said,) = [line for line in worker.lines if " info " not in line]
        assert said.endswith("rank 2 is stopped (SIGSTOP), and was not continued within 10 s")


def test_an_idle_worker_notices_that_a_rank_is_gone_and_leaves_no_other(source):
    with WorkerProcess(source, tensor_parallel=2, pipeline_parallel=2) as worker:
        first, *left = others_of(worker)
        ranks = Watched(left)
        os.kill(first, signal.SIGKILL)
        assert worker.exit_status() == 3
        assert ranks.end()
        assert any("rank 1 ended with signal 9" in line for line in worker.lines)


def test_ranks_end_with_a_worker_that_is_killed_in_the_middle_of_a_step(source):
    with WorkerProcess(source, tensor_parallel=2, pipeline_parallel=2) as worker, worker.connect() as gateway:
        ranks = Watched(others_of(worker))
        gateway.submit("a", PROMPT, 100)
        gateway.next(wire.StepOutput)
        worker.process.kill()
        assert ranks.end()


def test_a_worker_whose_parent_is_gone_does_not_wait_for_a_rank_that_hangs(source):
    with WorkerProcess(source, exit_with_stdin=True, tensor_parallel=2) as worker, worker.connect() as gateway:
        (other,) = others_of(worker)
        rank = Watched([other])
        os.kill(other, signal.SIGSTOP)
        gateway.submit("a", PROMPT, 100)
        worker.process.stdin.close()
        assert worker.exit_status() == 0
        assert rank.end()


def test_a_signal_to_the_whole_group_lets_the_worker_finish(pair):
    with pair.connect() as gateway:
        gateway.submit("a", PROMPT, 100)
        gateway.next(wire.StepOutput)
        for number in (signal.SIGHUP, signal.SIGTERM):
            for pid in [*others_of(pair), pair.process.pid]:
                os.kill(pid, number)
        assert len(gateway.finish("a")) == 100
    assert pair.exit_status() == 0


def refusal(directory, source, **engine):
    """The one sentence of a worker that cannot start."""
    told = {"device": "cpu", "dtype": "float32", "num_threads": 1, **engine}
    ended = run_worker(settings(directory, source=str(source), engine=told))
    (sentence,) = ended.stderr.splitlines()
    assert ended.returncode == 2
    return sentence


def test_ranks_that_the_model_cannot_be_shared_among_are_refused(tmp_path, source):
    assert "engine.tensor_parallel is 3, which does not divide the 4 attention heads" in refusal(
        tmp_path, source, tensor_parallel=3
    )
    assert "engine.pipeline_parallel is 4, but this LlamaForCausalLM has 3 layers" in refusal(
        tmp_path, source, pipeline_parallel=4
    )
    assert "Expected `int` >= 1 - at `$.engine.tensor_parallel`" in refusal(tmp_path, source, tensor_parallel=0)


def test_an_encoder_on_several_ranks_is_refused_for_them_and_not_for_what_it_is(tmp_path):
    checkpoint(tmp_path / "encoder", "BertModel")
    for layout in ({"tensor_parallel": 2}, {"pipeline_parallel": 2}):
        sentence = refusal(tmp_path, tmp_path / "encoder", **layout)
        assert sentence.endswith(
            "bert is an encoder, and served on one rank: engine.tensor_parallel and engine.pipeline_parallel do not"
            " reach it"
        )


def test_what_only_another_rank_finds_wrong_is_said_by_the_worker(tmp_path, source):
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in source.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    data = (broken / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["model.layers.0.gone.weight"] = header.pop("model.layers.0.mlp.up_proj.weight")
    told = json.dumps(header).encode()
    (broken / "model.safetensors").write_bytes(len(told).to_bytes(8, "little") + told + data[8 + length :])
    # The last rank has the first layers.
    sentence = refusal(tmp_path, broken, pipeline_parallel=2)
    assert sentence.startswith("penstock worker: rank 1: ")
    assert "has no tensor model.layers.0.mlp.up_proj.weight" in sentence


def test_a_pool_that_one_rank_has_no_room_for_is_refused(tmp_path, source):
    assert "engine.kv_memory_share and engine.max_kv_bytes leave" in refusal(
        tmp_path, source, tensor_parallel=2, max_kv_bytes=1000
    )


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [("float32", "int8"), ("float32", "int4"), ("bfloat16", "none"), ("bfloat16", "int8"), ("bfloat16", "int4")],
)
def test_ranks_that_quantise_or_pack_their_own_parts_say_nearly_the_same(dtype, kind, tmp_path):
    model = checkpoint(tmp_path, "LlamaForCausalLM", hidden_size=128, intermediate_size=512, vocab_size=96)
    # A large one would make more of what quantising loses, and hide what is wrong.
    adapter_files(tmp_path / "adapter", model, 1, lora_alpha=2)
    logits = []

    def said(runner: Runner | ParallelRunner) -> torch.Tensor:
        """By the base, and with an adapter."""
        adapter = runner.load_adapter("changed", str(tmp_path / "adapter"), 1 << 24)
        tokens = [3, 14, 15, 92, 65]
        spans = [Span(tokens, 0, [0], 1), Span(4 * tokens, 0, [1, 2], 1, adapter=adapter)]
        return runner.forward(spans).log_softmax(-1)

    for layout in (Layout(), Layout(2)):
        engine = EngineSettings(
            device="cpu",
            dtype=dtype,
            num_threads=1,
            quantize=kind,
            tensor_parallel=layout.tensor,
            max_kv_bytes=1 << 20,
        )
        if layout.tensor == 1:
            logits.append(said(Runner.load(str(tmp_path), engine)))
            continue
        lost: list[Exception] = []
        runner = ParallelRunner.load(WorkerSettings("w", "tiny", str(tmp_path), "nowhere", engine=engine), lost.append)
        assert (runner.num_blocks, runner.vocab_size) == (Runner.load(str(tmp_path), engine).num_blocks, 96)
        logits.append(said(runner))
        runner.close()
        assert not lost
    alone, together = logits
    # Not the same: a row that is cut has scales of its own in each part.
    divergence = (alone.exp() * (alone - together)).sum(-1)
    assert torch.isfinite(together).all()
    assert divergence.max() < (0.3 if kind == "int4" else 0.02)
    assert (together[0] - together[1]).abs().max() > 1.0
