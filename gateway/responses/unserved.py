"""What a response may be asked in its items and tools that is not done here, refused by name like any such parameter.

Fields that nobody knows are tolerated, here as in all of a body.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.openai import Malformed


def check_served(given: Mapping[str, Any], path: str, unserved: Mapping[str, Any]) -> None:
    """``unserved``: fields, each with what it may say, as that is how it is here anyway; null means that, too. ``path``
    of ``given``. Raises Malformed."""
    for name, served in unserved.items():
        value = given.get(name)
        if value is not None and value != served:
            where = f"{path}.{name}"
            only = "" if served is None else ": it may be left out"
            raise Malformed(f"'{where}' is not supported by this server{only}", where, "unsupported_parameter")
