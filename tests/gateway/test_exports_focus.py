"""The FinOps Foundation's own validator on what we export as FOCUS 1.2.

It needs Python 3.12 and other versions of our libraries, so it is a program in an environment of its own
(``FOCUS_VALIDATOR``, which ``.ci/run`` makes).
"""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.builders import an_entry, write_chain
from tests.gateway.test_exports import DAY_S, FIRST, an_order, closed, exported, random_entries, rooms  # noqa: F401

SUPPORTED = (
    "ACCOUNT_NAMING_SUPPORTED",
    "SUB_ACCOUNT_SUPPORTED",
    "USAGE_MEASUREMENT_SUPPORTED",
    "UNIT_PRICING_SUPPORTED",
    "PUBLIC_PRICE_LIST_SUPPORTED",
    "NEGOTIATED_PRICING_SUPPORTED",
    "TAGGING_SUPPORTED",
    "RESOURCE_TYPE_ASSIGNMENT_SUPPORTED",
    "MULTIPLE_SUB_ACCOUNT_TYPES_SUPPORTED",
    "MULTIPLE_BILLING_ACCOUNT_TYPES_SUPPORTED",
)
"""What of FOCUS applies here."""
ONE_OF_TWO = {"InvoiceId-C-005-C"}
"""That an invoice is named, and that none is, are two rules of which one must hold; it reports the other as failed."""
VALIDATOR = os.environ.get("FOCUS_VALIDATOR") or shutil.which("focus-validator")


@pytest.mark.skipif(VALIDATOR is None, reason="needs focus-validator, a program for Python 3.12 or later")
async def test_the_foundations_validator_finds_nothing_wrong(rooms, tmp_path):  # noqa: F811
    entries = random_entries(7, 100)
    correction = an_entry(
        settled_at=(FIRST + 2) * DAY_S + DAY_S - 1,
        price_version="list:1",
        corrects=entries[0].request_id,
        reason="counted twice",
        num_prompt_tokens=-1_000,
        num_cached_tokens=-10,
        num_completion_tokens=-100,
        cost_micros=-480,
        endpoint="correction",
    )
    await write_chain(rooms, *entries, correction)
    await closed(rooms, FIRST + 3)
    file = tmp_path / "focus.csv"
    file.write_bytes(await exported(rooms, an_order("costs", "focus")))
    assert_valid(file)


async def test_a_small_quantity_is_written_with_digits_alone(rooms):  # noqa: F811
    entry = an_entry(settled_at=FIRST * DAY_S, num_prompt_tokens=7, num_cached_tokens=0, num_completion_tokens=0)
    await write_chain(rooms, entry)
    written = (await exported(rooms, an_order("costs", "focus"))).decode()
    (line,) = (line for line in csv.DictReader(io.StringIO(written)) if line["SkuMeter"] == "Input Tokens")
    assert (line["ConsumedQuantity"], line["PricingQuantity"]) == ("7.0", "0.000007")


def assert_valid(file: Path) -> None:
    assert VALIDATOR is not None
    python = Path(VALIDATOR).with_name("python")
    found = subprocess.run(
        [python, "-c", "import focus_validator, os; print(os.path.dirname(os.path.dirname(focus_validator.__file__)))"],
        capture_output=True,
        text=True,
        check=True,
    )
    said = subprocess.run(
        [
            *(VALIDATOR, "--data-file", str(file), "--validate-version", "1.2", "--block-download"),
            *("--applicability-criteria", ",".join(SUPPORTED), "--show-violations"),
        ],
        capture_output=True,
        text=True,
        cwd=found.stdout.strip(),  # it looks for its own tables from there
        check=True,
    ).stdout
    totals = re.search(r"Pass: (\d+) \| Fail: (\d+)", said)
    assert totals is not None, said
    assert int(totals[1]) > 200
    assert set(re.findall(r"^\S+ (\S+): FAIL", said, re.MULTILINE)) == ONE_OF_TWO, said
