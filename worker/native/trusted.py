"""The kernels of this machine, once they have proved themselves: in a process of its own, whose end says the rest."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import torch

from worker.native.build import BuildError, CompilerFailed, built
from worker.native.library import Library

log = logging.getLogger(__name__)

PROOF = (sys.executable, "-P", "-m", "worker.proof")
"""And the shared object, and the number of threads."""
DISPROVED = 3
"""What it exits with where the kernels compute something else than torch does; its last line says what."""
TIMEOUT_S = 180.0
CRASHES = {signal.SIGILL, signal.SIGSEGV, signal.SIGFPE, signal.SIGTRAP}
"""Of which nothing but the kernels is the reason; whatever else ends it may not do so the next time."""


class Unproved(Exception):
    """These kernels are not to be used; the message says why."""


@cache
def library() -> Library | None:
    """The kernels of this machine, or None where they cannot be built or do not compute what torch does."""
    try:
        path = built()
        prove(path)
        return Library(str(path))
    except CompilerFailed as error:
        log.warning("the kernels do not compile here, so decoding is slower: %s", error)
    except Unproved as error:
        log.warning("the compiled kernels are not used, so decoding is slower: %s", error)
    except (BuildError, OSError) as error:
        log.info("no compiled kernels, so decoding is slower: %s", error)
    return None


def prove(path: Path) -> None:
    """Raises Unproved; what was found is kept beside the shared object, and not found out again."""
    kept = path.with_name(f"{path.stem}-proved.txt")
    try:
        said = kept.read_text()
    except OSError:
        said = _proved(path)
        _keep(kept, said)
    if said:
        raise Unproved(f"{said.rstrip()} ({kept} keeps this; without it they are tried again)")


def _proved(path: Path) -> str:
    """What is wrong with the kernels; nothing: they are fine. Raises Unproved where that cannot be said."""
    command = [*PROOF, str(path), str(torch.get_num_threads())]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise Unproved(f"whether they compute what torch does could not be found out: {error}") from None
    last = (done.stdout.strip() or done.stderr.strip()).rpartition("\n")[2]
    if done.returncode == DISPROVED:
        return f"they do not compute what torch does on this machine: {last}\n"
    if -done.returncode in CRASHES:
        return f"they crash on this machine: {signal.Signals(-done.returncode).name}, after: {last or 'nothing'}\n"
    if done.returncode:
        raise Unproved(f"their proof ended with {done.returncode}: {last}")
    return ""


def _keep(kept: Path, said: str) -> None:
    made = kept.with_suffix(f".{os.getpid()}")
    try:
        made.write_text(said)
        made.replace(kept)
    except OSError as error:
        log.warning("that the compiled kernels were tried is forgotten: %s", error)
