"""Overview under 500 requests a second, with seconds that are a fiftieth as long, so that five minutes' worth of
snapshots are soon there. What it keeps is bounded. How long its frames take is measured where nothing else runs."""

from __future__ import annotations

from benchmarks.console_soak import soak
from gateway import live


def test_what_overview_keeps_is_bounded(open_console, chromium, house, monkeypatch):
    monkeypatch.setattr(live, "TICK_S", 0.02)
    found = soak(house, chromium, seconds=9, per_s=500, look_s=3, is_full=True)
    assert found["ttft"].endswith("ms"), found
    # With five minutes' worth of snapshots nothing grows but by what is not yet collected.
    full, *later = found["heap_bytes"]
    assert max(later) < 1.25 * full + (2 << 20), found
    assert max(found["nodes"]) < 1.5 * found["nodes"][0] + 500, found
