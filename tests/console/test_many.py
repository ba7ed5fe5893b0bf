"""Much of everything, and slow answers: nothing is left out unsaid, and what was asked for last is what is shown."""

from __future__ import annotations

import re
import sqlite3
import time
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
    tiles = page.locator(".tiles")
    assert "20.5K" in tiles.inner_text()
    page.get_by_label("Grouped by").select_option("model")
    page.get_by_role("rowheader", name="many").wait_for()
    assert "20.5K" in tiles.inner_text()

    held = []
    page.route(re.compile("group_by=key_id"), lambda route: held.append(route))
    page.get_by_label("Grouped by").select_option("key_id")
    page.wait_for_function("() => document.querySelector('.bones')")
    page.get_by_label("Grouped by").select_option("sla_class")
    page.get_by_role("rowheader", name="standard").wait_for()
    assert held
    for route in held:
        with suppress(Exception):  # the page has given it up
            route.continue_()
    console.settled()
    page.wait_for_timeout(300)
    assert page.get_by_role("rowheader", name="standard").is_visible()
