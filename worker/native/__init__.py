"""Compiled kernels for the CPU: optional, built once a machine, and checked against torch before they are trusted.

Owns the C++ and its building. Where there is no compiler, or the check fails, ``library()`` is None and everything runs
in torch; nothing else changes.
"""

from worker.native.check import library
from worker.native.library import ACTIVATIONS, DTYPES, MAX_HEAD_DIM, Library, Step
from worker.native.packed import PackedInt4, PackedInt8, filled_up, packed_int4, packed_int8
from worker.native.pages import huge_empty
from worker.native.whole import PackedMatrix

__all__ = [
    "ACTIVATIONS",
    "DTYPES",
    "MAX_HEAD_DIM",
    "Library",
    "PackedInt4",
    "PackedInt8",
    "PackedMatrix",
    "Step",
    "filled_up",
    "huge_empty",
    "library",
    "packed_int4",
    "packed_int8",
]
