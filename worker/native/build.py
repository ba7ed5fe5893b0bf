"""From kernels.cpp and its headers to a shared object in the user's cache, once a compiler, machine and source."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from worker.cgroups import cpu_quota
from worker.user_cache import in_turn, user_cache

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.cpp")
GUARD = Path(__file__).with_name("guard.py")
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-mprefer-vector-width=512",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
    "-falign-loops=64",
    "-shared",
    "-fPIC",
)
"""Where a loop begins in a line of the cache decides on a hundredth of a prompt's products on Zen 5: it is to be the
same."""
IN_PARALLEL = ("--param", "lto-partitions=16", "--param", "lto-min-partition=1000")
"""With the number of processes; see ``in_parallel``."""
COMPILER = "g++"
"""Unless CXX names another."""
TIMEOUT_S = 180.0
SAID_LINES = 12
"""That are told of what a compiler said."""


class BuildError(Exception):
    """There are no compiled kernels; the message says why."""


class CompilerFailed(BuildError):
    """There is a compiler, and it could not make them; the message is how it began to say why."""


def built() -> Path:
    """The shared object, compiled now if no earlier start has left it. Raises BuildError."""
    path = compiler()
    if path is None:
        raise BuildError(f"there is no compiler {_asked_for()}")
    try:
        target = user_cache() / f"kernels-{_key(path)}.so"
        if not target.exists():
            log.info("the kernels for this processor are compiled, once; that may take a minute")
            with in_turn(target.parent):
                if not target.exists():
                    _compile(path, target)
    except subprocess.TimeoutExpired:
        raise CompilerFailed(f"{path} has not ended after {TIMEOUT_S:.3g} s; the next start tries again") from None
    except subprocess.SubprocessError as error:
        raise CompilerFailed(str(error)) from None
    except OSError as error:
        raise BuildError(str(error).strip().partition("\n")[0]) from None
    return target


def compiler() -> str | None:
    """Where it lies; None: there is none."""
    return shutil.which(_asked_for())


def _asked_for() -> str:
    return os.environ.get("CXX") or COMPILER


def in_parallel() -> tuple[str, ...]:
    """As GCC is told besides, to make the machine code of one source in as many processes as there are cores for us
    (where there is ``make``): two cores need 11 s for it rather than 17. Others would only be waited for, each with the
    compiler's memory."""
    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"-flto={max(1, min(num_cpus, int(cpu_quota() or num_cpus)))}", *IN_PARALLEL


def _compile(compiler: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / "kernels.so"
        ways = [(), in_parallel()] if _is_gcc(compiler) else [()]
        while True:
            status, said = _ran([compiler, *FLAGS, *ways.pop(), "-o", str(made), str(SOURCE)], scratch)
            if not status:
                break
            if not ways:
                raise CompilerFailed("\n".join(said.strip().splitlines()[:SAID_LINES]) or f"{compiler} failed")
        made.replace(target)


def _ran(command: list[str], scratch: str) -> tuple[int, str]:
    """The status, and what it said. It does not outlive this process, nor do its files, however that ends. Raises
    subprocess.TimeoutExpired."""
    guarded = [sys.executable, "-I", "-S", str(GUARD), scratch, *command]
    environment = os.environ | {"TMPDIR": scratch}  # what a compiler puts aside
    ended, alive = os.pipe()
    try:
        with subprocess.Popen(
            guarded, stdin=ended, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
        ) as process:
            try:
                _, said = process.communicate(timeout=TIMEOUT_S)
            finally:
                os.close(alive)
    finally:
        os.close(ended)
    return process.returncode, said


def _is_gcc(compiler: str) -> bool:
    said = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    return "Free Software Foundation" in said.stdout


def _key(compiler: str) -> str:
    """Of everything that decides what the machine code is: the cache may lie on a disk that several machines share."""
    status = os.stat(compiler)
    digest = hashlib.sha256()
    for path in (SOURCE, *sorted(SOURCE.parent.glob("*.h"))):
        digest.update(path.read_bytes())
    digest.update(
        repr(
            (FLAGS, IN_PARALLEL, compiler, status.st_size, status.st_mtime_ns, platform.machine(), _processor())
        ).encode()
    )
    return digest.hexdigest()[:20]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
