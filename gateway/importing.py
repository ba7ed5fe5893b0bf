"""What a process is made of, loaded in one go."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """For what stays as long as the process: the collector looks it through neither meanwhile nor later, which would
    take a sixth of a start. What little of it is garbage stays as well."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
