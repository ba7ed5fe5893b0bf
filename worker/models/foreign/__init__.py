"""The door to every family that transformers knows: its own model on our paged KV, through its attention interface."""

from worker.models.foreign.load import (
    is_native,
    load_foreign,
    mismatch,
    quietly,
    read_facts,
    refuse_foreign,
    text_config,
)
from worker.models.foreign.model import Facts, Foreign

__all__ = [
    "Facts",
    "Foreign",
    "is_native",
    "load_foreign",
    "mismatch",
    "quietly",
    "read_facts",
    "refuse_foreign",
    "text_config",
]
