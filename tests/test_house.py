"""The drawing of the house, kept true: who may import whom, and in which order files lean on each other."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("policies", "sources", "gateway", "worker", "demo", "migrations")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

MAY_IMPORT = {
    "policies": {"policies"},
    "sources": {"sources", "policies", "demo"},
    "gateway": {"gateway", "policies", "sources", "migrations", "demo"},
    "worker": {"worker", "policies", "sources", "demo"},
    "migrations": {"migrations"},
    "demo": {"demo"},
}
GATEWAY_NEVER = {"torch", "transformers", "numpy", "safetensors"}
WORKER_NEVER = {"aiohttp", "uvloop", "asyncio", "sqlalchemy", "tokenizers", "jinja2"}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


@cache
def imports_of(path: Path) -> tuple[tuple[str, bool], ...]:
    """(module, at the top of the file?) for each import; ``from package import module`` counts as that module."""
    tree = ast.parse(path.read_text())
    top = {id(node) for node in tree.body}
    found = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; the house says whole names"
            base = node.module or ""
            names = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base for alias in node.names]
        found += [(name, id(node) in top) for name in names]
    return tuple(found)


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_a_file_imports_only_what_its_package_may(path):
    package = path.relative_to(ROOT).parts[0]
    for name, _ in imports_of(path):
        first = name.split(".")[0]
        assert first not in PACKAGES or first in MAY_IMPORT[package], (
            f"{package} and {first} have never met ({path.name})"
        )
        assert first != "tests"
        if package == "policies":
            assert first in {"policies", "msgspec"} or first in sys.stdlib_module_names
            assert first not in {"asyncio", "time", "socket", "os", "io"}, (
                f"policies does not wait, read or know the time ({name})"
            )
        if package in {"gateway", "sources"}:
            assert first not in GATEWAY_NEVER
        if package in {"worker", "sources"}:
            assert first not in WORKER_NEVER


def test_imports_have_no_circles():
    graph = {
        name: {target for target, at_top in imports_of(path) if at_top and target in MODULES and target != name}
        for name, path in MODULES.items()
    }
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name not in done:
            for target in graph[name]:
                visit(target, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_a_file_is_a_page():
    assert {module_of(path): lines for path in FILES if (lines := len(path.read_text().splitlines())) > 400} == {}


def test_there_is_no_utils():
    assert [path for path in FILES if path.stem in {"utils", "util", "helpers", "common", "misc"}] == []


def git(*words: str) -> str:
    """What git says of this checkout, or nothing where it cannot."""
    try:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        return ""


def commits_named(text: str) -> set[str]:
    """Abbreviated and whole hashes; of digits alone only behind the word "commit", since counts look alike."""
    after_the_word = re.findall(r"\bcommits?\s+`?([0-9a-f]{7,40})\b", text)
    alone = re.findall(r"(?<![\w./=-])(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])([0-9a-f]{40}|[0-9a-f]{7,12})(?![\w-])", text)
    return {*after_the_word, *alone}


def test_hashes_are_told_from_other_words():
    named = commits_named(
        "commit 7299931, 437a1f6 and 4,000,000; 988000000 bytes, decade, trace 0af7651916cd43dd8448eb211c80319c"
    )
    assert named == {"7299931", "437a1f6"}


def test_a_commit_that_a_page_names_can_be_checked_out():
    if git("rev-parse", "--is-shallow-repository").strip() != "false":
        pytest.skip("the history is not here, or not whole")
    history = git("rev-list", "HEAD").split()
    pages = git("ls-files", "*.md").split("\n")[:-1]
    assert len(pages) > 40
    lost = {
        (page, named)
        for page in pages
        for named in commits_named((ROOT / page).read_text())
        if not any(commit.startswith(named) for commit in history)
    }
    assert lost == set()
