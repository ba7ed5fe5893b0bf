"""A real Redis of one's own: made for the tests that ask for it, gone after them."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from gateway.redis import Redis
from tests.builders import PATIENCE_S
from tests.ports import free_port

STALLED_S = 0.1
"""How long one that is stalled is waited for, and no other: where a machine is slow, that would take as long."""


class Missing(Exception):
    """There is no Redis on this machine."""


class RedisServer:
    """One server; it can be stalled, killed and started again on the same port."""

    def __init__(self, program: str, folder: Path) -> None:
        self._program = program
        self._folder = folder
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Until it answers. Nothing is kept on disk: it starts empty."""
        settings = {"bind": "127.0.0.1", "port": self.port, "dir": self._folder, "save": "", "appendonly": "no"}
        options = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen([self._program, *options], stdout=log, stderr=log)
        deadline = time.monotonic() + PATIENCE_S
        while not self._answers():
            assert self._process.poll() is None, (self._folder / "log").read_text()
            assert time.monotonic() < deadline, "Redis does not answer"
            time.sleep(0.01)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stall(self) -> None:
        """Connections stay open, and the kernel takes what they are sent, but nothing answers until ``resume``."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(7).startswith(b"+PONG")
        except OSError:
            return False


@contextlib.contextmanager
def server() -> Iterator[RedisServer]:
    """A fresh one, running. Raises Missing."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        raise Missing("redis-server is not installed (apt-get install redis-server)")
    with tempfile.TemporaryDirectory(prefix="redis-", dir="/tmp") as folder:
        running = RedisServer(program, Path(folder))
        running.start()
        try:
            yield running
        finally:
            running.kill()


@contextlib.contextmanager
def stalled(server: RedisServer, redis: Redis) -> Iterator[None]:
    """While this lasts the server says nothing, and ``redis`` gives it up soon."""
    server.stall()
    patience_s, redis._timeout_s = redis._timeout_s, STALLED_S
    try:
        yield
    finally:
        redis._timeout_s = patience_s
        server.resume()
