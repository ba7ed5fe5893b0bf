"""What comes of a call of a compiled kernel, as an exception where it is not what was asked for."""

from __future__ import annotations

from ctypes import c_int
from typing import Any

_NO_MEMORY = 1
"""See kernels.cpp's Outcome."""


def may_fail(*functions: Any) -> None:
    """These return an Outcome: calls raise MemoryError, or RuntimeError, where it is another than FINE."""
    for function in functions:
        function.restype, function.errcheck = c_int, _checked


def _checked(outcome: Any, function: Any, arguments: Any) -> Any:
    if outcome == _NO_MEMORY:
        raise MemoryError(f"{function.__name__} found no memory")
    if outcome:
        raise RuntimeError(f"{function.__name__} failed")
