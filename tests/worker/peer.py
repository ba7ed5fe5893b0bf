"""A gateway's end of the wire, for tests of the worker: blocking, bounded, and it can misbehave."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from policies import framing, wire
from policies.terms import Sampling

PATIENCE_S = 120.0
ROOT = Path(__file__).parents[2]


class Peer:
    def __init__(self, address, greet=True):
        kind, _, where = address.partition(":")
        if kind == "unix":
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.settimeout(PATIENCE_S)
            self.socket.connect(where)
        else:
            host, _, port = where.rpartition(":")
            self.socket = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
        self.frames = framing.frames_to_gateway()
        self.inbox = []
        self.answers = {}
        self.finishes = {}
        if greet:
            self.send(wire.Hello(wire.VERSION, "gateway"))
            self.hello = self.next(wire.Hello)
            self.ready = self.next(wire.Ready)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.socket.close()

    def send(self, *messages):
        self.socket.sendall(b"".join(map(framing.encode, messages)))

    def submit(self, request_id, prompt, max_tokens=8, **fields):
        sampling = Sampling(max_tokens=max_tokens, ignore_eos=True, seed=fields.pop("seed", 0))
        self.send(wire.Submit(request_id, list(prompt), sampling, **fields))

    def message(self):
        """The next one, whatever it is; None at the end of the connection."""
        while not self.inbox:
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionError:
                return None
            if not data:
                return None
            self.inbox += self.frames.feed(data)
        message = self.inbox.pop(0)
        if isinstance(message, wire.StepOutput):
            for delta in message.deltas:
                self.answers.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
                if delta.finish:
                    self.finishes[delta.request_id, delta.index] = delta.finish
        return message

    def next(self, kind, **fields):
        """The next message of this kind with these values; others are read past, for as long as patience lasts."""
        latest = time.monotonic() + PATIENCE_S
        while time.monotonic() < latest:
            message = self.message()
            assert message is not None, f"the connection ended before a {kind.__name__} with {fields}"
            if isinstance(message, kind) and all(getattr(message, name) == value for name, value in fields.items()):
                return message
        raise AssertionError(f"no {kind.__name__} with {fields} within {PATIENCE_S:g} s")

    def finish(self, request_id, index=0):
        """Waits for the end of a sequence; its tokens."""
        while (request_id, index) not in self.finishes:
            assert self.message() is not None, f"the connection ended before {request_id} did"
        return self.answers[request_id, index]

    def quiet(self):
        """Waits until nothing runs and no block is used."""
        return self.next(wire.Stats, num_running=0, num_waiting=0, num_used_blocks=0)

    def is_closed_by_worker(self):
        while self.message() is not None:
            pass
        return True


class WorkerProcess:
    """A real worker with its stderr at hand."""

    def __init__(self, source, listen=None, exit_with_stdin=False, claims=(), **engine):
        self.directory = tempfile.TemporaryDirectory()
        self.address = listen or f"unix:{self.directory.name}/worker"
        settings = {
            "name": "tiny-0",
            "model": "tiny",
            "source": str(source),
            "listen": self.address,
            "exit_with_stdin": exit_with_stdin,
            "claims": list(claims),
            "engine": {"device": "cpu", "dtype": "float32", "num_threads": 1, "max_kv_bytes": 1 << 20, **engine},
        }
        self.process = subprocess.Popen(
            ["env", "--default-signal=HUP", sys.executable, "-m", "worker", json.dumps(settings)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.lines = []
        self._arrived = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stderr:
            with self._arrived:
                self.lines.append(line.decode().rstrip())
                self._arrived.notify_all()

    def __enter__(self):
        self.says("serving")
        return self

    def __exit__(self, *error):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self._reader.join()
        self.process.stderr.close()
        self.directory.cleanup()

    def says(self, text):
        """Waits for a line of its log."""
        with self._arrived:
            said = self._arrived.wait_for(lambda: any(text in line for line in self.lines), PATIENCE_S)
        assert said, f"the worker never said {text!r}, but: {self.lines}"

    def connect(self, **options):
        return Peer(self.address, **options)

    def terminate(self):
        self.process.send_signal(signal.SIGTERM)

    def exit_status(self):
        """Waits for its end."""
        status = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return status


@contextlib.contextmanager
def running(loop):
    """A loop on a thread; ends with it."""
    failures = []

    def run():
        try:
            loop.run()
        except BaseException as error:
            failures.append(error)

    waker, wakes = socket.socketpair()
    loop.wake_on(waker)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        loop.stop()
        wakes.send(b"!")
        thread.join(PATIENCE_S)
        waker.close()
        wakes.close()
    assert not thread.is_alive()
    assert not failures, failures
