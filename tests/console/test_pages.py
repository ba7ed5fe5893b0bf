"""Each page in both themes: nothing in it keeps anybody from using it, and nothing of what people wrote becomes
markup."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import re
import threading
import urllib.error
import urllib.request

import pytest

PAGES = ("Overview", "Tenants and keys", "Policies", "Usage and cost", "Requests", "Workers", "Playground")


def asked(house, text: str, key: str = "", **more: object) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": text}], "max_tokens": 24, **more}
    posted(house, "/v1/chat/completions", body, key or house.key)


def posted(house, path: str, body: object, key: str) -> dict:
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    request = urllib.request.Request(house.url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def teams(house) -> list[str]:
    """The keys of a few tenants."""
    found = []
    for name in ("Search", "Support", "Research", "Translation"):
        tenant = posted(house, "/admin/v1/tenants", {"name": name}, house.admin_key)
        asked_for = {"tenant_id": tenant["id"], "name": f"{name.lower()}, production"}
        found.append(posted(house, "/admin/v1/keys", asked_for, house.admin_key)["key"])
    return found


@contextlib.contextmanager
def busy(house, keys: list[str], num_clients: int = 8):
    """As many ask all the time."""
    stopped = threading.Event()

    def ask(seed: int) -> None:
        rng = random.Random(seed)
        for number in itertools.takewhile(lambda _: not stopped.is_set(), itertools.count()):
            story = f"Tell me a long story about fox {seed} and hen {number}."
            key, num_tokens = keys[seed % len(keys)], rng.randrange(16, 240)
            try:
                asked(house, story, key=key, max_tokens=num_tokens, ignore_eos=True)
            except urllib.error.HTTPError as refused:  # what a tenant may ask in a minute is little on a fast machine
                if refused.code != 429:
                    raise
                stopped.wait(float(refused.headers["retry-after"]))

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(num_clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopped.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_page_keeps_anybody_from_using_it(open_console, house, teams, theme):
    for number, key in enumerate(teams):
        asked(house, f"Tell me a story about fox {number}.", key=key, user="ann")
    console = open_console(theme)
    console.page.goto(f"{house.url}/console")
    console.page.get_by_label("Admin key").wait_for()
    assert console.serious() == []
    console.picture(f"sign-in-{theme}")
    console.sign_in()
    found = {}
    with contextlib.ExitStack() as stack:
        if console.takes_pictures:
            stack.enter_context(busy(house, teams))
        for title in PAGES:
            console.open(title)
            shown(console, title)
            found[title] = console.serious()
            console.picture(f"{title.lower().replace(' ', '-')}-{theme}")
    assert [f"{title}: {each}" for title, what in found.items() for each in what] == []
    assert console.wrong == []


def shown(console, title: str) -> None:
    """What a page has to show is there."""
    page = console.page
    if title == "Overview":
        page.get_by_text("Live", exact=True).wait_for()
        page.locator(".chart canvas").nth(6).wait_for()
        if console.takes_pictures:
            page.wait_for_timeout(30_000)
    elif title == "Tenants and keys":
        page.get_by_role("link", name="Search", exact=True).click()
        page.get_by_text("Limits used now").wait_for()
    elif title == "Requests":
        page.get_by_label("End user").fill("ann")
        with page.expect_response(re.compile(r"ledger/rows\?.*end_user=ann")):
            console.button("Search").click()
        console.settled()
        console.button(re.compile("Show request")).first.click()
        page.get_by_role("rowheader", name="Written into the ledger").wait_for()
    elif title == "Workers":
        page.locator(".blocks").wait_for()
    console.settled()


def test_long_names_leave_room_for_what_is_said_of_them(open_console, house):
    tenant = posted(house, "/admin/v1/tenants", {"name": "Research " * 10}, house.admin_key)
    key = posted(house, "/admin/v1/keys", {"tenant_id": tenant["id"], "name": "k"}, house.admin_key)["key"]
    asked(house, "Tell me a story about a fox.", key=key)
    console = open_console(width=1280)
    console.sign_in()
    table = console.page.get_by_role("table", name="Tenants")
    table.get_by_role("link", name="Research Research").wait_for()
    assert table.evaluate("table => table.parentElement.scrollWidth - table.parentElement.clientWidth") == 0


def test_a_fleet_with_more_workers_than_colours_is_drawn_as_three_lines(open_console, house):
    console = open_console()
    console.page.route(re.compile("/admin/v1/live"), lambda route: route.fulfill(**fleet_of_seven(house)))
    console.sign_in()
    kv = console.page.get_by_role("region", name="KV in use by worker")
    kv.locator("canvas").wait_for()
    assert kv.get_by_role("listitem").all_inner_texts() == ["fullest worker\n70 %", "middle\n40 %", "emptiest\n10 %"]
    assert console.wrong == []


def test_workers_of_one_name_are_told_apart_by_their_gateways(open_console, house):
    console = open_console()
    snapshot = snapshot_of(house)
    (worker,) = snapshot["workers"]
    full = {**worker, "num_blocks": 10, "num_used_blocks": 10, "gateway": "far:7:0a"}
    told = stream_of({**snapshot, "workers": [{**worker, "gateway": "near:3:0b"}, full]})
    console.page.route(re.compile("/admin/v1/live"), lambda route: route.fulfill(**told))
    console.sign_in()
    lines = console.page.get_by_role("region", name="KV in use by worker").get_by_role("listitem")
    lines.first.wait_for()
    assert lines.all_inner_texts() == ["demo-0 of near:3\n0 %", "demo-0 of far:7\n100 %"]
    table = console.page.get_by_role("table", name="Workers")
    assert [table.get_by_text(f"demo-0 of {each}").count() for each in ("near:3", "far:7")] == [1, 1]


def test_a_clock_that_was_set_back_does_not_stop_the_view(open_console, house):
    now = snapshot_of(house)
    (worker,) = now["workers"]
    then = {**now, "at": now["at"] - 3600, "num_open": 7, "workers": [{**worker, "name": "demo-then"}]}
    console = open_console()
    console.page.route(re.compile("/admin/v1/live"), lambda route: route.fulfill(**stream_of(now, then)))
    console.sign_in()
    console.page.get_by_role("table", name="Workers").get_by_text("demo-then").wait_for()
    assert console.page.locator(".tiles").get_by_text("7", exact=True).is_visible()


def fleet_of_seven(house) -> dict:
    """One snapshot as it came, but with workers that have a tenth to seven tenths of their blocks in use."""
    snapshot = snapshot_of(house)
    (worker,) = snapshot["workers"]
    shares = [{"name": f"demo-{number}", "num_blocks": 10, "num_used_blocks": number} for number in range(1, 8)]
    return stream_of({**snapshot, "workers": [{**worker, **each} for each in shares]})


def snapshot_of(house) -> dict:
    request = urllib.request.Request(
        f"{house.url}/admin/v1/live?history=0", headers={"authorization": f"Bearer {house.admin_key}"}
    )
    with urllib.request.urlopen(request) as stream:
        return next(json.loads(line[6:]) for line in stream if line.startswith(b"data: "))


def stream_of(*snapshots: dict) -> dict:
    body = "".join(f"data: {json.dumps(each)}\n\n" for each in snapshots)
    return {"content_type": "text/event-stream", "body": body}


def test_a_clock_that_was_set_back_a_little_does_not_either(open_console, house):
    now = snapshot_of(house)
    then = {**now, "at": now["at"] - 30, "num_open": 7}
    console = open_console()
    console.page.route(re.compile("/admin/v1/live"), lambda route: route.fulfill(**stream_of(now, then)))
    console.sign_in()
    console.page.locator(".tiles").get_by_text("7", exact=True).wait_for()
