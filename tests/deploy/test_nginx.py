"""`deploy/nginx/penstock.conf` before a real gateway: nothing on the way is held back, cut or mistaken."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from tests.builders import PATIENCE_S
from tests.conftest import skip
from tests.gateway.test_transport import certified
from tests.house import House
from tests.journeys.test_process import until
from tests.ports import free_port

SITE = Path(__file__).parents[2] / "deploy" / "nginx" / "penstock.conf"
AROUND = """
{user}
daemon off;
pid {here}/pid;
error_log {here}/errors;
events {{}}
http {{
    access_log off;
    client_body_temp_path {here}/bodies;
    proxy_temp_path {here}/answers;
    include {here}/penstock.conf;
}}
"""


@contextlib.contextmanager
def nginx(house: House, here: Path) -> Iterator[str]:
    """The URL under which it has the house."""
    program = shutil.which("nginx")
    if program is None:
        skip(FileNotFoundError("nginx is not installed (apt-get install nginx-light)"))
    port = free_port()
    certificate, key = certified(here, "localhost")
    site = SITE.read_text()
    for written, real in (
        ("127.0.0.1:8080", urlsplit(house.url).netloc),
        ("listen 443", f"listen 127.0.0.1:{port}"),
        ("/etc/ssl/certs/llm.example.com.pem", str(certificate)),
        ("/etc/ssl/private/llm.example.com.key", str(key)),
    ):
        assert site.count(written) == 1, written
        site = site.replace(written, real)
    (here / "penstock.conf").write_text(site)
    user = "user root;" if os.geteuid() == 0 else ""
    (here / "nginx.conf").write_text(AROUND.format(user=user, here=here))
    command = [program, "-e", here / "errors", "-c", here / "nginx.conf"]
    tried = subprocess.run([*command, "-t"], capture_output=True, text=True, check=False)
    assert (tried.returncode, "warn" in tried.stderr) == (0, False), tried.stderr
    process = subprocess.Popen(command)
    try:
        until(lambda: _listens(port))
        yield f"https://localhost:{port}"
    finally:
        process.terminate()
        process.wait()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


@contextlib.asynccontextmanager
async def asking(url: str, here: Path, **headers: str) -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=str(here / "cert.pem")))
    timeout = aiohttp.ClientTimeout(PATIENCE_S)
    async with aiohttp.ClientSession(url, headers=headers, timeout=timeout, connector=connector) as http:
        yield http


async def test_nothing_on_the_way_is_held_back_or_cut(start_house, tmp_path):
    house = start_house("--step-s", 0.01, "--token-ids", "72")
    with nginx(house, tmp_path) as url:
        async with asking(url, tmp_path, authorization=f"Bearer {house.key}") as http:
            body = {"model": "demo", "prompt": "x", "max_tokens": 8000, "stream": True}
            async with http.post("/v1/completions", json=body) as stream:
                assert (await stream.content.readline()).startswith(b"data: ")
                assert await house.num_open_requests() == 1
            await house.quiet()

            async with http.ws_connect("/v1/responses") as lane:
                await lane.send_json({"type": "response.create", "model": "demo", "input": "x", "store": False})
                assert (await lane.receive_json())["type"] == "response.created"
            await house.quiet()

            form = aiohttp.FormData({"purpose": "batch"})
            form.add_field("file", bytes(20 << 20), filename="lines.jsonl")
            async with http.post("/v1/files", data=form) as answer:
                assert (answer.status, (await answer.json())["bytes"]) == (200, 20 << 20)


async def test_who_comes_through_it_is_no_program_on_its_machine(start_house, tmp_path):
    house = start_house()
    with nginx(house, tmp_path) as url:
        async with asking(url, tmp_path) as http, http.get("/metrics") as through:
            assert through.status == 401
        async with asking(house.url, tmp_path) as http, http.get("/metrics") as directly:
            assert directly.status == 200
