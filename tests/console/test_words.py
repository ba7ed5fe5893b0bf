"""What is said where: refusals at the field that they are of, names as they are written, times as everywhere."""

from __future__ import annotations

import re

from tests.console.test_pages import posted


def test_a_refusal_is_told_at_the_field_that_it_is_of_and_what_was_typed_stays(open_console, house):
    console = open_console()
    page = console.page
    tenant = posted(house, "/admin/v1/tenants", {"name": "of forms"}, house.admin_key)
    console.sign_in()
    page.goto(f"{house.url}/console#/tenants?id={tenant['id']}")
    console.button("New key").click()
    name, networks = console.dialog().get_by_label("Name"), console.dialog().get_by_label("Networks")
    name.fill("k")
    networks.fill("10.0.0.0/99")
    console.button("Create key").click()
    page.wait_for_function("() => document.activeElement.matches('[name=networks][aria-invalid=true]')")
    described = networks.get_attribute("aria-describedby").split()[-1]
    assert "10.0.0.0/99" in page.locator(f"#{described}").inner_text()
    assert (name.input_value(), networks.input_value()) == ("k", "10.0.0.0/99")
    page.keyboard.press("Escape")

    console.open("Requests")
    page.get_by_label("End user").fill("somebody")
    page.get_by_label("Slower than").fill("1,5 s")
    console.button("Search").click()
    page.wait_for_function("() => document.activeElement.matches('[name=min_duration_ms][aria-invalid=true]')")
    page.get_by_text("Milliseconds, such as 250.").wait_for()
    assert page.get_by_label("End user").input_value() == "somebody"


def test_what_was_written_of_a_policy_is_there_again_after_another_page_and_another_session(open_console, house):
    console = open_console()
    page, text = console.page, '{"limits": {"requests_per_minute": 99}}'
    document, note, told = (
        page.get_by_label("Document"),
        page.get_by_label("Note"),
        page.locator(".note", has_text="is here again"),
    )
    console.sign_in()
    console.open("Policies")
    before = document.input_value()
    document.fill(text)
    note.fill("more of them")
    console.open("Overview")
    page.go_back()
    told.wait_for()
    assert (document.input_value(), note.input_value()) == (text, "more of them")

    page.context.clear_cookies()
    console.button("Apply").click()
    page.get_by_text("Your session is over").wait_for()
    page.get_by_label("Admin key").fill(house.admin_key)
    console.button("Sign in").click()
    told.wait_for()
    assert (document.input_value(), note.input_value()) == (text, "more of them")
    console.button("Start over").click()
    console.open("Overview")
    console.open("Policies")
    assert (document.input_value(), note.input_value(), told.count()) == (before, "", 0)

    document.fill(text)
    console.button("Sign out").click()
    others = posted(house, "/admin/v1/admin_keys", {"role": "operator", "name": "of another"}, house.admin_key)["key"]
    page.get_by_label("Admin key").fill(others)
    console.button("Sign in").click()
    page.get_by_role("heading", level=1, name="Policies").wait_for()
    document.wait_for()
    assert (document.input_value(), told.count()) == (before, 0)


def test_a_name_is_written_the_way_it_is_read_above_a_page_and_a_dialog_too(console, house):
    name = "צוות מחקר (A/B) 123"
    tenant = posted(house, "/admin/v1/tenants", {"name": name}, house.admin_key)
    console.sign_in()
    console.page.goto(f"{house.url}/console#/tenants?id={tenant['id']}")
    heading = console.page.get_by_role("heading", level=2, name=name)
    assert heading.evaluate("each => getComputedStyle(each).direction") == "rtl"
    console.button("New key").click()
    assert console.dialog().get_by_role("heading").evaluate("each => getComputedStyle(each).direction") == "ltr"


def test_times_of_a_chart_are_as_in_all_tables_whatever_the_browser_speaks(open_console):
    console = open_console(locale="en-US", timezone_id="Asia/Kolkata")
    console.sign_in()
    console.page.locator(".chart canvas").first.wait_for()
    console.page.get_by_text("Show as a table").first.click()
    time = console.page.locator("figure tbody th").first
    time.wait_for()
    assert re.fullmatch(r"\d\d:\d\d:\d\d", time.inner_text())
