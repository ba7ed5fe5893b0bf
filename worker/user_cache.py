"""The directory in the user's cache for what each start would make anew: compiled kernels, quantised weights."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def user_cache() -> Path:
    """A directory that is ours alone: what is loaded from it runs, and answers, in this process. Raises OSError."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = root / "penstock"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
        raise PermissionError(f"{directory} can be written by others")
    return directory
