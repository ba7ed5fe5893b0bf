"""The same search once more, another tab with the same session, the next answer, and what was chosen in a long list."""

from __future__ import annotations

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
