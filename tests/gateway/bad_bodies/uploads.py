"""POST /v1/uploads, and what is asked of uploads that there are not."""

from __future__ import annotations

from typing import Any

from tests.gateway.bad_bodies.cases import HUGE, INFINITY, NAN, SURROGATE, Case, nested

PATH = "/v1/uploads"
GOOD: dict[str, Any] = {"filename": "a.jsonl", "purpose": "batch", "bytes": 5, "mime_type": "application/jsonl"}
NONE = f"{PATH}/upload_none"
COMPLETE = f"{NONE}/complete"
FORM = {"content-type": "multipart/form-data; boundary=frontier"}
PART = b'--frontier\r\nContent-Disposition: form-data; name="data"; filename="a"\r\n\r\nx\r\n--frontier--\r\n'


def bad(param: str | None, status: int = 400, **fields: Any) -> Case:
    return Case(param, {**GOOD, **fields}, PATH, status)


def without(param: str, *others: str) -> Case:
    return Case(param, {name: value for name, value in GOOD.items() if name not in (param, *others)}, PATH)


def raw(param: str | None, more: bytes) -> Case:
    return Case(param, b'{"filename": "a", "purpose": "batch", "bytes": 5, "mime_type": "a/b", ' + more + b"}", PATH)


def lasting(part: str, expires_after: Any) -> Case:
    return bad(f"expires_after{part}", expires_after=expires_after)


def ending(param: str | None, **fields: Any) -> Case:
    return Case(param, {"part_ids": ["part_1"], **fields}, COMPLETE)


def at(param: str | None, method: str, path: str, status: int = 404) -> Case:
    return Case(param, b"", path, status, method=method)


def part(path: str) -> Case:
    return Case("id", PART, path, 404, FORM)


CASES = [
    # How long it is to be
    without("bytes"),
    without("bytes", "mime_type"),
    bad("bytes", bytes=None),
    bad("bytes", bytes="5"),
    bad("bytes", bytes=""),
    bad("bytes", bytes=5.5),
    bad("bytes", bytes=-1),
    bad("bytes", bytes=-0.5),
    bad("bytes", bytes=True),
    bad("bytes", bytes=False),
    bad("bytes", bytes=[]),
    bad("bytes", bytes=[5]),
    bad("bytes", bytes={}),
    bad("bytes", bytes={"min": 5}),
    bad("bytes", bytes="5 MB"),
    bad("bytes", bytes="0x5"),
    bad("bytes", bytes=2**63),
    bad("bytes", bytes=2**64),
    bad("bytes", bytes=-(2**63)),
    bad("bytes", bytes=HUGE),
    bad("bytes", bytes=-HUGE),
    bad("bytes", bytes=1e300),
    bad("bytes", bytes=nested()),
    bad(None, bytes=NAN),
    bad(None, bytes=INFINITY),
    bad(None, bytes=-INFINITY),
    bad(None, 413, bytes=2**63 - 1),
    bad(None, 413, bytes=(512 << 20) + 1),
    bad(None, 413, bytes=10**18),
    raw("bytes", b'"bytes": 6'),
    # What it is called
    without("filename"),
    bad("filename", filename=None),
    bad("filename", filename=""),
    bad("filename", filename=5),
    bad("filename", filename=True),
    bad("filename", filename=1.5),
    bad("filename", filename=[]),
    bad("filename", filename=["a.jsonl"]),
    bad("filename", filename={}),
    bad("filename", filename={"name": "a.jsonl"}),
    bad("filename", filename="a\0b"),
    bad("filename", filename="\0"),
    bad("filename", filename="a.jsonl\0.png"),
    bad("filename", filename="x" * 256),
    bad("filename", filename="ü" * 256),
    bad("filename", filename="x" * 100_000),
    bad("filename", filename=nested()),
    bad(None, filename=SURROGATE),
    bad(None, filename=f"a{SURROGATE}b"),
    raw(None, b'"filename": "\xff"'),
    raw("filename", b'"filename": "b"'),
    # What it is for
    without("purpose"),
    bad("purpose", purpose=None),
    bad("purpose", purpose=""),
    bad("purpose", purpose=5),
    bad("purpose", purpose=True),
    bad("purpose", purpose=[]),
    bad("purpose", purpose=["batch"]),
    bad("purpose", purpose={}),
    bad("purpose", purpose={"name": "batch"}),
    bad("purpose", purpose="Batch"),
    bad("purpose", purpose="BATCH"),
    bad("purpose", purpose=" batch"),
    bad("purpose", purpose="batch "),
    bad("purpose", purpose="batch\0"),
    bad("purpose", purpose="batch\n"),
    bad("purpose", purpose="batch,evals"),
    bad("purpose", purpose="batch_output"),
    bad("purpose", purpose="assistants_output"),
    bad("purpose", purpose="fine-tune-results"),
    bad("purpose", purpose="fine_tune"),
    bad("purpose", purpose="user-data"),
    bad("purpose", purpose="party"),
    bad("purpose", purpose="search"),
    bad("purpose", purpose="answers"),
    bad("purpose", purpose="null"),
    bad("purpose", purpose="größe"),
    bad("purpose", purpose="x" * 5000),
    bad("purpose", purpose=nested()),
    raw("purpose", b'"purpose": "evals"'),
    # What kind of bytes they are
    without("mime_type"),
    bad("mime_type", mime_type=None),
    bad("mime_type", mime_type=""),
    bad("mime_type", mime_type=5),
    bad("mime_type", mime_type=True),
    bad("mime_type", mime_type=[]),
    bad("mime_type", mime_type=["text/plain"]),
    bad("mime_type", mime_type={}),
    bad("mime_type", mime_type={"type": "text", "subtype": "plain"}),
    bad("mime_type", mime_type="x" * 256),
    bad("mime_type", mime_type="x" * 100_000),
    bad("mime_type", mime_type=nested()),
    bad(None, mime_type=SURROGATE),
    raw("mime_type", b'"mime_type": "a/b"'),
    # How long its file is to stay
    lasting("", 3600),
    lasting("", "3600"),
    lasting("", ""),
    lasting("", True),
    lasting("", []),
    lasting("", ["created_at", 3600]),
    lasting("", nested()),
    lasting(".anchor", {}),
    lasting(".anchor", {"seconds": 3600}),
    lasting(".anchor", {"anchor": None, "seconds": 3600}),
    lasting(".anchor", {"anchor": "", "seconds": 3600}),
    lasting(".anchor", {"anchor": "now", "seconds": 3600}),
    lasting(".anchor", {"anchor": "last_active_at", "seconds": 3600}),
    lasting(".anchor", {"anchor": "Created_at", "seconds": 3600}),
    lasting(".anchor", {"anchor": "created_at\0", "seconds": 3600}),
    lasting(".anchor", {"anchor": 5, "seconds": 3600}),
    lasting(".anchor", {"anchor": ["created_at"], "seconds": 3600}),
    lasting(".seconds", {"anchor": "created_at"}),
    lasting(".seconds", {"anchor": "created_at", "days": 1}),
    lasting(".seconds", {"anchor": "created_at", "seconds": None}),
    lasting(".seconds", {"anchor": "created_at", "seconds": 0}),
    lasting(".seconds", {"anchor": "created_at", "seconds": -3600}),
    lasting(".seconds", {"anchor": "created_at", "seconds": 3599}),
    lasting(".seconds", {"anchor": "created_at", "seconds": 2_592_001}),
    lasting(".seconds", {"anchor": "created_at", "seconds": 3600.5}),
    lasting(".seconds", {"anchor": "created_at", "seconds": "3600"}),
    lasting(".seconds", {"anchor": "created_at", "seconds": "1h"}),
    lasting(".seconds", {"anchor": "created_at", "seconds": True}),
    lasting(".seconds", {"anchor": "created_at", "seconds": [3600]}),
    lasting(".seconds", {"anchor": "created_at", "seconds": {}}),
    lasting(".seconds", {"anchor": "created_at", "seconds": HUGE}),
    lasting(".seconds", {"anchor": "created_at", "seconds": -HUGE}),
    lasting(".seconds", {"anchor": "created_at", "seconds": 2**63}),
    raw("expires_after.seconds", b'"expires_after": {"anchor": "created_at", "seconds": 3600, "seconds": 3601}'),
    # Of what it is made
    Case("part_ids", {}, COMPLETE),
    Case("part_ids", {"md5": "0" * 32}, COMPLETE),
    Case("part_ids", {"parts": ["part_1"]}, COMPLETE),
    Case("part_ids", {"part_id": "part_1"}, COMPLETE),
    ending("part_ids", part_ids=None),
    ending("part_ids", part_ids="part_1"),
    ending("part_ids", part_ids=""),
    ending("part_ids", part_ids=5),
    ending("part_ids", part_ids=True),
    ending("part_ids", part_ids={}),
    ending("part_ids", part_ids={"0": "part_1"}),
    ending("part_ids", part_ids=["part_1"] * 10_001),
    ending("part_ids[0]", part_ids=[None]),
    ending("part_ids[0]", part_ids=[5]),
    ending("part_ids[0]", part_ids=[True]),
    ending("part_ids[0]", part_ids=[["part_1"]]),
    ending("part_ids[0]", part_ids=[{"id": "part_1"}]),
    ending("part_ids[1]", part_ids=["part_1", 1.5]),
    ending("part_ids[2]", part_ids=["part_1", "part_2", None]),
    ending("part_ids[0]", part_ids=nested()),
    ending(None, part_ids=[SURROGATE]),
    ending("md5", md5=""),
    ending("md5", md5=5),
    ending("md5", md5=True),
    ending("md5", md5=[]),
    ending("md5", md5={}),
    ending("md5", md5="x" * 32),
    ending("md5", md5="0" * 31),
    ending("md5", md5="0" * 33),
    ending("md5", md5="0" * 64),
    ending("md5", md5=" " + "0" * 31),
    ending("md5", md5="0" * 31 + "\n"),
    ending("md5", md5="0x" + "0" * 30),
    ending("md5", md5="0" * 31 + "\0"),
    ending("md5", md5="０" * 32),
    ending("md5", md5="1B2M2Y8AsgTpgAmY7PhCfg=="),
    ending("md5", md5="d41d8cd9-8f00-b204-e980-0998ecf8427e"),
    ending("md5", md5=nested()),
    Case("part_ids", b'{"part_ids": ["part_1"], "part_ids": []}', COMPLETE),
    Case("md5", b'{"part_ids": [], "md5": "' + b"0" * 32 + b'", "md5": null}', COMPLETE),
    Case(None, b"", COMPLETE),
    Case(None, b"[]", COMPLETE),
    Case(None, b'["part_1"]', COMPLETE),
    Case(None, b'{"part_ids": [}', COMPLETE),
    Case(None, b'{"part_ids": [NaN]}', COMPLETE),
    Case(None, b'{"part_ids": ["part_1"]', COMPLETE),
    Case(None, b'{"part_ids": ["part_1"]}', COMPLETE, 415, {"content-type": "text/plain"}),
    Case(None, b'{"part_ids": ["part_1"]}', COMPLETE, 415, FORM),
    # Uploads that there are not, and other addresses
    Case("id", {"part_ids": []}, COMPLETE, 404),
    Case("id", {"part_ids": ["part_1"], "md5": "0" * 32}, COMPLETE, 404),
    Case("id", {"part_ids": ["\0"]}, COMPLETE, 404),
    Case("id", {"part_ids": []}, f"{PATH}/%00/complete", 404),
    at("id", "POST", f"{NONE}/cancel"),
    at("id", "POST", f"{PATH}/%00/cancel"),
    at("id", "POST", f"{PATH}/%FF/cancel"),
    at("id", "POST", f"{PATH}/%ED%A0%80/cancel"),
    at("id", "POST", f"{PATH}/..%2F..%2Fetc%2Fpasswd/cancel"),
    at("id", "POST", f"{PATH}/' OR 1=1 --/cancel"),
    at("id", "POST", f"{PATH}/file-none/cancel"),
    at("id", "POST", f"{PATH}/" + "x" * 300 + "/cancel"),
    at("id", "POST", f"{NONE}/parts"),
    part(f"{NONE}/parts"),
    part(f"{PATH}/%00/parts"),
    part(f"{PATH}/" + "x" * 300 + "/parts"),
    at(None, "GET", PATH, 405),
    at(None, "PUT", PATH, 405),
    at(None, "DELETE", PATH, 405),
    at(None, "PATCH", PATH, 405),
    at(None, "GET", NONE),
    at(None, "POST", NONE),
    at(None, "DELETE", NONE),
    at(None, "GET", f"{NONE}/parts", 405),
    at(None, "GET", f"{NONE}/complete", 405),
    at(None, "PUT", f"{NONE}/complete", 405),
    at(None, "GET", f"{NONE}/cancel", 405),
    at(None, "DELETE", f"{NONE}/cancel", 405),
    at(None, "POST", f"{NONE}/parts/1"),
    at(None, "POST", f"{NONE}/abort"),
    at(None, "POST", f"{PATH}/"),
    at(None, "GET", "/v1/upload"),
    Case(None, PART, PATH, 415, FORM),
    Case(None, b"filename=a&bytes=5", PATH, 415, {"content-type": "application/x-www-form-urlencoded"}),
]
