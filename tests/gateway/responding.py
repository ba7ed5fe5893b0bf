"""Responses as a test asks for them, with the worker's part played beside."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import openai

from tests import official
from tests.builders import PATIENCE_S
from tests.gateway.conftest import Front
from tests.gateway.desk import Desk

END = 3
ASSISTANT = "<|im_start|>assistant\n"


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def ask(front: Front, **others: object) -> asyncio.Task[Any]:
    """One under way."""
    call: dict[str, Any] = {"model": "demo", "input": "Hello", **others}
    return asyncio.create_task(front.client.responses.create(**call))


async def answered(front: Front, text: str = "Hi there.", **others: object) -> Any:
    """One that says this."""
    call = ask(front, **others)
    front.peer.say(await front.peer.submitted(), [*front.ids(text), END], "stop")
    return await call


async def prompt_of(front: Front, call: asyncio.Task[Any], text: str = "Yes.") -> tuple[str, Any]:
    """What the model read, and the response."""
    submit = await front.peer.submitted()
    front.peer.say(submit, [*front.ids(text), END], "stop")
    return front.text._tokenizer.decode(submit.prompt_token_ids, skip_special_tokens=False), await call


@contextlib.asynccontextmanager
async def another_tenant(front: Front) -> AsyncIterator[openai.AsyncOpenAI]:
    """Its client."""
    desk = Desk(front)
    tenant = await desk.made("tenants", {"name": "another"})
    key = (await desk.made("keys", {"tenant_id": tenant["id"], "name": "k"}))["key"]
    options: dict[str, Any] = {"max_retries": 0, "timeout": PATIENCE_S}
    async with official.Client(base_url=f"{front.url}/v1", api_key=key, **options) as client:
        yield client
