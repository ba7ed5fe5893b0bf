"""Every benchmark can still be started: a renamed part of the house breaks it here, not on the day it is needed."""

from __future__ import annotations

import subprocess
import sys

from tests.builders import ROOT

IMPORT_ALL = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"


def test_every_module_of_the_benchmarks_is_imported():
    # What drives a peer is a program of the peer's environment: it is read, and not run.
    paths = [path for path in sorted((ROOT / "benchmarks").rglob("*.py")) if path.parent.name != "drivers"]
    for driver in (ROOT / "benchmarks").rglob("drivers/*.py"):
        compile(driver.read_text(), driver, "exec")
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    assert "benchmarks.engine_gpu.__main__" in names
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *names], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
