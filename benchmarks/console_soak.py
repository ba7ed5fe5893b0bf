"""The console's Overview under 500 requests a second: how long its frames take, and what its memory does.

    python -m benchmarks.console_soak [--seconds 3600] [--requests-per-second 500]

It is timed from when the page has five minutes' worth of snapshots, which is all that it keeps.

A gateway of its own runs in this process, with a scripted worker. The ledger's rows of so many requests a second, of 40
tenants and three classes, are given to what tells of the present, as if they had just ended; the page shows them in
chromium without a window, where frames are timed by requestAnimationFrame and the heap is read after a collection.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

from gateway.ledger import Entry
from policies import settings
from tests.builders import an_entry, scripted
from tests.house import House, running

FRAMES = """() => {
  // However long it lasts, what is kept is as large: frames by tenths of a millisecond, the last for all longer ones.
  const seen = window.seen = { frames: new Array(10001).fill(0), longest_ms: 0, num_long_tasks: 0, longest_task_ms: 0 };
  let last = performance.now();
  const next = (now) => {
    seen.frames[Math.min(Math.round(10 * (now - last)), seen.frames.length - 1)] += 1;
    seen.longest_ms = Math.max(seen.longest_ms, now - last);
    last = now;
    requestAnimationFrame(next);
  };
  requestAnimationFrame(next);
  new PerformanceObserver((list) => list.getEntries().forEach((each) => {
    seen.num_long_tasks += 1;
    seen.longest_task_ms = Math.max(seen.longest_task_ms, each.duration);
  })).observe({ type: 'longtask' });
}"""
FULL = """async (limit_ms) => {
  const live = await import("/console/assets/live.js");
  await new Promise((resolve, reject) => {
    live.watch((snapshots) => { if (snapshots.length >= live.KEPT_S) resolve(); });
    setTimeout(() => reject(new Error("there are too few snapshots")), limit_ms);
  });
}"""
FILL_S = 400.0
"""How long it may take until the page has as many snapshots as it keeps, which are of five minutes."""
CLASSES = ("interactive", "standard", "batch")
SHARES = (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))


def entries(rng: random.Random, num: int) -> list[Entry]:
    """Of requests that have ended."""
    return [
        an_entry(
            tenant_id=f"ten_{rng.randrange(40)}",
            sla_class=rng.choice(CLASSES),
            status=200 if rng.random() < 0.99 else 500,
            ttft_ms=rng.lognormvariate(4, 0.8),
            duration_ms=rng.lognormvariate(8, 0.5),
            num_completion_tokens=rng.randrange(2, 400),
        )
        for _ in range(num)
    ]


@contextmanager
def fed(house: House, per_s: int) -> Iterator[None]:
    """Rows come to ``house`` while this lasts, in ten parts a second."""
    stopped, rng = threading.Event(), random.Random(1)

    def feed() -> None:
        due = time.monotonic()
        while not stopped.is_set():
            some = entries(rng, per_s // 10)
            house._loop.call_soon_threadsafe(_ended, house, some)
            due += 0.1
            stopped.wait(max(0.0, due - time.monotonic()))

    thread = threading.Thread(target=feed, name="feed")
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def _ended(house: House, some: list[Entry]) -> None:
    house.gw.ledger.tally.add(some)


@contextmanager
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as started:
        opened = started.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        )
        try:
            yield opened
        finally:
            opened.close()


def soak(
    house: House, opened: Browser, seconds: float, per_s: int, look_s: float, is_full: bool = False
) -> dict[str, Any]:
    """Frame times in milliseconds, and the heap in bytes each ``look_s``; with ``is_full`` from when the page has as
    many snapshots as it keeps."""
    page = opened.new_page(viewport={"width": 1360, "height": 900})
    page.goto(f"{house.url}/console")
    page.get_by_label("Admin key").fill(house.admin_key)
    page.keyboard.press("Enter")
    page.get_by_text("Live", exact=True).wait_for()
    protocol = page.context.new_cdp_session(page)
    with fed(house, per_s):
        page.wait_for_timeout(2000)
        if is_full:
            page.evaluate(FULL, 1000 * FILL_S)
        page.evaluate(FRAMES)
        heaps, nodes = [], []
        for _ in range(int(seconds / look_s)):
            page.wait_for_timeout(1000 * look_s)
            protocol.send("HeapProfiler.collectGarbage")
            heaps.append(protocol.send("Runtime.getHeapUsage")["usedSize"])
            nodes.append(protocol.send("Memory.getDOMCounters")["nodes"])
        seen = page.evaluate("window.seen")
        shown = page.locator(".tile", has_text="TTFT").locator("dd").inner_text()
    page.close()
    return {
        "seconds": seconds,
        "ttft": shown.split("\n")[0],
        **_frames(seen["frames"], seen["longest_ms"]),
        "long_tasks": seen["num_long_tasks"],
        "longest_task_ms": seen["longest_task_ms"],
        "heap_bytes": heaps,
        "nodes": nodes,
    }


def _frames(by_tenths: list[int], longest_ms: float) -> dict[str, Any]:
    """``by_tenths``: how many took so many tenths of a millisecond."""
    num_frames = sum(by_tenths)
    until = list(accumulate(by_tenths))
    shares = {name: bisect_left(until, share * num_frames) / 10 for name, share in SHARES}
    return {
        "num_frames": num_frames,
        "frame_ms": {**shares, "max": round(longest_ms, 2)},
        "frames_over_50_ms": sum(by_tenths[501:]) / num_frames,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--requests-per-second", type=int, default=500)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        models = {"demo": settings.Model()}
        with running(Path(folder), scripted(), models=models) as house, browser() as opened:
            look_s = max(5.0, options.seconds / 60)
            found = soak(house, opened, options.seconds, options.requests_per_second, look_s, is_full=True)
            print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
