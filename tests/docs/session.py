"""A page of the documentation, done: its commands typed, its programs run, its files written, its output compared.

What the words after the fence mean:

- ``bash`` is typed into the page's shell; with ``title="In a terminal of its own"`` into another one, until the server
  there is ready, and it runs on until the page ends.
- ``python`` is a program; ``toml``, ``json`` and others with ``title="NAME"`` are files of that name.
- ``text`` behind one of the first two is what it printed, with ``…`` for anything.
- ``console`` and everything else is there to be read.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.builders import ROOT

LIMIT_S = 600
PORTS = ("8080", "8090")
"""As pages write them; the first is where they call."""
DONE = "@@done@@"

_FENCE = re.compile(r"^( *)```(\w+)?(?: title=\"([^\"]*)\")?\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    kind: str
    title: str
    text: str
    line: int


def blocks(page: str) -> list[Block]:
    found = []
    for match in _FENCE.finditer(page):
        indent, kind, title, text = match.groups()
        text = "".join(line.removeprefix(indent) for line in text.splitlines(keepends=True))
        found.append(Block(kind or "", title or "", text, page[: match.start()].count("\n") + 1))
    return found


class Session:
    """One reader, in a directory of their own."""

    def __init__(self, directory: Path, ports: Sequence[int]) -> None:
        """``ports``: free ones, for ``PORTS``."""
        self._directory = directory
        self._ports = dict(zip(PORTS, map(str, ports), strict=True))
        programs = directory / "bin"
        programs.mkdir()
        penstock = programs / "penstock"
        penstock.write_text(f'#!/bin/sh\nexec {sys.executable} -m gateway "$@"\n')
        penstock.chmod(0o755)
        self._environ = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")} | {
            "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PENSTOCK_SERVER__PORT": str(ports[0]),
            "PENSTOCK_URL": f"http://127.0.0.1:{ports[0]}",
            "PENSTOCK_ENGINE__MAX_KV_BYTES": "67108864",
            "OMP_NUM_THREADS": "1",
            "NO_COLOR": "1",
        }
        self._servers: list[subprocess.Popen[str]] = []
        self._shell = self._begin(["bash", "--noprofile", "--norc"], stdin=subprocess.PIPE, stderr=subprocess.STDOUT)
        self._typed("exec 2>&1; trap 'echo failed: $BASH_COMMAND' ERR; set -o pipefail")

    def do(self, block: Block) -> str | None:
        """What it printed; None where nothing was run."""
        text = block.text
        for written, real in self._ports.items():
            text = text.replace(written, real)
        if block.kind == "bash" and block.title == "In a terminal of its own":
            return self._serve(text)
        if block.kind == "bash":
            return self._typed(text)
        if block.kind == "python" and not block.title:
            (self._directory / "program.py").write_text(text)
            return self._typed("python program.py")
        if block.title and block.kind not in ("", "bash", "console", "text"):
            path = self._directory / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return None

    def close(self) -> None:
        self._shell.kill()
        for server in reversed(self._servers):
            server.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(LIMIT_S)
        for process in (self._shell, *self._servers):
            process.kill()
            process.wait()

    def _begin(self, command: list[str], **streams: int) -> subprocess.Popen[str]:
        streams = {"stdout": subprocess.PIPE, **streams}
        return subprocess.Popen(command, cwd=self._directory, env=self._environ, text=True, **streams)  # type: ignore[call-overload,no-any-return]

    def _typed(self, text: str) -> str:
        assert self._shell.stdin is not None
        self._shell.stdin.write(f"{text}\necho; echo {DONE}\n")
        self._shell.stdin.flush()
        printed = self._read(self._shell, DONE)
        assert "failed: " not in printed, printed
        return printed

    def _serve(self, text: str) -> str:
        server = self._begin(["bash", "-c", text], stderr=subprocess.STDOUT)
        self._servers.append(server)
        return self._read(server, "serving" if text.startswith("penstock worker") else "Penstock ready on")

    def _read(self, process: subprocess.Popen[str], *ends: str) -> str:
        printed = "".join(self._until(process, *ends))
        for written, real in self._ports.items():
            printed = printed.replace(real, written)
        return printed

    def _until(self, process: subprocess.Popen[str], *ends: str) -> Iterator[str]:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip() == DONE:
                return
            yield line
            if ends != (DONE,) and any(end in line for end in ends):
                return
        raise AssertionError(f"it ended with {process.wait()}")


def is_as(printed: str, written: str) -> bool:
    """``…`` in what is written stands for anything, lines among it; how wide a gap is makes no difference."""
    pattern = ".*".join(re.escape(_even(part)) for part in written.strip().split("…"))
    return re.fullmatch(pattern, _even(printed.strip()), re.DOTALL) is not None


def _even(text: str) -> str:
    return re.sub(r" *\n", "\n", re.sub(r" +", " ", text))
