"""Compiled kernels are built once, by whatever compiler there is, and where there is none it is said."""

from __future__ import annotations

import logging
import os
import select
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.builders import PATIENCE_S
from tests.journeys.test_process import until
from tests.worker.compiling import needs_compiler, optimise
from worker.native import build
from worker.native.build import BuildError, CompilerFailed, built
from worker.native.check import agrees_with_torch
from worker.native.library import Library
from worker.native.trusted import library


@needs_compiler
def test_kernels_are_compiled_once_and_then_found(cache, monkeypatch):
    optimise(monkeypatch, "-O0")
    first = built()
    compiled_at = first.stat().st_mtime_ns
    assert first.parent == cache
    assert [path.name for path in cache.iterdir()] == [first.name]
    assert built() == first
    assert first.stat().st_mtime_ns == compiled_at
    assert agrees_with_torch(Library(str(first)))


@needs_compiler
def test_what_cannot_be_made_in_parallel_is_made_in_one_go(cache, monkeypatch):
    optimise(monkeypatch, "-O0")
    monkeypatch.setattr(build, "IN_PARALLEL", ("-fno-such-option",))
    assert agrees_with_torch(Library(str(built())))


def test_no_more_processes_compile_than_there_are_cores_for_them(monkeypatch):
    monkeypatch.setattr(build.os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr(build, "cpu_quota", lambda: 2.5)
    assert build.in_parallel()[0] == "-flto=2"
    monkeypatch.setattr(build, "cpu_quota", lambda: 0.5)
    assert build.in_parallel()[0] == "-flto=1"
    monkeypatch.setattr(build, "cpu_quota", lambda: None)
    assert build.in_parallel()[0] == "-flto=64"


@needs_compiler
def test_only_gcc_is_told_how_to_make_them_in_parallel(cache, tmp_path, monkeypatch):
    other, log = tmp_path / "other", tmp_path / "told"
    answers = 'case "$1" in --version) echo "clang version 19";; *) exit 1;; esac'
    other.write_text(f'#!/bin/sh\necho "$@" >> {log}\n{answers}\n')
    other.chmod(0o755)
    monkeypatch.setenv("CXX", str(other))
    with pytest.raises(CompilerFailed, match="other failed"):
        built()
    version, command = log.read_text().splitlines()
    assert version == "--version"
    assert "-std=c++17" in command
    assert "-flto" not in command


def test_a_compiler_that_does_not_end_is_named_with_how_long_it_had(cache, tmp_path, monkeypatch):
    endless, never = tmp_path / "endless", tmp_path / "never"
    os.mkfifo(never)
    endless.write_text(f'#!/bin/sh\ncase "$1" in --version) echo "clang version 19";; *) read line < {never};; esac\n')
    endless.chmod(0o755)
    monkeypatch.setenv("CXX", str(endless))
    monkeypatch.setattr(build, "TIMEOUT_S", 0.5)
    with pytest.raises(CompilerFailed) as caught:
        built()
    assert str(caught.value) == f"{endless} has not ended after 0.5 s; the next start tries again"


def test_of_workers_that_start_together_one_compiles_and_the_others_wait(cache, tmp_path, monkeypatch):
    compiler, log = tmp_path / "compiler", tmp_path / "told"
    made = f'echo made >> {log}; while [ "$1" != -o ]; do shift; done; sleep 0.3; echo kernels > "$2"'
    compiler.write_text(f'#!/bin/sh\ncase "$1" in --version) echo "clang version 19";; *) {made};; esac\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with ThreadPoolExecutor(3) as pool:
        first, *others = [each.result() for each in [pool.submit(built) for _ in range(3)]]
    assert others == [first] * 2
    assert first.read_text() == "kernels\n"
    assert log.read_text() == "made\n"


def test_a_worker_that_is_killed_leaves_neither_compilers_nor_their_files(cache, tmp_path, monkeypatch):
    compiler, runs = tmp_path / "compiler", tmp_path / "runs"
    os.mkfifo(runs)
    starts_another = f'echo > "$TMPDIR/aside"; sleep 600 > {runs} & wait'
    compiler.write_text(f'#!/bin/sh\ncase "$1" in --version) echo "clang version 19";; *) {starts_another};; esac\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    worker = subprocess.Popen([sys.executable, "-c", "from worker.native.build import built; built()"])
    with runs.open("rb") as another:
        (scratch,) = cache.iterdir()
        assert (scratch / "aside").exists()
        worker.kill()
        worker.wait()
        assert select.select([another], [], [], PATIENCE_S)[0] != []
        assert another.read() == b""
    until(lambda: not list(cache.iterdir()))


def test_without_a_compiler_there_are_none(cache, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="there is no compiler no-such-compiler"):
        built()


@pytest.fixture
def failing_compiler(cache, tmp_path, monkeypatch):
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\nprintf 'in step.h\\nkernels.cpp:1: nonsense\\n' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))


@pytest.mark.usefixtures("failing_compiler")
def test_a_compiler_that_fails_leaves_nothing_behind(cache):
    with pytest.raises(CompilerFailed, match=r"in step\.h\nkernels\.cpp:1: nonsense"):
        built()
    assert list(cache.iterdir()) == []


def told(caplog):
    """That there are no kernels, by how loud it is said."""
    caplog.set_level(logging.INFO)
    assert library.__wrapped__() is None
    return [(record.levelname, record.getMessage()) for record in caplog.records]


@pytest.mark.usefixtures("failing_compiler")
def test_that_kernels_do_not_compile_is_a_warning_with_what_the_compiler_said(caplog):
    (_, first), (level, message) = told(caplog)
    assert "compiled, once; that may take a minute" in first
    assert level == "WARNING"
    assert message.endswith("in step.h\nkernels.cpp:1: nonsense")


@pytest.mark.usefixtures("cache")
def test_that_there_is_no_compiler_is_no_warning(monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert told(caplog) == [
        ("INFO", "no compiled kernels, so decoding is slower: there is no compiler no-such-compiler")
    ]


def test_a_cache_that_others_can_write_is_not_trusted(cache):
    cache.mkdir(mode=0o777)
    cache.chmod(0o777)
    with pytest.raises(BuildError, match=r"can be written by others|there is no compiler"):
        built()
