"""The administration as its clients see it: one call, its status, body and headers; and every problem is proper."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from tests.gateway.conftest import ADMIN_KEY, Front


@dataclass
class Reply:
    status: int
    body: Any
    headers: Mapping[str, str]

    @property
    def etag(self) -> str:
        return self.headers["etag"]

    def fields(self) -> list[str]:
        """What a problem says has to change."""
        return [field["name"] for field in self.body["fields"]]


class Desk:
    """``reply = await desk("POST", "tenants", {"name": "blue"})``; header names are written with underscores."""

    def __init__(self, front: Front) -> None:
        self.front = front

    async def __call__(
        self, method: str, path: str, body: object = None, key: str | None = ADMIN_KEY, **headers: str
    ) -> Reply:
        """``path`` is under /admin/v1 unless it begins with a slash; ``body`` is sent as JSON unless it is bytes;
        ``key`` None: no key is sent."""
        path = path if path.startswith("/") else f"/admin/v1/{path}"
        data = body if isinstance(body, bytes | None) else msgspec.json.encode(body)
        sent = {
            **({} if key is None else {"authorization": f"Bearer {key}"}),
            "content-type": "application/json",
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        async with (
            contextlib.nullcontext(self.front.http) if key is not None else aiohttp.ClientSession() as http,
            http.request(method, self.front.url + path, data=data, headers=sent) as answer,
        ):
            reply = Reply(answer.status, msgspec.json.decode(await answer.read() or b"null"), answer.headers)
        assert "x-request-id" in reply.headers
        if reply.status >= 400 and path.startswith("/admin/v1/"):
            assert answer.content_type == "application/problem+json", reply
            assert set(reply.body) == {"type", "title", "status", "detail", "instance", "fields"}
            assert reply.body["status"] == reply.status
            assert reply.body["detail"]
        return reply

    async def made(self, path: str, body: object, **options: Any) -> Any:
        """What a POST made."""
        reply = await self("POST", path, body, **options)
        assert reply.status in (200, 201), reply
        return reply.body

    async def got(self, path: str, **options: Any) -> Any:
        """What a GET found."""
        reply = await self("GET", path, **options)
        assert reply.status == 200, reply
        return reply.body

    async def can(self, key: str) -> int:
        """The status that a request for the models has with this key."""
        headers = {"authorization": f"Bearer {key}"}
        async with self.front.http.get(f"{self.front.url}/v1/models", headers=headers) as answer:
            return answer.status

    async def everything(self) -> dict[str, list[Any]]:
        """All that can be changed, to see that nothing was."""
        paths = ("organizations", "tenants", "service_accounts", "keys", "admin_keys", "policies", "audit_log")
        return {path: (await self.got(f"{path}?limit=500"))["data"] for path in paths}
