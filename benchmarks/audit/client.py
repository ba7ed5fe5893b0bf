"""Clients that count what reaches them: on sockets of their own, so that no library hides a byte or sends one twice."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass, field
from typing import Any, Literal

Ending = Literal["stay", "abort", "half"]
"""stay: reads to the end; abort: closes the connection; half: says that it sends no more, and reads what is on its
way."""
How = Literal["whole", "failed", "refused", "left", "broken", "unreached"]
"""whole: all of it came; failed: the stream ended with an error; refused: an error instead of an answer; left: the
client did; broken: the connection ended within the answer; unreached: there was no connection, or no answer on it."""
MAX_READ = 1 << 16


@dataclass
class Asked:
    """One request, as one client makes it once."""

    kind: str
    user: str
    """Of this attempt alone, except that repetitions under one Idempotency-Key have the same."""
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)
    ending: Ending = "stay"
    leaves_after: int = 0
    """Events of a stream; 0: no matter how many."""
    gives_up_s: float | None = None


@dataclass
class Heard:
    """What came of it."""

    asked: Asked
    how: How
    status: int = 0
    request_id: str = ""
    num_tokens: int = 0
    """Of the completion, in whole events or in a whole body."""


async def ask(port: int, key: str, asked: Asked) -> Heard:
    """Never raises: what goes wrong is what was heard."""
    body = json.dumps({**asked.body, "user": asked.user}).encode()
    fields = {
        "host": "127.0.0.1",
        "authorization": f"Bearer {key}",
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        **asked.headers,
    }
    head = "POST /v1/chat/completions HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    received = bytearray()
    has_left = False
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=MAX_READ)
    except OSError:
        return Heard(asked, "unreached")
    try:
        async with asyncio.timeout(asked.gives_up_s):
            writer.write(head.encode() + b"\r\n" + body)
            while data := await reader.read(MAX_READ):
                received += data
                if asked.leaves_after and not has_left and received.count(b"data: {") >= asked.leaves_after:
                    has_left = True
                    if asked.ending == "abort":
                        break
                    writer.write_eof()
    except TimeoutError:
        has_left = True
    except OSError:
        pass
    finally:
        writer.transport.abort()
    return heard_in(asked, bytes(received), has_left)


def heard_in(asked: Asked, received: bytes, has_left: bool) -> Heard:
    """Reads an HTTP answer that may end anywhere."""
    head, found, rest = received.partition(b"\r\n\r\n")
    if not found:
        return Heard(asked, "left" if has_left else "unreached")
    status = int(head.split(b" ", 2)[1])
    named = re.search(rb"(?i)x-request-id: (\S+)", head)
    request_id = named[1].decode() if named else ""
    is_chunked = b"transfer-encoding: chunked" in head.lower()
    body = _joined(rest) if is_chunked else rest
    heard = Heard(asked, "broken", status, request_id)
    if status != 200:
        heard.how = "refused"
    elif is_chunked:
        _read_events(heard, body, has_left)
    else:
        _read_body(heard, head, body, has_left)
    return heard


def _read_events(heard: Heard, body: bytes, has_left: bool) -> None:
    *events, _ = body.split(b"\n\n")
    has_failed = False
    for event in events:
        if event.startswith(b"data: {"):
            said = json.loads(event[6:])
            has_failed = has_failed or "error" in said
            heard.num_tokens += sum(len(choice["delta"].get("content") or "") for choice in said.get("choices", ()))
    if events and events[-1] == b"data: [DONE]":
        heard.how = "whole"
    elif has_failed:
        heard.how = "failed"
    elif has_left:
        heard.how = "left"


def _read_body(heard: Heard, head: bytes, body: bytes, has_left: bool) -> None:
    length = re.search(rb"(?i)content-length: (\d+)", head)
    if length and len(body) == int(length[1]):
        said = json.loads(body)
        heard.num_tokens = sum(len(choice["message"]["content"]) for choice in said["choices"])
        heard.how = "whole"
    elif has_left:
        heard.how = "left"


def _joined(chunked: bytes) -> bytes:
    """The chunks of a transfer as far as they came."""
    joined, at = b"", 0
    while (end := chunked.find(b"\r\n", at)) >= 0:
        num_bytes = int(chunked[at:end], 16)
        joined += chunked[end + 2 : end + 2 + num_bytes]
        at = end + 2 + num_bytes + 2
    return joined
