"""Spans as OTLP has them on its way: the bytes of an ``ExportTraceServiceRequest``, written here.

OpenTelemetry's own encoder makes an object for each attribute and another for its value, which is 0.25 ms for a
request's spans; these bytes are the same and take a sixth of it. Field numbers are those of opentelemetry-proto 1.x:
``collector/trace/v1/trace_service.proto``, ``trace/v1/trace.proto``, ``common/v1/common.proto``. The format itself is
protobuf's: a tag (number and wire type), then a number, or a length and so many bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final

from gateway.tracing.names import UPSTREAM_SPAN
from gateway.tracing.spans import Event, Span, Value

_KIND_INTERNAL, _KIND_SERVER, _KIND_CLIENT, _STATUS_ERROR = b"\x30\x01", b"\x30\x02", b"\x30\x03", b"\x18\x02"
"""Whole fields."""
_HAS_IS_REMOTE, _IS_REMOTE = 0x100, 0x200
"""Bits of a span's flags: it is known whether its parent is somebody else's, and it is."""
MAX_KNOWN_BYTES = 256
"""Longer texts are not kept for the next span that says the same."""

_DOUBLE, _AT, _FROM_TO = struct.Struct("<d").pack, struct.Struct("<BQ").pack, struct.Struct("<BQBQ").pack
_LINK_FLAGS = struct.Struct("<BI").pack
_FROM_HERE, _FROM_ELSEWHERE = (struct.pack("<2sI", b"\x85\x01", _HAS_IS_REMOTE | bit) for bit in (0, _IS_REMOTE))
"""Flags of a span, a whole field."""


def _varint(number: int) -> bytes:
    """``number`` is not negative."""
    said = bytearray()
    while number > 0x7F:
        said.append(number & 0x7F | 0x80)
        number >>= 7
    said.append(number)
    return bytes(said)


_LENGTHS: Final = [_varint(number) for number in range(4096)]


def _field(number: int, body: bytes) -> bytes:
    """Bytes, a text or a message under a number below 16."""
    size = len(body)
    return bytes((number << 3 | 2,)) + (_LENGTHS[size] if size < 4096 else _varint(size)) + body


def _value(value: Value) -> bytes:
    """As an AnyValue."""
    if isinstance(value, str):
        return _field(1, value.encode(errors="replace"))
    if isinstance(value, bool):
        return b"\x10\x01" if value else b"\x10\x00"
    if isinstance(value, int):
        return b"\x18" + _varint(value & 0xFFFF_FFFF_FFFF_FFFF)
    if isinstance(value, float):
        return b"\x21" + _DOUBLE(value)
    return _field(5, b"".join([_field(1, _value(each)) for each in value]))


def _pair(number: int, name: str, value: Value) -> bytes:
    return _field(number, _field(1, name.encode()) + _field(2, _value(value)))


_known_words, _known_count = lru_cache(4096)(_pair), lru_cache(4096)(_pair)
"""Most of what spans say they have said before. For texts, and for integers: True and 1 would be the same to one."""


@lru_cache(1024)
def _before_double(number: int, name: str) -> bytes:
    """A pair whose value is a float, all but the eight bytes of that."""
    return _pair(number, name, 0.0)[:-8]


def _pairs(number: int, attributes: Mapping[str, Value]) -> list[bytes]:
    told = []
    for name, value in attributes.items():
        kind = value.__class__
        if kind is str and len(value) <= MAX_KNOWN_BYTES:
            told.append(_known_words(number, name, value))
        elif kind is int:
            told.append(_known_count(number, name, value))
        elif kind is float:
            told.append(_before_double(number, name) + _DOUBLE(value))
        else:
            told.append(_pair(number, name, value))
    return told


@lru_cache(1024)
def _known_text(number: int, text: str) -> bytes:
    return _field(number, text.encode())


@lru_cache(1024)
def _named(name: str, is_whole: bool) -> bytes:
    kind = _KIND_SERVER if is_whole else _KIND_CLIENT if name == UPSTREAM_SPAN else _KIND_INTERNAL
    return _field(5, name.encode()) + kind


@lru_cache(1024)
def _failed(error: str) -> bytes:
    """``error``: what it is called; empty: nobody knows."""
    return _field(15, (_field(2, error.encode()) if error else b"") + _STATUS_ERROR)


def _event(event: Event) -> bytes:
    name, at_ns, attributes = event
    body = _AT(0x09, at_ns) + _known_text(2, name)
    if attributes:
        body += b"".join(_pairs(3, attributes))
    return _field(11, body)


def _link(traceparent: str) -> bytes:
    _, trace_id, span_id, _ = traceparent.split("-")
    whose = _field(1, bytes.fromhex(trace_id)) + _field(2, bytes.fromhex(span_id))
    return _field(13, whose + _LINK_FLAGS(0x35, _HAS_IS_REMOTE))


class Encoder:
    """For the spans of one gateway."""

    def __init__(self, resource: Mapping[str, Value], scope: str, version: str) -> None:
        """``resource``: what all of them are of."""
        whose = _field(1, scope.encode()) + (_field(2, version.encode()) if version else b"")
        self._resource = _field(1, b"".join(_pairs(1, resource)))
        self._scope = _field(1, whose)

    def request(self, spans: Iterable[bytes]) -> bytes:
        """An ExportTraceServiceRequest with those of several requests."""
        return _field(1, self._resource + _field(2, self._scope + b"".join(spans)))

    def spans(self, spans: Sequence[Span], trace_id: str, whole_id: int, state: str, error: str) -> bytes:
        """Those of one request, as fields of a ScopeSpans. ``whole_id``: which of them is the request's own; ``state``
        is its trace's, ``error`` what its failure is called."""
        trace = _field(1, bytes.fromhex(trace_id)) + b"\x12\x08"
        in_state = _known_text(3, state) if state else b""
        said: list[bytes] = []
        for name, span_id, parent_id, start_ns, end_ns, attributes, events, is_remote, failed, link in spans:
            body = b"".join(
                (
                    trace,
                    span_id.to_bytes(8, "big"),
                    in_state,
                    b"\x22\x08" + parent_id.to_bytes(8, "big") if parent_id else b"",
                    _named(name, span_id == whole_id),
                    _FROM_TO(0x39, start_ns, 0x41, end_ns),
                    b"".join(_pairs(9, attributes)) if attributes else b"",
                    b"".join(map(_event, events)) if events else b"",
                    _link(link) if link else b"",
                    _failed(error) if failed else b"",
                    _FROM_ELSEWHERE if is_remote else _FROM_HERE,
                )
            )
            size = len(body)
            said += (b"\x12", _LENGTHS[size] if size < 4096 else _varint(size), body)
        return b"".join(said)
