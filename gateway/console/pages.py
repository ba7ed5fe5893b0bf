"""What a browser is given at /console: one page and what it loads, all of it from the package.

Nothing of it is secret, so no key is asked for; what it shows comes from /admin/v1. Scripts and styles are files of our
own, and the policy that goes with the page lets a browser run nothing else.
"""

from __future__ import annotations

import functools
import hashlib
from importlib import resources
from importlib.resources.abc import Traversable

from aiohttp import hdrs, web

from gateway.errors import NotFound

PATH = "/console"
TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
    "txt": "text/plain",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        *(
            f"{what} 'self'"
            for what in ("script-src", "style-src", "img-src", "font-src", "connect-src", "form-action")
        ),
        *(f"{what} 'none'" for what in ("base-uri", "frame-ancestors", "object-src")),
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
"""no-cache: a browser keeps it, and asks each time whether it is still the same."""


class Asset:
    """One file."""

    def __init__(self, name: str, body: bytes) -> None:
        self.body = body
        self.content_type = TYPES[name.rpartition(".")[2]]
        self.etag = f'"{hashlib.blake2b(body, digest_size=16).hexdigest()}"'

    def answer(self, request: web.Request) -> web.Response:
        headers = {**HEADERS, hdrs.ETAG: self.etag}
        if request.headers.get(hdrs.IF_NONE_MATCH) == self.etag:
            return web.Response(status=304, headers=headers)
        response = web.Response(body=self.body, headers=headers)
        response.content_type, response.charset = self.content_type, "utf-8"
        response.enable_compression()
        return response


@functools.cache
def assets() -> dict[str, Asset]:
    """By path below the folder."""
    found: dict[str, Asset] = {}

    def look(folder: Traversable, before: str) -> None:
        for each in folder.iterdir():
            if each.is_dir():
                look(each, f"{before}{each.name}/")
            elif each.name.rpartition(".")[2] in TYPES:
                found[before + each.name] = Asset(each.name, each.read_bytes())

    look(resources.files("gateway.console") / "assets", "")
    return found


async def page(request: web.Request) -> web.Response:
    return assets()["index.html"].answer(request)


async def asset(request: web.Request) -> web.Response:
    """Raises NotFound."""
    found = assets().get(request.match_info["name"])
    if found is None:
        raise NotFound(f"Unknown request URL: GET {request.path}.")
    return found.answer(request)


def routes() -> list[web.RouteDef]:
    return [
        web.get(PATH, page),
        web.get(f"{PATH}/", page),
        web.get(PATH + "/assets/{name:.+}", asset),
    ]
