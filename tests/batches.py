"""Batches for tests: lines, and what became of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any, Final

import openai

from gateway.batches.book import Batch
from policies.policy import Price
from tests import builders
from tests.builders import PATIENCE_S

CHAT: Final = "/v1/chat/completions"
PRICE = Price(prompt=Decimal(10), completion=Decimal(40))
OVER = ("completed", "failed", "expired", "cancelled")


def line(custom_id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    """A good one, unless told otherwise."""
    if url == CHAT:
        body = {"messages": [{"role": "user", "content": f"Hello, {custom_id}"}], **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "demo", "max_tokens": 4, **body}}


def lines(number: int, **body: Any) -> list[dict[str, Any]]:
    return [line(f"line-{index}", **body) for index in range(number)]


def as_file(some: Iterable[dict[str, Any] | str]) -> bytes:
    return "\n".join(one if isinstance(one, str) else json.dumps(one) for one in some).encode()


def a_batch(number: int, tenant_id: str, status: Any = "validating") -> Batch:
    """As it is in the book, and nobody's yet."""
    return Batch(
        id=f"batch_{number:024x}",
        tenant_id=tenant_id,
        key_id="key_1",
        endpoint="/v1/completions",
        input_file_id="file-1",
        completion_window="24h",
        metadata=None,
        output_expires_s=None,
        model=None,
        status=status,
        errors=None,
        output_file_id=None,
        error_file_id=None,
        created_at=0,
        expires_at=86_400,
    )


async def begun(
    client: openai.AsyncOpenAI, some: Iterable[dict[str, Any] | str] | bytes, endpoint: Any = CHAT, **others: Any
) -> Any:
    """A batch of these."""
    data = some if isinstance(some, bytes) else as_file(some)
    file = await client.files.create(file=("in.jsonl", data), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **others)


async def when(client: openai.AsyncOpenAI, batch: Any, condition: Callable[[Any], bool]) -> Any:
    """The batch, as soon as it is so."""
    return await builders.when(lambda: client.batches.retrieve(batch.id), condition, 2 * PATIENCE_S)


async def over(client: openai.AsyncOpenAI, batch: Any) -> Any:
    return await when(client, batch, lambda batch: batch.status in OVER)


async def outputs(client: openai.AsyncOpenAI, file_id: str | None) -> list[Any]:
    """What is in the file; nothing where there is none."""
    if file_id is None:
        return []
    return [json.loads(one) for one in (await client.files.content(file_id)).text.splitlines()]


async def admin(house: Any, method: str, path: str, **body: Any) -> Any:
    async with (
        house.http(house.admin_key) as session,
        session.request(method, f"/admin/v1/{path}", json=body or None) as answer,
    ):
        assert answer.status < 300, await answer.text()
        return await answer.json() if answer.status != 204 else None


async def another_key(house: Any, is_stranger: bool = False, **others: Any) -> Any:
    """A new one, with its id."""
    tenant_id = (await admin(house, "GET", "tenants"))["data"][0]["id"]
    if is_stranger:
        tenant_id = (await admin(house, "POST", "tenants", name="another"))["id"]
    return await admin(house, "POST", "keys", tenant_id=tenant_id, name="k", **others)
