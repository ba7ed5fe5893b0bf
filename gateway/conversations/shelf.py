"""Where conversations lie (``gateway/shelving.py``).

One expires so long after it was last added to. While a response is being written that goes on from it, nobody else's
goes on from it: the gateway that writes says so every few seconds, and one that says so no more has lost its hold.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from gateway import store
from gateway.background import to_its_end
from gateway.conversations.shapes import Conversation
from gateway.errors import InvalidRequest, NotFound
from gateway.responses.items import MAX_ITEMS, AnyItem, response_of
from gateway.responses.shapes import ItemsQuery
from gateway.shelving import ShelfAway, Shelving, Step, in_time, pieces

HOLD_S = 12
NUM_ROW_BYTES = 128
"""What each conversation and each item is counted for beside what it says."""
MAX_BYTES = 64 << 20
"""Of one conversation, counted so: all of it is read for each response that goes on from it."""
_ID = re.compile("conv_[0-9a-f]{32}")

rows, entries = store.conversations, store.conversation_items
_num_item_bytes = sa.func.length(entries.c.item).label("num_bytes")
_encode = msgspec.json.encode
_item: msgspec.json.Decoder[AnyItem] = msgspec.json.Decoder(AnyItem)


class ConversationLocked(InvalidRequest):
    """Another response goes on from the conversation at the moment."""

    code, should_retry = "conversation_locked", True

    def __init__(self) -> None:
        what = "Another response is being written in this conversation. Please retry in a few seconds."
        super().__init__(what, param="conversation", retry_after_s=1.0)


class Kept(msgspec.Struct, frozen=True):
    """A conversation; its labels are JSON."""

    id: str
    tenant_id: str
    labels: bytes
    created_at: int

    def shown(self) -> Conversation:
        return Conversation(id=self.id, created_at=self.created_at, metadata=msgspec.json.decode(self.labels))


class Conversations(Shelving):
    """All of them."""

    what = "conversations"
    rows = rows
    named_by = entries.c.conversation_id

    def __init__(self, *where: Any) -> None:
        super().__init__(*where)
        self._held: dict[str, str] = {}
        """By the responses that are being written here, those that they go on from."""

    async def create(
        self, tenant_id: str, conversation_id: str, metadata: Mapping[str, str], items: Sequence[AnyItem]
    ) -> Kept:
        """A new one, durable when this returns."""
        kept = Kept(conversation_id, tenant_id, _encode(metadata), int(self._wall()))
        added = _entries(conversation_id, items)
        num_bytes = NUM_ROW_BYTES + len(kept.labels) + _num_bytes(added)
        row = {**msgspec.structs.asdict(kept), "num_bytes": num_bytes, "held_until": 0}
        await self._put(row, [(entries, entry) for entry in added])
        return kept

    @in_time
    async def find(self, tenant_id: str, conversation_id: str, param: str | None = None) -> Kept:
        """``param``: what names it. Raises NotFound; another tenant's is not there."""
        if _ID.fullmatch(conversation_id) is None:  # and nothing for a database
            raise missing(conversation_id, param)
        query = sa.select(*[rows.c[name] for name in Kept.__struct_fields__])
        async with self._engine.connect() as connection:
            found = (await connection.execute(query.where(*self._is(tenant_id, conversation_id)))).first()
        if found is None:
            raise missing(conversation_id, param)
        return Kept(*found)

    @in_time
    async def label(self, kept: Kept, metadata: Mapping[str, str]) -> Kept:
        """The same with all of its metadata anew. Raises NotFound when it is gone meanwhile."""
        changed = msgspec.structs.replace(kept, labels=_encode(metadata))
        num_bytes = rows.c.num_bytes + len(changed.labels) - sa.func.length(rows.c.labels)
        update = sa.update(rows).where(*self._is(kept.tenant_id, kept.id))
        async with self._engine.begin() as connection:
            if not (await connection.execute(update.values(labels=changed.labels, num_bytes=num_bytes))).rowcount:
                raise missing(kept.id)
        return changed

    # Items

    async def items(self, kept: Kept) -> list[AnyItem]:
        """All of them, oldest first. Raises InvalidRequest where they are too much."""
        items: list[AnyItem] = []
        for numbers in pieces(await self._sizes(kept)):
            items += await self._some(kept, numbers)
        return items

    @in_time
    async def _sizes(self, kept: Kept) -> dict[int, int]:
        """How many bytes each has, by their numbers. Raises InvalidRequest where they are too much."""
        size = sa.select(rows.c.num_bytes).where(rows.c.id == kept.id)
        query = sa.select(entries.c.number, _num_item_bytes).where(entries.c.conversation_id == kept.id)
        async with self._engine.connect() as connection:
            _check_size((await connection.execute(size)).scalar() or 0, "conversation")
            found = await connection.execute(query.order_by(entries.c.number))
            return {row.number: row.num_bytes for row in found}

    @in_time
    async def _some(self, kept: Kept, numbers: Sequence[int]) -> list[AnyItem]:
        """Those from the first of these numbers to the last, in either order."""
        number, is_up = entries.c.number, numbers[0] <= numbers[-1]
        query = sa.select(entries.c.item).where(entries.c.conversation_id == kept.id)
        query = query.where(number.between(min(numbers), max(numbers))).order_by(number if is_up else number.desc())
        async with self._engine.connect() as connection:
            return [_item.decode(item) for item in (await connection.execute(query)).scalars()]

    async def page(self, kept: Kept, asked: ItemsQuery) -> tuple[list[AnyItem], bool]:
        """Those that are asked for, as far as they can be read at once, and whether there are more. Raises
        InvalidRequest."""
        sizes = await self._page(kept, asked)
        numbers = next(pieces(dict(sizes[: asked.limit])), [])
        return await self._some(kept, numbers) if numbers else [], len(sizes) > len(numbers)

    @in_time
    async def _page(self, kept: Kept, asked: ItemsQuery) -> list[tuple[int, int]]:
        """The numbers of those that are asked for, and of one more if there is one, with how many bytes each has."""
        is_up, number = asked.order == "asc", entries.c.number
        query = sa.select(number, _num_item_bytes).where(entries.c.conversation_id == kept.id)
        async with self._engine.connect() as connection:
            if asked.after is not None:
                after = sa.select(number).where(*_is_item(kept, asked.after))
                place = (await connection.execute(after)).scalar()
                if place is None:
                    raise InvalidRequest(f"Item with id '{asked.after[:80]}' not found.", param="after")
                query = query.where(number > place if is_up else number < place)
            query = query.order_by(number.asc() if is_up else number.desc()).limit(asked.limit + 1)
            return [(row.number, row.num_bytes) for row in await connection.execute(query)]

    @in_time
    async def item(self, kept: Kept, item_id: str) -> AnyItem:
        """Raises NotFound."""
        query = sa.select(entries.c.item).where(*_is_item(kept, item_id))
        async with self._engine.connect() as connection:
            found = (await connection.execute(query)).scalar()
        if found is None:
            raise _missing_item(item_id)
        return _item.decode(found)

    @in_time
    async def add(
        self,
        tenant_id: str,
        conversation_id: str,
        items: Sequence[AnyItem],
        response_id: str | None = None,
        also: Step | None = None,
    ) -> None:
        """Behind all others, and all of them or none; none of those has one of their ids. ``response_id``: of the
        response whose they are, for which there is always room, and which holds it no more when this returns;
        ``also``: what else is to be kept: both are or neither. Raises NotFound, InvalidRequest where there would be too
        many, and what ``also`` raises."""
        added = _entries(conversation_id, items)
        update = sa.update(rows).where(*self._is(tenant_id, conversation_id))
        update = update.values(num_bytes=rows.c.num_bytes + _num_bytes(added), expires_at=self._expires_at())
        there = sa.select(sa.func.count(), sa.func.coalesce(sa.func.max(entries.c.number), -1))
        async with self._engine.begin() as connection:
            # This first: whoever else adds to it waits here, and no number is given twice.
            num_bytes = (await connection.execute(update.returning(rows.c.num_bytes))).scalar()
            if num_bytes is None:
                raise missing(conversation_id)
            if response_id is None:
                _check_size(num_bytes, "items")
            there = there.where(entries.c.conversation_id == conversation_id)
            num_items, last = (await connection.execute(there)).one()
            if response_id is None and num_items + len(added) > MAX_ITEMS:
                raise InvalidRequest(f"A conversation may have {MAX_ITEMS} items at most", param="items")
            if added:
                behind = [{**entry, "number": entry["number"] + last + 1} for entry in added]
                await connection.execute(sa.insert(entries), behind)
            if also is not None:
                await also(connection)
            if response_id is not None:
                await connection.execute(_release(conversation_id, response_id))
        if response_id is not None:
            self._held.pop(response_id, None)

    @in_time
    async def remove(self, kept: Kept, item_id: str) -> None:
        """Raises NotFound."""
        is_one = _is_item(kept, item_id)
        num_bytes = sa.select(NUM_ROW_BYTES + sa.func.length(entries.c.item)).where(*is_one).scalar_subquery()
        lighter = rows.c.num_bytes - sa.func.coalesce(num_bytes, 0)
        async with self._engine.begin() as connection:
            await connection.execute(sa.update(rows).where(rows.c.id == kept.id).values(num_bytes=lighter))
            if not (await connection.execute(sa.delete(entries).where(*is_one))).rowcount:
                raise _missing_item(item_id)

    # One response at a time

    @contextlib.asynccontextmanager
    async def held(self, tenant_id: str, conversation_id: str, response_id: str) -> AsyncIterator[None]:
        """For a response that goes on from it. Raises NotFound, and ConversationLocked where another one does."""
        kept = await self.find(tenant_id, conversation_id, "conversation")
        self._held[response_id] = kept.id
        try:
            await to_its_end(self._hold(kept, response_id))
            yield
        finally:  # also where it was held for somebody who is gone by now
            await self.release(response_id)

    async def release(self, response_id: str) -> None:
        """It is over, and nothing of it is added."""
        conversation_id = self._held.pop(response_id, None)
        if conversation_id is not None:
            with contextlib.suppress(ShelfAway):  # its hold ends all the same
                await self._let_go(conversation_id, response_id)

    async def sweep(self) -> None:
        """What has expired, or is too much; and what is held here stays so."""
        if self._held:
            await self._renew()
        await super().sweep()

    @in_time
    async def _hold(self, kept: Kept, response_id: str) -> None:
        now = int(self._wall())
        free = sa.update(rows).where(*self._is(kept.tenant_id, kept.id), rows.c.held_until <= now)
        free = free.values(held_by=response_id, held_until=now + HOLD_S, expires_at=self._expires_at())
        async with self._engine.begin() as connection:
            if not (await connection.execute(free)).rowcount:
                self._held.pop(response_id, None)
                raise ConversationLocked()

    @in_time
    async def _let_go(self, conversation_id: str, response_id: str) -> None:
        async with self._engine.begin() as connection:
            await connection.execute(_release(conversation_id, response_id))

    @in_time
    async def _renew(self) -> None:
        """Of those that have not been let go meanwhile."""
        mine = sa.update(rows).where(rows.c.id.in_([*self._held.values()]), rows.c.held_by.in_([*self._held]))
        mine = mine.where(rows.c.held_until > 0)
        async with self._engine.begin() as connection:
            await connection.execute(mine.values(held_until=int(self._wall()) + HOLD_S))

    def _is(self, tenant_id: str, conversation_id: str) -> tuple[sa.ColumnElement[bool], ...]:
        is_there = rows.c.expires_at > int(self._wall())
        return rows.c.id == conversation_id, rows.c.tenant_id == tenant_id, is_there


def missing(conversation_id: str, param: str | None = None) -> NotFound:
    said = f"Conversation with id '{conversation_id[:80]}' not found."
    return NotFound(said, param=param, code="conversation_not_found")


def _missing_item(item_id: str) -> NotFound:
    return NotFound(f"Item with id '{item_id[:80]}' not found.", code="item_not_found")


def _check_size(num_bytes: int, param: str) -> None:
    if num_bytes > MAX_BYTES:
        raise InvalidRequest(f"A conversation may take {MAX_BYTES} bytes at most", param=param)


def _is_item(kept: Kept, item_id: str) -> tuple[sa.ColumnElement[bool], ...]:
    """Nothing that is no id of ours reaches a database, which may not take it."""
    return entries.c.conversation_id == kept.id, entries.c.id == (item_id if response_of(item_id) else "")


def _entries(conversation_id: str, items: Sequence[AnyItem]) -> list[dict[str, Any]]:
    """Their rows, numbered from 0."""
    return [
        {"conversation_id": conversation_id, "number": number, "id": item.id, "item": _encode(item)}
        for number, item in enumerate(items)
    ]


def _num_bytes(added: Sequence[dict[str, Any]]) -> int:
    return sum([NUM_ROW_BYTES + len(entry["item"]) for entry in added])


def _release(conversation_id: str, response_id: str) -> sa.Update:
    return sa.update(rows).where(rows.c.id == conversation_id, rows.c.held_by == response_id).values(held_until=0)
