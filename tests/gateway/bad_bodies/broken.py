"""What is wrong with a body whatever it asks for: not JSON, not whole, not of the type or encoding that it says."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping

from tests.gateway.bad_bodies.cases import TEN_MB, Case, nested_text

UTF16, UTF32 = "utf-16", "utf-32"


def broken(good: Mapping[str, object]) -> list[Case]:
    """``good``: a body that would be answered."""
    text = json.dumps(good).encode()
    inside = text[1:-1]
    name = text.index(b'": "') + 4
    start, end = text[:name], text[name:]
    first = next(iter(good))
    return [
        Case(None, b""),
        Case(None, b" \n\t"),
        Case(None, b"\0"),
        Case(None, b"\0" + text),
        Case(None, text + b"\0"),
        Case(None, b"null"),
        Case(None, b"true"),
        Case(None, b"7"),
        Case(None, b'"a text"'),
        Case(None, b"[]"),
        Case(None, b"[" + text + b"]"),
        Case(None, b"{"),
        Case(None, text[:-1]),
        Case(None, text[: len(text) // 2]),
        Case(None, text + b"}"),
        Case(None, text + b","),
        Case(None, text + text),
        Case(None, text + b"\n" + text),
        Case(None, b"{" + inside + b",}"),
        Case(None, b"{," + inside + b"}"),
        Case(None, b"{" + inside + b' "a": 1}'),
        Case(None, b"{" + inside + b', "a" 1}'),
        Case(None, b"{" + inside + b', "a":}'),
        Case(None, b"{" + inside + b", a: 1}"),
        Case(None, b"{" + inside + b", 'a': 1}"),
        Case(None, b"{" + inside + b", 5: 1}"),
        Case(None, b"{" + inside + b', null: "x"}'),
        Case(None, b"{" + inside + b', "a": undefined}'),
        Case(None, b"{" + inside + b', "a": None}'),
        Case(None, b"{" + inside + b', "a": True}'),
        Case(None, b"{" + inside + b', "a": NaN}'),
        Case(None, b"{" + inside + b', "a": Infinity}'),
        Case(None, b"{" + inside + b', "a": -Infinity}'),
        Case(None, b"{" + inside + b', "a": 01}'),
        Case(None, b"{" + inside + b', "a": +1}'),
        Case(None, b"{" + inside + b', "a": 1.}'),
        Case(None, b"{" + inside + b', "a": .5}'),
        Case(None, b"{" + inside + b', "a": 0x10}'),
        Case(None, b"{" + inside + b', "a": 1e}'),
        Case(None, b"{" + inside + b', "a": 1_000}'),
        Case(None, b"{" + inside + b', "a": "\\x41"}'),
        Case(None, b"{" + inside + b', "a": "\\u12"}'),
        Case(None, b"{" + inside + b', "a": "\\ud800"}'),
        Case(None, b"{" + inside + b', "a": "\\udc00\\ud800"}'),
        Case(None, b"{" + inside + b', "a": "line\nbreak"}'),
        Case(None, start + b"\xff" + end),
        Case(None, start + b"\xed\xa0\x80" + end),
        Case(None, start + b"\xc0\x80" + end),
        Case(None, start + b"\xf0\x9f\x98" + end),
        Case(None, b"{" + inside + b', "a": "open}'),
        Case(first, b"{" + inside + f', "{first}":'.encode() + json.dumps(good[first]).encode() + b"}"),
        Case("a.b[1].c", b"{" + inside + b', "a": {"b": [{}, {"c": 1, "\\u0063": "\\"", "d": ""}]}}'),
        Case(None, b"{" + inside + b', "a": ' + nested_text(b"[", b"]") + b"}"),
        Case(None, b"{" + inside + b', "a": ' + nested_text(b'{"a":', b"}") + b"}"),
        Case(None, nested_text(b"[", b"")),
        Case(None, b"// a comment\n" + text),
        Case(None, text[:-1] + b"/* a comment */}"),
        Case(None, b"\xef\xbb\xbf" + text),
        Case(None, text.decode().encode(UTF16)),
        Case(None, text.decode().encode(UTF32)),
        Case(None, b"model=demo&stream=false"),
        Case(None, b"<request><model>demo</model></request>"),
        Case(None, b"model: demo\nstream: true\n"),
        Case(None, b"data: " + text + b"\n\n"),
        Case(None, gzip.compress(text)),
        Case(None, text, status=415, headers={"content-type": "text/plain"}),
        Case(None, text, status=415, headers={"content-type": "application/x-www-form-urlencoded"}),
        Case(None, text, status=415, headers={"content-type": "multipart/form-data; boundary=x"}),
        Case(None, text, status=415, headers={"content-type": "application/xml"}),
        Case(None, text, status=415, headers={"content-type": "json"}),
        Case(None, text, status=415, headers={"content-encoding": "zstd"}, is_unread=True),
        Case(None, text, status=415, headers={"content-encoding": "gzip, gzip"}),
        Case(None, text, headers={"content-encoding": "gzip"}),
        Case(None, gzip.compress(text)[:30], headers={"content-encoding": "gzip"}),
        Case(None, gzip.compress(text)[:4], headers={"content-encoding": "gzip"}),
        Case(None, text, headers={"content-encoding": "br"}),
        Case(None, zlib.compress(text)[:8], headers={"content-encoding": "deflate"}, is_unread=True),
        Case(None, gzip.compress(b" " * (2 * TEN_MB)), status=413, headers={"content-encoding": "gzip"}),
    ]
