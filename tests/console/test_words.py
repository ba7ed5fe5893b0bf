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
