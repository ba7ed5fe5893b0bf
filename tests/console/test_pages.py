"""Each page in both themes: nothing in it keeps anybody from using it, and nothing of what people wrote becomes
markup."""

from __future__ import annotations

import json
import urllib.request

import pytest

from benchmarks.console_soak import fed

PAGES = ("Overview", "Tenants and keys", "Policies", "Usage and cost", "Requests", "Workers", "Playground")


def asked(house, text: str, key: str = "", **more: object) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": text}], "max_tokens": 24, **more}
    request = urllib.request.Request(
        f"{house.url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"authorization": f"Bearer {key or house.key}", "content-type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        answer.read()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_page_keeps_anybody_from_using_it(open_console, house, theme):
    for number in range(4):
        asked(house, f"Tell me a story about fox {number}.", user="ann")
    console = open_console(theme)
    console.page.goto(f"{house.url}/console")
    console.page.get_by_label("Admin key").wait_for()
    assert console.serious() == []
    console.picture(f"sign-in-{theme}")
    console.sign_in()
    found = {}
    for title in PAGES:
        console.open(title)
        if title == "Overview":
            console.page.get_by_text("Live", exact=True).wait_for()
            console.page.locator(".chart canvas").nth(5).wait_for()
            if console.takes_pictures:
                with fed(house, 60):
                    console.page.wait_for_timeout(20_000)
        elif title == "Tenants and keys":
            console.page.get_by_role("link", name="default").first.click()
            console.page.get_by_text("Limits used now").wait_for()
        elif title == "Requests":
            console.page.get_by_role("button", name="Show request").first.click()
            console.page.get_by_role("heading", name="Receipt").wait_for()
        elif title == "Workers":
            console.page.locator(".blocks").wait_for()
        console.settled()
        found[title] = console.serious()
        console.picture(f"{title.lower().replace(' ', '-')}-{theme}")
    assert [f"{title}: {each}" for title, what in found.items() for each in what] == []
    assert console.wrong == []
