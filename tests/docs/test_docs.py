"""The documentation is true: every page's code runs from top to bottom, and the site is built without a warning."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import msgspec
import pytest

from gateway import errors, metrics, openapi
from gateway.cli import main
from gateway.openai.extras import Extras
from policies import configuration
from policies.policy import Budget, Cache, Limits, Policy, Price
from tests.builders import ROOT
from tests.docs.session import LIMIT_S, PORTS, Block, Session, blocks, is_as
from tests.ports import free_ports

PAGES = sorted((ROOT / "docs").rglob("*.md"))


@pytest.fixture
def session(tmp_path):
    session = Session(tmp_path, free_ports(len(PORTS)))

    def too_long(number, frame):
        raise TimeoutError(f"a page takes more than {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(LIMIT_S)
    try:
        yield session
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        session.close()


@pytest.mark.parametrize(
    "path",
    [path for path in PAGES if any(block.kind in ("bash", "python") for block in blocks(path.read_text()))],
    ids=lambda path: path.stem,
)
def test_what_a_page_says_is_what_happens(path, session):
    printed = None
    for block in blocks(path.read_text()):
        if block.kind == "text" and printed is not None:
            assert is_as(printed, block.text), f"{path.name}:{block.line} printed\n{printed}"
            printed = None
        else:
            printed = session.do(block)


def test_what_the_readme_begins_with_is_what_happens(session):
    """It installs and starts Penstock in its first line; the reader's second terminal is done here."""
    first, *others = blocks((ROOT / "README.md").read_text())
    assert first.text == "pip install -e . && penstock serve\n"
    session.do(Block("bash", "In a terminal of its own", "penstock serve\n", first.line))
    printed = [session.do(block) for block in others if block.kind in ("bash", "python")]
    (said,) = [block.text for block in others if block.kind == "text"]
    assert len(printed) == 3
    assert '"content":"' in printed[0]
    assert "Paris" in printed[1]
    assert is_as(printed[2], said)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_settings_on_a_page_are_settings(path):
    for block in blocks(path.read_text()):
        if block.kind == "toml" and block.title in ("", "config.toml"):
            configuration.load(block.text, {})


def test_the_page_of_policies_names_all_that_a_policy_may_say():
    table = (ROOT / "docs" / "how-to" / "policies.md").read_text().partition("## All that a policy may say")[2]
    fields = [re.findall(r"`(\w+)`", row.split("|")[1]) for row in table.splitlines() if row.startswith("| `")]
    assert [name for row in fields for name in row] == list(Policy.__struct_fields__)
    for part in (Limits, Budget, Cache, Price):
        assert {f"`{name}`" for name in part.__struct_fields__} <= set(re.findall(r"`\w+`", table)), part.__name__


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The whole of it, built as `mkdocs build` does."""
    place: Path = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(place)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return place


def test_the_reference_has_every_setting_command_operation_metric_and_failure(site):
    settings = (site / "reference/config.html").read_text()
    written = tomllib.loads((ROOT / "config.toml").read_text())
    for section, keys in written.items():
        for key, value in keys.items():
            assert f"<code>{key}</code>" in settings or isinstance(value, dict), f"{section}.{key}"

    commands = (site / "reference/cli.html").read_text()
    for name in main.list_commands(click.Context(main)):
        assert f'id="penstock-{name}"' in commands or f'id="{name}"' in commands, name

    rest = (site / "reference/rest.html").read_text()
    for path in _paths():
        assert path in rest, path

    measured = (site / "reference/metrics.html").read_text()
    for metric in metrics.reference():
        assert f"<code>{metric.name}</code>" in measured, metric.name

    failures = (site / "reference/errors.html").read_text()
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.GatewayError):
            assert kind.code is None or f"<code>{kind.code}</code>" in failures, kind.code


def test_the_reference_tells_what_is_taken_from_what_is_refused(site):
    rest = (site / "reference/rest.html").read_text()
    chats = rest.partition('id="chat_completions"')[2].partition("<h3")[0]
    table, _, behind = chats.partition("</table>")
    for field in Extras.__struct_fields__:
        assert f"<td><code>{field}</code></td>" not in table, field
        assert f"<code>{field}</code>" in behind, field
    assert "<td><code>messages</code></td>" in table
    assert "gateway.openai" not in rest, "types go by names that clients know"


def _paths() -> list[str]:
    return list(msgspec.json.decode(openapi.document())["paths"])


def test_the_site_needs_nothing_from_elsewhere(site):
    for page in site.rglob("*.html"):
        text = page.read_text()
        for word in ('src="http', 'rel="stylesheet" href="http', "fonts.googleapis"):
            assert word not in text, f"{page.name}: {word}"


@pytest.mark.parametrize(
    ("printed", "written", "is_so"),
    [
        ("a\nb\n", "a\nb", True),
        ("a 12 b", "a … b", True),
        ("first\nx\ny\nlast", "first\n…\nlast", True),
        ("first\nlast", "first", False),
        ("a.b", "a?b", False),
    ],
)
def test_what_is_written_is_compared(printed, written, is_so):
    assert is_as(printed, written) is is_so
