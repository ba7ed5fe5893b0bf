"""What a request is given in items: its own, and those that it goes on from. Where they are stored, ShelfAway is raised
as well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway import openai
from gateway.api.request import may_store
from gateway.auth import Caller
from gateway.errors import InvalidRequest
from gateway.house import Gateway
from gateway.responses import shelf
from gateway.responses.compaction import all_opened, check
from gateway.responses.conversation import Message, messages_of
from gateway.responses.items import MAX_ITEMS, AnyItem, CompactionItem, ItemReference, parse, response_of
from gateway.responses.nearby import Context
from gateway.responses.requests import Asked


async def given(gw: Gateway, caller: Caller, said: str | list[dict[str, Any]], path: str = "input") -> list[AnyItem]:
    """Its own, as they are ``said`` at ``path``, with what they refer to in the place of references. Raises
    Malformed."""
    referred = _Referred(gw, caller.tenant_id)
    items: list[AnyItem] = []
    for number, item in enumerate(parse(said, path)):
        if isinstance(item, ItemReference):
            item = await referred.item(item.id, f"{path}[{number}].id")
        elif isinstance(item, CompactionItem):
            check(gw.directory.secret, caller.tenant_id, item, f"{path}[{number}].encrypted_content")
        items.append(item)
    return items


async def before(
    gw: Gateway, caller: Caller, call: Asked, num_more: int = 0, remembered: Context | None = None
) -> list[AnyItem]:
    """Those that it goes on from; ``remembered`` where they are. ``num_more`` are to come behind them.
    Raises Malformed for what is not there, or has no room for them, and NotFound."""
    if remembered is not None:
        return remembered.items
    if call.conversation_id is not None:
        found = await gw.conversations.find(caller.tenant_id, call.conversation_id, "conversation")
        items = await gw.conversations.items(found)
        if len(items) + num_more > MAX_ITEMS:
            raise openai.Malformed(f"A conversation may have {MAX_ITEMS} items at most.", "conversation")
        return items
    if call.previous_response_id is None:
        return []
    chain = await gw.responses.shelf.chain(caller.tenant_id, call.previous_response_id)
    missing = chain[0].previous_id if chain else call.previous_response_id
    if missing is not None:
        raise openai.Malformed(
            f"Previous response with id '{missing}' not found.",
            "previous_response_id",
            "previous_response_not_found",
        )
    if chain[-1].is_open:
        raise openai.Malformed(f"Previous response with id '{chain[-1].id}' has not ended yet.", "previous_response_id")
    said, first = await shelf.said_in(chain, num_more)
    if (conversation := first.conversation) is not None:
        raise openai.Malformed(
            f"Response '{first.id}' was written in conversation '{conversation.id}': go on from that one instead.",
            "previous_response_id",
        )
    return said


def messages(gw: Gateway, caller: Caller, call: Asked, items: Sequence[AnyItem]) -> list[Message]:
    """What the model reads. Raises Malformed."""
    read = messages_of(call.instructions, all_opened(gw.directory.secret, caller.tenant_id, items))
    if not read:
        what = "'input' is empty, and so is all that could be gone on from: 'instructions', 'conversation' and "
        raise openai.Malformed(
            f"There is nothing to answer: {what}'previous_response_id'.", "input", "missing_required_parameter"
        )
    return read


def check_kept(gw: Gateway, caller: Caller) -> None:
    """Raises InvalidRequest where nothing may be added to a conversation."""
    if not may_store(gw, caller):
        raise InvalidRequest("Nothing is stored for this project, so there are no conversations")


class _Referred:
    """What a request refers to by its id, each response of which is read once."""

    def __init__(self, gw: Gateway, tenant_id: str) -> None:
        self._shelf = gw.responses.shelf
        self._tenant_id = tenant_id
        self._num_bytes = 0
        self._items: dict[str, dict[str, AnyItem]] = {}
        """By the responses that they were made with, and by their ids; of one that is not there, none."""

    async def item(self, item_id: str, path: str) -> AnyItem:
        """Raises Malformed where it is not there, and where too much would be read for all of them."""
        response_id = response_of(item_id)
        if response_id is not None and response_id not in self._items:
            self._items[response_id] = await self._read(response_id, path)
        found = None if response_id is None else self._items[response_id].get(item_id)
        if found is None:
            raise openai.Malformed(f"Item with id '{item_id[:80]}' not found.", path)
        return found

    async def _read(self, response_id: str, path: str) -> dict[str, AnyItem]:
        kept = await self._shelf.find(self._tenant_id, response_id)
        if kept is None:
            return {}
        self._num_bytes += kept.num_bytes
        if self._num_bytes > shelf.MAX_CHAIN_BYTES:
            raise openai.Malformed(
                f"The {len(self._items) + 1} responses that items are referred to in, up to this one, have "
                f"{self._num_bytes} bytes, and may have {shelf.MAX_CHAIN_BYTES} at most",
                path,
            )
        return {item.id: item for item in [*kept.response().output, *reversed(kept.items())]}
