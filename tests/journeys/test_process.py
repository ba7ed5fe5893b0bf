"""`penstock serve` as people run it: a process, its signals, its files, and workers that are shot."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120.0
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")},
    "PENSTOCK_ENGINE__NUM_THREADS": "1",
    "PENSTOCK_ENGINE__MAX_KV_BYTES": "67108864",
    "PENSTOCK_WORKERS__RESTART_BACKOFF_S": "0.1",
    "PYTHONPATH": str(ROOT),
}


class Unavailable(Exception):
    """Nobody can answer at the moment."""


class Process:
    """One `penstock serve`, up to its ready line."""

    def __init__(self, directory: Path, errors: int = subprocess.PIPE, **environment: str) -> None:
        """``errors``: its standard error, if nobody is to read it here."""
        self.directory = directory
        self.process = subprocess.Popen(
            # Whoever runs the tests may heed no SIGHUP (nohup), nor would what they start.
            ["env", "--default-signal=HUP", sys.executable, "-m", "gateway", "serve", "--port", "0"],
            cwd=directory,
            env={**ENVIRONMENT, **environment},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        self.errors: list[str] = []
        self._reader = threading.Thread(target=lambda: self.errors.extend(self.process.stderr or ()))
        self._reader.start()
        self.lines: list[str] = []
        for line in self.process.stdout:
            self.lines.append(line)
            if line.startswith("Penstock ready on "):
                self.url = line.split()[-1]
                break

    @property
    def key(self) -> str:
        lines = (self.directory / "data" / "bootstrap.env").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines)["PENSTOCK_API_KEY"]

    def open(self, path: str, **body: object):
        headers = {"authorization": f"Bearer {self.key}", "content-type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        try:
            return urllib.request.urlopen(request, timeout=PATIENCE_S)
        except urllib.error.HTTPError as refusal:
            if refusal.code != 503:
                raise
            raise Unavailable from refusal

    def story(self, max_tokens: int):
        """A long streamed answer, whose first event is read and kept."""
        prompt = {"prompt": "Once upon a time", "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
        stream = self.open("/v1/completions", model="demo", stream=True, **prompt)
        stream.first = stream.readline()
        return stream

    def answer(self, model: str = "demo") -> str:
        """What the model says to a greeting; nothing while it is not to be had."""
        messages = [{"role": "user", "content": "Hello!"}]
        try:
            with self.open("/v1/chat/completions", model=model, max_tokens=8, messages=messages) as response:
                return json.load(response)["choices"][0]["message"]["content"]
        except Unavailable:
            return ""

    def workers(self, of: int = 0) -> list[int]:
        """Process ids of its children, or of one of theirs."""
        pid = of or self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def wait(self) -> int:
        status = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return status


@contextlib.contextmanager
def serving(directory: Path, errors: int = subprocess.PIPE, **environment: str):
    running = Process(directory, errors, **environment)
    try:
        yield running
    finally:
        running.process.kill()
        running.wait()


def until(condition):
    """Polls, as there is nothing inside another process to wait on."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def events(stream) -> list[bytes]:
    return [line[6:].strip() for line in stream if line.startswith(b"data: ")]


def text_of(stream) -> str:
    """Of a ``story`` that came to its end. How many tokens an event has is nobody's promise."""
    *chunks, done = events([stream.first, *stream])
    assert done == b"[DONE]"
    return "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks)


def test_it_takes_as_many_connections_as_the_system_lets_it_and_not_only_as_a_shell_gives(tmp_path):
    given, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, most))
        try:
            running = stack.enter_context(serving(tmp_path))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (given, most))
        address = running.url.removeprefix("http://").split(":")
        for _ in range(160):
            stack.enter_context(socket.create_connection((address[0], int(address[1]))))
        assert running.answer()


def test_when_no_more_files_may_be_open_the_log_says_so_and_clients_are_answered_again_when_some_are(tmp_path):
    with serving(tmp_path) as running:
        resource.prlimit(running.process.pid, resource.RLIMIT_NOFILE, (128, 128))
        address = running.url.removeprefix("http://").split(":")
        with contextlib.ExitStack() as stack:
            for _ in range(160):
                stack.enter_context(socket.create_connection((address[0], int(address[1]))))
            with pytest.raises(OSError, match=r"reset|closed"):
                running.answer()
        until_s, answer = time.monotonic() + PATIENCE_S, ""
        while not answer and time.monotonic() < until_s:
            with contextlib.suppress(OSError):  # they are closed one after the other
                answer = running.answer()
        assert answer
        running.process.terminate()
        assert running.wait() == 0
    assert len([line for line in running.errors if "of 128 files are open" in line]) == 1


def test_a_first_start_makes_keys_and_a_second_start_keeps_them(tmp_path):
    with serving(tmp_path) as first:
        printed = [line for line in first.lines if line.startswith("PENSTOCK_")]
        assert sorted(line.split("=")[0] for line in printed) == ["PENSTOCK_ADMIN_KEY", "PENSTOCK_API_KEY"]
        assert stat.S_IMODE((tmp_path / "data" / "bootstrap.env").stat().st_mode) == 0o600
        assert first.answer()
        key, workers = first.key, first.workers()
        first.process.send_signal(signal.SIGTERM)
        assert first.wait() == 0
        assert not any(map(is_alive, workers))
        assert key not in "".join(first.errors)
    with serving(tmp_path) as second:
        assert [line for line in second.lines if line.startswith("PENSTOCK_")] == []
        assert second.key == key
        assert second.answer()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_stop_lets_a_running_stream_finish(tmp_path, number):
    with serving(tmp_path) as house:
        with house.story(max_tokens=400) as stream:
            house.process.send_signal(number)
            assert events(stream)[-1] == b"[DONE]"
        assert house.wait() == 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_dies_or_hangs_is_replaced_and_its_answer_goes_on(tmp_path, how):
    # In float32 the most likely token is the same, whether a token before it was computed in a prompt or by itself.
    plain = {"PENSTOCK_ENGINE__DTYPE": "float32", "PENSTOCK_CACHE__MAX_BYTES": "0"}
    with serving(tmp_path, PENSTOCK_WORKERS__SILENCE_TIMEOUT_S="3", **plain) as house:
        (shot,) = house.workers()
        with house.story(max_tokens=800) as stream:
            undisturbed = text_of(stream)
        with house.story(max_tokens=800) as stream:
            os.kill(shot, how)
            assert text_of(stream) == undisturbed
        assert house.workers() != [shot]
        assert not is_alive(shot)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_whose_other_rank_dies_or_hangs_is_replaced_with_it(tmp_path, how):
    ranks = {"PENSTOCK_ENGINE__TENSOR_PARALLEL": "2", "PENSTOCK_WORKERS__SILENCE_TIMEOUT_S": "3"}
    with serving(tmp_path, **ranks) as house:
        (worker,) = house.workers()
        (rank,) = house.workers(of=worker)
        end = os.pidfd_open(rank)
        with house.story(max_tokens=800) as stream:
            os.kill(rank, how)
            assert text_of(stream)
        assert house.workers() != [worker]
        assert select.select([end], [], [], PATIENCE_S)[0]
        os.close(end)


def test_a_gateway_that_is_shot_takes_its_workers_along(tmp_path):
    with serving(tmp_path) as house:
        workers = house.workers()
        house.process.kill()
        house.wait()
        until(lambda: not any(map(is_alive, workers)))


def test_other_models_answer_while_one_is_down(tmp_path):
    (tmp_path / "config.toml").write_text("[models.one]\n[models.two]\n")
    with serving(tmp_path) as house:
        until(lambda: house.answer("one") and house.answer("two"))
        os.kill(house.workers()[0], signal.SIGKILL)
        assert any([house.answer("one"), house.answer("two")])
        until(lambda: house.answer("one") and house.answer("two"))


class Receiver(ThreadingHTTPServer):
    """Takes events, or refuses them while it is told to."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Taker)
        self.refuses = True
        self.seen: list[tuple[str, dict[str, object]]] = []
        self.refused: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_port}/events"


class Taker(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body, event_id = self.rfile.read(int(self.headers["content-length"])), self.headers["webhook-id"]
        receiver = self.server
        if receiver.refuses:
            receiver.refused.append(event_id)
        else:
            receiver.seen.append((event_id, json.loads(body)["data"]))
        self.send_response(503 if receiver.refuses else 204)
        self.end_headers()

    def log_message(self, *words: object) -> None:
        """Nobody reads it."""


@pytest.fixture
def receiver():
    receiver = Receiver()
    serving_it = threading.Thread(target=receiver.serve_forever)
    serving_it.start()
    yield receiver
    receiver.shutdown()
    serving_it.join()
    receiver.server_close()


def test_shares_of_a_budget_that_a_crash_kept_from_being_posted_are_posted_by_the_next_start(tmp_path, receiver):
    (tmp_path / "config.toml").write_text(
        f"""
        [billing]
        webhook_url = "{receiver.url}"
        [policies.default]
        budget = {{amount = "0.0001", hard = false, alerts_at = [0.5, 1.0, 5.0]}}
        prices = {{"*" = {{request = "0.00006"}}}}
        """
    )
    secret = {"PENSTOCK_WEBHOOK_SECRET": "0123456789abcdef0123456789abcdef"}
    with serving(tmp_path, **secret) as house:
        for num_shares in (1, 2):
            assert house.answer()
            until(lambda: len(set(receiver.refused)) == num_shares)  # noqa: B023
        house.process.kill()
        house.wait()
    receiver.refuses = False
    with serving(tmp_path, **secret) as house:
        until(lambda: len(receiver.seen) == 2)
        assert {(event_id, told["share"]) for event_id, told in receiver.seen} == set(
            zip(sorted(set(receiver.refused), key=receiver.refused.index), (0.5, 1.0), strict=True)
        )
        until(lambda: num_posted(tmp_path) == 2)
        house.process.kill()
        house.wait()
    with serving(tmp_path, **secret) as house:
        # What was taken is not posted again: the next thing that is heard is the share that comes next.
        for _ in range(7):
            assert house.answer()
        until(lambda: len(receiver.seen) > 2)
        assert [told["share"] for _, told in receiver.seen][2:] == [5.0]


def num_posted(directory: Path) -> int:
    with contextlib.closing(sqlite3.connect(directory / "data" / "penstock.db")) as connection:
        return connection.execute("SELECT count(*) FROM posted_events").fetchone()[0]
