"""/v1/files: what tenants upload, and what batches have written for them."""

from __future__ import annotations

from urllib.parse import quote

from aiohttp import hdrs, web

from gateway import head, openai
from gateway.api.forms import received
from gateway.api.request import query_of
from gateway.errors import RangeNotSatisfiable
from gateway.files import File
from gateway.house import GATEWAY
from gateway.openai.pages import ends_of

SCOPE = "files"
"""The scope."""


async def upload(request: web.Request) -> web.StreamResponse:
    """Its parts come in any order, so what it is for may be known only when all of it is here."""
    gw = request.app[GATEWAY]
    caller = gw.auth.caller_for(SCOPE, request)
    tenant_id = caller.tenant_id
    async with gw.files.quota(tenant_id) as check, gw.files.staged(tenant_id) as staged:
        fields, filename = await received(gw, request, "file", staged, check)
        terms = openai.converted(fields, openai.FileTerms, "", strict=False)
        file = await gw.files.keep(staged, tenant_id, filename, terms.purpose, gw.files.expires_s(terms))
    return head.Whole.of(body_of(file))


async def every(request: web.Request) -> web.StreamResponse:
    gw = request.app[GATEWAY]
    caller = gw.auth.caller_for(SCOPE, request)
    query = query_of(request, openai.FileQuery)
    files, has_more = await gw.files.page(
        caller.tenant_id, query.after, query.limit, query.order == "desc", query.purpose
    )
    data = [body_of(file) for file in files]
    first, last = ends_of(data)
    return head.Whole.of(openai.FileList(data=data, first_id=first, last_id=last, has_more=has_more))


async def one(request: web.Request) -> web.StreamResponse:
    return head.Whole.of(body_of(await _found(request)))


async def content(request: web.Request) -> web.StreamResponse:
    """All of it or a range, as the disk gives it."""
    gw, file = request.app[GATEWAY], await _found(request)
    if hdrs.RANGE in request.headers and hdrs.IF_RANGE not in request.headers and not _is_part(request, file):
        raise RangeNotSatisfiable(file.num_bytes)
    named = "attachment; filename*=UTF-8''" + quote(file.filename, safe="")
    headers = {hdrs.CONTENT_TYPE: "application/octet-stream", hdrs.CONTENT_DISPOSITION: named}
    return web.FileResponse(gw.files.path(file.id), headers=headers)


def _is_part(request: web.Request, file: File) -> bool:
    try:
        first = request.http_range.start
    except ValueError:
        return False
    return first is None or first < file.num_bytes


async def delete(request: web.Request) -> web.StreamResponse:
    gw = request.app[GATEWAY]
    file_id = request.match_info["file"]
    await gw.files.delete(gw.auth.caller_for(SCOPE, request).tenant_id, file_id)
    return head.Whole.of(openai.FileDeleted(id=file_id))


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


async def _found(request: web.Request) -> File:
    gw = request.app[GATEWAY]
    return await gw.files.find(gw.auth.caller_for(SCOPE, request).tenant_id, request.match_info["file"])
