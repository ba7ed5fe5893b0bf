"""Responses in the background, with real processes: their gateway is killed, or is another one than the one that is
asked."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from gateway.responses.shelf import LOST
from tests import official
from tests.builders import PATIENCE_S, when
from tests.family import Family, answered_by, family
from tests.journeys.test_crashes import rows_in
from tests.journeys.test_shared import two_hosts

ASKED: Any = {"model": "demo", "input": "Hello!", "background": True}


@contextlib.asynccontextmanager
async def client_of(house: Family) -> AsyncIterator[Any]:
    options: dict[str, Any] = {"max_retries": 0, "timeout": PATIENCE_S}
    async with official.Client(base_url=f"{house.url}/v1", api_key=house.key, **options) as client:
        yield client.responses


async def until_status(responses: Any, response_id: str, status: str) -> Any:
    return await when(lambda: responses.retrieve(response_id), lambda found: found.status == status)


async def deltas(stream: Any, at_least: int) -> list[Any]:
    """Its events, up to so many pieces of text."""
    seen: list[Any] = []
    async for event in stream:
        seen.append(event)
        at_least -= event.type == "response.output_text.delta"
        if at_least == 0:
            break
    return seen


async def test_what_a_killed_gateway_was_writing_has_failed_and_is_owed_as_far_as_it_came(
    tmp_path, start_scripted_worker
):
    environ = answered_by(await start_scripted_worker("--step-s", 0.005))
    async with family(tmp_path, **environ) as house, client_of(house) as responses:
        stream = await responses.create(**ASKED, stream=True, max_output_tokens=4000)
        seen = await deltas(stream, 300)
        house.process.kill()
    response_id = seen[0].response.id
    async with family(tmp_path, **environ) as house, client_of(house) as responses:
        failed = await responses.retrieve(response_id)
        assert (failed.status, failed.error.message) == ("failed", LOST.message)
        events = [event async for event in await responses.retrieve(response_id, stream=True)]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[-1].type == "response.failed"
        assert events[: len(events) - 1] == seen[: len(events) - 1]
        (row,) = rows_in(tmp_path)
        assert (row["request_id"].removeprefix("req_"), row["status"]) == (response_id.removeprefix("resp_"), 500)
        assert row["num_completion_tokens"] > 0
        await house.end()


async def test_gateways_that_share_a_database_know_each_others_responses(
    tmp_path, start_scripted_worker, redis_settings, postgres
):
    worker = answered_by(await start_scripted_worker("--step-s", 0.01))
    async with (
        two_hosts(tmp_path, redis_settings, postgres, worker) as (first, second),
        client_of(first) as here,
        client_of(second) as there,
    ):
        begun = await here.create(**ASKED, max_output_tokens=150)
        told = [event async for event in await there.retrieve(begun.id, stream=True)]
        assert [event.sequence_number for event in told] == list(range(len(told)))
        assert told[-1].response == await here.retrieve(begun.id)
        assert told[-1].response.usage.output_tokens == 150
        on = await there.create(model="demo", input="And?", previous_response_id=begun.id, max_output_tokens=2)
        assert on.usage.input_tokens > told[-1].response.usage.input_tokens + 100
        begun = await here.create(**ASKED, max_output_tokens=8000)
        await until_status(there, begun.id, "in_progress")
        assert (await there.cancel(begun.id)).status == "cancelled"
        assert [event async for event in await here.retrieve(begun.id, stream=True)]
        assert (await here.retrieve(begun.id)).status == "cancelled"
        begun = await here.create(**ASKED, max_output_tokens=8000)
        await until_status(there, begun.id, "in_progress")
        first.process.kill()
        failed = await until_status(there, begun.id, "failed")
        assert failed.error.message == LOST.message
        with pytest.raises(openai.APIConnectionError):
            await here.retrieve(begun.id)
