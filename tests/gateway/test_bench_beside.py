"""The engine beside a busy gateway: the benchmark of it still runs, on a tiny model, its figures taken for nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not shutil.which("wrk"), reason="needs wrk")


def test_a_round_measures_the_engine_alone_and_beside_a_gateway():
    options = ["--shape", "S", "--sequences", "2", "--input-tokens", "4", "--output-tokens", "400", "--threads", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.engine_beside", *options, "--rounds", "1", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if "more than twice its time" in done.stderr:
        pytest.skip("the machine is too busy to measure beside anything")
    assert done.returncode == 0, done.stderr
    (measured,) = json.loads(done.stdout)
    assert measured["requests_per_s"] > 0
    assert 0 < measured["gateway"] <= measured["taken"] <= 1
