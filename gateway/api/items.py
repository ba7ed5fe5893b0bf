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
from gateway.responses.compaction import all_opened, check
from gateway.responses.conversation import Message, messages_of
from gateway.responses.items import MAX_ITEMS, AnyItem, CompactionItem, ItemReference, parse, response_of
from gateway.responses.nearby import Context
from gateway.responses.requests import Asked
from gateway.responses.shelf import Kept


async def given(gw: Gateway, caller: Caller, said: str | list[dict[str, Any]], path: str = "input") -> list[AnyItem]:
    """Its own, as they are ``said`` at ``path``, with what they refer to in the place of references. Raises
    Malformed."""
    looked_for: dict[str, Kept | None] = {}
    items: list[AnyItem] = []
    for number, item in enumerate(parse(said, path)):
        if isinstance(item, ItemReference):
            item = await _referred(gw, caller, item.id, f"{path}[{number}].id", looked_for)
        elif isinstance(item, CompactionItem):
            check(gw.directory.secret, caller.tenant_id, item, f"{path}[{number}].encrypted_content")
        items.append(item)
    return items


async def before(
    gw: Gateway, caller: Caller, call: Asked, num_more: int = 0, remembered: Context | None = None
) -> list[AnyItem]:
    """Those that it goes on from; ``remembered`` where they are. ``num_more`` are to be added to its conversation.
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
    said = [kept.response() for kept in chain]
    if (conversation := said[0].conversation) is not None:
        raise openai.Malformed(
            f"Response '{said[0].id}' was written in conversation '{conversation.id}': go on from that one instead.",
            "previous_response_id",
        )
    return [item for kept, body in zip(chain, said, strict=True) for item in (*kept.items(), *body.output)]


def messages(gw: Gateway, caller: Caller, call: Asked, items: Sequence[AnyItem]) -> list[Message]:
    """What the model reads. Raises Malformed."""
    return messages_of(call.instructions, all_opened(gw.directory.secret, caller.tenant_id, items))


def check_kept(gw: Gateway, caller: Caller) -> None:
    """Raises InvalidRequest where nothing may be added to a conversation."""
    if not may_store(gw, caller):
        raise InvalidRequest("Nothing is stored for this project, so there are no conversations")


async def _referred(
    gw: Gateway, caller: Caller, item_id: str, path: str, looked_for: dict[str, Kept | None]
) -> AnyItem:
    response_id = response_of(item_id)
    if response_id is not None:
        if response_id not in looked_for:
            looked_for[response_id] = await gw.responses.shelf.find(caller.tenant_id, response_id)
        kept = looked_for[response_id]
        for item in [] if kept is None else [*kept.items(), *kept.response().output]:
            if item.id == item_id:
                return item
    raise openai.Malformed(f"Item with id '{item_id[:80]}' not found.", path)
