"""config.json, or what stands in its place, read with types."""

from __future__ import annotations

import math
from typing import Any

from worker.models.errors import ModelError

MAX_LAYERS = 4096


class Fields:
    """A table of it: a value of the wrong one is a ModelError that names it. A null counts as absent."""

    def __init__(self, raw: dict[str, Any], architecture: str, place: str = "") -> None:
        """``place``: where it stands, if not in config.json."""
        self.raw = raw
        self.architecture = architecture
        self.place = place or f"config.json of this {architecture}"

    def over(self, **defaults: Any) -> Fields:
        """The same with the family's defaults under it."""
        return Fields(
            {**defaults, **{key: value for key, value in self.raw.items() if value is not None}},
            self.architecture,
            self.place,
        )

    def integer(self, key: str, default: int | None = None) -> int:
        """From 0 to 2**31 - 1. Raises ModelError, as do all that follow; without a default also where there is none."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
            raise self.wrong(key, value)
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        """At least 1."""
        value = self.integer(key, default)
        if value < 1:
            raise self.wrong(key, value)
        return value

    def num_layers(self) -> int:
        """From 1 to 4,096."""
        value = self.positive("num_hidden_layers")
        if value > MAX_LAYERS:
            raise self.wrong("num_hidden_layers", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Finite."""
        value = self._get(key, default)
        if not _is_number(value):
            raise self.wrong(key, value)
        return float(value)

    def not_negative(self, key: str, default: float | None = None) -> float:
        value = self.number(key, default)
        if value < 0:
            raise self.wrong(key, value)
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value)
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, value)
        return value

    def table(self, key: str) -> Fields | None:
        """A table within this one; None: there is none."""
        value = self.raw.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, value)
        return Fields(value, self.architecture, self.place)

    def numbers(self, key: str) -> tuple[float, ...]:
        value = self._get(key, None)
        if not isinstance(value, list) or not all(map(_is_number, value)):
            raise self.wrong(key, value)
        return tuple(float(item) for item in value)

    def wrong(self, key: str, value: object) -> ModelError:
        """For a value that cannot be; None: it is missing."""
        if value is None:
            return ModelError(f"{self.place} lacks {key}")
        return ModelError(f"{self.place} has an impossible {key}: {str(value)[:80]}")

    def _get(self, key: str, default: Any) -> Any:
        value = self.raw.get(key)
        return default if value is None else value


def _is_number(value: object) -> bool:
    """JSON has integers that no float is large enough for."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
