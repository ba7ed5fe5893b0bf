"""Exports that were interrupted, while the ledger went on."""

from __future__ import annotations

import json

import pytest

from gateway.exports import pieces
from gateway.exports.files import write_file
from gateway.exports.pieces import Export
from tests.builders import write_chain
from tests.gateway.test_exports import FIRST, an_order, closed, exported, random_entries, rooms  # noqa: F401


async def test_an_export_that_goes_on_after_a_day_was_closed_has_each_row_once(rooms, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(pieces, "PIECE_ROWS", 40)
    monkeypatch.setattr("gateway.exports.spans.PAGE_ROWS", 7)
    entries = random_entries(6, 200, days=1)
    await write_chain(rooms, *entries[:60], chain=1)
    await write_chain(rooms, *entries[61:100], chain=1, first_position=62)  # the 61st has not come yet
    await write_chain(rooms, *entries[100:], chain=2)
    order = an_order(format="jsonl", days=2)

    class Interrupted(Exception):
        pass

    for name in ("open", "closed"):
        heard: list[int] = []

        def tell(num_read: int, heard: list[int] = heard) -> None:
            heard.append(num_read)
            if len(heard) > 3:
                raise Interrupted

        with pytest.raises(Interrupted):
            await write_file(await Export.begin(rooms, order), tmp_path / name, tell)

    await closed(rooms, FIRST + 1)
    # What stands behind the gap belongs to the second day now, which is open, and has been written for the first.
    assert await write_file(await Export.begin(rooms, order), tmp_path / "open", lambda num_read: None) == 199
    written = [json.loads(line)["request_id"] for line in (tmp_path / "open").read_bytes().splitlines()]
    assert sorted(written) == sorted(entry.request_id for entry in entries if entry is not entries[60])

    await write_chain(rooms, entries[60], chain=1, first_position=61)
    await closed(rooms, FIRST + 2)
    await write_file(await Export.begin(rooms, order), tmp_path / "closed", lambda num_read: None)
    assert (tmp_path / "closed").read_bytes() == await exported(rooms, order)
