"""The client's end of the admin API: one call after another, as a command makes them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

import msgspec

from gateway.client import CallFailed, Events, api_root, lost

if TYPE_CHECKING:
    import aiohttp

Thing = dict[str, Any]
"""One object of the API, as it came."""

TIMEOUT_S = 300.0
QUIET_S = 60.0
"""A stream of events in which nothing comes for so long is lost."""
PAGE = 500


class Refused(CallFailed):
    """The gateway said no; the message says why, each field on a line of its own."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


class Administration:
    """One gateway's admin API. Every call raises CallFailed: Refused, or Unreachable."""

    def __init__(self, url: str, key: str | None) -> None:
        import asyncio

        self.root = api_root(url).removesuffix("/v1")
        self._key = key
        self._runner = asyncio.Runner()
        self._session: aiohttp.ClientSession | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._session is not None:
            self._runner.run(self._session.close())
        self._runner.close()

    def get(self, *path: object, **query: object) -> Thing:
        """One answer. Whatever is None in ``query`` is not asked for."""
        return self._runner.run(self._call("GET", path, query, None, None))

    def every(self, *path: object, most: int | None = None, **query: object) -> Iterator[Thing]:
        """What a list has, over all its pages, or the first ``most`` of it."""
        left = most
        while left is None or left > 0:
            asked = PAGE if left is None else min(left, PAGE)
            page = self.get(*path, **query, limit=asked)
            yield from page["data"]
            if not page["has_more"]:
                return
            query["after"] = page["next_cursor"]
            left = None if left is None else left - len(page["data"])

    def post(self, *path: object, body: object = None) -> Thing:
        return self._runner.run(self._call("POST", path, {}, body, None))

    def patch(self, *path: object, body: object, version: int) -> Thing:
        """``version``: the one that was read. Somebody else's change in between is a refusal."""
        return self._runner.run(self._call("PATCH", path, {}, body, version))

    def put(self, *path: object, body: object, version: int) -> Thing:
        """As ``patch``."""
        return self._runner.run(self._call("PUT", path, {}, body, version))

    def delete(self, *path: object) -> Thing:
        return self._runner.run(self._call("DELETE", path, {}, None, None))

    def follow(self, *path: object, show: Callable[[bytes], bool], **query: object) -> None:
        """Hands each payload of a stream of server-sent events to ``show``, until that is enough or the stream ends.
        Raises what ``show`` raises, too."""
        self._runner.run(self._follow(path, _params(query), show))

    async def _follow(self, path: tuple[object, ...], params: dict[str, str], show: Callable[[bytes], bool]) -> None:
        async with contextlib.aclosing(self._payloads(path, params)) as payloads:
            async for payload in payloads:
                if not show(payload):
                    return

    async def _payloads(self, path: tuple[object, ...], params: dict[str, str]) -> AsyncGenerator[bytes]:
        import aiohttp

        events = Events()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=QUIET_S)
        try:
            session = await self._opened()
            async with session.get(self._url(path), params=params, timeout=timeout) as response:
                if response.status != 200:
                    raise _refused(response.status, await response.read())
                async for data in response.content.iter_any():
                    for payload in events.feed(data):
                        yield payload
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise lost(error) from error

    async def _call(
        self, method: str, path: tuple[object, ...], query: dict[str, object], body: object, version: int | None
    ) -> Thing:
        import aiohttp

        headers = {"content-type": "application/json"} if body is not None else {}
        if version is not None:
            headers["if-match"] = f'"{version}"'
        params = _params(query)
        try:
            data = None if body is None else msgspec.json.encode(body)
        except UnicodeEncodeError as error:
            raise CallFailed("the administration is sent UTF-8 text, and this is none") from error
        try:
            session = await self._opened()
            async with session.request(method, self._url(path), params=params, data=data, headers=headers) as response:
                answer = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise lost(error) from error
        if response.status >= 400:
            raise _refused(response.status, answer)
        try:
            return msgspec.json.decode(answer, type=Thing)
        except msgspec.DecodeError as error:
            raise CallFailed(f"{self.root} has no admin API: its answer cannot be read") from error

    async def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            import aiohttp

            self._session = aiohttp.ClientSession(
                headers={"authorization": f"Bearer {self._key}"} if self._key else None,
                timeout=aiohttp.ClientTimeout(total=TIMEOUT_S, sock_connect=10.0),
            )
        return self._session

    def _url(self, path: tuple[object, ...]) -> str:
        return "/".join([self.root, "admin/v1", *(quote(str(part), safe="") for part in path)])


def _params(query: dict[str, object]) -> dict[str, str]:
    """Without what is not asked for."""
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in query.items()
        if value is not None
    }


def _refused(status: int, body: bytes) -> Refused:
    """What a problem says (RFC 9457); fields that are named there are a line each."""
    try:
        problem = msgspec.json.decode(body, type=Thing)
    except msgspec.DecodeError:
        problem = {}
    fields = problem.get("fields") or []
    if fields:
        return Refused(status, "\n".join(f"{field['name']}: {field['message']}" for field in fields))
    return Refused(status, str(problem.get("detail") or f"HTTP {status}"))
