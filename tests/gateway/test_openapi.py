"""The published description: valid, complete, and true to what is served."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from gateway import admin, api, openapi
from gateway.api import ollama


@pytest.fixture(scope="module")
def description() -> Any:
    return json.loads(openapi.document())


async def test_it_is_served_without_a_key(front):
    async with front.http.get(front.url + "/openapi.json", headers={"authorization": ""}) as answer:
        assert (answer.status, answer.content_type) == (200, "application/json")
        assert await answer.read() == openapi.document()


def test_it_is_valid_openapi_3_1(description):
    assert [error.message for error in OpenAPIV31SpecValidator(description).iter_errors()] == []


def test_it_names_every_address_once(description):
    served = {
        (route.method, re.sub(r"\{(\w+):[^}]*\}", r"{\1}", route.path))
        for route in (*api.routes(), *admin.routes())
        if route.path not in ("/", "/healthz", "/readyz", "/health", *ollama.ABSENT, ollama.ABSENT_DELETE)
    }
    described = {(method.upper(), path) for path, methods in description["paths"].items() for method in methods}
    assert described == served | {("GET", "/metrics")}
    ids = [one["operationId"] for methods in description["paths"].values() for one in methods.values()]
    assert len(ids) == len(set(ids))


def test_every_operation_says_what_it_does_and_every_schema_is_used(description):
    for methods in description["paths"].values():
        for one in methods.values():
            assert one["summary"]
    used = set(re.findall(r"#/components/schemas/([^\"]+)", json.dumps(description)))
    assert used == set(description["components"]["schemas"])


def test_bounds_and_unknown_fields_are_in_the_schemas(description):
    schemas = description["components"]["schemas"]
    assert schemas["Limits"]["additionalProperties"] is False
    assert schemas["Limits"]["properties"]["tokens_per_minute"]["anyOf"][0]["minimum"] == 1
    limit = next(
        one for one in description["paths"]["/admin/v1/tenants"]["get"]["parameters"] if one["name"] == "limit"
    )
    assert limit["schema"]["maximum"] == 500
