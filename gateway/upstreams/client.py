"""Requests to upstreams over HTTP: one session for all of them, whose connections are used again.

What comes back is bounded in time (until connected, until the first byte, between bytes, altogether) and in bytes, and
is given out as JSON texts: the events of a stream, or the one body. Whatever goes wrong is a ``Trouble``.
"""

from __future__ import annotations

import asyncio
import contextlib
from codecs import BOM_UTF8
from collections.abc import AsyncIterator, Mapping

import aiohttp

from gateway.upstreams import failures
from gateway.upstreams.known import Known

MAX_CONNECTIONS = 4096
"""To all upstreams together."""
VECTORS_AN_ANSWER = 256
"""For each so many of them an answer may have ``max_answer_bytes`` again: 128 KiB a vector, where those are 32 MiB."""
MAX_ERROR_BYTES = 64 << 10
"""Of an answer that is an error."""
KEEP_S = 60.0
"""So long a connection that nobody uses is kept."""
LAST_S = 1.0
"""After its last event a stream may take so long to end, so that its connection can be used again."""
DONE = b"[DONE]"
NO_CONTEXT: Mapping[str, str] = {}
GONE = (502, 503, 504)
"""Who answers a probe so cannot answer anything else; with other errors some answer that have no such list."""


class Client:
    """An async context manager around the session."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        connector = aiohttp.TCPConnector(limit=MAX_CONNECTIONS, keepalive_timeout=KEEP_S, ttl_dns_cache=30)
        self._session = aiohttp.ClientSession(
            connector=connector, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=True, trust_env=False
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def ask(
        self,
        upstream: Known,
        path: str,
        body: bytes,
        streams: bool,
        context: Mapping[str, str] = NO_CONTEXT,
        num_vectors: int = 0,
    ) -> AsyncIterator[bytes]:
        """The JSON texts that it answers with; after the last of a stream, "[DONE]", if it says so. Raises Trouble.
        ``context``: headers that say which trace it belongs to; ``num_vectors``: that are asked for."""
        terms = upstream.terms
        max_bytes = terms.max_answer_bytes * max(1, -(-num_vectors // VECTORS_AN_ANSWER))
        first_s = terms.first_byte_timeout_s if streams else terms.timeout_s
        ends_at, has_begun = asyncio.get_running_loop().time() + terms.timeout_s, False
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout_at(ends_at):
                    try:
                        async with asyncio.timeout(first_s):
                            response = await stack.enter_async_context(self._post(upstream, path, body, context))
                    except TimeoutError as error:
                        if isinstance(error, aiohttp.ConnectionTimeoutError):
                            raise failures.unreachable(f"no connection within {terms.connect_timeout_s:g} s") from None
                        raise failures.too_late("did not begin to answer", first_s) from None
                    if response.status != 200:
                        raise failures.of_status(response.status, response.headers, await _error_of(response, upstream))
                is_stream = response.content_type == "text/event-stream"
                texts = _events(response, upstream) if is_stream else _whole(response, max_bytes, first_s)
                while (text := await _next_of(texts, ends_at)) is not None:
                    yield text
                    has_begun = True
        except TimeoutError:  # who has begun by then and did not fall silent was asked for much
            raise failures.too_late("did not finish its answer", terms.timeout_s, is_fault=not has_begun) from None
        except aiohttp.ClientPayloadError as error:
            raise failures.cut(f"the answer broke off: {_shown(error)}") from None
        except (aiohttp.ClientConnectorError, aiohttp.ServerDisconnectedError, ConnectionError) as error:
            raise failures.unreachable(_shown(error)) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:  # headers that are none, lines without an end
            raise failures.garbage(_shown(error)) from None

    async def is_there(self, upstream: Known) -> str:
        """Why it is not, empty where it is: it lists its models, or says at least something else."""
        assert self._session is not None
        terms, url = upstream.terms, upstream.terms.url.rstrip("/") + "/models"
        timeout = aiohttp.ClientTimeout(total=terms.connect_timeout_s, sock_connect=terms.connect_timeout_s)
        try:
            async with self._session.get(
                url, headers=_headers(upstream), timeout=timeout, allow_redirects=False
            ) as response:
                return f"HTTP {response.status}" if response.status in GONE else ""
        except TimeoutError:
            return f"no word within {terms.connect_timeout_s:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return _shown(error)

    def _post(
        self, upstream: Known, path: str, body: bytes, context: Mapping[str, str]
    ) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]:
        assert self._session is not None
        terms = upstream.terms
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=terms.connect_timeout_s)
        headers = {"content-type": "application/json", **_headers(upstream), **context}
        # A redirection would take the key to where nobody has said that it belongs.
        return self._session.post(
            terms.url.rstrip("/") + path,
            data=body,
            headers=headers,
            timeout=timeout,
            allow_redirects=False,
        )


async def _next_of(texts: AsyncIterator[bytes], ends_at: float) -> bytes | None:
    """None at the end. The time is taken anew for each, as it ends what the task that began to count it waits for: the
    first text is read by another one than the rest. Raises TimeoutError."""
    async with asyncio.timeout_at(ends_at):
        return await anext(texts, None)


async def _events(response: aiohttp.ClientResponse, upstream: Known) -> AsyncIterator[bytes]:
    """Of a stream of server-sent events, what each says."""
    said: list[bytes] = []
    async for line in _lines(response, upstream):
        if line.startswith(b"data:"):
            said.append(line[5:].strip())
        elif not line and said:
            event, said = b"\n".join(said), []
            yield event
            if event == DONE:
                with contextlib.suppress(TimeoutError, aiohttp.ClientError, RuntimeError):
                    async with asyncio.timeout(LAST_S):
                        await response.content.read(1)
                return
    if said:  # some end without the empty line
        yield b"\n".join(said)


async def _lines(response: aiohttp.ClientResponse, upstream: Known) -> AsyncIterator[bytes]:
    """Ends of lines are any of those that the standard names; a line is no longer than an answer may be."""
    terms, rest, num_bytes, is_half = upstream.terms, b"", 0, False
    while True:
        chunk = await _chunk(response, terms.idle_timeout_s)
        if not chunk:
            break
        num_bytes += len(chunk)
        if num_bytes > terms.max_answer_bytes:
            raise failures.too_long(terms.max_answer_bytes)
        if is_half:  # of "\r\n"
            chunk = chunk.removeprefix(b"\n")
        is_half = chunk.endswith(b"\r")
        if b"\r" in chunk:
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if b"\n" not in chunk:
            rest += chunk
            continue
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.removeprefix(BOM_UTF8)
    if rest:
        yield rest


async def _whole(response: aiohttp.ClientResponse, max_bytes: int, idle_s: float) -> AsyncIterator[bytes]:
    chunks, num_bytes = [], 0
    while chunk := await _chunk(response, idle_s):
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise failures.too_long(max_bytes)
        chunks.append(chunk)
    yield b"".join(chunks)


async def _chunk(response: aiohttp.ClientResponse, idle_s: float) -> bytes:
    """Empty at the end."""
    try:
        async with asyncio.timeout(idle_s):
            return await response.content.readany()
    except TimeoutError:
        raise failures.too_late("said no more", idle_s) from None
    except RuntimeError as error:  # aiohttp's, where it closed the connection on bytes that it cannot read
        raise failures.cut(_shown(error)) from None


async def _error_of(response: aiohttp.ClientResponse, upstream: Known) -> bytes:
    body = b""
    with contextlib.suppress(TimeoutError, aiohttp.ClientError):
        async with asyncio.timeout(upstream.terms.idle_timeout_s):
            while len(body) < MAX_ERROR_BYTES and (chunk := await response.content.readany()):
                body += chunk
    return upstream.key.without(body.decode("utf-8", "replace")).encode()


def _headers(upstream: Known) -> dict[str, str]:
    return {"authorization": f"Bearer {upstream.key.value}"} if upstream.key.value else {}


def _shown(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
