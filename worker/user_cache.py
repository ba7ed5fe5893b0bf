"""The directory in the user's cache for what each start would make anew: compiled kernels, ours and Triton's, and
quantised weights."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def user_cache() -> Path:
    """A directory that is ours alone: what is loaded from it runs, and answers, in this process. Raises OSError."""
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user that has neither HOME nor an entry in the system's list
        raise FileNotFoundError("this user has no home directory, and XDG_CACHE_HOME names no other place") from None
    directory = root / "penstock"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
        raise PermissionError(f"{directory} can be written by others")
    return directory


@contextmanager
def in_turn(directory: Path) -> Iterator[None]:
    """One of the processes that share a directory at a time, where its disk knows locks: workers that start together
    make nothing twice."""
    held = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def place_triton() -> None:
    """Triton's kernels lie beside ours, so that one volume keeps both, unless the environment says where. Triton reads
    that when it compiles; what it writes takes its place as a whole, so several processes may at once."""
    if "TRITON_CACHE_DIR" in os.environ or "TRITON_HOME" in os.environ:
        return
    try:
        directory = user_cache() / "triton"
        directory.mkdir(exist_ok=True)
    except OSError:
        return  # it has a place of its own
    os.environ["TRITON_CACHE_DIR"] = str(directory)
