"""Whole answers are good HTTP: on a connection that stays, on one that is closed, to an old client, in a row."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

import msgspec
import pytest

from tests.gateway.conftest import HELLO, KEY, PATIENCE_S

CALL = msgspec.json.encode({"model": "demo", "messages": HELLO})


def request(version: str, *headers: str, call: bytes = CALL) -> bytes:
    lines = [
        f"POST /v1/chat/completions HTTP/{version}",
        *("Host: penstock", f"Authorization: Bearer {KEY}", "Content-Type: application/json"),
        f"Content-Length: {len(call)}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + call


async def answer(reader: asyncio.StreamReader) -> tuple[str, dict[str, str], dict[str, object]]:
    """The status line, the headers, and the body."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    status, *lines = head.rstrip().split("\r\n")
    pairs = [line.split(": ", 1) for line in lines]
    headers = {name.lower(): value for name, value in pairs}
    assert len(headers) == len(pairs), "each header once"
    return status, headers, msgspec.json.decode(await reader.readexactly(int(headers["content-length"])))


@pytest.mark.parametrize(
    ("version", "asks", "status", "connection"),
    [
        ("1.1", (), "HTTP/1.1 200 OK", None),
        ("1.1", ("Connection: close",), "HTTP/1.1 200 OK", "close"),
        ("1.0", (), "HTTP/1.0 200 OK", None),
        ("1.0", ("Connection: keep-alive",), "HTTP/1.0 200 OK", "keep-alive"),
    ],
)
async def test_a_whole_answer_says_the_same_on_every_kind_of_connection(front, version, asks, status, connection):
    address = urlsplit(front.url)
    stays = connection == "keep-alive" or (version == "1.1" and connection is None)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(2 if stays else 1):
                writer.write(request(version, *asks))
                front.peer.say(await front.peer.submitted(), [3], "stop")
                line, headers, body = await answer(reader)
                assert line == status
                assert body["object"] == "chat.completion"
                assert headers.pop("x-request-id").startswith("req_")
                assert headers.pop("openai-organization").startswith("org_")
                assert headers.pop("openai-processing-ms").isdigit()
                assert parsedate_to_datetime(headers.pop("date"))
                assert headers.pop("content-length")
                assert headers.pop("connection", None) == connection
                assert headers == {
                    "content-type": "application/json",
                    "server": "penstock",
                    "openai-version": "2020-10-01",
                    "x-penstock-cache": "bypass",
                }
            if not stays:
                assert await reader.read() == b"", "the connection ends with the answer"
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


@pytest.mark.parametrize("asks", [(), ("Connection: keep-alive",)])
async def test_a_stream_to_an_old_client_ends_with_its_connection(front, asks):
    call = msgspec.json.encode({"model": "demo", "messages": HELLO, "stream": True})
    address = urlsplit(front.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(request("1.0", *asks, call=call))
        front.peer.say(await front.peer.submitted(), [3], "stop")
        async with asyncio.timeout(PATIENCE_S):
            head, _, events = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
    assert head.startswith(b"HTTP/1.0 200 OK")
    assert b"keep-alive" not in head.lower()
    assert events.endswith(b"data: [DONE]\n\n")


async def test_requests_sent_without_waiting_are_answered_in_their_order(front):
    address = urlsplit(front.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(3 * request("1.1"))
    async with asyncio.timeout(PATIENCE_S):
        answers = []
        for _ in range(3):
            submit = await front.peer.submitted()
            front.peer.say(submit, [3], "stop")
            answers.append((submit.request_id, await answer(reader)))
    writer.close()
    await writer.wait_closed()
    for request_id, (line, headers, _) in answers:
        assert line == "HTTP/1.1 200 OK"
        assert headers["x-request-id"] == request_id
    assert len({request_id for request_id, _ in answers}) == 3
