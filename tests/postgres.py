"""A real PostgreSQL of one's own: made for the tests that ask for it, gone after them."""

from __future__ import annotations

import contextlib
import glob
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.ports import free_port

UNPRIVILEGED = "nobody"
"""Whom the server runs as where the tests run as root, which it refuses."""


class Missing(Exception):
    """There is no PostgreSQL on this machine."""


def programs() -> Path:
    """Where initdb and postgres lie. Raises Missing."""
    places = []
    if shutil.which("pg_config"):
        places.append(subprocess.check_output(["pg_config", "--bindir"], text=True).strip())
    for place in [*places, *sorted(glob.glob("/usr/lib/postgresql/*/bin"), reverse=True)]:
        if (Path(place) / "initdb").exists():
            return Path(place)
    raise Missing("initdb is not installed (apt-get install postgresql)")


class PostgresServer:
    """One server; it can be stalled, killed and started again on the same port with what it has committed."""

    def __init__(self, folder: Path) -> None:
        """Raises Missing."""
        self._bin_dir = programs()
        account = pwd.getpwnam(UNPRIVILEGED) if os.geteuid() == 0 else None
        self.owner = (account.pw_uid, account.pw_gid) if account else (os.geteuid(), os.getegid())
        """Whom it runs as."""
        self._who: dict[str, Any] = (
            {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []} if account else {}
        )
        self._folder = folder
        self._port = free_port()
        self.url = f"postgresql+asyncpg://penstock@127.0.0.1:{self._port}"
        """Without a database's name."""
        self._process: subprocess.Popen[bytes] | None = None
        if account:
            os.chown(folder, account.pw_uid, account.pw_gid)
        initdb = [self._bin_dir / "initdb", "-D", folder / "data", "-U", "penstock", "-A", "trust", "--no-sync"]
        subprocess.run([*initdb, "-E", "UTF8"], check=True, stdout=subprocess.DEVNULL, cwd=folder, **self._who)

    def start(self) -> None:
        """Until it answers."""
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": self._port,
            "unix_socket_directories": self._folder,
            "max_connections": 50,
            # Its processes are killed, the machine is not: what they have written is there afterwards.
            "fsync": "off",
            "full_page_writes": "off",
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._bin_dir / "postgres", "-D", self._folder / "data", *options],
                stderr=log,
                stdout=log,
                cwd=self._folder,
                **self._who,
            )
        ready = [self._bin_dir / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(self._port), "-t", "30"]
        while subprocess.run(ready, check=False).returncode:
            assert self._process.poll() is None, (self._folder / "log").read_text()

    def stop(self) -> None:
        """For good: nothing is put in order, and if it is stalled, it hears of it all the same."""
        assert self._process is not None
        self._process.send_signal(signal.SIGQUIT)
        self.resume()
        self._process.wait()

    def kill(self) -> None:
        """All its processes at once; who is connected finds the connection broken."""
        self._signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait()

    def stall(self) -> None:
        """Connections stay open, and new ones are taken by the kernel, but nothing answers until ``resume``."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        """To the first process and the others that it has started, which are in groups of their own."""
        assert self._process is not None
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for each in (pid, *map(int, children)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, number)


@contextlib.contextmanager
def server() -> Iterator[PostgresServer]:
    """A fresh one, running. Raises Missing."""
    with tempfile.TemporaryDirectory(prefix="pg-", dir="/tmp") as folder:
        running = PostgresServer(Path(folder))
        running.start()
        try:
            yield running
        finally:
            running.stop()
