"""GET /openapi.json: what is served here, described in OpenAPI 3.1 by the very types that parse and answer.

Schemas are msgspec's, of the Structs; summaries and descriptions are the first lines of docstrings. No key is needed:
it says what can be asked, not what there is.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from aiohttp import web

from gateway import admin, openai
from gateway.admin import problems
from gateway.admin.endpoint import Endpoint, Versioned
from gateway.inference import INFERENCE, JSON, Inference

PATH = "/openapi.json"
VERSION = "1"
"""Of what is described, which is that of its paths."""
TEMPLATE = "#/components/schemas/{name}"
METRICS_PATH = "/metrics"
_METRICS = {
    "operationId": "metrics",
    "summary": "What operators measure, for Prometheus",
    "description": "Read by whom metrics.access says: programs on this machine, or a key of the administration.",
    "tags": ["metrics"],
    "security": [{}, {"adminKey": []}],
    "parameters": [],
    "responses": {
        "200": {
            "description": "In the text format that Accept prefers.",
            "content": {
                name: {"schema": {"type": "string"}} for name in ("text/plain", "application/openmetrics-text")
            },
        }
    },
}


async def serve(request: web.Request) -> web.Response:
    return web.Response(body=document(), content_type=JSON)


@functools.cache
def document() -> bytes:
    """The whole description, as JSON."""
    types = [
        *(type_ for one in INFERENCE for type_ in (one.query, one.body, one.answer) if type_ not in (None, bytes)),
        *(type_ for endpoint in admin.ENDPOINTS for type_ in (endpoint.query, endpoint.body, endpoint.answer)),
        *dict.fromkeys([openai.ErrorBody, *(one.refusal for one in INFERENCE)]),
        problems.ProblemBody,
    ]
    schemas, components = msgspec.json.schema_components(types, ref_template=TEMPLATE)
    by_type = dict(zip(map(_known, types), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for one in INFERENCE:
        paths.setdefault(one.path, {})[one.method.lower()] = _of_inference(one, by_type, components)
    for endpoint in admin.ENDPOINTS:
        path = re.sub(r"\{(\w+):[^}]*\}", r"{\1}", endpoint.path)
        paths.setdefault(path, {})[endpoint.method.lower()] = _of_endpoint(endpoint, path, by_type, components)
    paths[METRICS_PATH] = {"get": _METRICS}
    asked = [*(endpoint.query for endpoint in admin.ENDPOINTS), *(one.query for one in INFERENCE if one.query)]
    queries = {by_type[_known(query)]["$ref"] for query in asked}
    described = {
        "openapi": "3.1.0",
        "info": {
            "title": "Penstock",
            "version": VERSION,
            "description": "OpenAI's API under /v1, its Admin API under /v1/organization, and ours under /admin/v1.",
        },
        "paths": paths,
        "components": {
            "schemas": {
                name: schema for name, schema in components.items() if TEMPLATE.format(name=name) not in queries
            },
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "An API key of a tenant."},
                "adminKey": {"type": "http", "scheme": "bearer", "description": "A key of the administration."},
            },
        },
    }
    return msgspec.json.encode(described)


def _known(type_: Any) -> str:
    """A key for any type; generic ones are made anew each time they are named."""
    return str(type_)


def _of_inference(one: Inference, by_type: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any]
    if one.answer is None:
        content = {}
    elif one.answer is bytes:
        content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    else:
        content = {JSON: {"schema": by_type[_known(one.answer)]}}
    if one.streams:
        content[one.stream_type] = {"schema": {"type": "string"}}
    described: dict[str, Any] = {
        "operationId": one.name,
        "summary": one.summary,
        "tags": ["inference"],
        "security": [{"key": []}],
        "parameters": [
            *_of_path(one.path),
            *(_of_query(components[by_type[_known(one.query)]["$ref"].rpartition("/")[2]]) if one.query else ()),
            *([RECEIPT] if one.streams else []),
        ],
        "responses": {
            **({"101": {"description": "The connection is a WebSocket from here on."}} if one.is_socket else {}),
            **({"200": {"description": "Done.", "content": content}} if content else {}),
            "default": _refusal(one.refusal, JSON, by_type),
        },
    }
    if one.body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {one.content_type: {"schema": by_type[_known(one.body)]}},
        }
    return described


def _of_endpoint(endpoint: Endpoint, path: str, by_type: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    module = endpoint.handler.__module__.removeprefix("gateway.admin.").replace(".", "_")
    is_openais = not path.startswith(problems.ROOT)
    query = components[by_type[_known(endpoint.query)]["$ref"].rpartition("/")[2]]
    answered: dict[str, Any] = {
        "description": "Done.",
        "content": (
            {name: {"schema": {"type": "string", "format": "binary"}} for name in endpoint.files}
            if endpoint.answer is None
            else {name: {"schema": by_type[_known(endpoint.answer)]} for name in endpoint.files or (JSON,)}
        ),
    }
    if isinstance(endpoint.answer, type) and issubclass(endpoint.answer, Versioned):
        answered["headers"] = {"ETag": {"schema": {"type": "string"}, "description": "The version, in quotes."}}
    described: dict[str, Any] = {
        "operationId": f"{module}_{endpoint.handler.__name__}",
        "summary": endpoint.summary,
        "description": f"For the roles: {', '.join(sorted({'owner', *endpoint.roles}))}."
        + (" A tenant's own key is answered about the tenant alone." if endpoint.tenants_scope else ""),
        "tags": [module],
        "security": [{"adminKey": []}, *([{"key": []}] if endpoint.tenants_scope else [])],
        "parameters": [*_of_path(path), *_of_query(query), *_of_headers(endpoint)],
        "responses": {
            str(endpoint.status): answered,
            "default": (
                _refusal(openai.ErrorBody, JSON, by_type)
                if is_openais
                else _refusal(problems.ProblemBody, problems.CONTENT_TYPE, by_type, openai.ErrorBody)
            ),
        },
    }
    body = components[by_type[_known(endpoint.body)]["$ref"].rpartition("/")[2]]
    if body["properties"]:
        described["requestBody"] = {
            "required": bool(body["required"]),
            "content": {JSON: {"schema": by_type[_known(endpoint.body)]}},
        }
    return described


def _of_path(path: str) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+)\}", path)
    ]


def _of_query(schema: dict[str, Any]) -> Iterable[dict[str, Any]]:
    for name, shape in schema["properties"].items():
        shapes: Sequence[dict[str, Any]] = [one for one in shape.get("anyOf", ()) if one != {"type": "null"}]
        shape = shapes[0] if len(shapes) == 1 else shape  # what is not given is null
        is_object = "object" in (shape.get("type"), *(one.get("type") for one in shapes))
        style = {"style": "deepObject", "explode": True} if is_object else {}
        yield {"name": name, "in": "query", "required": name in schema["required"], "schema": shape, **style}


def _of_headers(endpoint: Endpoint) -> Iterable[dict[str, Any]]:
    if endpoint.changes and endpoint.method == "POST":
        what = "The same key and request get the same answer for a day, and are done once."
        yield _header("Idempotency-Key", what, required=False)
    if endpoint.changes and "{" in endpoint.path:
        what = "The ETag of what was read; the change is refused when it has changed meanwhile."
        yield _header("If-Match", what, required=endpoint.needs_match)


def _header(name: str, what: str, required: bool) -> dict[str, Any]:
    return {"name": name, "in": "header", "required": required, "description": what, "schema": {"type": "string"}}


RECEIPT = _header(
    "x-penstock-receipt",
    "true, as `penstock.receipt` in the body: the answer has a receipt under `penstock`, a stream in its last chunk.",
    required=False,
)


def _refusal(type_: Any, content_type: str, by_type: dict[str, Any], unread: Any = None) -> dict[str, Any]:
    """``unread``: the type of what is said, as JSON, to bytes that cannot be read as HTTP: there is no path by then."""
    content = {content_type: {"schema": by_type[_known(type_)]}}
    if unread is not None:
        content[JSON] = {"schema": by_type[_known(unread)]}
    return {"description": "Refused.", "content": content}
