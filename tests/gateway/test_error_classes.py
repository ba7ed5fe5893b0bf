"""What goes wrong is the error class of OpenAI's own client that its users catch, and is tried again where that helps.

One server for all of it; each case has a client of its own, which tries twice more by itself unless it is told not to.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import openai
import pytest

from tests import builders
from tests.builders import PATIENCE_S
from tests.gateway.conftest import HELLO, Front, OpenFront
from tests.gateway.desk import Desk
from tests.gateway.peer import Peer
from tests.gateway.responding import END

MAX_RETRIES = 2
ONCE, AGAIN = 1, 1 + MAX_RETRIES
"""Requests that the server sees of one call."""

Client = openai.AsyncOpenAI
Call = Callable[[Client], Awaitable[Any]]


def chat(**others: Any) -> Call:
    body: dict[str, Any] = {"model": "demo", "messages": HELLO, **others}
    return lambda client: client.chat.completions.create(**body)


class Midway:
    """A stream that breaks off once its client has heard some of it."""

    def __init__(self) -> None:
        self._heard = asyncio.Event()

    async def read(self, client: Client) -> None:
        async for _ in await client.chat.completions.create(model="demo", messages=HELLO, stream=True):
            self._heard.set()

    async def broken(self, front: Front) -> None:
        submit = await front.peer.submitted()
        front.peer.say(submit, front.ids("Hello"))
        await self._heard.wait()
        front.peer.say(submit, [], "error")


@dataclass
class Case:
    """``before``: what the key has asked for already. ``played``: the worker's part in each try."""

    name: str
    call: Call
    kind: type[openai.APIError]
    status: int | None
    type: str
    code: str | None
    param: str | None = None
    num_tries: int = ONCE
    policy: dict[str, Any] = field(default_factory=dict)
    key: str | None = None
    scopes: tuple[str, ...] | None = None
    before: int = 0
    played: Callable[[Front], Awaitable[None]] | None = None
    busy: bool = False


INVALID = "invalid_request_error"


async def broken(front: Front) -> None:
    front.peer.say(await front.peer.submitted(), [], "error")


MIDWAY = Midway()
PRICED = {"prices": {"*": {"request": "1"}}, "budget": {"amount": "1", "period": "month"}}
CASES = [
    Case(
        "a bad parameter",
        chat(temperature=3),
        openai.BadRequestError,
        400,
        INVALID,
        "decimal_above_max_value",
        "temperature",
    ),
    Case(
        "a parameter that is not served",
        chat(audio={}),
        openai.BadRequestError,
        400,
        INVALID,
        "unsupported_parameter",
        "audio",
    ),
    Case(
        "a prompt that is too long",
        chat(messages=[{"role": "user", "content": "Hello " * 5000}]),
        openai.BadRequestError,
        400,
        INVALID,
        "context_length_exceeded",
        "messages",
    ),
    Case("a wrong key", chat(), openai.AuthenticationError, 401, INVALID, "invalid_api_key", key="sk-nobody's"),
    Case(
        "a key that is not for this",
        chat(),
        openai.PermissionDeniedError,
        403,
        "permission_error",
        "missing_scope",
        scopes=("embeddings",),
    ),
    Case(
        "a model that the key may not use",
        chat(),
        openai.NotFoundError,
        404,
        INVALID,
        "model_not_found",
        "model",
        policy={"models": ["another"]},
    ),
    Case("an unknown model", chat(model="gpt-0"), openai.NotFoundError, 404, INVALID, "model_not_found", "model"),
    Case(
        "an unknown file",
        lambda client: client.files.retrieve("file-none"),
        openai.NotFoundError,
        404,
        INVALID,
        "not_found",
        "id",
    ),
    Case(
        "an unknown address",
        lambda client: client.images.generate(model="demo", prompt="x"),
        openai.NotFoundError,
        404,
        INVALID,
        "unknown_url",
    ),
    Case(
        "too many requests in a minute",
        chat(),
        openai.RateLimitError,
        429,
        "requests",
        "rate_limit_exceeded",
        num_tries=AGAIN,
        policy={"limits": {"requests_per_minute": 1}},
        before=1,
    ),
    Case(
        "too many tokens in a minute",
        chat(max_tokens=100),
        openai.RateLimitError,
        429,
        "tokens",
        "rate_limit_exceeded",
        num_tries=AGAIN,
        policy={"limits": {"tokens_per_minute": 150}},
        before=2,
    ),
    Case(
        "more tokens than a minute ever has",
        chat(max_tokens=100),
        openai.RateLimitError,
        429,
        "tokens",
        "rate_limit_exceeded",
        policy={"limits": {"tokens_per_minute": 1}},
    ),
    Case(
        "a budget that is spent",
        chat(),
        openai.RateLimitError,
        429,
        "insufficient_quota",
        "insufficient_quota",
        policy=PRICED,
        before=1,
    ),
    Case(
        "a fault of the model",
        chat(),
        openai.InternalServerError,
        500,
        "server_error",
        "internal_error",
        num_tries=AGAIN,
        played=broken,
    ),
    Case(
        "a fault in the middle of a stream",
        MIDWAY.read,
        openai.APIError,
        None,
        "server_error",
        "internal_error",
        played=MIDWAY.broken,
    ),
    Case(
        "a line that is full",
        chat(service_tier="flex"),
        openai.InternalServerError,
        503,
        "service_unavailable_error",
        "server_is_overloaded",
        num_tries=AGAIN,
        busy=True,
    ),
]


@pytest.fixture
async def front(open_front: OpenFront) -> AsyncIterator[Front]:
    batch = builders.classes()["batch"]
    classes = {**builders.classes(), "batch": msgspec.structs.replace(batch, max_waiting=1)}
    async with open_front(peer=Peer(max_sequences=1), classes=classes) as opened:
        yield opened


async def key_of(desk: Desk, number: int, case: Case) -> str:
    """Of a tenant of its own."""
    policy = "default"
    if case.policy:
        policy = f"policy-{number}"
        await desk.made("policies", {"name": policy, "document": case.policy})
    scopes = {} if case.scopes is None else {"scopes": {"endpoints": case.scopes}}
    tenant = await desk.made("tenants", {"name": f"tenant-{number}", "policy": policy})
    key: str = (await desk.made("keys", {"tenant_id": tenant["id"], "name": "k", **scopes}))["key"]
    return key


async def test_each_case_is_the_class_that_its_users_catch(front: Front, monkeypatch: pytest.MonkeyPatch):
    waits: list[float] = []
    num_requests = 0

    async def sleep(delay_s: float) -> None:
        waits.append(delay_s)

    async def count(_: object) -> None:
        nonlocal num_requests
        num_requests += 1

    monkeypatch.setattr("openai._base_client.anyio.sleep", sleep)
    desk = Desk(front)
    for number, case in enumerate(CASES):
        key = case.key or await key_of(desk, number, case)
        http = openai.DefaultAsyncHttpxClient(event_hooks={"request": [count]})
        options: dict[str, Any] = {"max_retries": MAX_RETRIES, "timeout": PATIENCE_S, "http_client": http}
        async with openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key=key, **options) as client:
            for _ in range(case.before):
                asked = asyncio.create_task(chat(max_tokens=50)(client))
                front.peer.say(await front.peer.submitted(), [*front.ids("Hi" * 20), END], "stop")
                await asked
            holding = []
            if case.busy:
                holding = [front.chat(service_tier="flex") for _ in range(4)]
                await asyncio.wait(holding, return_when=asyncio.FIRST_COMPLETED)  # one that had no room
            num_requests, waits[:] = 0, []
            asked = asyncio.create_task(case.call(client))
            for _ in range(case.num_tries if case.played else 0):
                assert case.played is not None
                await case.played(front)
            with pytest.raises(openai.APIError) as refused:
                await asked
            for task in holding:
                task.cancel()
            await asyncio.gather(*holding, return_exceptions=True)
        error = refused.value
        told = (type(error), getattr(error, "status_code", None), error.type, error.code, error.param)
        assert told == (case.kind, case.status, case.type, case.code, case.param), case.name
        assert (num_requests, len(waits)) == (case.num_tries, case.num_tries - 1), case.name
        if isinstance(error, openai.APIStatusError):
            assert error.request_id, case.name
            after_ms = error.response.headers.get("retry-after-ms")
            if after_ms is not None and waits:  # what it is told is what it waits, and it gives up at none of it
                assert 0 < waits[-1] <= 120, case.name
                assert waits[-1] == pytest.approx(int(after_ms) / 1e3, abs=1), case.name
