"""/v1/files: what tenants upload, and what batches have written for them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
from aiohttp import BodyPartReader, MultipartReader, hdrs, web
from aiohttp.http_exceptions import HttpProcessingError

from gateway import openai
from gateway.api.request import query_of
from gateway.auth import Caller
from gateway.errors import BodyTimeout, InvalidRequest, UnsupportedMediaType
from gateway.files import File, Staged
from gateway.house import GATEWAY, Gateway

ENDPOINT = "files"
"""The scope."""
PIECE_BYTES = 1 << 20
"""Written at once."""
MAX_FIELDS, MAX_FIELD_BYTES = 16, 4096
MAX_NAME_CHARS = 255

T = TypeVar("T")


async def upload(request: web.Request) -> web.Response:
    """Its parts come in any order, so what it is for may be known only when all of it is here."""
    gw = request.app[GATEWAY]
    caller = _caller(gw, request)
    if request.content_type != "multipart/form-data":
        raise UnsupportedMediaType(f"Unsupported content type '{request.content_type}': send multipart/form-data")
    tenant_id = caller.tenant_id
    async with gw.files.quota(tenant_id) as check, gw.files.staged() as staged, _parts(request) as reader:
        fields, filename = await _received(gw, reader, staged, check)
        if filename is None:
            raise openai.Malformed("Missing required parameter: 'file'.", "file", "missing_required_parameter")
        terms = openai.converted(_nested(fields), openai.FileTerms, "", strict=False)
        expires_s = gw.files.config.batch_expires_s if terms.purpose == "batch" else None
        if terms.expires_after is not None:
            expires_s = terms.expires_after.seconds
        file = await gw.files.keep(staged, tenant_id, filename, terms.purpose, expires_s)
    return _json(body_of(file))


async def every(request: web.Request) -> web.Response:
    gw = request.app[GATEWAY]
    caller = _caller(gw, request)
    query = query_of(request, openai.FileQuery)
    files, has_more = await gw.files.page(
        caller.tenant_id, query.after, query.limit, query.order == "desc", query.purpose
    )
    data = [body_of(file) for file in files]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return _json(openai.FileList(data=data, first_id=first, last_id=last, has_more=has_more))


async def one(request: web.Request) -> web.Response:
    return _json(body_of(await _found(request)))


async def content(request: web.Request) -> web.StreamResponse:
    """All of it or a range, as the disk gives it."""
    gw, file = request.app[GATEWAY], await _found(request)
    named = "attachment; filename*=UTF-8''" + quote(file.filename, safe="")
    headers = {hdrs.CONTENT_TYPE: "application/octet-stream", hdrs.CONTENT_DISPOSITION: named}
    return web.FileResponse(gw.files.path(file.id), headers=headers)


async def delete(request: web.Request) -> web.Response:
    gw = request.app[GATEWAY]
    file_id = request.match_info["file"]
    await gw.files.delete(_caller(gw, request).tenant_id, file_id)
    return _json(openai.FileDeleted(id=file_id))


def body_of(file: File) -> openai.FileBody:
    return openai.FileBody(
        id=file.id,
        bytes=file.num_bytes,
        created_at=file.created_at,
        expires_at=file.expires_at,
        filename=file.filename,
        purpose=file.purpose,
        penstock=openai.FileExtras(sha256=file.sha256),
    )


def _caller(gw: Gateway, request: web.Request) -> Caller:
    caller = gw.auth.caller_of(request)
    caller.check_endpoint(ENDPOINT)
    return caller


async def _found(request: web.Request) -> File:
    gw = request.app[GATEWAY]
    return await gw.files.find(_caller(gw, request).tenant_id, request.match_info["file"])


@contextlib.asynccontextmanager
async def _parts(request: web.Request) -> AsyncIterator[MultipartReader]:
    try:
        yield await request.multipart()
    except openai.Malformed:
        raise
    except (ValueError, AssertionError, RuntimeError, EOFError, HttpProcessingError) as error:
        # What aiohttp says of a broken body.
        raise InvalidRequest(f"The body could not be read as multipart/form-data: {error}") from None


async def _received(
    gw: Gateway, reader: MultipartReader, staged: Staged, check: Callable[[int], None]
) -> tuple[dict[str, str], str | None]:
    """The fields, and the name of the file, all of which has been written then; None: there was none."""
    fields: dict[str, str] = {}
    filename = None
    while (part := await _in_time(gw, reader.next())) is not None:
        if not isinstance(part, BodyPartReader) or part.name is None:
            raise InvalidRequest("Each part of the body needs a name")
        if part.name == "file":
            if filename is not None:
                raise InvalidRequest("There is more than one 'file'", param="file")
            filename = _storable(part.filename or "upload")
            await _stage(gw, part, staged, check)
        elif len(fields) == MAX_FIELDS:
            raise InvalidRequest(f"The body has more than {MAX_FIELDS} fields")
        else:
            fields[part.name] = await _field(gw, part)
    return fields, filename


async def _stage(gw: Gateway, part: BodyPartReader, staged: Staged, check: Callable[[int], None]) -> None:
    piece, num_bytes = bytearray(), 0
    while not part.at_eof():
        data = await _in_time(gw, part.read_chunk(1 << 16))
        num_bytes += len(data)
        check(num_bytes)
        piece += data
        if len(piece) >= PIECE_BYTES:
            await staged.write(bytes(piece))
            piece.clear()
    await staged.write(bytes(piece))


async def _field(gw: Gateway, part: BodyPartReader) -> str:
    value = bytearray()
    while not part.at_eof():
        value += await _in_time(gw, part.read_chunk(MAX_FIELD_BYTES))
        if len(value) > MAX_FIELD_BYTES:
            raise InvalidRequest(f"'{part.name}' is longer than {MAX_FIELD_BYTES} bytes", param=part.name)
    return value.decode("utf-8", "replace")


async def _in_time(gw: Gateway, arriving: Coroutine[Any, Any, T]) -> T:
    """A client that sends nothing for as long as one may read nothing is not waited for."""
    try:
        async with asyncio.timeout(gw.settings.server.stall_s):
            return await arriving
    except TimeoutError:
        raise BodyTimeout() from None


def _nested(fields: dict[str, str]) -> dict[str, Any]:
    """A form has no objects: ``expires_after[seconds]`` is how OpenAI's clients write one."""
    nested: dict[str, Any] = {}
    for name, value in fields.items():
        outer, bracket, inner = name.partition("[")
        if bracket and inner.endswith("]"):
            among = nested.setdefault(outer, {})
            if isinstance(among, dict):
                among[inner[:-1]] = value
        else:
            nested[name] = value
    return nested


def _storable(filename: str) -> str:
    """A name to be shown; nothing is opened by it. (PostgreSQL has no NUL, and UTF-8 no lone surrogates.)"""
    name = filename.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()
    return name[:MAX_NAME_CHARS]


def _json(body: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
