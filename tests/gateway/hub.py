"""A small model hub on this machine: as much of its API as huggingface_hub's own client asks for, and its faults."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee00" * 5
LARGE = (".safetensors", ".gguf")
"""What is stored by its SHA-256; the rest by Git's hash."""


class Hub:
    """One repository, "org/model", with these files."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = dict(files)
        self.status = 0
        """Answered to everything instead."""
        self.error_code = ""
        """The ``X-Error-Code`` that goes with it."""
        self.break_at: int | None = None
        """Of the first download that is longer: after so many bytes the connection is lost."""
        self.stays_away = False
        """After that nothing is answered any more."""
        self.corrupt: set[str] = set()
        """Files that arrive with another last byte."""
        self.ranges: list[str] = []
        """That were asked for."""
        self.downloads: list[str] = []
        self.url = ""

    def sibling(self, name: str) -> dict[str, object]:
        content = self.files[name]
        entry: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": git_hash(content)}
        if name.endswith(LARGE):
            entry["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
        return entry

    def leaf(self, name: str) -> dict[str, object]:
        content = self.files[name]
        entry: dict[str, object] = {"type": "file", "path": name, "size": len(content), "oid": git_hash(content)}
        if name.endswith(LARGE):
            entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
        return entry


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextlib.contextmanager
def serving(files: Mapping[str, bytes]) -> Iterator[Hub]:
    hub = Hub(files)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            parts = unquote(urlsplit(self.path).path).strip("/").split("/")
            if hub.status:
                return self.refuse(hub.status, hub.error_code)
            if parts[:2] == ["api", "models"]:
                return self.api(parts[2:])
            if parts[:2] == ["org", "model"] and parts[2:3] == ["resolve"]:
                return self.file("/".join(parts[4:]))
            return self.refuse(404, "RepoNotFound")

        def api(self, parts: list[str]) -> None:
            match parts:
                case ["org", "model", "tree", *_]:
                    return self.answer([hub.leaf(name) for name in hub.files])
                case ["org", "model"] | ["org", "model", "revision", "main" | "v1"]:
                    siblings = [hub.sibling(name) for name in hub.files]
                    return self.answer({"id": "org/model", "sha": COMMIT, "siblings": siblings})
                case ["org", "model", "revision", _]:
                    return self.refuse(404, "RevisionNotFound")
            return self.refuse(404, "RepoNotFound")

        def file(self, name: str) -> None:
            content = hub.files[name]
            is_large = name.endswith(LARGE)
            etag = hashlib.sha256(content).hexdigest() if is_large else git_hash(content)
            if name in hub.corrupt:
                content = content[:-1] + bytes([content[-1] ^ 1])
            start = 0
            if wanted := self.headers.get("range"):
                hub.ranges.append(wanted)
                start = int(wanted.removeprefix("bytes=").partition("-")[0])
            self.send_response(206 if wanted else 200)
            self.send_header("etag", f'"{etag}"')
            self.send_header("x-repo-commit", COMMIT)
            self.send_header("content-length", str(len(content) - start))
            if wanted:
                self.send_header("content-range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            self.end_headers()
            if self.command == "HEAD":
                return
            hub.downloads.append(name)
            if hub.break_at is not None and len(content) > hub.break_at:
                self.wfile.write(content[: hub.break_at])
                hub.break_at = None
                hub.status = 503 if hub.stays_away else 0
                self.close_connection = True
                return
            self.wfile.write(content[start:])

        def answer(self, body: object) -> None:
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("x-error-code", code)
            self.send_header("content-length", "0")
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="hub")
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
