"""Batches beside everything else: limits, budgets, keys that are revoked, workers that die, disks that are full,
requests that somebody waits for, and houses that stop."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import threading
import time
from decimal import Decimal
from statistics import median
from typing import Any

import msgspec
import openai
import pytest
import sqlalchemy as sa

from gateway import store
from gateway.batches import run
from gateway.batches.book import WINDOW_S, Book
from gateway.batches.journal import Record
from gateway.errors import StoreUnavailable
from policies import settings
from policies.policy import Budget, Limits, Policy
from policies.pricelist import Proposed
from tests import builders
from tests import house as houses
from tests.batches import PRICE, admin, another_key, begun, line, lines, outputs, over, when
from tests.builders import scripted, until


async def test_limits_are_waited_for_and_leave_room_for_requests_that_somebody_waits_for(start_house):
    policy = Policy(limits=Limits(concurrent_requests=5, requests_per_minute=100_000))
    house = start_house("--tokens-per-step", 1, "--step-s", 0.01, policies={"default": policy})
    async with house.client() as client:
        batch = await begun(client, lines(60))
        most = num_alone = 0
        while (batch := await client.batches.retrieve(batch.id)).status not in ("completed", "failed"):
            most = max(most, len(house.gw.limits.open_tickets))
            await client.chat.completions.create(
                model="demo", messages=[{"role": "user", "content": "?"}], max_tokens=1
            )
            num_alone += 1
    assert (batch.status, batch.request_counts.completed) == ("completed", 60)
    assert 1 < most <= 5
    assert num_alone > 3
    assert {row.status for row in await house.ledger_rows()} == {200}


async def test_a_spent_budget_is_each_lines_error_where_the_next_period_does_not_come_in_time(start_house, monkeypatch):
    monkeypatch.setitem(WINDOW_S, "24h", 300)  # on the last day of a month it would
    policy = Policy(budget=Budget(Decimal("0.001"), period="month"))
    house = start_house("--tokens-per-step", 4, policies={"default": policy}, prices=(Proposed(price=PRICE),))
    async with house.client() as client:
        batch = await over(client, await begun(client, lines(20)))
        answered, bad = await outputs(client, batch.output_file_id), await outputs(client, batch.error_file_id)
    assert answered
    assert len(answered) + len(bad) == 20
    assert {one["response"]["status_code"] for one in bad} == {429}
    assert {one["response"]["body"]["error"]["code"] for one in bad} == {"insufficient_quota"}
    # The file is for all keys of the tenant: also for those that may not know what it spends.
    assert not any("Spent" in one["response"]["body"]["error"]["message"] for one in bad)
    assert sum(row.cost_micros for row in await house.ledger_rows()) <= 1000


async def test_lines_wait_for_money_that_others_only_hold(start_house):
    policy = Policy(budget=Budget(Decimal("0.01")))  # as much as two lines may cost, and all do
    house = start_house("--num-tokens", 2, policies={"default": policy}, prices=(Proposed(price=PRICE),))
    async with house.client() as client:
        batch = await over(client, await begun(client, lines(8, max_tokens=200)))
    assert (batch.status, batch.request_counts.completed) == ("completed", 8)


async def test_a_revoked_key_stops_its_batch(start_house):
    house = start_house("--tokens-per-step", 1, "--step-s", 0.02, batches=settings.Batches(max_in_flight=4))
    made = await another_key(house)
    async with house.client() as client, house.client(made["key"]) as doomed:
        batch = await begun(doomed, lines(300))
        await when(client, batch, lambda batch: batch.request_counts.completed >= 4)
        await admin(house, "DELETE", f"keys/{made['id']}")
        batch = await over(client, batch)
        answered, unasked = await outputs(client, batch.output_file_id), await outputs(client, batch.error_file_id)
    assert (batch.status, batch.errors.data[0].code) == ("failed", "invalid_api_key")
    assert {one["error"]["code"] for one in unasked} == {"invalid_api_key"}
    assert len(answered) + len(unasked) == 300


async def test_a_batch_of_a_disabled_tenant_says_so(start_house):
    house = start_house("--tokens-per-step", 1, "--step-s", 0.02, batches=settings.Batches(max_in_flight=4))
    made = await another_key(house, is_stranger=True)

    async def disabled(is_disabled: bool) -> None:
        url, change = f"/admin/v1/tenants/{made['tenant_id']}", {"disabled": is_disabled}
        async with house.http(house.admin_key) as session:
            assert (await session.patch(url, json=change, headers={"if-match": "*"})).status == 200

    async def is_over() -> bool:
        async with house.gw.store.engine.connect() as connection:
            return (await connection.execute(sa.select(store.batches.c.failed_at))).scalar() is not None

    async with house.client(made["key"]) as client:
        batch = await begun(client, lines(300))
        await when(client, batch, lambda batch: batch.request_counts.completed >= 4)
        await disabled(True)
        await builders.when(lambda: house.inside(is_over()))
        await disabled(False)
        batch = await client.batches.retrieve(batch.id)
    assert (batch.status, batch.errors.data[0].code) == ("failed", "invalid_api_key")
    assert "or its project was disabled" in batch.errors.data[0].message


async def test_a_batch_that_is_cancelled_while_it_is_read_has_not_failed(start_house, monkeypatch):
    """At another gateway, of which this one has not heard."""
    is_reading, may_end, read = threading.Event(), threading.Event(), run.read

    def slowly(*given: Any) -> Any:
        is_reading.set()
        may_end.wait()
        return read(*given)

    async def cancel() -> None:
        async with house.gw.store.engine.begin() as connection:
            await connection.execute(sa.update(store.batches).values(status="cancelling", cancelling_at=1))

    monkeypatch.setattr(run, "read", slowly)
    house = start_house("--tokens-per-step", 4)
    async with house.client() as client:
        batch = await begun(client, [line("a", model="nobody's")])
        try:
            await until(is_reading.is_set)
            await house.inside(cancel())
        finally:
            may_end.set()
        batch = await over(client, batch)
    assert (batch.status, batch.failed_at, batch.cancelled_at > 1) == ("cancelled", None, True)
    assert batch.errors.data[0].code == "model_not_found"


async def test_a_worker_that_dies_and_one_that_refuses_fail_no_line(start_house, tmp_path):
    house = start_house(
        *("--tokens-per-step", 1, "--fault", "die", "--after", 20, "--once", tmp_path / "died"),
        workers=settings.Workers(restart_backoff_s=0.05, max_failovers=0),
    )
    async with house.client() as client:
        batch = await over(client, await begun(client, lines(100)))
    assert (tmp_path / "died").exists()
    assert (batch.status, batch.request_counts.completed) == ("completed", 100)


async def test_while_the_disk_is_full_nothing_counts_and_then_it_goes_on(start_house, caplog):
    # Lines that wait for the ledger are not all that are under way: others come to their end, and to the journal.
    house = start_house(
        *("--tokens-per-step", 1, "--step-s", 0.005, "--max-sequences", 4), batches=settings.Batches(max_in_flight=16)
    )
    async with house.client() as client:
        batch = await begun(client, lines(400))
        await when(client, batch, lambda batch: batch.request_counts.completed >= 4)
        (journal,) = house.gw.files.directory.glob("batch_*.journal")
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        most = journal.stat().st_size + 100
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))  # no file grows beyond it, the ledger's neither
        most = max(most, journal.stat().st_size)  # it may have grown just before
        try:
            await until(lambda: f"{journal.name} cannot be written" in caplog.text)
            size = journal.stat().st_size
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert size <= most
        batch = await over(client, batch)
        found = await outputs(client, batch.output_file_id)
    assert (batch.status, len(found)) == ("completed", 400)
    rows = await house.ledger_rows(status=200)
    assert sorted(row.request_id for row in rows) == sorted(one["response"]["request_id"] for one in found)


async def test_a_line_that_is_broken_off_while_its_result_is_written_is_answered_once_and_paid(
    start_house, monkeypatch
):
    """Its batch was cancelled, and the disk takes longer than the last lines have."""
    is_writing, may_end, sync = threading.Event(), threading.Event(), os.fdatasync

    def slowly(number: int) -> None:
        is_writing.set()
        may_end.wait()
        sync(number)

    monkeypatch.setattr(run, "LAST_LINES_S", 0.01)
    monkeypatch.setattr(os, "fdatasync", slowly)
    house = start_house("--tokens-per-step", 4)
    async with house.client() as client:
        try:
            batch = await begun(client, lines(3))
            await until(is_writing.is_set)
            await client.batches.cancel(batch.id)
            await asyncio.sleep(1.0)
        finally:
            may_end.set()
        batch = await over(client, batch)
        answered, unasked = await outputs(client, batch.output_file_id), await outputs(client, batch.error_file_id)
    rows = await house.ledger_rows(status=200)
    assert batch.status == "cancelled"
    assert sorted(one["custom_id"] for one in [*answered, *unasked]) == ["line-0", "line-1", "line-2"]
    assert (batch.request_counts.completed, batch.request_counts.failed) == (len(answered), len(unasked))
    assert {row.request_id for row in rows} == {one["response"]["request_id"] for one in answered}


async def test_an_interactive_request_does_not_wait_behind_a_batch(start_house):
    """The worker is full of lines, and more of them wait; whoever comes is served as if there were none."""
    house = start_house(
        *("--tokens-per-step", 1, "--step-s", 0.005, "--max-sequences", 8),
        policies={"default": Policy(sla_class="interactive")},
    )
    async with house.client() as client:
        batch = await begun(client, lines(2000, max_tokens=16))
        await when(client, batch, lambda batch: batch.request_counts.completed >= 50)
        for _ in range(20):
            await client.chat.completions.create(
                model="demo", messages=[{"role": "user", "content": "?"}], max_tokens=4
            )

        def num_waiting() -> int:
            return {view.sla_class: view.num_waiting for view in house.gw.dispatch.queues()}["batch"]

        await until(num_waiting)  # none does while those that ended together are followed by others
        assert num_waiting() <= 9
        still = await client.batches.cancel(batch.id)
        await over(client, batch)
    assert still.status == "cancelling"
    waits = [row.queue_ms for row in await house.ledger_rows(sla_class="interactive")]
    assert len(waits) == 20
    lines_waited = [row.queue_ms for row in await house.ledger_rows(sla_class="batch", status=200)]
    assert median(waits) < median(lines_waited) / 4  # it was never put in line behind them


async def test_a_house_that_stops_goes_on_where_it_was(tmp_path):
    command = scripted("--tokens-per-step", 1, "--step-s", 0.01)
    slow = settings.Batches(max_in_flight=8)
    with houses.running(tmp_path / "data", command, batches=slow) as house:
        async with house.client() as client:
            batch = await begun(client, lines(500))
            await when(client, batch, lambda batch: batch.request_counts.completed >= 20)
    with houses.running(tmp_path / "data", command, batches=slow) as house:
        async with house.client() as client:
            batch = await over(client, batch)
            found = await outputs(client, batch.output_file_id)
        rows = await house.ledger_rows()
    assert (batch.status, len(found)) == ("completed", 500)
    assert [one["custom_id"] for one in found] == [f"line-{number}" for number in range(500)]
    owed = sorted(row.request_id for row in rows if row.status == 200 or row.num_completion_tokens)
    assert owed == sorted(one["response"]["request_id"] for one in found)


async def test_a_result_that_was_written_before_a_crash_has_its_row_written_after_it(tmp_path):
    """As if the machine had stopped between the two."""
    command = scripted("--tokens-per-step", 1, "--step-s", 0.01)
    slow = settings.Batches(max_in_flight=2)
    with houses.running(tmp_path / "data", command, batches=slow) as house:
        async with house.client() as client:
            batch = await begun(client, lines(100))
            await when(client, batch, lambda batch: batch.request_counts.completed >= 4)
        files = house.gw.files.directory
    (path,) = files.glob("*.journal")
    *_, last = [msgspec.json.decode(raw, type=Record) for raw in path.read_bytes().splitlines()]
    entry = msgspec.structs.replace(last.entry, request_id="req_that_was_not_written", num_completion_tokens=77)
    output = json.loads(bytes(last.output)) | {"custom_id": "line-99"}
    record = Record(99, True, entry, msgspec.Raw(json.dumps(output).encode()))
    path.write_bytes(path.read_bytes() + msgspec.json.encode(record) + b"\n")
    with houses.running(tmp_path / "data", command, batches=slow) as house:
        async with house.client() as client:
            batch = await over(client, batch)
            found = await outputs(client, batch.output_file_id)
        (row,) = await house.ledger_rows(request_id="req_that_was_not_written")
        num_owed = len(await house.ledger_rows(status=200))
    assert (row.num_completion_tokens, row.tenant_id) == (77, last.entry.tenant_id)
    assert (len(found), num_owed, batch.usage.output_tokens) == (100, 100, 99 * 4 + 77)


async def test_a_batch_that_has_begun_goes_on_where_the_bounds_are_lower_since(tmp_path):
    command, bounds = scripted("--tokens-per-step", 1, "--step-s", 0.01), settings.Batches(max_in_flight=2)
    long = line("long", messages=[{"role": "user", "content": "x " * 3000}])
    with houses.running(tmp_path / "data", command, batches=bounds) as house:
        async with house.client() as client:
            batch = await begun(client, [*lines(100), long])
            await when(client, batch, lambda batch: batch.request_counts.completed >= 4)
    bounds, server = settings.Batches(max_lines=50), settings.Server(max_body_bytes=1024)
    with houses.running(tmp_path / "data", command, batches=bounds, server=server) as house:
        async with house.client() as client:
            batch = await over(client, batch)
            answered, bad = await outputs(client, batch.output_file_id), await outputs(client, batch.error_file_id)
    assert (batch.status, len(answered)) == ("completed", 100)
    assert [(one["custom_id"], one["response"]["status_code"]) for one in bad] == [("long", 413)]


async def test_a_batch_whose_journal_is_damaged_fails_with_as_many_lines_as_it_has(tmp_path):
    command = scripted("--tokens-per-step", 1, "--step-s", 0.01)
    slow = settings.Batches(max_in_flight=2)
    with houses.running(tmp_path / "data", command, batches=slow) as house:
        async with house.client() as client:
            batch = await begun(client, lines(100))
            await when(client, batch, lambda batch: batch.request_counts.completed >= 4)
        (path,) = house.gw.files.directory.glob("*.journal")
    path.write_bytes(b"x" + path.read_bytes()[1:])
    with houses.running(tmp_path / "data", command, batches=slow) as house:
        async with house.client() as client:
            batch = await over(client, batch)
    assert (batch.status, batch.errors.data[0].code, batch.request_counts.total) == ("failed", "internal_error", 100)
    os.utime(path, (1, 1))
    with houses.running(tmp_path / "data", command) as house:
        await house.inside(house.gw.files.sweep())
    assert path.exists()


@pytest.mark.parametrize("ending", ["cancelled", "expired"])
async def test_a_batch_whose_input_is_lost_ends_with_what_was_answered(tmp_path, ending):
    command = scripted("--tokens-per-step", 1, "--step-s", 0.01)
    slow = settings.Batches(max_in_flight=2)
    with houses.running(tmp_path / "data", command, batches=slow) as house:
        async with house.client() as client:
            batch = await begun(client, lines(100))
            await when(client, batch, lambda batch: batch.request_counts.completed >= 4)
            unbegun = await client.files.create(file=("in.jsonl", b"{}"), purpose="batch")
        files = house.gw.files.directory
    for file_id in (batch.input_file_id, unbegun.id):
        (files / file_id).unlink()
    with houses.running(tmp_path / "data", command, batches=slow) as house:
        async with house.client() as client:
            other = await client.batches.create(
                input_file_id=unbegun.id, endpoint="/v1/chat/completions", completion_window="24h"
            )
            if ending == "cancelled":
                await asyncio.gather(*[client.batches.cancel(each.id) for each in (batch, other)])
            house.gw.batches.wall = lambda: time.time() + (86_401 if ending == "expired" else 0)
            batch, other = await over(client, batch), await over(client, other)
            answered, unasked = await outputs(client, batch.output_file_id), await outputs(client, batch.error_file_id)
        rows = await house.ledger_rows(status=200)
    assert (batch.status, other.status) == (ending, "failed" if ending == "expired" else "cancelled")
    assert "input file" in other.errors.data[0].message
    assert len(answered) == batch.request_counts.completed == len(rows) >= 4
    assert len(unasked) == 100 - len(answered)
    assert {(one["custom_id"], one["error"]["code"]) for one in unasked} == {(None, f"batch_{ending}")}
    assert not list(files.glob("*.journal"))


async def test_a_journal_that_a_killed_gateway_left_behind_the_end_of_its_batch_is_swept_up(tmp_path):
    command = scripted("--tokens-per-step", 4)
    with houses.running(tmp_path / "data", command) as house:
        async with house.client() as client:
            batch = await over(client, await begun(client, lines(1)))
            failed = await over(client, await begun(client, [line("a", model="nobody's")]))
        ids = batch.id, failed.id, f"batch_{0:024x}"
        *left, of_nobody = (house.gw.files.directory / f"{name}.journal" for name in ids)
    for path in (*left, of_nobody):
        path.touch()
        os.utime(path, (1, 1))
    with houses.running(tmp_path / "data", command):
        await until(lambda: not any(path.exists() for path in left))
    assert (failed.status, of_nobody.exists()) == ("failed", True)


async def test_results_are_there_although_nobody_heard_that_the_batch_was_committed_as_over(tmp_path, monkeypatch):
    """The connection to the database breaks behind the commit, or the gateway stops there."""
    num_ended, finish = 0, Book.finish

    async def unheard(book: Book, *what: Any, **values: Any) -> Any:
        nonlocal num_ended
        ended = await finish(book, *what, **values)
        num_ended += 1
        if num_ended == 1:
            raise StoreUnavailable.for_clients(True)
        await asyncio.sleep(1.0)
        return ended

    monkeypatch.setattr(Book, "finish", unheard)
    with houses.running(tmp_path / "data", scripted("--tokens-per-step", 4)) as house:
        async with house.client() as client:
            batches = [await over(client, await begun(client, lines(3))) for _ in range(2)]
    with houses.running(tmp_path / "data", scripted("--tokens-per-step", 4)) as house:
        async with house.client() as client:
            found = [await outputs(client, batch.output_file_id) for batch in batches]
    assert [(batch.status, batch.request_counts.completed) for batch in batches] == [("completed", 3)] * 2
    assert [[one["custom_id"] for one in of_batch] for of_batch in found] == [["line-0", "line-1", "line-2"]] * 2
    assert num_ended == 2


async def test_an_input_whose_time_is_over_stays_as_long_as_it_is_read(start_house):
    house = start_house("--tokens-per-step", 1, "--step-s", 0.02, batches=settings.Batches(max_in_flight=4))
    async with house.client() as client:
        batch = await begun(client, lines(60))
        house.gw.files.wall = lambda: time.time() + 2_592_001
        await house.inside(house.gw.files.sweep())
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(batch.input_file_id)
        batch = await over(client, batch)
        await house.inside(house.gw.files.sweep())
    assert (batch.status, batch.request_counts.completed) == ("completed", 60)
    assert not (house.gw.files.directory / batch.input_file_id).exists()
