"""What the tables of config.toml are made of."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

MAX_COUNT = (1 << 63) - 1
MAX_S, MAX_MS = 1e10, 1e13
"""Three hundred years: no clock, calendar or column of a database has an end before."""

Positive = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
NonNegative = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Threads = Annotated[int, Meta(ge=1, le=1024)]
Seconds = Annotated[float, Meta(gt=0, le=MAX_S)]
SecondsOrNone = Annotated[float, Meta(ge=0, le=MAX_S)]
Milliseconds = Annotated[float, Meta(gt=0, le=MAX_MS)]
MillisecondsOrNone = Annotated[float, Meta(ge=0, le=MAX_MS)]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all of them."""
