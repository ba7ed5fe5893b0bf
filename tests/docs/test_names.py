"""What pages name in passing is there: settings, variables, metrics, paths, commands with their options, and files."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
import pytest

from gateway import metrics, openapi
from gateway.cli import main
from policies.admission import Alert
from tests.builders import ROOT
from tests.docs.session import blocks

PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def settings() -> dict[str, set[str]]:
    """The keys of config.toml by section; those that are only examples, too."""
    found: dict[str, set[str]] = {}
    section = ""
    for line in (ROOT / "config.toml").read_text().splitlines():
        if head := re.match(r"(?:# )?\[+([a-z_.]+)\]+", line):
            section = head[1]
            found.setdefault(section, set())
        elif section and (key := re.match(r"(?:# )?([a-z_0-9]+) = ", line)):
            found[section].add(key[1])
    return found


SETTINGS = settings()
SECTIONS = {name.partition(".")[0] for name in SETTINGS}


def section_of(name: str) -> str:
    """As config.toml has it, where a page says NAME."""
    known = {"models": "demo", "policies": "default"}
    return re.sub(r"^(models|policies)\.NAME", lambda found: f"{found[1]}.{known[found[1]]}", name)


def marked(page: Path) -> Iterator[str]:
    """What stands between backticks."""
    yield from re.findall(r"(?<!`)`([^`\n]+)`(?!`)", page.read_text())


@EVERY_PAGE
def test_settings(page):
    for word in marked(page):
        name = re.fullmatch(r"([a-z_]+(?:\.[A-Za-z_]+)*)\.([a-z_]+)(?: = .*)?", word)
        if name and name[1].partition(".")[0] in SECTIONS and word != "text.format":  # that one is OpenAI's
            assert name[2] in SETTINGS.get(section_of(name[1]), ()) or word in SETTINGS, word


@EVERY_PAGE
def test_defaults(page):
    """A number in brackets behind a setting."""
    written = tomllib.loads((ROOT / "config.toml").read_text())
    for section, key, number in re.findall(r"`([a-z_]+)\.([a-z_]+)` \(([\d,]+)\)", page.read_text()):
        assert int(number.replace(",", "")) == written[section][key], f"{section}.{key}"


@EVERY_PAGE
def test_variables(page):
    code = "".join(path.read_text() for part in ("gateway", "tests") for path in (ROOT / part).rglob("*.py"))
    for name in set(re.findall(r"\bPENSTOCK_\w+", page.read_text())):
        section, _, key = name.removeprefix("PENSTOCK_").lower().rpartition("__")
        assert key in SETTINGS[section.replace("__", ".")] if section else f'"{name}"' in code, name


@EVERY_PAGE
def test_metrics(page):
    known = {metric.name for metric in metrics.reference()}
    for word in marked(page):
        if re.fullmatch(r"(penstock|gen_ai|vllm)[_:][a-z_]+(_total|_seconds|_ratio|_bytes)", word):
            assert word in known, word


@EVERY_PAGE
def test_paths(page):
    paths = list(msgspec.json.decode(openapi.document())["paths"])
    there = [re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(path)) for path in paths]
    for word in marked(page):
        for path in re.findall(r"^(?:[A-Z]+ )?(/(?:admin/v1|v1|api)/[\w/{}]+)", word):
            is_prefix = any(each.startswith(f"{path}/") for each in paths)
            assert is_prefix or any(re.fullmatch(each, path) for each in there), path


@EVERY_PAGE
def test_commands_and_their_options(page):
    for typed in re.findall(r"(?:^\$? ?|`|\$\()penstock ((?:[^`\n|)\\]|\\\n)+)", page.read_text(), re.M):
        words, command, names = typed.split(), main, []
        while isinstance(command, click.Group) and words and not words[0].startswith("-"):
            found = command.get_command(click.Context(main), words[0])
            if found is None:  # as in "`penstock COMMAND --help`"
                assert names or words[0].isupper(), typed
                break
            command, names = found, [*names, words.pop(0)]
        known = {option for each in command.params for option in (*each.opts, *each.secondary_opts)} | {"--help"}
        unknown = [word for word in words if re.fullmatch(r"--[a-z-]+", word) and word not in known]
        assert not unknown or names[:2] == ["bench", "engine"], typed  # the worker's own command has these


@EVERY_PAGE
def test_files(page):
    parts = "|".join(("gateway", "worker", "policies", "sources", "tests", "benchmarks", "demo", "deploy", "docs"))
    for word in marked(page):
        for path in re.findall(rf"^(?:{parts})/[\w/.-]+$", word):
            assert (ROOT / path).exists(), path
        for module in re.findall(r"python -m ((?:benchmarks|worker|gateway)[\w.]*)", word):
            place = ROOT / module.replace(".", "/")
            assert place.with_suffix(".py").exists() or (place / "__main__.py").exists(), module


def test_an_alert_is_as_the_page_on_billing_has_it():
    (shown,) = [block.text for block in blocks((ROOT / "docs/how-to/billing.md").read_text()) if block.kind == "json"]
    posted = msgspec.json.decode(shown)
    assert posted.keys() == {"type", "timestamp", "data"}
    assert msgspec.to_builtins(msgspec.convert(posted["data"], Alert)) == posted["data"]
