"""What clients say over a WebSocket, and what they are told beside the events of responses: openai-python's
``types/responses/responses_client_event.py`` and ``responses_server_event.py``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from gateway import errors, failures, openai
from gateway.openai import Malformed
from gateway.responses.events import split

CREATE, STEER = "response.create", "response.steer"
_STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}")
_OF_THE_SOCKET = ("type", "stream_id", "generate", "stream")
"""Fields of an event that the request has not, or not as they are said."""
_encode = msgspec.json.encode


class ClientEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of any event before it is known which it is."""

    type: str
    stream_id: Any = None
    generate: bool | None = None
    background: bool | None = None


class Create(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A response is asked for."""

    stream_id: str | None
    """The lane; None: the one that has no name."""
    generates: bool
    is_background: bool
    body: bytes
    """Of POST /v1/responses."""


class Steer(msgspec.Struct, frozen=True, kw_only=True):
    """Input for a response that is being written."""

    previous_response_id: str
    input: Any


_event, _steer = msgspec.json.Decoder(ClientEvent), msgspec.json.Decoder(Steer)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def parse(message: bytes) -> Create | Steer:
    """Raises Malformed."""
    event = openai.decoded(_event, message)
    if event.type == STEER:
        return openai.decoded(_steer, message)
    if event.type != CREATE:
        shown = event.type[:40]
        raise Malformed(f"Invalid 'type': '{shown}' is none of {CREATE} and {STEER}.", "type", "invalid_value")
    stream_id = event.stream_id
    if stream_id is not None and not (isinstance(stream_id, str) and _STREAM_ID.fullmatch(stream_id)):
        raise Malformed(
            "Invalid 'stream_id': it has 1 to 256 letters, digits, underscores, hyphens and periods.",
            "stream_id",
            "invalid_stream_id",
        )
    fields = {name: value for name, value in _fields.decode(message).items() if name not in _OF_THE_SOCKET}
    return Create(
        stream_id=stream_id,
        generates=event.generate is not False,
        is_background=bool(event.background),
        body=_encode({**fields, "stream": True}),
    )


def frames(events: bytes, stream_id: str | None) -> list[bytes]:
    """The events of a response's stream, each as the JSON of a message."""
    told = [event.partition(b"\ndata: ")[2][:-2] for event in split(events)]
    if stream_id is None:
        return told
    return [b'%b,"stream_id":"%b"}' % (event[:-1], stream_id.encode()) for event in told]


def error(detail: openai.ErrorDetail, status: int, headers: Mapping[str, str], stream_id: str | None) -> bytes:
    """What was asked is refused. ``headers``: those that its answer would have."""
    said = {**msgspec.structs.asdict(detail), **({"headers": dict(headers)} if headers else {})}
    event = {"type": "error", "status": status, "error": said}
    return _encode(event if stream_id is None else {**event, "stream_id": stream_id})


def refused(failure: errors.GatewayError, stream_id: str | None = None) -> bytes:
    """As ``error``, of what has not come so far as to be a request."""
    return error(failures.detail(failure), failure.status, failure.headers(), stream_id)


def not_steered(steer: Steer) -> bytes:
    """Its input goes back, for a response of its own."""
    return _encode(
        {
            "type": "response.steer.failed",
            "sequence_number": 0,
            "steer": steer,
            "error": {
                "type": "invalid_request_error",
                "code": "steering_not_supported",
                "message": "Responses are not steered by this server: send the input as a response of its own.",
            },
        }
    )
