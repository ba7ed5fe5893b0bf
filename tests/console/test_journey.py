"""A team lead's morning at the console, from signing in to signing out; and what people write stays text."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path

import pytest

from tests.console.test_pages import asked

TOO_WIDE = """() => document.documentElement.scrollWidth <= document.documentElement.clientWidth ? [] :
    [...document.querySelectorAll('body *')].filter(each => each.getBoundingClientRect().right > innerWidth)
        .map(each => each.outerHTML.slice(0, 100))"""
HTML = "<img src=x onerror=\"window.broken='yes'\"><b>bold</b>"


def test_a_tenant_is_made_asks_and_is_limited_billed_and_seen(console, house):
    page = console.page
    console.sign_in()

    console.open("Tenants and keys")
    console.button("New tenant").first.click()
    console.dialog().get_by_label("Name").fill("kiosk")
    console.button("Create tenant").click()
    console.button("New key").click()
    console.dialog().get_by_label("Name").fill("till")
    console.button("Create key").click()
    key = console.dialog().get_by_label("The new key").inner_text()
    assert re.fullmatch(r"sk-penstock-\w{43}", key)
    console.button("Done").click()
    console.page.get_by_role("rowheader", name="till").wait_for()

    console.open("Overview")
    tenants = page.get_by_role("group", name="Tenants")
    for number in range(5):
        asked(house, f"What is the capital of France? {number}", key=key)
    tenants.get_by_role("link", name="kiosk").wait_for()
    page.wait_for_function("""() => [...document.querySelectorAll('.tile')].some(
        each => each.textContent.includes('TTFT') && each.textContent.includes(' ms'))""")

    tenants.get_by_role("link", name="kiosk").click()
    page.get_by_role("heading", level=1, name="Requests").wait_for()
    console.settled()
    assert console.button(re.compile("Show request")).count() == 5
    console.button(re.compile("Show request")).first.click()
    where_its_time_went(console)

    change_of_a_policy(console)
    console.open("Usage and cost")
    page.get_by_label("Grouped by").select_option("Tenant")
    page.get_by_role("rowheader", name="kiosk").wait_for()
    page.get_by_label("Format").select_option("JSON lines")
    page.get_by_label("What").select_option("Requests")
    with page.expect_download() as download:
        page.get_by_role("link", name="Export").click()
    assert download.value.suggested_filename.startswith("usage-")
    rows = [json.loads(line) for line in Path(download.value.path()).read_text().splitlines()]
    assert "kiosk" in json.dumps(rows)

    console.open("Tenants and keys")
    page.get_by_role("link", name="kiosk").click()
    console.button("Revoke till").click()
    console.button("Revoke", console.dialog()).click()
    page.get_by_text("revoked", exact=True).wait_for()

    cookies = {cookie["name"]: cookie for cookie in page.context.cookies()}
    assert (cookies["penstock_session"]["httpOnly"], cookies["penstock_session"]["sameSite"]) == (True, "Strict")
    console.button("Sign out").click()
    page.get_by_label("Admin key").wait_for()
    page.context.add_cookies([cookies["penstock_session"]])
    answer = page.request.get(f"{house.url}/admin/v1/tenants")
    assert answer.status == 401


def where_its_time_went(console) -> None:
    """Each part of its way has a row; they are together all the time that it took."""
    parts = console.page.get_by_role("figure", name=re.compile("Where .* went"))
    parts.get_by_role("rowheader", name="Written into the ledger").wait_for()
    rows = parts.get_by_role("group", name="Where the time went").get_by_role("row").all_inner_texts()[1:]
    assert [row.split("\t")[0] for row in rows] == [
        "Waited to be handled",
        "Whose key it is",
        "Body read",
        "Prompt made",
        "Looked for in the cache",
        "Limits checked",
        "Waited in line",
        "Worker chosen",
        "With the worker",
        "Last words sent",
        "Written into the ledger",
    ]
    assert re.search(r"demo-0, \d+ tokens of prompt, .*prefilled in 1 chunk, \d+ tokens of answer", rows[8]), rows[8]
    (whole,) = re.findall(r"([\d.]+) ms in all", parts.inner_text())
    took = [float(number) * {"ms": 1, "µs": 1e-3}[unit] for row in rows for number, unit in _took(row)]
    assert sum(took) == pytest.approx(float(whole), abs=4)  # each is rounded
    parts.locator("summary").click()
    parts.get_by_role("rowheader", name="first token").wait_for()


def _took(row: str) -> list[tuple[str, str]]:
    return re.findall(r"([\d.]+) (ms|µs)", row.split("\t")[2])


def change_of_a_policy(console) -> None:
    """One is wrong and named so; one is tried, compared and applied; the first counts again."""
    page = console.page
    console.open("Policies")
    document = page.get_by_label("Document")
    written = json.loads(document.input_value())
    document.fill(json.dumps({**written, "limits": {"requests_per_minute": "many"}}))
    console.button("Try the change").click()
    page.get_by_text(re.compile("limits.requests_per_minute: ")).wait_for()
    console.wrong.clear()  # the browser says that a call was answered 400
    document.fill(json.dumps({**written, "limits": {"requests_per_minute": 2}}, indent=2))
    console.button("Try the change").click()
    page.get_by_role("region", name="Result of the trial").wait_for()
    requests = page.get_by_role("figure").filter(has_text="Admitted").first
    assert re.search(r"Admitted\s*\d+ → [0-4]\b", requests.inner_text())
    console.picture("policies-trial")
    assert console.serious() == []
    console.button("Show the difference").click()
    console.dialog().locator("ins", has_text='"requests_per_minute": 2').wait_for()
    console.button("Close").click()
    page.get_by_label("Note").fill("Fewer at once")
    console.button("Apply").click()
    page.get_by_role("heading", name=re.compile("default, version 2")).wait_for()
    console.button("Roll back to version 1").click()
    console.button("Roll back", console.dialog()).click()
    page.get_by_role("heading", name=re.compile("default, version 3")).wait_for()


def test_what_people_write_is_shown_as_text(console, house):
    page = console.page
    console.sign_in()
    console.open("Tenants and keys")
    console.button("New tenant").first.click()
    console.dialog().get_by_label("Name").fill(HTML)
    console.button("Create tenant").click()
    page.get_by_role("heading", level=2, name=HTML).wait_for()
    console.button("New key").click()
    console.dialog().get_by_label("Name").fill(HTML)
    console.button("Create key").click()
    key = console.dialog().get_by_label("The new key").inner_text()
    console.button("Done").click()
    asked(house, HTML, key=key, user=HTML, metadata={"name": HTML})
    for title in ("Overview", "Requests", "Usage and cost"):
        console.open(title)
        page.get_by_text(HTML).first.wait_for(state="attached")
    console.open("Requests")
    console.button(re.compile("Show request")).first.click()
    page.locator("dd", has_text=HTML).first.wait_for()
    console.open("Playground")
    page.get_by_label("Message", exact=True).fill(HTML)
    page.get_by_label("Tokens at most").fill("8")
    console.button("Send").click()
    page.get_by_text("in the ledger").wait_for()
    assert page.evaluate("window.broken === undefined && !document.querySelector('main img, main b:not(.legend b)')")
    leave_the_playground(console)


def test_the_playground_compares_two_and_says_what_tokens_were_worth(console, house):
    page = console.page
    console.sign_in()
    console.open("Playground")
    page.get_by_label("Two side by side").check()
    page.get_by_label("Message", exact=True).fill("Tell me a story about a fox.")
    page.get_by_label("Temperature").fill("0.8")
    page.get_by_label("Tokens at most").fill("48")
    console.button("Send").click()
    page.get_by_text("in the ledger").nth(1).wait_for()
    tokens = page.locator(".answer [data-p]")
    assert tokens.count() > 20
    assert page.get_by_text("USD").count() >= 2
    told_of_tokens(page)
    console.picture("playground-answers")
    assert console.serious() == []
    page.get_by_label("Tokens at most").fill("4000")
    page.get_by_label("Message", exact=True).fill("Go on, and do not stop.")
    console.button("Send").click()
    if console.button("Stop").is_enabled():
        console.button("Stop").click(force=True)
    page.wait_for_function("() => !document.querySelector('.answer[aria-busy]')")
    leave_the_playground(console)
    console.button(re.compile("^Drain")).click()
    console.button(re.compile("^Resume")).click()
    console.button(re.compile("^Drain")).wait_for()
    before = keys_of_the_playground(page, house)
    assert [key for key in before if not key["revoked_at"]] == []

    console.open("Playground")
    page.get_by_label("Message", exact=True).fill("Hello")
    console.button("Send").click()
    page.get_by_text("in the ledger").wait_for()
    console.button("Sign out").click()
    page.get_by_label("Admin key").wait_for()
    keys = keys_of_the_playground(page, house)
    assert (len(keys), [key for key in keys if not key["revoked_at"]]) == (len(before) + 1, [])


def leave_the_playground(console) -> None:
    """And so have its key revoked; a browser that is ended may not come to it."""
    with console.page.expect_response(lambda answer: answer.request.method == "DELETE"):
        console.open("Workers")


def keys_of_the_playground(page, house) -> list[dict]:
    answer = page.request.get(f"{house.url}/admin/v1/keys", headers={"authorization": f"Bearer {house.admin_key}"})
    return [key for key in answer.json()["data"] if key["name"] == "Playground"]


def told_of_tokens(page) -> None:
    """What each was worth, to whoever points at one and to whoever goes along them by the keyboard."""
    tip, tokens = page.get_by_role("tooltip"), page.locator(".answer [data-p]")
    tokens.nth(3).hover()
    tip.wait_for()
    assert re.search(r"[\d.]+ %\nlog-probability -?[\d.e-]+; most likely besides:\n", tip.inner_text())
    page.mouse.move(0, 0)
    tip.wait_for(state="hidden")
    page.locator(".answer").first.focus()
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    assert tokens.nth(1).evaluate("each => each === document.activeElement")
    assert json.dumps(tokens.nth(1).text_content(), ensure_ascii=False) in tip.inner_text()
    page.keyboard.press("Escape")
    tip.wait_for(state="hidden")
    tokens.nth(6).focus()
    tip.wait_for()


def test_a_session_that_ends_elsewhere_leads_back_to_signing_in(open_console, house):
    console = open_console()
    console.sign_in()
    console.page.get_by_text("Live", exact=True).wait_for()  # nothing of Overview is asked for any more
    token = console.page.context.cookies()[0]["value"]
    console.page.context.clear_cookies()
    console.page.get_by_role("navigation").get_by_role("link", name="Policies").click()
    console.page.get_by_text("Your session is over").wait_for()
    assert "401" in " ".join(console.wrong)
    assert len(token) == 43


def test_a_session_that_ends_while_nothing_is_asked_leads_back_to_signing_in(open_console, house):
    admins = f"{house.url}/admin/v1/admin_keys"
    made = asked_by_admin(house, "POST", admins, {"role": "operator", "name": "for an hour"})
    console = open_console()
    console.sign_in(made["key"])
    console.page.get_by_text("Live", exact=True).wait_for()
    asked_by_admin(house, "DELETE", f"{admins}/{made['id']}")
    console.page.get_by_text("Your session is over").wait_for()


def asked_by_admin(house, method: str, url: str, body: object = None) -> dict:
    headers = {"authorization": f"Bearer {house.admin_key}", "content-type": "application/json"}
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers, method=method)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def test_a_key_that_is_none_is_refused_in_words_and_a_narrow_screen_suffices(open_console, house):
    asked(house, "Hello")
    console = open_console("dark", width=390)
    page = console.page
    page.goto(f"{house.url}/console")
    page.get_by_label("Admin key").fill("sk-penstock-admin-nobody")
    page.keyboard.press("Enter")
    page.get_by_text("This key does not open the administration.").wait_for()
    console.wrong.clear()
    page.get_by_label("Admin key").fill(house.admin_key)
    page.keyboard.press("Enter")
    page.get_by_role("heading", level=1, name="Overview").wait_for()
    for title in ("Overview", "Requests", "Playground"):
        console.open(title)
        if title == "Overview":
            page.locator(".chart canvas").nth(6).wait_for()
        elif title == "Requests":
            console.button(re.compile("Show request")).first.click()
            page.get_by_role("rowheader", name="Written into the ledger").wait_for()
        assert page.evaluate(TOO_WIDE) == [], title
        console.picture(f"narrow-{title.lower()}")
    page.get_by_label("Theme").select_option("Light")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(246, 247, 247)"
    page.reload()
    page.get_by_role("heading", level=1, name="Playground").wait_for()
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    assert console.wrong == []


def test_the_keyboard_reaches_everything_and_a_dialog_gives_the_focus_back(console, house):
    page = console.page
    console.sign_in()
    page.reload()
    page.get_by_role("heading", level=1, name="Overview").wait_for()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to content"
    console.open("Tenants and keys")
    opener = console.button("New tenant").first
    opener.focus()
    page.keyboard.press("Enter")
    assert console.dialog().get_by_label("Name").evaluate("each => each === document.activeElement")
    page.keyboard.press("Escape")
    assert opener.evaluate("each => each === document.activeElement")
