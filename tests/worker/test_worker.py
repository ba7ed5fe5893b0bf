"""``python -m worker`` as it is started: a real process, a tiny random model, the real wire."""

import json
import signal
import subprocess
import sys

import pytest

from policies import wire
from tests.worker.peer import PATIENCE_S, ROOT, WorkerProcess
from tests.worker.tiny import checkpoint

PROMPT = list(range(3, 23))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    checkpoint(directory, "LlamaForCausalLM")
    return directory


@pytest.fixture(scope="module")
def worker(source):
    with WorkerProcess(source) as worker:
        yield worker


def test_a_gateway_that_connects_early_waits_for_ready(source, worker):
    with worker.connect() as gateway:
        assert gateway.hello.name == "tiny-0"
        ready = gateway.ready
        assert (ready.model, ready.vocab_size, ready.eos_token_ids, ready.block_size) == ("tiny", 97, [1], 32)
        assert (ready.max_model_tokens, ready.device, ready.dtype, ready.pid) == (
            128,
            "cpu",
            "float32",
            worker.process.pid,
        )
        assert ready.num_blocks > 4


def test_a_seeded_request_is_answered_alike_each_time_and_to_every_gateway(worker):
    with worker.connect() as one, worker.connect() as other:
        one.submit("a", PROMPT, 40, seed=5)
        other.submit("b", PROMPT, 40, seed=5, num_sequences=2)
        first = one.finish("a")
        assert len(first) == 40
        assert other.finish("b") == first
        assert other.finish("b", 1) != first
        one.quiet()


def test_cancelling_frees_all_blocks(worker):
    with worker.connect() as gateway:
        gateway.submit("a", PROMPT, 100)
        gateway.next(wire.StepOutput)
        gateway.send(wire.Cancel("a"))
        gateway.finish("a")
        gateway.quiet()


def test_garbage_does_not_end_the_process(worker):
    with worker.connect(greet=False) as peer:
        peer.socket.sendall(b"\x00\x00\x00\x05hello")
        assert peer.is_closed_by_worker()
    worker.says("broke the protocol: bad frame of 5 bytes")
    with worker.connect() as gateway:
        gateway.submit("a", PROMPT)
        gateway.finish("a")


def test_terminating_a_worker_lets_it_finish_what_it_has(source):
    with WorkerProcess(source) as worker, worker.connect() as gateway:
        gateway.submit("a", PROMPT, 100)
        gateway.next(wire.StepOutput)
        worker.terminate()
        worker.terminate()
        assert len(gateway.finish("a")) == 100
        assert worker.exit_status() == 0


def test_a_worker_whose_terminal_ends_finishes_what_it_has(source):
    with WorkerProcess(source) as worker, worker.connect() as gateway:
        gateway.submit("a", PROMPT, 100)
        gateway.next(wire.StepOutput)
        worker.process.send_signal(signal.SIGHUP)
        assert len(gateway.finish("a")) == 100
        assert worker.exit_status() == 0


def test_a_worker_ends_with_its_parent_and_leaves_an_interrupt_to_it(source):
    with WorkerProcess(source, exit_with_stdin=True) as worker, worker.connect() as gateway:
        worker.process.send_signal(signal.SIGINT)
        gateway.submit("a", PROMPT, 8)
        gateway.finish("a")
        gateway.submit("b", PROMPT, 100)
        gateway.next(wire.StepOutput)
        worker.process.stdin.close()
        assert worker.exit_status() == 0
        assert gateway.is_closed_by_worker()


def run_worker(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "worker", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def settings(directory, **changes):
    return json.dumps({"name": "w", "model": "m", "source": "x", "listen": f"unix:{directory}/worker", **changes})


def test_what_keeps_a_worker_from_starting_is_one_sentence(tmp_path, source):
    (tmp_path / "empty").mkdir()
    for arguments, reason in {
        (): "one argument is expected",
        ("{",): "the settings cannot be read",
        (settings(tmp_path, engine={"block_sise": 3}),): "block_sise",
        (settings(tmp_path, listen="nowhere"),): "cannot listen on nowhere",
        (
            settings(tmp_path, listen="unix:/nowhere/at/all/socket"),
        ): "cannot listen on unix:/nowhere/at/all/socket: No such",
        (settings(tmp_path, source=str(tmp_path / "empty")),): str(tmp_path / "empty"),
    }.items():
        ended = run_worker(*arguments)
        (sentence,) = ended.stderr.splitlines()
        assert ended.returncode == 2, ended.stderr
        assert sentence.startswith("penstock worker: ")
        assert reason in sentence
