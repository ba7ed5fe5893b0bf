"""Tables of bad bodies (``bad_bodies/``), each against the real server: every one is refused in its dialect's shape, by
name where there is one, and none reaches a worker, the ledger or a later request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import msgspec
import pytest

from policies import settings, wire
from tests.builders import PATIENCE_S
from tests.gateway.bad_bodies import (
    batches,
    chat,
    completions,
    conversations,
    embeddings,
    files,
    messages,
    ollama,
    rerank,
    responses,
    tokens,
    uploads,
)
from tests.gateway.bad_bodies.broken import broken
from tests.gateway.bad_bodies.cases import Case, nested_text
from tests.gateway.conftest import HELLO, KEY, Front, OpenFront
from tests.gateway.peer import Peer

OPENAI = [
    pytest.param(chat.CASES, broken(chat.GOOD), chat.PATH, id="chat"),
    pytest.param(completions.CASES, broken(completions.GOOD), completions.PATH, id="completions"),
    pytest.param(embeddings.CASES, broken(embeddings.GOOD), embeddings.PATH, id="embeddings"),
    pytest.param(rerank.CASES, broken(rerank.GOOD), rerank.PATH, id="rerank and score"),
    pytest.param(tokens.CASES, broken(tokens.GOOD), tokens.PATH, id="tokens"),
    pytest.param(responses.CASES, broken(responses.GOOD), responses.PATH, id="responses"),
    pytest.param(conversations.CASES, broken(conversations.GOOD), conversations.PATH, id="conversations"),
]
FAMILIES: dict[str, Sequence[Case]] = {
    "batches": batches.CASES,
    "chat": chat.CASES,
    "completions": completions.CASES,
    "embeddings": [*embeddings.CASES, *embeddings.WITH_VECTORS],
    "files": files.CASES,
    "messages": messages.CASES,
    "ollama": ollama.CASES,
    "rerank and score": rerank.CASES,
    "responses": [*responses.CASES, *conversations.CASES],
    "tokens": tokens.CASES,
    "uploads": uploads.CASES,
}
FEWEST = 200
Shape = Callable[[int, Any, str | None], bool]
"""Whether a body is one, of this status and this parameter."""


async def answer_of(front: Front, case: Case, path: str, key: str = KEY) -> tuple[int, Any, str]:
    """Status, body and its type."""
    data = encoded(case.body)
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}", **case.headers}
    url = front.url + (case.path or path)
    async with front.http.request(case.method, url, data=data, headers=headers) as answer:
        return answer.status, msgspec.json.decode(await answer.read()), answer.content_type


def encoded(body: Any) -> bytes:
    """Also what is no JSON at all (NaN, lone surrogates), and what is nested deeper than an encoder goes. Bytes are
    sent as they stand."""
    if isinstance(body, bytes):
        return body
    try:
        return json.dumps(body).encode()
    except RecursionError:
        return json.dumps(flattened(body)).encode().replace(b'"DEEP"', nested_text(b"[", b"]"))


def flattened(body: Any) -> Any:
    """With a word in place of what is nested too deeply."""
    if isinstance(body, dict):
        return {name: flattened(value) for name, value in body.items()}
    if isinstance(body, list):
        return "DEEP" if is_deep(body) else [flattened(value) for value in body]
    return body


def is_deep(value: Any) -> bool:
    depth = 0
    while isinstance(value, list) and len(value) == 1 and depth < 500:
        value, depth = value[0], depth + 1
    return depth == 500


def shown(case: Case) -> str:
    try:
        return f"{case.path} {str(case.body)[:200]}"
    except RecursionError:
        return f"{case.path} nested"


def as_openai(status: int, body: Any, param: str | None) -> bool:
    return is_openais(body, param)


def is_openais(body: Any, param: str | None) -> bool:
    if not isinstance(body, dict):
        return False
    error = body.get("error", {})
    is_one = set(body) == {"error"} and set(error) == {"message", "type", "param", "code"} and error["param"] == param
    return is_one and "Invalid enum value" not in error["message"] and "(?!" not in error["message"]


async def still_well(front: Front) -> None:
    """Nothing is held, and the next request is answered."""
    assert front.peer.is_quiet()
    assert front.rows() == []
    assert front.gw.dispatch.num_waiting() == 0
    call = asyncio.create_task(front.post("/v1/chat/completions", {"model": "demo", "messages": HELLO}))
    front.peer.say(await front.peer.submitted(), [3], "stop")
    assert (await call)[0] == 200


def is_anthropics(status: int, body: Any, param: str | None) -> bool:
    if not isinstance(body, dict) or set(body) != {"type", "error", "request_id"}:
        return False
    kind = {404: "not_found_error", 413: "request_too_large"}.get(status, "invalid_request_error")
    error = body["error"]
    return set(error) == {"type", "message"} and error["type"] == kind and (param or "") in error["message"]


async def test_each_is_refused_as_anthropic_would(front: Front):
    await refused(front, messages.CASES, broken(messages.GOOD), messages.PATH, is_anthropics)


def is_ollamas(status: int, body: Any, param: str | None) -> bool:
    is_one = isinstance(body, dict) and set(body) == {"error"} and isinstance(body["error"], str)
    return is_one and bool(body["error"]) and (param or "") in body["error"]


async def test_each_is_refused_as_ollama_would(front: Front):
    # Whatever type it says that it has: curl says none.
    unread = [case for case in broken(ollama.GOOD) if case.status != 415]
    await refused(front, ollama.CASES, unread, ollama.PATH, is_ollamas)


@pytest.mark.parametrize(("own", "unread", "path"), OPENAI)
async def test_each_is_refused_as_openai_would(front: Front, own: Sequence[Case], unread: Sequence[Case], path: str):
    await refused(front, own, unread, path, as_openai)


async def test_what_is_stored_is_refused_by_either_store(open_front: OpenFront, store_settings: settings.Store):
    async with open_front(store=store_settings) as front:
        await each_refused(front, [*batches.CASES, *broken(batches.GOOD)], batches.PATH, as_openai)
        await each_refused(front, files.CASES, files.PATH, as_openai)
        await each_refused(front, [*uploads.CASES, *broken(uploads.GOOD)], uploads.PATH, as_openai)
        await each_refused(front, responses.CASES, responses.PATH, as_openai)
        assert front.peer.is_quiet()


async def test_a_model_with_vectors_refuses_what_does_not_suit_it(open_front: OpenFront):
    peer = Peer(pooling=wire.Pooling("mean"), num_dimensions=embeddings.NUM_DIMENSIONS)
    async with open_front(peer=peer) as front:
        await refused(front, embeddings.WITH_VECTORS, [], embeddings.PATH, as_openai)


@pytest.mark.parametrize("cases", FAMILIES.values(), ids=FAMILIES)
def test_there_are_enough_and_no_two_are_alike(cases: Sequence[Case]):
    seen: dict[object, Case] = {}
    for case in cases:
        asked = (case.method, case.path, encoded(case.body), *case.headers.items())
        assert asked not in seen, shown(case)
        seen[asked] = case
    assert len(seen) >= FEWEST


async def refused(front: Front, own: Sequence[Case], unread: Sequence[Case], path: str, is_well: Shape) -> None:
    """``own``: of this family; ``unread``: wrong whatever the family is."""
    await each_refused(front, [*own, *unread], path, is_well)
    await still_well(front)


async def each_refused(front: Front, cases: Sequence[Case], path: str, is_well: Shape) -> None:
    wrong = []
    for case in cases:
        try:
            status, body, _ = await asyncio.wait_for(answer_of(front, case, path), PATIENCE_S)
        except (aiohttp.ClientError, TimeoutError) as failure:
            status, body = 0, repr(failure)
        # What cannot be read as HTTP is of no dialect.
        is_one = is_well(status, body, case.param) or (case.is_unread and is_openais(body, case.param))
        if status != case.status or not is_one:
            wrong.append((shown(case), case.status, case.param, status, body))
    assert not wrong, "\n".join(map(str, wrong))
