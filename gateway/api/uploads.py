"""/v1/uploads: files that come in parts."""

from __future__ import annotations

import msgspec
from aiohttp import web

from gateway import head, openai
from gateway.api import files
from gateway.api.forms import received
from gateway.bodies import body_of
from gateway.files import File
from gateway.files.uploads import Upload
from gateway.house import GATEWAY

ROOT = "/v1/uploads"
PATH = "/v1/uploads/{upload}"

_request = msgspec.json.Decoder(openai.UploadRequest)
_completion = msgspec.json.Decoder(openai.UploadCompletion)


async def create(request: web.Request) -> web.StreamResponse:
    gw = request.app[GATEWAY]
    tenant_id = gw.auth.caller_for(files.SCOPE, request).tenant_id
    asked = openai.decoded(_request, await body_of(gw, request))
    return head.Whole.of(shaped(await gw.uploads.create(tenant_id, asked)))


async def add(request: web.Request) -> web.StreamResponse:
    """Whether it is pending is asked before anything is read of the part, and again when all of it is here."""
    gw = request.app[GATEWAY]
    tenant_id, upload_id = gw.auth.caller_for(files.SCOPE, request).tenant_id, request.match_info["upload"]
    await gw.uploads.pending(tenant_id, upload_id)
    async with gw.files.quota(tenant_id, "part") as check, gw.files.staged(tenant_id, gw.files.parts) as staged:
        await received(gw, request, "data", staged, check)
        part = await gw.uploads.add(tenant_id, upload_id, staged)
    return head.Whole.of(openai.UploadPartBody(id=part.id, created_at=part.created_at, upload_id=part.upload_id))


async def complete(request: web.Request) -> web.StreamResponse:
    gw = request.app[GATEWAY]
    tenant_id = gw.auth.caller_for(files.SCOPE, request).tenant_id
    asked = openai.decoded(_completion, await body_of(gw, request))
    return head.Whole.of(shaped(*await gw.uploads.complete(tenant_id, request.match_info["upload"], asked)))


async def cancel(request: web.Request) -> web.StreamResponse:
    gw = request.app[GATEWAY]
    tenant_id = gw.auth.caller_for(files.SCOPE, request).tenant_id
    return head.Whole.of(shaped(await gw.uploads.cancel(tenant_id, request.match_info["upload"])))


def routes() -> list[web.RouteDef]:
    return [
        web.post(ROOT, create),
        web.post(f"{PATH}/parts", add),
        web.post(f"{PATH}/complete", complete),
        web.post(f"{PATH}/cancel", cancel),
    ]


def shaped(upload: Upload, file: File | None = None) -> openai.UploadBody:
    """A row as its client sees it; ``file``: what has become of it."""
    return openai.UploadBody(
        id=upload.id,
        bytes=upload.num_bytes,
        created_at=upload.created_at,
        expires_at=upload.expires_at,
        filename=upload.filename,
        purpose=upload.purpose,
        status=upload.status,
        file=None if file is None else files.body_of(file),
    )
