"""A row for each request, and for each correction."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from gateway import store
from gateway.exports.columns import Column, Row, Type, instant, money
from gateway.exports.names import Names
from gateway.ledger.entry import Entry

_INSTANTS = ("created_at", "settled_at")
_NUMBERS = ("queue_ms", "ttft_ms", "duration_ms")
_COUNTS = ("status", "policy_version", "engine_us", "kv_block_ms", "chain", "position")
_FIELDS = tuple(name for name in Entry.__struct_fields__ if name != "cost_micros")


def _type_of(name: str) -> Type:
    if name in _INSTANTS:
        return "instant"
    if name in _NUMBERS:
        return "number"
    return "count" if name in _COUNTS or name.startswith("num_") else "text"


COLUMNS = (
    *(Column(name, _type_of(name)) for name in _FIELDS),
    Column("tenant_name", "text"),
    Column("cost", "money"),
    Column("currency", "text"),
)
"""Those of the ledger, the cost in units of the currency; ``link`` is in hexadecimal digits."""

_INSTANT_PLACES = [Entry.__struct_fields__.index(name) for name in _INSTANTS]
_LINK = Entry.__struct_fields__.index("link")
_COST = Entry.__struct_fields__.index("cost_micros")

assert {column.name for column in COLUMNS[: len(_FIELDS)]} <= set(store.ledger.c.keys())


def rows_of(entries: Iterable[Entry], names: Names, currency: str) -> list[Row]:
    """In the same order."""
    rows = []
    for entry in entries:
        values: list[Any] = list(msgspec.structs.astuple(entry))
        for place in _INSTANT_PLACES:
            values[place] = instant(values[place])
        link = values[_LINK]
        values[_LINK] = None if link is None else link.hex()
        cost = values.pop(_COST)
        rows.append((*values, names.of(entry.tenant_id), money(cost), currency))
    return rows
