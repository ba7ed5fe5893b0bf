"""Much of everything, and slow answers: nothing is left out unsaid, and what was asked for last is what is shown."""

from __future__ import annotations

import json
import re
import sqlite3
import time
import urllib.request
from contextlib import closing, suppress

from gateway import store
from gateway.ledger import sums
from tests.console.test_pages import posted

DAY_S = sums.WIDTHS[-1]


def used(house, num_tenants: int) -> None:
    """By as many tenants as the ledger had them yesterday: one request each, for a millionth."""
    yesterday = int(time.time()) // DAY_S * DAY_S - DAY_S
    known = {
        "width_s": DAY_S,
        "starts_at": yesterday,
        "key_id": "key_of_many",
        "model": "many",
        "endpoint": "/v1/chat/completions",
        "sla_class": "standard",
        "service_tier": "default",
        "cache": "miss",
        "price_version": "",
        "num_requests": 1,
        "cost_micros": 1,
    }
    columns = store.usage.c.keys()
    rows = [
        [(known | {"tenant_id": f"ten_{number:06}"}).get(name, 0) for name in columns] for number in range(num_tenants)
    ]
    with closing(sqlite3.connect(f"{house.config.store.data_dir}/penstock.db")) as connection, connection:
        insert = f"INSERT INTO usage ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
        connection.executemany(insert, rows)


def test_usage_and_cost_adds_up_all_that_there_is_and_shows_what_was_asked_for_last(console, house):
    used(house, 20_500)
    page = console.page
    console.sign_in()
    console.open("Usage and cost")
    page.get_by_text("The first 100 of 20,500.").wait_for()
    assert "20.5K" in page.locator(".tiles").inner_text()
    page.get_by_label("Grouped by").select_option("model")
    assert "20,500" in page.get_by_role("row", name="many").inner_text()

    held = []
    page.route(re.compile("group_by=key_id"), lambda route: held.append(route))
    page.get_by_label("Grouped by").select_option("key_id")
    page.wait_for_function("() => document.querySelector('.bones') && document.querySelector('.tiles')")
    page.get_by_label("Grouped by").select_option("sla_class")
    page.get_by_role("rowheader", name="standard").wait_for()
    assert held
    for route in held:
        with suppress(Exception):  # the page has given it up
            route.continue_()
    console.settled()
    page.wait_for_timeout(300)
    assert page.get_by_role("rowheader", name="standard").is_visible()


def test_of_many_tenants_and_keys_the_newest_are_shown_and_the_others_are_reached(console, house):
    tenants = [posted(house, "/admin/v1/tenants", {"name": f"one of {n}"}, house.admin_key) for n in range(110)]
    tenant, arabic = tenants[3], "فريق البحث والتطوير في الرياض ومدن أخرى كثيرة جدا"
    posted(house, "/admin/v1/tenants", {"name": arabic}, house.admin_key)
    made = posted(house, "/admin/v1/keys", {"tenant_id": tenant["id"], "name": "the oldest"}, house.admin_key)
    with closing(sqlite3.connect(f"{house.config.store.data_dir}/penstock.db")) as connection, connection:
        connection.row_factory = sqlite3.Row
        row = dict(connection.execute("SELECT * FROM keys WHERE id = ?", [made["id"]]).fetchone())
        connection.executemany(
            f"INSERT INTO keys ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})",
            [[*(row | {"id": f"key_z{n:04}", "hash": b"%032d" % n, "name": f"key {n}"}).values()] for n in range(2050)],
        )
    page = console.page
    console.sign_in()
    console.open("Tenants and keys")
    cells = page.get_by_role("group", name="Tenants", exact=True).get_by_role("rowheader")
    assert cells.count() == 100
    # Where it is cut it is cut at its end, which is on the left.
    assert cells.first.evaluate("each => getComputedStyle(each).direction") == "rtl"
    console.button("More").click()
    page.get_by_role("link", name="default", exact=True).first.wait_for()
    assert cells.count() == 112

    page.get_by_label("Find a tenant").fill("one of 3")
    page.get_by_role("link", name="one of 3", exact=True).click()
    page.get_by_role("heading", level=2, name="one of 3").wait_for()
    console.settled()
    assert page.get_by_label("Find a tenant").input_value() == "one of 3"
    keys = page.get_by_role("group", name="Keys", exact=True).get_by_role("rowheader")
    assert keys.count() == 100
    console.button("More").press("Enter")
    page.get_by_text("The newest 200.").wait_for()
    page.wait_for_function("() => document.activeElement.matches('[data-more]')")
    assert keys.count() == 200

    console.open("Workers")
    page.evaluate("id => { location.hash = `#/tenants?id=${id}`; }", tenant["id"])  # as links elsewhere lead there
    page.wait_for_function("() => document.activeElement.matches('[data-chosen] > .card')")
    heading = page.get_by_role("heading", level=2, name="one of 3")
    assert heading.evaluate(
        "each => { const at = each.getBoundingClientRect().top; return at >= 0 && at < innerHeight; }"
    )


def test_what_was_written_of_a_policy_outlives_a_version_that_another_tab_made(console, house):
    page = console.page
    console.sign_in()
    console.open("Policies")
    before = page.get_by_label("Document").input_value()
    name = page.get_by_role("heading", level=2).nth(1).inner_text().split(",")[0]
    with page.context.expect_page() as opening:
        page.evaluate("open(location.href)")
    other = type(console)(opening.value, house, "")
    other.page.get_by_label("Document").fill('{"limits": {"requests_per_minute": 77}}')
    other.button("Apply").click()
    other.page.get_by_role("heading", name=f"{name}, version 2").wait_for()

    page.get_by_label("Document").fill('{"limits": {"requests_per_minute": 88}}')
    page.get_by_label("Note").fill("more of them")
    console.button("Apply").click()
    page.get_by_text("Version 2 was made meanwhile").wait_for()
    assert "88" in page.get_by_label("Document").input_value()
    console.button("Show the difference").click()
    assert "77" in console.dialog().inner_text()
    console.button("Close").click()
    console.button("Apply").click()
    page.get_by_role("heading", name=f"{name}, version 3").wait_for()
    page.get_by_role("cell", name="more of them").wait_for()
    assert "requests_per_minute" in before
    console.wrong = [each for each in console.wrong if "412" not in each]


def test_a_list_that_cannot_be_had_is_not_called_empty(console):
    page, failing = console.page, re.compile("/admin/v1/policies")
    console.sign_in()
    page.route(failing, lambda route: route.fulfill(status=503, json={"detail": "The store is away."}))
    page.get_by_role("navigation").get_by_role("link", name="Policies").click()
    page.get_by_text("The store is away.").wait_for()
    assert page.get_by_text("No policy yet").count() == 0
    page.unroute(failing)
    console.button("Try again").click()
    page.get_by_label("Document").wait_for()
    console.wrong = [each for each in console.wrong if "503" not in each]


def test_a_worker_that_goes_leaves_its_name_on_no_other(console, house):
    page = console.page
    real = workers_of(house)
    gone = [{**real[0], "name": "gone-0"}]
    lists = iter([[*gone, *real], real])
    console.sign_in()
    page.route(re.compile(r"/admin/v1/workers$"), lambda route: route.fulfill(json={"data": next(lists, real)}))
    page.route(re.compile("/workers/gone-0"), lambda route: route.fulfill(status=404, json={"detail": "No such."}))
    page.goto(f"{house.url}/console#/workers?name=gone-0")
    page.get_by_role("heading", name="Batch and blocks of gone-0").wait_for()
    page.get_by_role("heading", name=f"Batch and blocks of {real[0]['name']}").wait_for()
    console.wrong = [each for each in console.wrong if "404" not in each]


def test_where_several_gateways_answer_the_workers_are_said_to_be_those_of_one(console, house):
    page = console.page
    console.sign_in()
    said = page.get_by_text("2 gateways answer here: these are the workers of one of them")
    console.open("Workers")
    page.get_by_text("The processes that compute.").wait_for()
    assert said.count() == 0
    reports = [{"name": name, "queues": []} for name in ("here:1:0a", "there:1:0b")]
    page.route(re.compile(r"/admin/v1/queues$"), lambda route: route.fulfill(json={"data": reports}))
    console.open("Overview")
    console.open("Workers")
    said.wait_for()


def workers_of(house) -> list[dict]:
    asked = urllib.request.Request(
        f"{house.url}/admin/v1/workers", headers={"authorization": f"Bearer {house.admin_key}"}
    )
    with urllib.request.urlopen(asked) as answer:
        return json.load(answer)["data"]
