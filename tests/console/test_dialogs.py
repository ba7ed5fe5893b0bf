"""Dialogs, and where the focus is after them and after what they did."""

from __future__ import annotations

import re

import pytest

from tests.console.test_pages import posted

FOCUS = "() => document.activeElement.getAttribute('aria-label') || document.activeElement.innerText"


@pytest.fixture(scope="module")
def tenant(house) -> dict:
    return posted(house, "/admin/v1/tenants", {"name": "of dialogs"}, house.admin_key)


def of_one(console, tenant) -> None:
    console.sign_in()
    console.page.goto(f"{console.house.url}/console#/tenants?id={tenant['id']}")
    console.page.get_by_role("heading", level=2, name="of dialogs").wait_for()
    console.settled()


def test_the_way_back_closes_a_dialog_with_the_page_that_it_is_of(console):
    console.sign_in()
    console.open("Tenants and keys")
    console.button("New tenant").first.click()
    console.dialog().get_by_label("Name").fill("typed")
    console.page.go_back()
    console.page.get_by_role("heading", level=1, name="Overview").wait_for()
    assert console.dialog().count() == 0


def test_a_session_that_ends_under_a_dialog_leads_back_to_signing_in(open_console, house, tenant):
    console = open_console()
    of_one(console, tenant)
    console.button("New key").click()
    console.dialog().get_by_label("Name").fill("typed")
    console.page.context.clear_cookies()
    console.button("Create key").click()
    console.page.get_by_text("Your session is over").wait_for()
    assert console.page.get_by_label("Admin key").evaluate("each => each === document.activeElement")
    assert console.dialog().count() == 0


@pytest.mark.parametrize(("may_copy", "told"), [(True, "Copied"), (False, "Selected: press Ctrl+C")])
def test_a_new_key_outlives_the_way_back_and_its_dialog_tells_what_became_of_it(console, tenant, may_copy, told):
    page = console.page
    write = "async () => {}" if may_copy else "() => Promise.reject(new Error('not allowed'))"
    page.add_init_script(f"navigator.clipboard.writeText = {write}")
    of_one(console, tenant)
    console.button("New key").click()
    console.dialog().get_by_label("Name").fill("a key")
    console.button("Create key").click()
    key = console.dialog().get_by_label("The new key").inner_text()
    console.button("Copy").click()
    console.dialog().get_by_role("status").get_by_text(told).wait_for()
    assert may_copy or page.evaluate("getSelection().toString()") == key
    assert console.serious() == []
    page.go_back()
    page.get_by_role("heading", level=1, name="Overview", include_hidden=True).wait_for()
    assert console.dialog().get_by_label("The new key").inner_text() == key


def test_a_new_key_may_have_a_budget_and_what_it_has_spent_is_drawn_beside_it(console, tenant):
    page = console.page
    of_one(console, tenant)
    console.button("New key").click()
    console.dialog().get_by_label("Name").fill("with money")
    console.dialog().get_by_label("Budget").fill("-1")
    console.dialog().get_by_label("For each").select_option("week")
    console.button("Create key").click()
    console.dialog().get_by_text("must be 0 or more").wait_for()
    console.wrong.clear()  # the browser says that a call was answered 400
    console.dialog().get_by_label("Budget").fill("5")
    console.button("Create key").click()
    console.dialog().get_by_label("The new key").wait_for()
    console.button("Done").click()
    page.get_by_text("Budget of the week: 0.00 USD of 5.00 USD").wait_for()
    console.settled()
    assert console.serious() == []


def test_what_keys_have_spent_is_asked_once_for_all_of_them(console, house, tenant):
    for name in ("one", "two", "three"):
        body = {"tenant_id": tenant["id"], "name": name, "narrowing": {"budget": {"amount": "5", "period": "week"}}}
        posted(house, "/admin/v1/keys", body, house.admin_key)
    asked: list[str] = []
    console.page.on("request", lambda request: asked.append(request.url))
    of_one(console, tenant)
    console.page.get_by_text("Budget of the week: 0.00 USD of 5.00 USD").nth(2).wait_for()
    assert len([url for url in asked if "/key_budgets?" in url]) == 1
    assert not [url for url in asked if "/keys/" in url]


def test_the_focus_stays_with_what_was_changed(console, house, tenant):
    posted(house, "/admin/v1/keys", {"tenant_id": tenant["id"], "name": "k"}, house.admin_key)
    of_one(console, tenant)
    page = console.page
    console.button("Revoke k").click()
    console.button("Revoke", console.dialog()).click()
    page.get_by_text("revoked", exact=True).wait_for()
    assert page.evaluate(FOCUS) == "Keys"
    console.button("Disable").click()
    console.button("Disable", console.dialog()).click()
    page.wait_for_function("() => document.activeElement.matches('[data-chosen] > .card')")
    assert page.evaluate(FOCUS).startswith("of dialogs")

    console.open("Policies")
    page.get_by_label("Note").fill("the same once more")
    console.button("Apply").click()
    page.wait_for_function("() => document.activeElement.matches('[data-chosen] > .card')")
    assert re.match(r"default, version \d+", page.evaluate(FOCUS))
