"""Bytes that are no HTTP, or more of it than is read: an error object, and a connection that ends."""

from __future__ import annotations

import asyncio
import json

import pytest
import yarl

from tests.builders import PATIENCE_S
from tests.gateway.conftest import ADMIN_KEY, Front


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /v1/models?" + b"x" * 70_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nhost: a\r\nx-long: " + b"y" * 9000 + b"\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nno colon\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: x\r\n\r\n",
    ],
    ids=["a long address", "a long header", "no header", "TLS", "no length"],
)
async def test_what_is_no_http_is_answered_with_an_error_object(front: Front, sent: bytes):
    url = yarl.URL(front.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(sent)
    head, _, body = (await asyncio.wait_for(reader.read(), PATIENCE_S)).partition(b"\r\n\r\n")
    writer.close()
    status, _, fields = head.partition(b"\r\n")
    headers = dict(line.lower().split(b": ", 1) for line in fields.split(b"\r\n"))
    assert status == b"HTTP/1.1 400 Bad Request"
    assert headers[b"content-type"].startswith(b"application/json")
    assert (headers[b"connection"], int(headers[b"content-length"])) == (b"close", len(body))
    assert (headers[b"server"], headers[b"openai-version"]) == (b"penstock", b"2020-10-01")
    request_id = headers[b"x-request-id"].decode()
    assert request_id.startswith("req_")
    error = json.loads(body)["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("The request could not be read as HTTP: ")
    assert not error["message"].endswith(":")


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_an_organization_that_is_no_text_is_named_as_the_header_that_is_wrong(front: Front, method: str):
    url = yarl.URL(front.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    body = b'{"name": "a"}' if method == "POST" else b""
    asked = (
        f"{method} /v1/organization/projects HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"
        f"authorization: Bearer {ADMIN_KEY}\r\ncontent-length: {len(body)}\r\n"
    )
    writer.write(asked.encode() + b"openai-organization: org_\xff\r\n\r\n" + body)
    head, _, answer = (await asyncio.wait_for(reader.read(), PATIENCE_S)).partition(b"\r\n\r\n")
    writer.close()
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer)["error"]["param"] == "OpenAI-Organization"
