"""A browser in front of a real gateway with a real worker: Debian's chromium, driven by Playwright.

Where there is no chromium, or no axe-core in PENSTOCK_CLIENTS (see tests/clients), tests are skipped, except in CI.
With PENSTOCK_SCREENSHOTS=FOLDER each page is drawn there as a picture.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from policies import settings
from policies.policy import Limits, Policy, Price
from tests import house as houses

ACCESSIBILITY = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice")
PATIENCE_MS = 120_000


def missing(what: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(what)
    pytest.skip(what)


@pytest.fixture(scope="session")
def axe() -> str:
    """The program that looks for what keeps people from using a page."""
    path = Path(os.environ.get("PENSTOCK_CLIENTS", "none")) / "node" / "node_modules" / "axe-core" / "axe.min.js"
    if not path.exists():
        missing(f"there is no {path.name}")
    return path.read_text()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """Not for longer: while it is open its loop runs, on which no test of another kind could be."""
    playwright = pytest.importorskip("playwright.sync_api") if not os.environ.get("CI") else None
    if playwright is None:
        import playwright.sync_api as playwright
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        missing("there is no chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[houses.House]:
    engine = settings.Engine(device="cpu", num_threads=1, max_kv_bytes=64 << 20)
    policy = Policy(
        limits=Limits(requests_per_minute=600, tokens_per_day=1_000_000),
        prices={"*": Price(prompt="0.15", completion="0.60")},
    )
    with houses.running(
        tmp_path_factory.mktemp("console"),
        models={"demo": settings.Model(engine=engine)},
        policies={"default": policy},
        console=settings.Console(recent_requests=20_000),  # a picture's minute has thousands
        tracing=settings.Tracing(endpoint="http://127.0.0.1:9", sample_ratio=1.0),  # where nobody collects them
    ) as house:
        yield house


class Console:
    """One browser window: a page, what went wrong in it, and what people do there."""

    def __init__(self, page: Any, house: houses.House, axe: str) -> None:
        self.page = page
        self.house = house
        self._axe = axe
        self.wrong: list[str] = []
        page.on("console", lambda message: self.wrong.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.wrong.append(str(error)))

    def sign_in(self, key: str = "") -> None:
        self.page.goto(f"{self.house.url}/console")
        self.page.get_by_label("Admin key").fill(key or self.house.admin_key)
        self.page.get_by_role("button", name="Sign in").click()
        self.page.get_by_role("heading", level=1, name="Overview").wait_for()

    def open(self, title: str) -> None:
        """By the navigation; until it has been fetched."""
        self.page.get_by_role("navigation").get_by_role("link", name=title, exact=True).click()
        self.page.get_by_role("heading", level=1, name=title, exact=True).wait_for()
        self.settled()

    def settled(self) -> None:
        self.page.wait_for_function("() => !document.querySelector('.bones, [aria-busy=true]')")

    def button(self, name: str | re.Pattern[str], within: Any = None) -> Any:
        return (within or self.page).get_by_role("button", name=name, exact=isinstance(name, str))

    def dialog(self) -> Any:
        return self.page.get_by_role("dialog")

    def serious(self) -> list[str]:
        """What axe-core finds that is serious, or worse."""
        self.page.evaluate(self._axe)
        found = self.page.evaluate(
            "tags => axe.run(document, {runOnly: tags, resultTypes: ['violations']})", list(ACCESSIBILITY)
        )
        return [
            f"{each['id']}: {node['html'][:200]} {node['failureSummary'][:300]}"
            for each in found["violations"]
            if each["impact"] in ("serious", "critical", "moderate")
            for node in each["nodes"]
        ]

    @property
    def takes_pictures(self) -> bool:
        return bool(os.environ.get("PENSTOCK_SCREENSHOTS"))

    def picture(self, name: str) -> None:
        if folder := os.environ.get("PENSTOCK_SCREENSHOTS"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.page.evaluate("document.querySelectorAll('.toast').forEach(each => each.remove())")
            height = self.page.evaluate("document.documentElement.scrollHeight")
            before = self.page.viewport_size
            self.page.set_viewport_size({"width": before["width"], "height": height})
            self.page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
            self.page.screenshot(path=f"{folder}/{name}.png", animations="disabled")
            self.page.set_viewport_size(before)


@pytest.fixture
def open_console(chromium: Any, house: houses.House, axe: str) -> Iterator[Callable[..., Console]]:
    with contextlib.ExitStack() as stack:

        def open_it(theme: str = "light", width: int = 1360, **options: Any) -> Console:
            context = chromium.new_context(
                color_scheme=theme, viewport={"width": width, "height": 900}, accept_downloads=True, **options
            )
            stack.callback(context.close)
            context.set_default_timeout(PATIENCE_MS)
            return Console(context.new_page(), house, axe)

        yield open_it


@pytest.fixture
def console(open_console: Callable[..., Console]) -> Iterator[Console]:
    opened = open_console()
    yield opened
    assert opened.wrong == []
