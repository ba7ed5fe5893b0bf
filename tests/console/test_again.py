"""The same search once more, another tab with the same session, the next answer, and what was chosen in a long list."""

from __future__ import annotations

import json
import re

from tests.console.test_pages import asked, posted


def test_an_answer_in_the_playground_is_called_complete_only_if_it_is(console):
    page, held = console.page, []
    console.sign_in()
    console.open("Playground")
    page.get_by_label("Or a key of a tenant").fill("none is needed")
    page.route(re.compile("/v1/chat/completions"), lambda route: held.append(route))
    piece = 'data: {"choices": [{"delta": {"content": "Once"}}]}\n\n'
    broken = piece + 'data: {"error": {"message": "The worker is gone."}}\n\n'
    for body, told, said in (
        (broken, "The worker is gone.", "The answer is not complete."),
        (piece, "First token after", "The answer is complete."),
        ("data: [DONE]\n\n", "The answer has no text.", "The answer is complete."),
    ):
        page.get_by_label("Message", exact=True).fill("Tell me a story.")
        with page.expect_request(re.compile("/v1/chat/completions")):
            console.button("Send").click()
        page.wait_for_function("() => document.querySelector('.answer[aria-busy]')")
        assert console.button("New conversation").is_disabled()
        held.pop().fulfill(content_type="text/event-stream", body=body)
        page.get_by_text(told).wait_for()
        page.wait_for_function("said => document.querySelector('#said').textContent === said", arg=said)
        assert console.button("New conversation").is_enabled()


def test_the_playground_shows_reasoning_apart_and_sends_no_number_that_is_not_there(console):
    page, bodies = console.page, []

    def answer(route) -> None:
        bodies.append(route.request.post_data_json)
        deltas = ({"reasoning_content": "They ask for "}, {"reasoning_content": "a story."}, {"content": "Once"})
        chunks = [json.dumps({"choices": [{"delta": delta}]}) for delta in deltas]
        route.fulfill(content_type="text/event-stream", body="".join(f"data: {chunk}\n\n" for chunk in chunks))

    console.sign_in()
    console.open("Playground")
    page.get_by_label("Or a key of a tenant").fill("none is needed")
    page.route(re.compile("/v1/chat/completions"), answer)
    for label in ("Temperature", "Tokens at most"):
        page.get_by_label(label).fill("")
    page.get_by_label("Message", exact=True).fill("Tell me a story.")
    console.button("Send").click()
    page.get_by_text("First token after").wait_for()
    assert not {"temperature", "max_tokens", "top_p", "seed"} & bodies[0].keys()
    assert page.locator(".answer").inner_text() == "Once"
    page.get_by_text("Reasoning", exact=True).click()
    assert page.get_by_text("They ask for a story.").is_visible()
    assert console.serious() == []
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Message", exact=True).fill("Another one.")
    with page.expect_response(re.compile("/v1/chat/completions")):
        console.button("Send").click()
    page.get_by_text("First token after").wait_for()
    assert bodies[1]["temperature"] == 0
    assert [message["content"] for message in bodies[1]["messages"]] == ["Tell me a story.", "Once", "Another one."]
    console.button("New conversation").click()
    assert page.get_by_text("Reasoning", exact=True).is_hidden()


def test_the_same_search_finds_what_is_new(console, house):
    page = console.page
    console.sign_in()
    console.open("Requests")
    page.get_by_label("End user").fill("somebody new")
    console.button("Search").click()
    page.get_by_text("No such request").wait_for()
    asked(house, "Hello", user="somebody new")
    console.button("Search").click()
    console.button(re.compile("Show request")).wait_for()
    page.wait_for_function("() => document.activeElement.matches('h1')")
    page.get_by_role("link", name="Clear").click()
    page.wait_for_function("() => document.querySelector('[name=end_user]').value === ''")
    page.get_by_label("Trace id").fill("typed, not searched")
    page.get_by_role("link", name="Clear").click()
    page.wait_for_function("() => document.querySelector('[name=trace_id]').value === ''")


def test_a_tenant_that_is_chosen_comes_into_view_however_long_the_list_and_its_name(open_console, house):
    for number in range(40):
        posted(house, "/admin/v1/tenants", {"name": f"one of many {number}"}, house.admin_key)
    name = "L" * 128
    posted(house, "/admin/v1/tenants", {"name": name}, house.admin_key)
    console = open_console(width=390)
    console.sign_in()
    console.open("Tenants and keys")
    console.page.get_by_role("link", name=name).click()
    console.page.wait_for_function("() => document.activeElement.matches('[data-chosen] > .card')")
    heading = console.page.get_by_role("heading", level=2, name=name)
    assert heading.evaluate("each => each.getBoundingClientRect().top < innerHeight")
    assert console.page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert console.wrong == []


def test_who_signs_in_anew_in_one_tab_goes_on_in_the_other(console, house):
    console.sign_in()
    console.open("Tenants and keys")
    other = type(console)(console.page.context.new_page(), house, "")
    other.page.goto(f"{house.url}/console")
    other.button("Sign out").click()
    console.page.get_by_text("Your session is over").wait_for()
    other.sign_in()
    console.button("New tenant").first.click()
    console.dialog().get_by_label("Name").fill("made in the first tab")
    console.button("Create tenant").click()
    console.page.get_by_role("heading", level=2, name="made in the first tab").wait_for()
