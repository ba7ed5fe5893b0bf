"""What lies between a client and its answer: packed bodies, other origins, proxies, certificates, names of requests."""

from __future__ import annotations

import asyncio
import datetime
import gzip
import heapq
import json
import random
import ssl
import time
import zlib
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import brotli
import pytest
from aiohttp.test_utils import make_mocked_request
from click.testing import CliRunner
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from gateway.certificate import Certificate
from gateway.cli import main
from gateway.doors import DoorsError
from gateway.pressure import BUSY_S, TICK_S, Pressure
from gateway.proxies import Proxies
from gateway.unpacking import PIECE_BYTES, Unpacker
from policies.settings import Server
from tests.builders import PATIENCE_S, HandClock
from tests.gateway.conftest import ADMIN_KEY, HELLO, KEY, Front

CHAT = "/v1/chat/completions"
CALL = json.dumps({"model": "demo", "messages": HELLO}).encode()


def raw_deflate(data: bytes) -> bytes:
    packing = zlib.compressobj(wbits=-15)
    return packing.compress(data) + packing.flush()


def streamed_gzip(data: bytes) -> bytes:
    """Several members, one behind the other, and one of nothing."""
    size = 1 + len(data) // 9
    return b"".join(gzip.compress(data[at : at + size]) for at in range(0, len(data), size)) + gzip.compress(b"")


PACKED = {
    "gzip": gzip.compress,
    "X-GZIP": streamed_gzip,
    "br": brotli.compress,
    "deflate": zlib.compress,
    "Deflate": raw_deflate,
}


async def sent(front: Front, request: bytes) -> tuple[str, str]:
    """The head of the answer, and all that follows it until the connection ends."""
    address = urlsplit(front.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(request)
    async with asyncio.timeout(PATIENCE_S):
        head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    return head, body


@pytest.mark.parametrize("encoding", PACKED)
async def test_a_body_may_come_packed(front: Front, encoding):
    asked = asyncio.create_task(front.post(CHAT, PACKED[encoding](CALL), **{"content-encoding": encoding}))
    front.peer.say(await front.peer.submitted(), [*front.ids("hello"), 3], "stop")
    status, body, _ = await asked
    assert (status, body["choices"][0]["message"]["content"]) == (200, "hello")


@pytest.mark.parametrize("encoding", PACKED)
async def test_a_small_body_that_is_large_when_unpacked_is_too_large(open_front, encoding):
    bomb = PACKED[encoding](CALL + b" " * (64 << 20)) if encoding != "X-GZIP" else gzip.compress(b" " * (2 << 20)) * 64
    async with open_front(server=Server(max_body_bytes=1 << 20)) as front:
        status, body, _ = await front.post(CHAT, bomb, **{"content-encoding": encoding})
    assert (status, body["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize(
    ("encoding", "body", "status"),
    [
        ("compress", CALL, 415),
        ("zstd", CALL, 415),
        ("gzip, br", brotli.compress(gzip.compress(CALL)), 415),
        ("gzip", b"not packed", 400),
        ("br", b"not packed", 400),
        ("gzip", gzip.compress(b"") * 10_001, 400),
    ],
    ids=["compress", "zstd", "two", "not gzip", "not br", "many members"],
)
async def test_a_body_that_cannot_be_unpacked_is_refused(front: Front, encoding, body, status, caplog):
    headers = f"host: here\r\nauthorization: Bearer {KEY}\r\ncontent-encoding: {encoding}\r\nconnection: close\r\n"
    request = f"POST {CHAT} HTTP/1.1\r\n{headers}content-length: {len(body)}\r\n\r\n"
    head, answer = await sent(front, request.encode() + body)
    assert head.startswith(f"HTTP/1.1 {status} ")
    assert set(json.loads(answer)["error"]) == {"message", "type", "param", "code"}
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize("encoding", PACKED)
async def test_a_body_whose_end_is_missing_or_that_goes_on_behind_it_is_not_run(front: Front, encoding):
    whole = PACKED[encoding](CALL)
    cuts = range(1, len(whole), 7) if encoding == "gzip" else (1, len(whole) // 2, len(whole) - 4, len(whole) - 1)
    for num_bytes in cuts:
        status, body, _ = await front.post(CHAT, whole[:num_bytes], **{"content-encoding": encoding})
        assert (status, body["error"]["type"]) == (400, "invalid_request_error"), num_bytes
        assert "could not be unpacked" in body["error"]["message"], num_bytes
    for rest in (b"x", b"\0" * 8, CALL):
        status, body, _ = await front.post(CHAT, whole + rest, **{"content-encoding": encoding})
        assert (status, "could not be unpacked" in body["error"]["message"]) == (400, True), rest
    assert front.peer.is_quiet()


def test_what_was_packed_comes_out_however_it_is_cut():
    seed = random.randrange(1 << 32)
    draw = random.Random(seed)
    for _ in range(200):
        data = draw.randbytes(draw.choice((0, 1, 70, 70_000))) + b"a" * draw.choice((0, 1, 300_000))
        encoding = draw.choice(sorted(PACKED))
        packed, unpacker, whole = PACKED[encoding](data), Unpacker(encoding.lower()), b""
        while packed:
            num_bytes = draw.choice((1, 1 + len(packed) // 3, len(packed)))
            for piece in unpacker.feed(packed[:num_bytes]):
                assert len(piece) <= 2 * PIECE_BYTES, f"seed {seed}"
                whole += piece
            packed = packed[num_bytes:]
        unpacker.finish()
        assert whole == data, f"seed {seed}"


@pytest.mark.parametrize(
    ("path", "allowed"),
    [(CHAT, {"GET", "HEAD", "POST"}), ("/v1/embeddings", {"POST"}), ("/v1/models", {"GET", "HEAD"})],
)
async def test_every_address_says_what_it_takes(front: Front, path, allowed):
    async with front.http.options(front.url + path) as told:
        assert told.status == 204
        assert set(told.headers["allow"].split(", ")) == {"OPTIONS", *allowed}


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/chat/completions", "/v1/files", "/v1/batches", "/openapi.json", "/"]
)
async def test_a_head_is_an_answer_without_its_body(front: Front, path, version):
    async with front.http.get(front.url + path) as whole:
        num_bytes = len(await whole.read())
    headers = f"host: here\r\nauthorization: Bearer {KEY}\r\nconnection: close\r\n\r\n"
    head, body = await sent(front, f"HEAD {path} HTTP/{version}\r\n{headers}".encode())
    assert head.startswith(f"HTTP/{version} 200 OK")
    assert f"\r\ncontent-length: {num_bytes}\r\n" in head.lower() + "\r\n"
    assert body == ""


async def test_a_request_keeps_the_name_that_its_client_gave_it(front: Front):
    for stream in (False, True):
        call = json.dumps({"model": "demo", "messages": HELLO, "stream": stream})
        headers = {"x-request-id": "job-7/step:3", "content-type": "application/json"}
        asked = asyncio.create_task(front.http.post(front.url + CHAT, data=call, headers=headers))
        submit = await front.peer.submitted()
        front.peer.say(submit, [3], "stop")
        answer = await asked
        await answer.read()
        assert answer.headers.getall("x-request-id") == ["job-7/step:3"]
        assert answer.headers["x-penstock-request-id"] == submit.request_id
        assert answer.headers["openai-processing-ms"].isdigit()


@pytest.mark.parametrize("name", ["", "two words", "x" * 129, "naïve", '"'])
async def test_a_name_that_is_none_is_not_repeated(front: Front, name):
    _, _, headers = await front.post(CHAT, b"{", **{"x-request-id": name})
    assert headers["x-request-id"].startswith("req_")
    assert "x-penstock-request-id" not in headers


def seen(proxies: Server, peer: str, **headers: str) -> str | None:
    pairs = {name.replace("_", "-"): value for name, value in headers.items()}
    return Proxies(proxies).address_of(make_mocked_request("GET", "/", pairs).clone(remote=peer))


OURS = Server(trusted_proxies=("10.0.0.0/8", "fd00::/8"))
STANDARD = Server(trusted_proxies=("10.0.0.0/8",), forwarded_header="forwarded")


@pytest.mark.parametrize(
    ("proxies", "peer", "headers", "address"),
    [
        (Server(), "10.0.0.1", {"x_forwarded_for": "192.0.2.1"}, "10.0.0.1"),
        (OURS, "10.0.0.1", {"x_forwarded_for": "192.0.2.1"}, "192.0.2.1"),
        (OURS, "198.51.100.1", {"x_forwarded_for": "192.0.2.1"}, "198.51.100.1"),
        (OURS, "10.0.0.1", {"x_forwarded_for": "127.0.0.1, 192.0.2.1"}, "192.0.2.1"),
        (OURS, "10.0.0.1", {"x_forwarded_for": "192.0.2.1, 10.0.0.2"}, "192.0.2.1"),
        (OURS, "10.0.0.1", {"x_forwarded_for": "192.0.2.1:4711"}, "192.0.2.1"),
        (OURS, "fd00::1", {"x_forwarded_for": "[2001:db8::1]:4711"}, "2001:db8::1"),
        (OURS, "10.0.0.1", {"x_forwarded_for": "unknown"}, "10.0.0.1"),
        (OURS, "10.0.0.1", {"x_forwarded_for": "192.0.2.1, nonsense, 10.0.0.2"}, "10.0.0.2"),
        (OURS, "10.0.0.1", {"forwarded": "for=192.0.2.1"}, "10.0.0.1"),
        (OURS, "10.0.0.1", {}, "10.0.0.1"),
        (OURS, "::ffff:10.0.0.1", {"x_forwarded_for": "::ffff:192.0.2.1"}, "192.0.2.1"),
        (STANDARD, "10.0.0.1", {"forwarded": 'for="[2001:db8::1]:4711";proto=https'}, "2001:db8::1"),
        (STANDARD, "10.0.0.1", {"forwarded": "For=192.0.2.9;by=10.0.0.3, for=10.0.0.3;host=x"}, "192.0.2.9"),
        (STANDARD, "10.0.0.1", {"forwarded": 'for="192.0.2.9, for=10.0.0.3"'}, "10.0.0.1"),
        (STANDARD, "10.0.0.1", {"x_forwarded_for": "192.0.2.1"}, "10.0.0.1"),
    ],
)
def test_only_proxies_of_ours_are_believed(proxies, peer, headers, address):
    assert seen(proxies, peer, **headers) == address


@pytest.mark.parametrize("text", [';"' * 50_000, '"' + '\\"' * 50_000, "for=" + " " * 50_000 + "a b"])
def test_what_a_stranger_says_in_front_of_a_proxy_of_ours_takes_no_time(text):
    began_at = time.process_time()
    assert seen(STANDARD, "10.0.0.1", forwarded=f"{text}, for=192.0.2.1") == "192.0.2.1"
    assert time.process_time() - began_at < 5


async def test_a_key_for_an_address_works_through_a_proxy_of_ours(open_front):
    server = Server(trusted_proxies=("127.0.0.0/8",))
    async with open_front(server=server) as front:
        admin = {"authorization": "Bearer sk-of-the-tests-admin"}
        tenants = await (await front.http.get(f"{front.url}/admin/v1/tenants", headers=admin)).json()
        made = await front.http.post(
            f"{front.url}/admin/v1/keys",
            json={"tenant_id": tenants["data"][0]["id"], "name": "there", "networks": ["192.0.2.0/24"]},
            headers=admin,
        )
        assert made.status == 201, await made.text()
        bearer = {"authorization": f"Bearer {(await made.json())['key']}"}
        for address, status in (("192.0.2.7", 200), ("198.51.100.7", 403)):
            headers = {**bearer, "x-forwarded-for": address}
            assert (await front.http.get(f"{front.url}/v1/models", headers=headers)).status == status


def certified(
    directory: Path, name: str, num_days: int = 1, curve: ec.EllipticCurve | None = None
) -> tuple[Path, Path]:
    """A certificate for localhost, signed by itself and good for so many days from now on, and its key."""
    key = ec.generate_private_key(curve or ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(9))
        .not_valid_after(now + datetime.timedelta(num_days))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    cert_path, key_path = directory / "cert.pem", directory / "key.pem"
    cert_path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return cert_path, key_path


async def test_a_certificate_makes_it_https(open_front, tmp_path):
    cert, key = certified(tmp_path, "first")
    async with open_front(server=Server(host="localhost", tls_cert=str(cert), tls_key=str(key))) as front:
        assert front.url.startswith("https://localhost:")
        trusted = ssl.create_default_context(cafile=str(cert))
        headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
        async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(ssl=trusted)) as session:
            for stream in (False, True):
                call = json.dumps({"model": "demo", "messages": HELLO, "stream": stream})
                asked = asyncio.create_task(session.post(front.url + CHAT, data=call))
                front.peer.say(await front.peer.submitted(), [*front.ids("in private"), 3], "stop")
                assert "in private" in await (await asked).text()


@pytest.mark.parametrize("command", [["tenants", "list"], ["chat", "Hello"]])
async def test_a_certificate_that_a_command_does_not_trust_is_no_missing_gateway(open_front, tmp_path, command):
    cert, key = certified(tmp_path, "first")
    async with open_front(server=Server(host="localhost", tls_cert=str(cert), tls_key=str(key))) as front:
        ended = await asyncio.to_thread(CliRunner().invoke, main, [*command, "--url", front.url])
        assert ended.exit_code == 1
        assert "is not trusted" in ended.stderr
        assert "SSL_CERT_FILE" in ended.stderr
        assert "penstock serve" not in ended.stderr


def test_a_certificate_that_has_changed_is_read_again(tmp_path):
    cert, key = certified(tmp_path, "first")
    certificate = Certificate(Server(tls_cert=str(cert), tls_key=str(key)))
    assert not certificate.renew(), "nothing has changed"
    key.write_text("half of a change")
    assert not certificate.renew()
    certified(tmp_path, "second")
    assert certificate.renew()
    assert not certificate.renew()


def test_a_certificate_that_not_every_client_speaks_or_that_is_being_replaced_is_no_trouble(tmp_path):
    cert, key = certified(tmp_path, "first", curve=ec.BrainpoolP256R1())
    certificate = Certificate(Server(tls_cert=str(cert), tls_key=str(key)))
    assert certificate.trouble == ""
    cert.unlink()
    assert certificate.trouble == ""


def test_a_certificate_that_cannot_be_used_is_said_at_the_start(tmp_path):
    cert, _ = certified(tmp_path, "first")
    (tmp_path / "other").mkdir()
    _, other = certified(tmp_path / "other", "second")
    for wrong in (tmp_path / "nowhere.pem", other, cert):
        with pytest.raises(DoorsError, match="cannot be used"):
            Certificate(Server(tls_cert=str(cert), tls_key=str(wrong)))


def come(clock: HandClock, late_s: float) -> None:
    """The next timer, so late."""
    due_at, _, timer = heapq.heappop(clock._due)
    clock._now = due_at + late_s
    timer.fire()


def test_streams_wait_for_more_tokens_only_while_the_loop_is_late(clock):
    pressure = Pressure(clock, 0.004)
    assert clock.waits() == [], "nobody streams, so nothing is measured"
    with pressure.streaming():
        assert clock.waits() == [TICK_S]
        for _ in range(50):
            come(clock, BUSY_S / 2)
        assert pressure.hold_s == 0.0
        for _ in range(50):
            come(clock, 2 * BUSY_S)
        assert pressure.hold_s == 0.004
        for _ in range(50):
            come(clock, 0.0)
        assert pressure.hold_s == 0.0
        for _ in range(50):
            come(clock, 1.0)
    come(clock, 1.0)
    assert pressure.hold_s == 0.0
    assert clock.waits() == []


def test_settings_may_say_that_streams_never_wait(clock):
    with Pressure(clock, 0.0).streaming():
        assert clock.waits() == []


async def trickling(writer: asyncio.StreamWriter, gap_s: float) -> None:
    while True:
        writer.write(b"x")
        await asyncio.sleep(gap_s)  # the clock of the other end is real


@pytest.mark.parametrize("gap_s", [0.01, 1000.0])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/admin/v1/tenants"])
async def test_a_body_that_trickles_or_stops_is_not_waited_for(open_front, path, gap_s):
    async with open_front(server=Server(stall_s=0.2)) as front:
        reader, writer = await asyncio.open_connection(*front.url.removeprefix("http://").split(":"))
        key = ADMIN_KEY if path.startswith("/admin") else KEY
        head = f"POST {path} HTTP/1.1\r\nhost: here\r\nauthorization: Bearer {key}\r\ncontent-length: 100000\r\n"
        writer.write(f'{head}content-type: application/json\r\n\r\n{{"model": "'.encode())
        task = asyncio.create_task(trickling(writer, gap_s))
        async with asyncio.timeout(PATIENCE_S):
            assert (await reader.readline()).split()[1] == b"408"
        task.cancel()
        writer.close()


async def test_a_body_that_says_that_it_is_too_long_is_refused_before_it_comes(open_front):
    async with open_front(server=Server(stall_s=1000.0)) as front:
        reader, writer = await asyncio.open_connection(*front.url.removeprefix("http://").split(":"))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: here\r\nauthorization: Bearer {KEY}\r\n"
        writer.write(f"{head}content-length: {10**11}\r\n\r\n{{".encode())
        async with asyncio.timeout(PATIENCE_S):
            assert (await reader.readline()).split()[1] == b"413"
        writer.close()


@pytest.mark.parametrize("expected", [b"tea", b"\xff\xfe"])
async def test_whoever_expects_something_else_than_to_go_on_is_refused(front: Front, expected, caplog):
    asked = b"POST /v1/chat/completions HTTP/1.1\r\nhost: here\r\nconnection: close\r\ncontent-length: 2\r\n"
    head, body = await sent(front, asked + b"expect: %b\r\n\r\n{}" % expected)
    assert head.startswith("HTTP/1.1 400 ")
    assert "Expectation Failed" in body
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_long_body_that_keeps_coming_is_waited_for(open_front):
    async with open_front(server=Server(stall_s=2.0)) as front:

        async def slowly():
            yield b'{"model": "demo", "messages": ['
            for _ in range(8):
                yield b" " * (70 << 10)
                await asyncio.sleep(0.3)  # longer than stall_s together
            yield b"]}"

        headers = {"content-type": "application/json"}
        async with front.http.post(f"{front.url}/v1/chat/completions", data=slowly(), headers=headers) as answer:
            assert (answer.status, (await answer.json())["error"]["param"]) == (400, "messages")
