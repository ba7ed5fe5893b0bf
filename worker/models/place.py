"""Where a model's weights are, and what is wrong where there are none."""

from __future__ import annotations

from pathlib import Path

from policies.model_source import SourceError
from sources import WEIGHTS, place_of
from worker.models.errors import ModelError


def path_of(source: str) -> Path:
    """As ``place_of``, with the weights. Raises ModelError."""
    try:
        return place_of(source, WEIGHTS)
    except SourceError as error:
        raise ModelError(str(error)) from None
