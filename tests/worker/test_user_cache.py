"""Where Triton's compiled kernels are kept, in a process that begins."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.builders import ROOT

ASKED = "from worker.process import prepare; prepare(); import os; print(os.environ.get('TRITON_CACHE_DIR'))"
ASKED_OF_TRITON = "from worker.process import prepare; prepare(); from triton import knobs; print(knobs.cache.dir)"


def said(asked: str, **environment: str) -> str:
    told = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    command = [sys.executable, "-c", asked]
    done = subprocess.run(command, cwd=ROOT, env=told | environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_triton_keeps_its_kernels_beside_ours(tmp_path):
    pytest.importorskip("triton")
    assert said(ASKED_OF_TRITON, XDG_CACHE_HOME=str(tmp_path)) == str(tmp_path / "penstock" / "triton")


@pytest.mark.parametrize("name", ["TRITON_CACHE_DIR", "TRITON_HOME"])
def test_where_the_environment_says_a_place_it_is_that_one(tmp_path, name):
    place = said(ASKED, **{"XDG_CACHE_HOME": str(tmp_path), name: str(tmp_path / "mine")})
    assert place == (str(tmp_path / "mine") if name == "TRITON_CACHE_DIR" else "None")


def test_a_cache_that_others_can_write_to_is_not_used(tmp_path):
    (tmp_path / "penstock").mkdir()
    (tmp_path / "penstock").chmod(0o777)
    assert said(ASKED, XDG_CACHE_HOME=str(tmp_path)) == "None"


def test_a_user_without_a_home_has_no_cache_and_that_is_all():
    """As a container's may be: a number that no list of users has."""
    nobody = "import os, pwd; pwd.getpwuid = {}.__getitem__; os.environ.pop('HOME', None); "
    assert said(nobody + ASKED, XDG_CACHE_HOME="") == "None"
    asked = "from worker.native.build import built, BuildError\ntry: built()\nexcept BuildError as error: print(error)"
    assert "this user has no home directory" in said(f"{nobody}\n{asked}", XDG_CACHE_HOME="", CXX=sys.executable)
