"""Compiled kernels for the CPU: optional, built once a machine, and checked against torch before they are trusted.

Owns the C++ and its building. Where there is no compiler, or the kernels do not prove themselves (``worker.proof``),
``library()`` is None and everything runs in torch; nothing else changes.
"""

from worker.native.adapters import MAX_FACTORS, PackedAdapter
from worker.native.floats import FloatMatrix
from worker.native.library import ACTIVATIONS, DTYPES, MAX_HEAD_DIM, STORED_TYPES, Library
from worker.native.of_logits import MAX_TRIES, TILE_LOGITS
from worker.native.packed import PackedInt4, PackedInt8, PackedMatrix
from worker.native.pages import huge_empty
from worker.native.structures import Seen, Step
from worker.native.trial import coding_pays
from worker.native.trusted import library

__all__ = [
    "ACTIVATIONS",
    "DTYPES",
    "MAX_FACTORS",
    "MAX_HEAD_DIM",
    "MAX_TRIES",
    "STORED_TYPES",
    "TILE_LOGITS",
    "FloatMatrix",
    "Library",
    "PackedAdapter",
    "PackedInt4",
    "PackedInt8",
    "PackedMatrix",
    "Seen",
    "Step",
    "coding_pays",
    "huge_empty",
    "library",
]
