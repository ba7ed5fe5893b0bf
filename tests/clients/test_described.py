"""What /openapi.json says is true: schemathesis asks for what it describes, and for what it does not, and every answer
is one that it describes, none of them a failure of the server."""

from __future__ import annotations

INFERENCE = "^/(v1/(?!organization)|v2|rerank|score|api|tokenize|detokenize)"
ADMINISTRATION = "^/(v1/organization|admin/v1/(?!adapters|live))"
"""Whoever loads an adapter is told of a worker that could not, which is a failure by intention; and what is live has no
end."""


def test_inference_is_as_described(house, clients):
    assert clients.describes(house.url, house.key, INFERENCE) == ""


def test_administration_is_as_described(start_house, clients):
    house = start_house()
    assert clients.describes(house.url, house.admin_key, ADMINISTRATION) == ""
