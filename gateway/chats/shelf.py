"""Where kept chats lie (``gateway/shelving.py``)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from gateway import openai, store
from gateway.chats.shapes import ChatQuery
from gateway.openai.messages import Message
from gateway.shelving import Row, Shelving, in_time, pieces

_ID = re.compile("chatcmpl-[0-9a-f]{32}")

rows, labels = store.chats, store.chat_labels
_encode = msgspec.json.encode
_messages = msgspec.json.Decoder(list[Message])


class Answered(msgspec.Struct, frozen=True):
    """What is shown of a kept chat; the last two are JSON."""

    id: str
    tenant_id: str
    model: str
    body: bytes
    labels: bytes

    def shown(self) -> bytes:
        """The completion, and its metadata."""
        return b'%b,"metadata":%b}' % (self.body[:-1], self.labels)


class Kept(Answered, frozen=True):
    """All of it; what it was asked with is JSON, too."""

    messages: bytes

    @classmethod
    def of(cls, tenant_id: str, call: openai.ChatRequest, answer: openai.ChatCompletion) -> Kept:
        given, whole, labels = _encode(call.messages), _encode(answer), _encode(call.metadata)
        return cls(answer.id, tenant_id, answer.model, whole, labels, given)

    def asked(self) -> list[Message]:
        """What it was asked with."""
        return _messages.decode(self.messages)


class Chats(Shelving):
    """All of them, of each tenant for itself."""

    what = "chat completions"
    rows = rows
    named_by = labels.c.chat_id

    async def put(self, kept: Kept, metadata: Mapping[str, str]) -> None:
        """A new one, durable when this returns. ``metadata`` is what its labels say."""
        num_bytes = len(kept.messages) + len(kept.body) + len(kept.labels)
        await self._put({**msgspec.structs.asdict(kept), "num_bytes": num_bytes}, _labels(kept.id, metadata))

    @in_time
    async def find(self, tenant_id: str, chat_id: str) -> Kept | None:
        """Another tenant's is not there."""
        if not is_id(chat_id):
            return None
        query = self._of(tenant_id, Kept).where(rows.c.id == chat_id)
        async with self._engine.connect() as connection:
            found = (await connection.execute(query)).first()
        return None if found is None else Kept(*found)

    @in_time
    async def page(self, tenant_id: str, asked: ChatQuery) -> tuple[list[Answered], bool]:
        """Those that are asked for, as far as they can be read at once, and whether there are more. ``after`` has to be
        an id."""
        size = sa.func.length(rows.c.body) + sa.func.length(rows.c.labels)
        query, is_up = sa.select(rows.c.id, size.label("num_bytes")).where(*self._are(tenant_id)), asked.order == "asc"
        if asked.model is not None:
            if "\0" in asked.model:  # which PostgreSQL would not even look for
                return [], False
            query = query.where(rows.c.model == asked.model)
        for key, value in asked.metadata.items():
            has = sa.select(labels.c.chat_id).where(labels.c.chat_id == rows.c.id)
            query = query.where(has.where(labels.c.key == key.encode(), labels.c.value == value.encode()).exists())
        if asked.after is not None:
            query = query.where(rows.c.id > asked.after if is_up else rows.c.id < asked.after)
        order = rows.c.id.asc() if is_up else rows.c.id.desc()
        async with self._engine.connect() as connection:
            there = (await connection.execute(query.order_by(order).limit(asked.limit + 1))).all()
            ids = next(pieces({row.id: row.num_bytes for row in there[: asked.limit]}), [])
            some = self._of(tenant_id, Answered).where(rows.c.id.in_(ids)).order_by(order)
            found = [Answered(*row) for row in (await connection.execute(some)).all()]
        return found, len(there) > len(ids)

    @in_time
    async def label(self, kept: Kept, metadata: Mapping[str, str] | None) -> Kept | None:
        """The same with all of its metadata anew; None when it is gone meanwhile."""
        changed = msgspec.structs.replace(kept, labels=_encode(metadata))
        num_more = len(changed.labels) - len(kept.labels)
        update = sa.update(rows).where(rows.c.id == kept.id, rows.c.tenant_id == kept.tenant_id)
        async with self._engine.begin() as connection:
            update = update.values(labels=changed.labels, num_bytes=rows.c.num_bytes + num_more)
            if not (await connection.execute(update)).rowcount:
                return None
            await connection.execute(sa.delete(labels).where(labels.c.chat_id == kept.id))
            for table, row in _labels(kept.id, metadata or {}):
                await connection.execute(sa.insert(table), row)
        return changed

    def _of(self, tenant_id: str, shape: type[Answered]) -> sa.Select[Any]:
        return sa.select(*[rows.c[name] for name in shape.__struct_fields__]).where(*self._are(tenant_id))

    def _are(self, tenant_id: str) -> tuple[sa.ColumnElement[bool], ...]:
        return rows.c.tenant_id == tenant_id, rows.c.expires_at > int(self._wall())


def is_id(text: str) -> bool:
    """Of a chat completion. Nothing else reaches a database, which may not take it."""
    return _ID.fullmatch(text) is not None


def _labels(chat_id: str, metadata: Mapping[str, str]) -> Sequence[Row]:
    return [
        (labels, {"chat_id": chat_id, "key": key.encode(), "value": value.encode()}) for key, value in metadata.items()
    ]
