"""Models that come and go, as operators and clients see them: the real gateway with scripted workers as children."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp

from policies import settings
from tests.builders import until
from tests.house import House

LATER = settings.Model(load_at_start=False)


@contextlib.asynccontextmanager
async def asking(house: House) -> AsyncIterator[Callable[..., Any]]:
    """``status, body = await call("POST", "demo/pin")``."""
    async with house.http(house.admin_key) as session:

        async def call(method: str, path: str = "") -> tuple[int, Any]:
            where = f"/admin/v1/models/{path}" if path else "/admin/v1/models"
            async with session.request(method, where) as answer:
                return answer.status, await answer.json(content_type=None)

        yield call


async def listed(house: House) -> dict[str, str]:
    async with house.http() as session, session.get("/v1/models") as answer:
        return {model["id"]: model["penstock"]["state"] for model in (await answer.json())["data"]}


async def completed(session: aiohttp.ClientSession, model: str) -> tuple[int, Any]:
    body = {"model": model, "prompt": "Hello", "max_tokens": 3}
    async with session.post("/v1/completions", json=body) as answer:
        return answer.status, await answer.json()


async def test_a_model_that_is_not_in_memory_is_listed_and_answers_whoever_asks(start_house):
    house = start_house(models={"demo": settings.Model(), "later": LATER})
    assert await listed(house) == {"demo": "ready", "later": "unloaded"}
    async with house.http() as session:
        status, body = await completed(session, "later")
        assert (status, body["usage"]["completion_tokens"]) == (200, 3)
    assert await listed(house) == {"demo": "ready", "later": "ready"}


async def test_a_gateway_is_ready_when_a_model_only_has_to_be_loaded(start_house):
    house = start_house(models={"later": LATER})
    async with house.http() as session, session.get("/readyz") as answer:
        assert (answer.status, await answer.json()) == (200, {"status": "ready", "models": {"later": "unloaded"}})


async def test_a_model_that_cannot_be_loaded_is_refused_and_stays_listed(start_house):
    house = start_house("--exit-at-start", 2, models={"later": LATER})
    async with house.http() as session:
        status, body = await completed(session, "later")
    assert (status, body["error"]["code"]) == (503, "model_unavailable")
    assert body["error"]["message"] == "The model 'later' cannot be loaded."
    assert set(await listed(house)) == {"later"}


async def test_operators_load_unload_and_pin_and_each_change_is_in_the_audit_log(start_house):
    house = start_house(models={"demo": settings.Model(), "later": LATER})
    async with asking(house) as call, house.http(house.admin_key) as session:
        status, model = await call("POST", "later/load")
        assert (status, model.get("state")) == (200, "starting"), model
        await until(lambda: house.gw.dispatch.residence.state("later") == "ready")
        status, model = await call("GET", "later")
        assert (status, model["state"], model["pinned"]) == (200, "ready", False)
        assert 0 < model["planned_bytes"] < model["budget_bytes"]
        assert (await call("POST", "later/pin"))[1]["pinned"] is True
        assert (await call("POST", "later/unpin"))[1]["pinned"] is False
        assert (await call("POST", "later/unload"))[1]["state"] == "unloading"
        await until(lambda: house.gw.dispatch.residence.state("later") == "unloaded")
        assert (await call("GET", "later"))[1]["planned_bytes"] == 0
        assert (await call("POST", "nobody/unload"))[0] == 404
        async with session.get("/admin/v1/audit_log?limit=4") as answer:
            actions = [line["action"] for line in (await answer.json())["data"]]
    assert sorted(actions) == ["model.loaded", "model.pinned", "model.unloaded", "model.unpinned"]


async def test_a_model_that_answers_is_not_unloaded(start_house):
    house = start_house("--step-s", 0.01, models={"demo": settings.Model()})
    async with asking(house) as call:
        async with house.stream("Hello", max_tokens=5000) as stream:
            await stream.take(2)
            status, problem = await call("POST", "demo/unload")
            assert (status, "answers requests" in problem["detail"]) == (409, True)
        await house.quiet()
        assert (await call("POST", "demo/unload"))[0] == 200
