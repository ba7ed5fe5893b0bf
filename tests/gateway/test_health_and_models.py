"""Who is served here, and whether anybody is."""

from __future__ import annotations

import openai
import pytest

from tests.gateway.conftest import Front


async def test_models_are_listed_and_found(front: Front):
    models = await front.client.models.list()
    assert [model.id for model in models.data] == ["demo"]
    model = await front.client.models.retrieve("demo")
    assert (model.object, model.owned_by) == ("model", "penstock")
    assert model.created > 1_700_000_000
    with pytest.raises(openai.NotFoundError) as missing:
        await front.client.models.retrieve("org/other")
    assert missing.value.code == "model_not_found"


async def test_models_are_shown_to_those_with_a_key(front: Front):
    for path in ("/v1/models", "/v1/models/demo"):
        async with front.http.get(front.url + path, headers={"authorization": "Bearer wrong"}) as answer:
            assert answer.status == 401


async def test_health_needs_no_key_and_readiness_a_worker(front: Front):
    async def ask(path: str) -> tuple[int, dict[str, object]]:
        async with front.http.get(front.url + path, headers={"authorization": ""}) as answer:
            return answer.status, await answer.json()

    assert await ask("/healthz") == (200, {"status": "ok"})
    assert await ask("/readyz") == (200, {"status": "ready", "models": {"demo": "ready"}})
    front.gw.dispatch.draining = True
    assert (await ask("/readyz"))[0] == 503
    front.gw.dispatch.draining = False
    await front.peer.close()
    await front.lost()
    assert await ask("/healthz") == (200, {"status": "ok"})
    assert await ask("/readyz") == (503, {"status": "starting", "models": {"demo": "starting"}})


async def test_a_model_without_a_worker_is_unavailable_for_now(front: Front):
    await front.peer.close()
    await front.lost()
    status, body, headers = await front.post("/v1/completions", {"model": "demo", "prompt": "x"})
    assert (status, body["error"]["code"]) == (503, "model_unavailable")
    assert int(headers["retry-after-ms"]) > 0
