"""What the administration's fields are made of. Every text and every number has a bound."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

# Not of blanks alone and without control characters; the last group keeps ``$`` from overlooking a newline at the end.
Title = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^(?=.*\S)[^\x00-\x1f\x7f]+$(?!\n)")]
"""What people call something."""
Note = Annotated[str, Meta(max_length=1024, pattern=r"^[^\x00]*$(?!\n\x00)")]
Id = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_-]+$(?!\n)")]
"""Of a thing that the store named."""
Instant = Annotated[int, Meta(ge=0, le=253_402_300_799)]
"""Unix seconds, up to the year 9999."""
Metadata = Annotated[
    dict[Annotated[str, Meta(min_length=1, max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


class Written(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of what administrators send."""
