"""What /openapi.json says is true: schemathesis asks for what it describes, and for what it does not, and every answer
is one that it describes, none of them a failure of the server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

INFERENCE = "^/(v1/(?!organization)|v2|rerank|score|api|tokenize|detokenize)"
ADMINISTRATION = "^/(v1/organization|admin/v1/(?!adapters|live))"
"""Whoever loads an adapter is told of a worker that could not, which is a failure by intention; and what is live has no
end."""


def test_what_can_be_asked_is_answered_as_described(house, start_house, clients):
    administered = start_house()
    with ThreadPoolExecutor() as both:  # whoever asks only waits for who answers, and these are two that do
        asked = (
            both.submit(clients.describes, house.url, house.key, INFERENCE),
            both.submit(clients.describes, administered.url, administered.admin_key, ADMINISTRATION),
        )
    assert [one.result() for one in asked] == ["", ""]
