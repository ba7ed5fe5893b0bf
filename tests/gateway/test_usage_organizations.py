"""Where there are several organizations, OpenAI's own client reads what the one that it names has used."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import pytest

from gateway.clock import Clock
from gateway.ledger.sums import Rollup
from gateway.prices import PriceHistory
from tests.builders import an_entry, write_chain
from tests.gateway.conftest import ADMIN_KEY, KEY, Front, OpenFront
from tests.gateway.test_organization import administering, everything


@pytest.fixture
async def front(open_front: OpenFront) -> AsyncIterator[Front]:
    async with open_front() as front:
        yield front


@pytest.fixture
async def rollup(front: Front) -> Rollup:
    return Rollup(front.gw.store, PriceHistory(front.gw.store.engine).rates, Clock())


async def test_usage_and_costs_are_those_of_the_organization_that_the_header_names(front, rollup):
    async with front.http.post(
        f"{front.url}/admin/v1/organizations", json={"name": "two"}, headers={"authorization": f"Bearer {ADMIN_KEY}"}
    ) as answer:
        other = (await answer.json())["id"]
    async with (
        administering(front) as whole,
        administering(front, organization=other) as two,
        administering(front, organization="org_nobody") as none,
    ):
        (first,) = await everything(whole.projects.list())
        second = await two.projects.create(name="its own")
        own = front.gw.auth.caller(KEY).organization_id
        now = int(time.time())
        for chain, is_added_up in ((1, True), (2, False)):
            rows = [
                an_entry(tenant_id=project.id, num_prompt_tokens=tokens, cost_micros=tokens, settled_at=now)
                for project, tokens in ((first, 1000), (second, 20))
            ]
            await write_chain(front.gw.store, *rows, chain=chain)
            if is_added_up:
                await rollup.roll()
        async with administering(front, organization=own) as one:
            for asked, tokens in ((whole, 2040), (one, 2000), (two, 40), (none, 0)):
                usage = await asked.usage.completions(start_time=now - 60)
                found = [result for bucket in usage.data for result in bucket.results]
                assert sum(result.input_tokens for result in found) == tokens
                costs = await asked.usage.costs(start_time=now - 60, group_by=["line_item"])
                amounts = [result.amount.value for bucket in costs.data for result in bucket.results]
                assert round(1e6 * sum(amounts)) == tokens
    async with administering(front, KEY, organization=other) as tenant:  # whose clients may name one that they had
        usage = await tenant.usage.completions(start_time=now - 60)
        assert [result.input_tokens for bucket in usage.data for result in bucket.results] == [2000]
