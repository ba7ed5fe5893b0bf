"""Whose batches a gateway takes next."""

from __future__ import annotations

import asyncio
from collections import Counter
from decimal import Decimal

import msgspec
import sqlalchemy as sa

from gateway import openai, store
from gateway.batches.book import Batch, Book
from gateway.bootstrap import bootstrap
from gateway.clock import Clock
from gateway.errors import TooManyBatches
from gateway.files import Files
from policies import settings
from policies.policy import Budget, Policy
from policies.pricelist import Proposed
from tests.batches import PRICE, a_batch, another_key, begun, lines, outputs, over, when
from tests.residents import add_tenant


async def test_tenants_take_turns_and_none_has_more_than_its_share_but_the_cancelled_go_first(store_settings):
    async with store.opened(store_settings) as rooms:
        await bootstrap(rooms, {})
        one, other = await add_tenant(rooms, "one"), await add_tenant(rooms, "other")
        of_whom = [one] * 6 + [other] * 3
        batches = [
            a_batch(number, tenant_id, "cancelling" if number == 5 else "validating")
            for number, tenant_id in enumerate(of_whom)
        ]
        async with rooms.engine.begin() as connection:
            await connection.execute(sa.insert(store.batches), [msgspec.structs.asdict(batch) for batch in batches])
        book = Book(rooms, settings.Batches(), Files(rooms, settings.Files(), Clock()), "a gateway")

        first = await book.claim([], 4, 2)
        assert [int(batch.id[6:], 16) for batch in first] == [5, 0, 6, 1]
        more = await book.claim(first[:3], 4, 2)
        assert [int(batch.id[6:], 16) for batch in more] == [7]
        assert Counter(batch.owner for batch in [*first, *more]) == {"a gateway": 5}
        assert not await book.claim(batches, 4, 2)
        assert not await book.claim([], 0, 2)


async def test_a_batch_that_nothing_comes_of_leaves_its_place_to_others(start_house, monkeypatch):
    for name, value in (("MAX_RUNS", 1), ("AGAIN_S", 0.1), ("run.STUCK_S", 0.1)):
        monkeypatch.setattr(f"gateway.batches.{name}", value)
    policy = Policy(budget=Budget(Decimal("0.001"), period="day"))
    house = start_house("--tokens-per-step", 4, policies={"default": policy}, prices=(Proposed(price=PRICE),))
    made = await another_key(house, is_stranger=True)
    async with house.client() as client, house.client(made["key"]) as other:
        stuck = await begun(client, lines(20))
        await when(client, stuck, lambda batch: batch.request_counts.completed)
        batch = await over(other, await begun(other, lines(1)))
        assert (batch.status, batch.request_counts.completed) == ("completed", 1)
        cancelled = await over(client, await client.batches.cancel(stuck.id))
        assert (cancelled.status, cancelled.request_counts.total) == ("cancelled", 20)
        assert len(await outputs(client, cancelled.output_file_id)) == cancelled.request_counts.completed > 0


async def test_however_many_come_at_once_a_tenant_has_no_more_batches_than_it_may(store_settings):
    async with store.opened(store_settings) as rooms:
        await bootstrap(rooms, {})
        tenant_id, files = await add_tenant(rooms, "one"), Files(rooms, settings.Files(), Clock())
        async with files.staged(tenant_id) as staged:
            file = await files.keep(staged, tenant_id, "in.jsonl", "batch")
        asked = openai.BatchRequest(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        book = Book(rooms, settings.Batches(max_open=3), files, "a gateway")
        came = await asyncio.gather(
            *[book.create(tenant_id, "key_1", asked) for _ in range(12)], return_exceptions=True
        )
        assert Counter(type(each) for each in came) == {Batch: 3, TooManyBatches: 9}
