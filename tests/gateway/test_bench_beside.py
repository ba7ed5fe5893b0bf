"""The engine beside a busy gateway: the benchmark of it still runs, on a tiny model, its figures taken for nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders import PATIENCE_S

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not shutil.which("wrk"), reason="needs wrk")


def test_a_round_measures_the_engine_alone_and_beside_a_gateway():
    options = ["--shape", "S", "--sequences", "2", "--input-tokens", "4", "--output-tokens", "200", "--threads", "1"]
    # On a machine that tests share the second batch may be put aside for much longer than the first one was.
    options += ["--rounds", "1", "--patience", "12"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.engine_beside", *options, "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (measured,) = json.loads(done.stdout)
    assert measured["requests_per_s"] > 0
    assert measured["beside_s"] > 0
    # Of two clocks that do not tick together the gateway's part may be a little more than all of it.
    assert 0 < measured["gateway"] <= 1.1 * measured["taken"] + 0.05
    assert measured["taken"] <= 1.05
