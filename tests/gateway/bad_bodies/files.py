"""POST /v1/files: forms that are broken, and fields that say what no file is for."""

from __future__ import annotations

import gzip

from tests.gateway.bad_bodies.cases import DEEP, HUGE, Case

PATH = "/v1/files"
BOUNDARY = b"frontier"
TYPE = {"content-type": "multipart/form-data; boundary=frontier"}
LINES = b'{"custom_id": "a"}\n'


def field(name: str, value: str) -> bytes:
    return f'Content-Disposition: form-data; name="{name}"\r\n\r\n{value}'.encode()


FILE = b'Content-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n' + LINES
PURPOSE = field("purpose", "batch")


def form(*parts: bytes) -> bytes:
    return b"".join(b"--" + BOUNDARY + b"\r\n" + part + b"\r\n" for part in parts) + b"--" + BOUNDARY + b"--\r\n"


def bad(param: str | None, *parts: bytes, status: int = 400) -> Case:
    return Case(param, form(*parts), PATH, status, TYPE)


def raw(body: bytes, kind: str = TYPE["content-type"], status: int = 400, param: str | None = None) -> Case:
    return Case(param, body, PATH, status, {"content-type": kind})


def expiring(param: str, anchor: str | None, seconds: str | None) -> Case:
    said = [field("expires_after[anchor]", anchor)] if anchor is not None else []
    said += [field("expires_after[seconds]", seconds)] if seconds is not None else []
    return bad(param, PURPOSE, *said, FILE)


def lasting(param: str, *said: tuple[str, str]) -> Case:
    """With fields of whatever names."""
    return bad(param, PURPOSE, *[field(name, value) for name, value in said], FILE)


def at(param: str | None, method: str, path: str, status: int = 400) -> Case:
    return Case(param, b"", path, status, method=method)


CASES = [
    # What it is for
    bad("purpose", FILE),
    bad("purpose", field("purpose", ""), FILE),
    bad("purpose", field("purpose", "party"), FILE),
    bad("purpose", field("purpose", "Batch"), FILE),
    bad("purpose", field("purpose", "batch "), FILE),
    bad("purpose", field("purpose", "batch\0"), FILE),
    bad("purpose", field("purpose", "batch_output"), FILE),
    bad("purpose", field("purpose", "null"), FILE),
    bad("purpose", field("purpose", "x" * 5000), FILE),
    bad("purpose", field("purpose", "5"), FILE),
    bad("purpose", field("purposes", "batch"), FILE),
    bad("purpose", FILE, field("purpose", '{"purpose": "batch"}')),
    bad("purpose", PURPOSE.replace(b"batch", b"\xff\xfe"), FILE),
    bad("purpose", field("purpose[0]", "batch"), FILE),
    # What is in it
    bad("file", PURPOSE),
    bad("file"),
    bad("file", PURPOSE, field("files", "x")),
    bad("file", PURPOSE, field("File", "x")),
    bad("file", PURPOSE, FILE, FILE),
    bad("file", FILE, PURPOSE, FILE),
    bad("file", field("purpose", "party")),
    # How long it stays
    expiring("expires_after.seconds", "created_at", None),
    expiring("expires_after.anchor", None, "3600"),
    expiring("expires_after.anchor", "now", "3600"),
    expiring("expires_after.anchor", "", "3600"),
    expiring("expires_after.anchor", "last_active_at", "3600"),
    expiring("expires_after.seconds", "created_at", "0"),
    expiring("expires_after.seconds", "created_at", "3599"),
    expiring("expires_after.seconds", "created_at", "2592001"),
    expiring("expires_after.seconds", "created_at", "-3600"),
    expiring("expires_after.seconds", "created_at", "an hour"),
    expiring("expires_after.seconds", "created_at", "3600.5"),
    expiring("expires_after.seconds", "created_at", ""),
    expiring("expires_after.seconds", "created_at", "NaN"),
    expiring("expires_after.seconds", "created_at", str(HUGE)),
    expiring("expires_after.seconds", "created_at", "1e999"),
    bad("expires_after", PURPOSE, field("expires_after", "3600"), FILE),
    bad("expires_after", PURPOSE, field("expires_after", "[" * DEEP)[:3000], FILE),
    # Forms that are broken
    bad(None, *[field(f"f{number}", "x") for number in range(17)], FILE),
    bad(None, b"Content-Disposition: form-data\r\n\r\nx"),
    bad(None, b"\r\nx"),
    bad("note", PURPOSE, field("note", "x" * 5000), FILE),
    raw(b""),
    raw(b"\0"),
    raw(b"not a form"),
    raw(b"--frontier"),
    raw(b"--frontier\r\n"),
    raw(b"--frontier--", param="file"),
    raw(b"--other\r\n" + PURPOSE + b"\r\n--other--\r\n"),
    raw(form(PURPOSE, FILE)[:60]),
    raw(form(PURPOSE, FILE)[:110]),
    raw(form(PURPOSE, FILE).replace(b"\r\n\r\n", b"\r\n")),
    raw(form(PURPOSE, FILE), "multipart/form-data"),
    raw(form(PURPOSE, FILE), "multipart/form-data; boundary="),
    raw(form(PURPOSE, FILE), "multipart/form-data; boundary=" + "x" * 100),
    raw(form(PURPOSE, FILE), "multipart/mixed; boundary=frontier", 415),
    raw(form(PURPOSE, FILE), "application/json", 415),
    raw(form(PURPOSE, FILE), "text/plain", 415),
    raw(b'{"purpose": "batch", "file": "x"}', "application/json", 415),
    raw(b"purpose=batch&file=x", "application/x-www-form-urlencoded", 415),
    raw(LINES, "application/jsonl", 415),
    raw(LINES, "application/octet-stream", 415),
    # A file that there is not, and lists of them
    at("id", "GET", f"{PATH}/file-none", 404),
    at("id", "GET", f"{PATH}/%00", 404),
    at("id", "GET", f"{PATH}/..%2F..%2Fetc%2Fpasswd", 404),
    at("id", "GET", f"{PATH}/file-none/content", 404),
    at("id", "DELETE", f"{PATH}/file-none", 404),
    at(None, "PUT", f"{PATH}/file-none", 405),
    at("limit", "GET", f"{PATH}?limit=0"),
    at("limit", "GET", f"{PATH}?limit=10001"),
    at("limit", "GET", f"{PATH}?limit=many"),
    at("order", "GET", f"{PATH}?order=up"),
    at("purpose", "GET", f"{PATH}?purpose=" + "x" * 65),
    at("after", "GET", f"{PATH}?after=" + "x" * 257),
    # Other things than what it is for
    bad("purpose", field("purpose", "BATCH"), FILE),
    bad("purpose", field("purpose", " batch"), FILE),
    bad("purpose", field("purpose", "batch\n"), FILE),
    bad("purpose", field("purpose", "batch,evals"), FILE),
    bad("purpose", field("purpose", "fine_tune"), FILE),
    bad("purpose", field("purpose", "fine-tune-results"), FILE),
    bad("purpose", field("purpose", "assistants_output"), FILE),
    bad("purpose", field("purpose", "user-data"), FILE),
    bad("purpose", field("purpose", "responses"), FILE),
    bad("purpose", field("purpose", "[]"), FILE),
    bad("purpose", field("purpose", '"batch"'), FILE),
    bad("purpose", field("purpose", "batch/../evals"), FILE),
    bad("purpose", field("purpose", "größe"), FILE),
    bad("purpose", PURPOSE, field("purpose", "party"), FILE),
    bad("purpose", field("purpose[]", "batch"), FILE),
    bad("purpose", field("purpose[name]", "batch"), FILE),
    bad("purpose", field("Purpose", "batch"), FILE),
    bad("purpose", field(" purpose", "batch"), FILE),
    # Other things than a file
    bad("file", PURPOSE, field("file[]", "x")),
    bad("file", PURPOSE, field("FILE", "x")),
    bad("file", PURPOSE, field("data", "x")),
    bad("file", PURPOSE, field("upload", "x")),
    bad("file", PURPOSE, field("file_id", "file-1")),
    bad("file", PURPOSE, field("url", "https://example.com/lines.jsonl")),
    bad("file", PURPOSE, FILE.replace(b'name="file"', b'name="lines"')),
    bad("file", PURPOSE, FILE, field("file", "x")),
    bad("file", PURPOSE, FILE, FILE, FILE),
    # Other things than how long it stays
    expiring("expires_after.anchor", "Created_at", "3600"),
    expiring("expires_after.anchor", "created_at ", "3600"),
    expiring("expires_after.anchor", "null", "3600"),
    expiring("expires_after.anchor", '["created_at"]', "3600"),
    expiring("expires_after.anchor", "created_at\0", "3600"),
    expiring("expires_after.seconds", "created_at", "3600s"),
    expiring("expires_after.seconds", "created_at", "1h"),
    expiring("expires_after.seconds", "created_at", "3,600"),
    expiring("expires_after.seconds", "created_at", "3 600"),
    expiring("expires_after.seconds", "created_at", "0xe10"),
    expiring("expires_after.seconds", "created_at", "3600\0"),
    expiring("expires_after.seconds", "created_at", "null"),
    expiring("expires_after.seconds", "created_at", "true"),
    expiring("expires_after.seconds", "created_at", "[3600]"),
    expiring("expires_after.seconds", "created_at", "Infinity"),
    expiring("expires_after.seconds", "created_at", "-0"),
    expiring("expires_after.seconds", "created_at", "９９９９"),
    expiring("expires_after.seconds", "created_at", "9" * 20),
    expiring("expires_after.seconds", "created_at", "x" * 4000),
    lasting("expires_after", ("expires_after", '{"anchor": "created_at", "seconds": 3600}')),
    lasting("expires_after", ("expires_after", ""), ("expires_after[anchor]", "created_at")),
    lasting("expires_after", ("expires_after[anchor]", "created_at"), ("expires_after", "3600")),
    lasting("expires_after.anchor", ("expires_after[]", "created_at")),
    lasting("expires_after.anchor", ("expires_after[anchor][0]", "created_at"), ("expires_after[seconds]", "3600")),
    lasting("expires_after.anchor", ("expires_after[Anchor]", "created_at"), ("expires_after[seconds]", "3600")),
    lasting("expires_after.seconds", ("expires_after[anchor]", "created_at"), ("expires_after[days]", "1")),
    lasting("expires_after.seconds", ("expires_after[anchor]", "created_at"), ("expires_after.seconds", "3600")),
    lasting("expires_after[seconds]", ("expires_after[seconds]", "9" * 5000)),
    # Forms that are broken in other ways
    bad(None, PURPOSE, b'Content-Disposition: form-data; filename="a.jsonl"\r\n\r\n' + LINES),
    bad(None, PURPOSE, b"Content-Type: application/jsonl\r\n\r\n" + LINES),
    bad(None, PURPOSE, b"Content-Disposition\r\n\r\nx"),
    bad(None, PURPOSE, b": form-data\r\n\r\nx"),
    bad(None, PURPOSE, b'Content-Disposition: form-data; name="file\r\n\r\n' + LINES),
    bad(None, PURPOSE, b"X-Long: " + b"x" * 20_000 + b"\r\n\r\nx"),
    bad(None, PURPOSE, *[b"X-Many: x\r\n" * 300 + FILE]),
    bad(
        None,
        PURPOSE,
        b'Content-Disposition: form-data; name="file"\r\nContent-Type: multipart/mixed; boundary=inner\r\n\r\n'
        b"--inner\r\nContent-Disposition: attachment\r\n\r\nx\r\n--inner--",
    ),
    raw(form(PURPOSE, FILE), "multipart/related; boundary=frontier", 415),
    raw(form(PURPOSE, FILE), "multipart/form-data-x; boundary=frontier", 415),
    raw(form(PURPOSE, FILE), "image/png", 415),
    raw(form(PURPOSE, FILE), "multipart/form-data; Boundary"),
    raw(form(PURPOSE, FILE).replace(b"--frontier", b"--Frontier")),
    raw(form(PURPOSE, FILE).replace(b"\r\n", b"\n")[:40]),
    raw(b"--frontier--\r\n" + form(PURPOSE, FILE), param="file"),
    raw(form(PURPOSE, FILE)[2:], param="purpose"),
    # Addresses at which there is no file, or nothing of the kind
    at("id", "GET", f"{PATH}/a%20b", 404),
    at("id", "GET", f"{PATH}/%FF", 404),
    at("id", "GET", f"{PATH}/%ED%A0%80", 404),
    at("id", "GET", f"{PATH}/batch_none", 404),
    at("id", "GET", f"{PATH}/' OR 1=1 --", 404),
    at("id", "GET", f"{PATH}/" + "x" * 300, 404),
    at("id", "GET", f"{PATH}/%00/content", 404),
    at("id", "GET", f"{PATH}/..%2F..%2Fetc%2Fpasswd/content", 404),
    at("id", "GET", f"{PATH}/%FF/content", 404),
    at("id", "DELETE", f"{PATH}/%00", 404),
    at("id", "DELETE", f"{PATH}/..%2F..%2Fetc%2Fpasswd", 404),
    at("id", "DELETE", f"{PATH}/" + "x" * 300, 404),
    at(None, "POST", f"{PATH}/file-none", 405),
    at(None, "PATCH", f"{PATH}/file-none", 405),
    at(None, "DELETE", PATH, 405),
    at(None, "PUT", PATH, 405),
    at(None, "POST", f"{PATH}/file-none/content", 405),
    at(None, "DELETE", f"{PATH}/file-none/content", 405),
    at(None, "GET", f"{PATH}/", 404),
    at(None, "GET", f"{PATH}/file-none/download", 404),
    at(None, "GET", f"{PATH}/file-none/content/1", 404),
    at("limit", "GET", f"{PATH}?limit="),
    at("limit", "GET", f"{PATH}?limit=-1"),
    at("limit", "GET", f"{PATH}?limit=1.5"),
    at("limit", "GET", f"{PATH}?limit=99999999999999999999999"),
    at("limit", "GET", f"{PATH}?limit=true"),
    at("order", "GET", f"{PATH}?order="),
    at("order", "GET", f"{PATH}?order=ASC"),
    at("order", "GET", f"{PATH}?order=created_at"),
    at("order", "GET", f"{PATH}?order=asc,desc"),
    at("purpose", "GET", f"{PATH}?limit=5&purpose=" + "x" * 1000),
    at("after", "GET", f"{PATH}?purpose=batch&after=" + "x" * 1000),
    at("after", "GET", f"{PATH}?after=%00"),
    at("after", "GET", f"{PATH}?after=file-none%00"),
    at("purpose", "GET", f"{PATH}?purpose=%00"),
    at("purpose", "GET", f"{PATH}?purpose=batch%00"),
    # What files were for once, and parts of what they are for
    bad("purpose", field("purpose", "answers"), FILE),
    bad("purpose", field("purpose", "search"), FILE),
    bad("purpose", field("purpose", "classifications"), FILE),
    bad("purpose", field("purpose", "fine-tune-"), FILE),
    bad("purpose", field("purpose", "Vision"), FILE),
    bad("purpose", field("purpose", "batch;evals"), FILE),
    # Numbers that are nearly some
    expiring("expires_after.seconds", "created_at", "--3600"),
    expiring("expires_after.seconds", "created_at", "3600-"),
    expiring("expires_after.seconds", "created_at", "3599.999"),
    expiring("expires_after.seconds", "created_at", "7200/2"),
    expiring("expires_after.seconds", "created_at", "two hours"),
    expiring("expires_after.seconds", "created_at", "PT1H"),
    expiring("expires_after.seconds", "created_at", "0b111000010000"),
    expiring("expires_after.seconds", "created_at", '"3600"'),
    # Packed in a way that it is not
    Case(None, form(PURPOSE, FILE), PATH, headers={**TYPE, "content-encoding": "gzip"}),
    Case(None, form(PURPOSE, FILE), PATH, headers={**TYPE, "content-encoding": "br"}),
    Case(None, gzip.compress(form(PURPOSE, FILE))[:40], PATH, headers={**TYPE, "content-encoding": "gzip"}),
    Case(None, gzip.compress(form(PURPOSE, FILE)), PATH, headers=TYPE),
    # Lists of so many, and other addresses
    at("limit", "GET", f"{PATH}?limit=5,6"),
    at("limit", "GET", f"{PATH}?limit=0x10"),
    at("limit", "GET", f"{PATH}?limit=null"),
    at("limit", "GET", f"{PATH}?order=asc&limit=10001"),
    at("order", "GET", f"{PATH}?limit=5&order=descending"),
    at(None, "PUT", f"{PATH}/file-none/content", 405),
    at(None, "POST", f"{PATH}/", 404),
    at(None, "GET", "/v1/file/file-none", 404),
]
