"""The benchmark of the gateway's own cost still runs: a round of it in seconds, its figures taken for nothing."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.builders import PATIENCE_S

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    not shutil.which("wrk") or len(os.sched_getaffinity(0)) < 2, reason="needs wrk and two cores"
)


async def test_one_round_measures_everything_and_the_ledger_holds_every_answer(tmp_path):
    picture = tmp_path / "gateway.png"
    options = "--rounds 1 --seconds 1 --streams 8 --tokens 50 --json --no-check --plot"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.gateway", *options.split(), str(picture)),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(4 * PATIENCE_S):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    result = json.loads(out)
    assert result["num_ledger_rows"] >= result["num_answers"] > 8
    (measured,) = result["rounds"]
    assert all(value > 0 for value in measured.values())
    assert measured["in_step_tokens_per_chunk"] == 1
    assert picture.read_bytes().startswith(b"\x89PNG")
