"""The kernels of this machine, once they have proved themselves: in a process of its own, whose end says the rest."""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from worker.native.build import BuildError, CompilerFailed, built
from worker.native.library import Library
from worker.user_cache import in_turn

log = logging.getLogger(__name__)

PROOF = (sys.executable, "-P", "-m", "worker.proof")
"""And the shared object, and the number of threads."""
DISPROVED = 3
"""What it exits with where the kernels compute something else than torch does; its last line says what."""
TIMEOUT_S = 180.0
CRASHES = {signal.SIGILL, signal.SIGTRAP}
"""Of which nothing but the kernels is the reason; whatever else ends it may not do so the next time."""
ROOT = Path(__file__).parents[2]
"""Of the packages that this process has, which the proof is to have, too."""
FINE = "fine"


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
    """Raises Unproved. What was found is kept beside the shared object, and not found out again by as many threads with
    the same proof and the same torch."""
    kept, version = path.with_name(f"{path.stem}-proved-{torch.get_num_threads()}.txt"), _version()
    said = _kept(kept, version)
    if said is None:
        with in_turn(kept.parent):
            said = _kept(kept, version) or _proved(path)
            if not _keep(kept, f"{version}\n{said}\n") and said != FINE:
                raise Unproved(said)
    if said != FINE:
        raise Unproved(f"{said} ({kept} keeps this; without it they are tried again)")


def _version() -> str:
    """Of what the kernels are called by, and held against."""
    digest = hashlib.sha256(str(torch.__version__).encode())
    others = (ROOT / "worker" / "models" / "whole.py", ROOT / "worker" / "proof.py")
    for file in (*sorted(Path(__file__).parent.glob("*.py")), *others):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:20]


def _kept(kept: Path, version: str) -> str | None:
    """What was found; None: nothing that counts."""
    try:
        first, _, said = kept.read_text(errors="replace").partition("\n")
    except OSError:
        return None
    return said.strip() or None if first == version else None


def _proved(path: Path) -> str:
    """What is wrong with the kernels, or FINE. Raises Unproved where that cannot be said."""
    command = [*PROOF, str(path), str(torch.get_num_threads())]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    try:
        done = subprocess.run(
            command,
            env=os.environ | {"PYTHONPATH": paths},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise Unproved(f"whether they compute what torch does could not be found out: {error}") from None
    tried, reason = (text.strip().rpartition("\n")[2] for text in (done.stdout, done.stderr))
    tried = tried or "to load them"
    if done.returncode == DISPROVED:
        return f"they do not compute what torch does on this machine: {tried}"
    if -done.returncode in CRASHES:
        return f"they crash on this machine: {signal.Signals(-done.returncode).name}, while this is tried: {tried}"
    if done.returncode:
        raise Unproved(f"their proof ended with {done.returncode}, while this is tried: {tried}; {reason}")
    return FINE


def _keep(kept: Path, said: str) -> bool:
    """Whether it is kept."""
    made = None
    try:
        with tempfile.NamedTemporaryFile("w", dir=kept.parent, delete=False) as made:
            made.write(said)
        Path(made.name).replace(kept)
    except OSError as error:
        log.warning("that the compiled kernels were tried is forgotten: %s", error)
        if made is not None:
            with suppress(OSError):
                Path(made.name).unlink()
        return False
    return True
