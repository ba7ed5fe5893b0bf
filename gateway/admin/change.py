"""One change of the administration: a transaction, its lines in the audit log, and the answer that an Idempotency-Key
gets again.

All of it is committed or nothing, and changes come one after the other (``Store.changing``), so what a handler reads in
its transaction is what it changes. An answer that is kept may hold a new key, which the store must not have in clear:
it is sealed under the key of whoever asked, who alone can have it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import secrets
import time
from typing import TYPE_CHECKING, Any

import msgspec
import sqlalchemy as sa
from aiohttp import web
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway import store
from gateway.admin.problems import Invalid, KeyReused
from gateway.console.sessions import credentials_of
from gateway.head import HEAD
from gateway.store import StoreError, new_id

if TYPE_CHECKING:
    from gateway.admin.endpoint import Ask, Endpoint
    from gateway.house import Gateway

KEPT_S = 86_400
"""How long the same Idempotency-Key gets the same answer."""
TELL_S = 2.0
"""How long an answer waits for this gateway to go by what it changed."""
NUM_NONCE_BYTES = 16
_PRINTABLE = re.compile(r"[\x20-\x7e]{1,255}")


class Change:
    """What a handler needs to change something."""

    def __init__(self, ask: Ask[Any, Any], connection: AsyncConnection, revision: int) -> None:
        self.connection = connection
        self.revision = revision
        """Every row that is changed carries it."""
        self.at = int(time.time())
        self._ask = ask
        self.num_recorded = 0
        self.is_done_already = False
        """What is asked for was so before: nothing changes, and there is nothing to record."""

    async def record(
        self, action: str, kind: str, object_id: str, before: msgspec.Struct | None, after: msgspec.Struct | None
    ) -> None:
        """A line in the audit log. ``action`` such as "tenant.created"; neither side may hold a secret."""
        self.num_recorded += 1
        line = {
            "id": new_id("aud"),
            "at": self.at,
            "actor_key_id": self._ask.caller.key_id,
            "actor_name": self._ask.caller.name,
            "action": action,
            "object_kind": kind,
            "object_id": object_id,
            "before": None if before is None else msgspec.json.encode(before).decode(),
            "after": None if after is None else msgspec.json.encode(after).decode(),
            "request_id": self._ask.request[HEAD].request_id,
            "address": self._ask.request[HEAD].address or "",
        }
        await self.connection.execute(sa.insert(store.audit_log), line)


async def made(ask: Ask[Any, Any], endpoint: Endpoint, *found: Any) -> web.Response:
    """The endpoint's change, once committed; or the answer that its Idempotency-Key had before. ``found``: what the
    handler gets besides."""
    request = ask.request
    key = _idempotency_key(request) if endpoint.method == "POST" else None
    async with ask.gw.store.changing() as (connection, revision):
        body_hash = await _hash_of(request)
        if key is not None and (again := await _kept(connection, ask, key, body_hash)) is not None:
            return again
        change = Change(ask, connection, revision)
        answer = await endpoint.handler(ask, change, *found)
        assert isinstance(answer, msgspec.Struct), "what changes something answers with what it is now"
        response = endpoint.response(request, answer)
        assert change.num_recorded or change.is_done_already, "a change without a line in the audit log"
        if key is not None:
            await _keep(change, ask, key, body_hash, response)
    return response


async def tell(gw: Gateway) -> None:
    """This gateway and the others go by the change before the answer is out. What fails here, or takes too long, is
    made up for by whoever watches the store."""
    with contextlib.suppress(SQLAlchemyError, OSError, StoreError):  # TimeoutError is an OSError
        async with asyncio.timeout(TELL_S):
            await gw.directory.refresh()
    gw.directory.notice()
    await gw.gateways.tell(gw.directory.revision)


def _idempotency_key(request: web.Request) -> str | None:
    key: str | None = request.headers.get("idempotency-key")
    if key is not None and not _PRINTABLE.fullmatch(key):
        raise Invalid.of([("Idempotency-Key", "must be 1 to 255 printable characters")])
    return key


async def _hash_of(request: web.Request) -> bytes:
    body = hashlib.sha256(f"{request.method} {request.rel_url}\n".encode())
    body.update(await request.read())
    return body.digest()


async def _kept(connection: AsyncConnection, ask: Ask[Any, Any], key: str, body_hash: bytes) -> web.Response | None:
    columns = store.idempotency.c
    oldest = int(time.time()) - KEPT_S
    await connection.execute(sa.delete(store.idempotency).where(columns.created_at < oldest))
    query = sa.select(columns.body_hash, columns.status, columns.response)
    row = (await connection.execute(query.where(columns.key_id == ask.caller.key_id, columns.key == key))).first()
    if row is None:
        return None
    if row.body_hash != body_hash:
        raise KeyReused(
            "This Idempotency-Key was used for another request. Take a new one for each thing that you want done."
        )
    try:
        etag, body = msgspec.msgpack.decode(_sealed(ask.request, row.response), type=tuple[str | None, bytes])
    except (msgspec.DecodeError, UnicodeDecodeError):  # sealed with other credentials of the same admin key
        raise KeyReused(
            "This Idempotency-Key was used in another session of this admin key, or with the key itself. What it asked"
            " for is done, and its answer is for whoever asked then."
        ) from None
    headers = {"idempotent-replayed": "true", **({"etag": etag} if etag else {})}
    return web.Response(status=row.status, body=body, content_type="application/json", headers=headers)


async def _keep(change: Change, ask: Ask[Any, Any], key: str, body_hash: bytes, response: web.Response) -> None:
    nonce = secrets.token_bytes(NUM_NONCE_BYTES)
    answer = msgspec.msgpack.encode((response.headers.get("etag"), response.body))
    row = {
        "key_id": ask.caller.key_id,
        "key": key,
        "body_hash": body_hash,
        "status": response.status,
        "response": nonce + _sealed(ask.request, nonce + answer),
        "created_at": change.at,
    }
    await change.connection.execute(sa.insert(store.idempotency), row)


def _sealed(request: web.Request, text: bytes) -> bytes:
    """Seals and opens: what follows the nonce in ``text``, with each byte turned by SHAKE-256 of the caller's key and
    the nonce. A nonce is used once."""
    nonce, body = text[:NUM_NONCE_BYTES], text[NUM_NONCE_BYTES:]
    turns = hashlib.shake_256(b"penstock answer\0" + nonce + credentials_of(request)).digest(len(body))
    return bytes(one ^ other for one, other in zip(body, turns, strict=True))
