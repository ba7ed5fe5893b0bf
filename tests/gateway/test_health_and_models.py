"""Who is served here, and whether anybody is."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from typing import Any

import openai
import pytest

from gateway.anthropic import ModelInfo, ModelQuery, page_of
from tests.builders import when
from tests.gateway.conftest import KEY, Front


async def test_models_are_listed_and_found(front: Front):
    models = await front.client.models.list()
    assert [model.id for model in models.data] == ["demo"]
    model = await front.client.models.retrieve("demo")
    assert (model.object, model.owned_by) == ("model", "penstock")
    assert model.created > 1_700_000_000
    assert models.data == [model]
    assert (model.model_extra["root"], model.model_extra["max_model_len"]) == ("demo", 4096)
    with pytest.raises(openai.NotFoundError) as missing:
        await front.client.models.retrieve("org/other")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError) as missing:
        await front.client.models.delete("org/other")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.PermissionDeniedError, match="`demo` cannot be deleted") as refused:
        await front.client.models.delete("demo")
    assert (refused.value.code, refused.value.param) == ("permission_denied", "model")
    with pytest.raises(openai.AuthenticationError):
        await front.client.with_options(api_key="wrong").models.delete("demo")
    assert [model.id for model in (await front.client.models.list()).data] == ["demo"]


async def test_anthropics_clients_are_told_of_models_in_their_shapes(front: Front):
    async def ask(path: str, **headers: str) -> tuple[int, dict[str, Any]]:
        headers = {"anthropic-version": "2023-06-01", "x-api-key": KEY, **headers}
        async with front.http.get(front.url + path, headers=headers) as answer:
            assert answer.headers["request-id"]
            return answer.status, await answer.json()

    status, page = await ask("/v1/models")
    (model,) = page["data"]
    assert (status, page["first_id"], page["last_id"], page["has_more"]) == (200, "demo", "demo", False)
    assert (model["type"], model["id"], model["display_name"], model["lifecycle"]) == (
        "model",
        "demo",
        "demo",
        "active",
    )
    assert (model["max_input_tokens"], model["created_at"][-1]) == (4096, "Z")
    assert await ask("/v1/models/demo") == (200, model)
    assert (await ask("/v1/models?after_id=demo"))[1]["data"] == []
    assert (await ask("/v1/models?before_id=demo"))[1]["data"] == []
    for path, wanted, kind in (
        ("/v1/models/other", 404, "not_found_error"),
        ("/v1/models?limit=0", 400, "invalid_request_error"),
        ("/v1/models?after_id=other", 400, "invalid_request_error"),
        ("/v1/models?after_id=demo&before_id=demo", 400, "invalid_request_error"),
    ):
        status, body = await ask(path)
        assert (status, body["type"], body["error"]["type"]) == (wanted, "error", kind)
    status, body = await ask("/v1/models", authorization="Bearer wrong")
    assert (status, body["error"]["type"]) == (401, "authentication_error")


def test_models_come_in_pages_either_way():
    models = [ModelInfo.of(name, 0, None) for name in "abcde"]

    def page(**asked: Any) -> tuple[str, bool]:
        found = page_of(models, ModelQuery(**asked))
        return "".join(model.id for model in found.data), found.has_more

    assert page(limit=2) == ("ab", True)
    assert page(limit=2, after_id="b") == ("cd", True)
    assert page(limit=2, after_id="d") == ("e", False)
    assert page(limit=2, before_id="d") == ("bc", True)
    assert page(limit=3, before_id="d") == ("abc", False)


async def test_models_are_shown_to_those_with_a_key(front: Front):
    for path in ("/v1/models", "/v1/models/demo"):
        async with front.http.get(front.url + path, headers={"authorization": "Bearer wrong"}) as answer:
            assert answer.status == 401


async def test_health_needs_no_key_and_readiness_a_worker(front: Front):
    async def ask(path: str) -> tuple[int, dict[str, object]]:
        async with front.http.get(front.url + path, headers={"authorization": ""}) as answer:
            return answer.status, await answer.json()

    assert await ask("/healthz") == (200, {"status": "ok"})
    for path in ("/readyz", "/health"):
        assert await ask(path) == (200, {"status": "ready", "models": {"demo": "ready"}})
    front.gw.dispatch.draining = True
    assert (await ask("/readyz"))[0] == 503
    front.gw.dispatch.draining = False
    await front.peer.close()
    await front.lost()
    assert await ask("/healthz") == (200, {"status": "ok"})
    assert await ask("/readyz") == (503, {"status": "starting", "models": {"demo": "starting"}})


async def test_who_cannot_write_the_ledger_is_not_ready(open_front, monkeypatch):
    monkeypatch.setattr("gateway.ledger.writers.PRAGMAS", ("busy_timeout = 1",))

    async def ready(front: Front, wanted: str) -> int:
        async def told() -> tuple[str, int]:
            async with front.http.get(f"{front.url}/readyz") as answer:
                return (await answer.json())["status"], answer.status

        return (await when(told, lambda told: told[0] == wanted))[1]

    async with open_front() as front:
        assert await ready(front, "ready") == 200
        another = sqlite3.connect(front.gw.store.database, isolation_level=None, check_same_thread=False)
        with contextlib.closing(another) as other:
            await asyncio.to_thread(other.execute, "BEGIN IMMEDIATE")  # whoever writes now may end meanwhile
            answering = front.chat()
            front.peer.say(await front.peer.submitted(), [3], "stop")
            assert await ready(front, "ledger_behind") == 503
            status, body, _ = await front.post("/v1/completions", {"model": "demo", "prompt": "x"})
            assert (status, body["error"]["code"]) == (503, "server_is_overloaded")
            other.execute("ROLLBACK")
        await answering
        assert await ready(front, "ready") == 200


async def test_a_model_without_a_worker_is_unavailable_for_now(front: Front):
    await front.peer.close()
    await front.lost()
    status, body, headers = await front.post("/v1/completions", {"model": "demo", "prompt": "x"})
    assert (status, body["error"]["code"]) == (503, "model_unavailable")
    assert int(headers["retry-after-ms"]) > 0
