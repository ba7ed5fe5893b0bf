"""A real PostgreSQL of one's own: made for the tests that ask for it, gone after them."""

from __future__ import annotations

import contextlib
import glob
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

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


@contextlib.contextmanager
def server() -> Iterator[str]:
    """The URL of a fresh server, without the database's name. Raises Missing."""
    bin_dir = programs()
    account = pwd.getpwnam(UNPRIVILEGED) if os.geteuid() == 0 else None
    who = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []} if account else {}
    with tempfile.TemporaryDirectory(prefix="pg-", dir="/tmp") as folder:
        root, data = Path(folder), Path(folder) / "data"
        if account:
            os.chown(root, account.pw_uid, account.pw_gid)
        initdb = [bin_dir / "initdb", "-D", data, "-U", "penstock", "-A", "trust", "--no-sync", "-E", "UTF8"]
        subprocess.run(initdb, check=True, stdout=subprocess.DEVNULL, cwd=root, **who)
        port = _free_port()
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": port,
            "unix_socket_directories": root,
            "max_connections": 50,
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        log = (root / "log").open("wb")
        process = subprocess.Popen(
            [bin_dir / "postgres", "-D", data, *options], stderr=log, stdout=log, cwd=root, **who
        )
        try:
            ready = [bin_dir / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(port), "-t", "30"]
            while subprocess.run(ready, check=False).returncode:
                assert process.poll() is None, (root / "log").read_text()
            yield f"postgresql+asyncpg://penstock@127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()
            log.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
