"""The ledger by the administration, on both kinds of store: rows in pages, corrections, closed days."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator

import pytest

from gateway.ledger import Entry
from gateway.ledger.closing import close_next, day_of
from gateway.ledger.verify import verify
from policies import settings
from tests.builders import an_entry, write_chain
from tests.gateway.conftest import KEY, OpenFront
from tests.gateway.desk import Desk

ROWS, CORRECTIONS = "ledger/rows", "ledger/corrections"


@pytest.fixture
async def desk(open_front: OpenFront, store_settings: settings.Store) -> AsyncIterator[Desk]:
    async with open_front(store=store_settings) as front:
        yield Desk(front)


async def settle(desk: Desk, *entries: Entry) -> list[str]:
    """Their request ids."""
    await asyncio.gather(*(desk.front.gw.ledger.settle(entry) for entry in entries))
    return [entry.request_id for entry in entries]


async def ids(desk: Desk, query: str = "") -> list[str]:
    return [row["request_id"] for row in (await desk.got(f"{ROWS}?{query}"))["data"]]


async def test_rows_are_read_with_every_field(desk):
    entry = an_entry(metadata='{"team":"a"}', end_user="somebody", trace_id="0" * 31 + "1", cost_micros=7)
    await settle(desk, entry)
    (row,) = (await desk.got(ROWS))["data"]
    assert (row["request_id"], row["metadata"], row["cost_micros"]) == (entry.request_id, {"team": "a"}, 7)
    assert (row["currency"], row["end_user"], row["trace_id"]) == ("USD", "somebody", entry.trace_id)
    assert (row["position"], len(row["link"])) == (1, 64)
    assert abs(row["settled_at"] - time.time()) < 60


async def test_rows_are_found_by_what_they_have_and_listed_in_the_order_of_settling(desk):
    entries = [an_entry(tenant_id=f"ten_{number % 2}", model=f"m{number % 3}") for number in range(12)]
    everything = await settle(desk, *entries)
    assert await ids(desk) == sorted(everything)
    assert await ids(desk, "order=desc") == sorted(everything, reverse=True)
    assert await ids(desk, "tenant_id=ten_1&model=m0") == [everything[3], everything[9]]
    assert await ids(desk, f"request_id={everything[4]}") == [everything[4]]
    assert await ids(desk, "until=5") == await ids(desk, "key_id=key_x") == []
    assert await ids(desk, "since=5") == sorted(everything)
    for order in ("asc", "desc"):
        found, after = [], ""
        while after is not None:
            page = await desk.got(f"{ROWS}?limit=5&order={order}" + (f"&after={after}" if after else ""))
            found += [row["request_id"] for row in page["data"]]
            after = page["next_cursor"]
        assert found == sorted(everything, reverse=order == "desc")


async def test_the_row_of_an_answer_is_found_by_the_id_that_its_client_knows(desk):
    asked = desk.front.chat()
    desk.front.peer.say(await desk.front.peer.submitted(), [5, 3], "stop")
    answer = await asked
    (row,) = await ids(desk)
    assert answer.id.startswith("chatcmpl-")
    assert await ids(desk, f"request_id={answer.id}") == [row]
    assert await ids(desk, f"request_id={answer.id}0") == await ids(desk, "request_id=chatcmpl-") == []


async def test_rows_that_come_while_pages_are_read_are_on_one_of_them(desk):
    """All within a second, in which gateways write into chains of their own, whatever their requests are called."""
    chance, rooms, ends = random.Random(1), desk.front.gw.store, dict.fromkeys((3, 5, 7), 1)
    names = [f"req_{number:032x}" for number in range(60)]
    chance.shuffle(names)

    async def come(num: int) -> None:
        for _ in range(num):
            chain = chance.choice([*ends])
            entry = an_entry(request_id=names.pop(), settled_at=1_795_000_000)
            await write_chain(rooms, entry, chain=chain, first_position=ends[chain])
            ends[chain] += 1

    await come(10)
    found, after = [], ""
    while after is not None:
        page = await desk.got(f"{ROWS}?limit=4" + (f"&after={after}" if after else ""))
        found += [row["request_id"] for row in page["data"]]
        if (after := page["next_cursor"]) is not None:
            await come(3)
    assert len(found) == len(set(found)) > 20
    assert sorted(found) == sorted(await ids(desk, "limit=500"))
    newest_first, after = [], ""
    while after is not None:
        page = await desk.got(f"{ROWS}?limit=4&order=desc" + (f"&after={after}" if after else ""))
        newest_first += [row["request_id"] for row in page["data"]]
        after = page["next_cursor"]
        await come(1)
    assert len(newest_first) == len(set(newest_first))
    assert set(newest_first) >= set(found)


async def test_rows_are_searched_for_by_how_they_ended(desk):
    fine, slow, failed, theirs = await settle(
        desk,
        an_entry(duration_ms=10.0),
        an_entry(duration_ms=5000.0, sla_class="interactive"),
        an_entry(status=500),
        an_entry(end_user="ann", trace_id="ab" * 16),
    )
    for query, found in (
        ("failed=true", [failed]),
        ("failed=false", sorted((fine, slow, theirs))),
        ("status=500", [failed]),
        ("sla_class=interactive", [slow]),
        ("min_duration_ms=1000", [slow]),
        ("end_user=ann", [theirs]),
        (f"trace_id={'ab' * 16}", [theirs]),
        ("end_user=bob", []),
    ):
        assert sorted(await ids(desk, query)) == found, query
    for query in ("status=ok", "failed=perhaps", "min_duration_ms=-1", "trace_id=%00"):
        assert (await desk("GET", f"{ROWS}?{query}")).status == 400, query


async def test_a_correction_is_a_row_that_points_at_the_one_it_corrects_with_a_reason_in_the_audit_log(desk):
    entry = an_entry(
        num_prompt_tokens=10, num_completion_tokens=20, cost_micros=300, end_user="somebody", price_version="list:3"
    )
    (request_id,) = await settle(desk, entry)
    reason = "The answer was of no use: half of it is given back.\nTicket 17"
    asked = {"request_id": request_id, "reason": reason, "num_completion_tokens": -10, "cost_micros": -150}
    made = await desk("POST", CORRECTIONS, asked)
    assert made.status == 201
    row = made.body
    assert row["request_id"].startswith("corr_")
    assert {name: row[name] for name in ("corrects", "reason", "endpoint", "status", "tenant_id", "model")} == {
        "corrects": request_id,
        "reason": reason,
        "endpoint": entry.endpoint,
        "status": 200,
        "tenant_id": "ten_1",
        "model": "demo",
    }
    assert (row["num_prompt_tokens"], row["num_completion_tokens"], row["cost_micros"]) == (0, -10, -150)
    assert (row["end_user"], row["price_version"], row["num_sequences"]) == ("somebody", "list:3", 0)
    assert sorted(await ids(desk, f"request_id={request_id}")) == sorted([request_id, row["request_id"]])
    (line,) = (await desk.got("audit_log?action=ledger.corrected"))["data"]
    assert (line["object_id"], line["before"], line["after"]) == (row["request_id"], None, row)


async def test_a_correction_is_made_once_under_an_idempotency_key(desk):
    (request_id,) = await settle(desk, an_entry(cost_micros=300))
    asked = {"request_id": request_id, "reason": "r", "cost_micros": -200}
    made = [await desk("POST", CORRECTIONS, asked, idempotency_key="one") for _ in range(3)]
    assert len({reply.body["request_id"] for reply in made}) == 1
    assert len(await ids(desk)) == 2


async def test_a_request_and_its_corrections_never_come_to_less_than_nothing(desk):
    (request_id,) = await settle(desk, an_entry(num_completion_tokens=20, cost_micros=300))
    asked = {"request_id": request_id, "reason": "r", "num_completion_tokens": -15, "cost_micros": -300}
    await desk.made(CORRECTIONS, asked)
    refused = await desk("POST", CORRECTIONS, asked)
    assert (refused.status, refused.fields()) == (400, ["num_completion_tokens"])
    assert "would leave -10: the row and its corrections come to 5" in refused.body["detail"]
    assert (await desk("POST", CORRECTIONS, asked | {"num_completion_tokens": 0})).fields() == ["cost_micros"]
    await desk.made(CORRECTIONS, asked | {"num_completion_tokens": 15, "cost_micros": 300})
    await desk.made(CORRECTIONS, asked)
    assert len(await ids(desk)) == 4


async def test_a_request_and_its_corrections_never_come_to_more_than_can_be_added_up(desk):
    (request_id,) = await settle(desk, an_entry(cost_micros=300))
    asked = {"request_id": request_id, "reason": "r", "cost_micros": 2**53 - 300}
    await desk.made(CORRECTIONS, asked)
    refused = await desk("POST", CORRECTIONS, asked | {"cost_micros": 1})
    assert (refused.status, refused.fields()) == (400, ["cost_micros"])
    assert f"would leave {2**53 + 1}" in refused.body["detail"]
    await desk.made(CORRECTIONS, asked | {"cost_micros": -1})
    assert len(await ids(desk)) == 3


@pytest.mark.parametrize(
    ("changes", "status", "fields"),
    [
        ({"request_id": "req_of_nobody"}, 404, []),
        ({"reason": ""}, 400, ["reason"]),
        ({"reason": "a\x00b"}, 400, ["reason"]),
        ({"reason": "x" * 1025}, 400, ["reason"]),
        ({"reason": None}, 400, ["reason"]),
        ({"cost_micros": 2**60}, 400, ["cost_micros"]),
        ({"cost_micros": 0.5}, 400, ["cost_micros"]),
        ({"cost": 1}, 400, ["cost"]),
        ({"num_cached_tokens": 9}, 400, ["num_cached_tokens"]),
        ({"num_reasoning_tokens": 35}, 400, ["num_reasoning_tokens"]),
        ({"num_prompt_tokens": -9}, 400, ["num_cached_tokens"]),
    ],
)
async def test_what_cannot_be_corrected_is_refused_by_name_and_nothing_is_written(desk, changes, status, fields):
    (request_id,) = await settle(desk, an_entry())
    asked = {"request_id": request_id, "reason": "r", "cost_micros": 1, **changes}
    refused = await desk("POST", CORRECTIONS, asked)
    assert (refused.status, refused.fields()) == (status, fields)
    assert await ids(desk) == [request_id]


async def test_what_corrects_nothing_and_what_corrects_a_correction_is_refused(desk):
    (request_id,) = await settle(desk, an_entry())
    nothing = await desk("POST", CORRECTIONS, {"request_id": request_id, "reason": "r"})
    assert (nothing.status, nothing.fields()[-1]) == (400, "cost_micros")
    row = await desk.made(CORRECTIONS, {"request_id": request_id, "reason": "r", "cost_micros": 5})
    again = await desk("POST", CORRECTIONS, {"request_id": row["request_id"], "reason": "r", "cost_micros": -5})
    assert (again.status, again.fields()) == (400, ["request_id"])
    assert request_id in again.body["detail"]


async def test_corrections_of_several_at_once_are_one_chain_that_can_be_verified(desk):
    chance = random.Random(1)
    entries = [an_entry(cost_micros=1000) for _ in range(5)]
    request_ids = await settle(desk, *entries)

    async def correct() -> int:
        asked = {"request_id": chance.choice(request_ids), "reason": "r", "cost_micros": -chance.randrange(1, 400)}
        return (await desk("POST", CORRECTIONS, asked)).status

    statuses = await asyncio.gather(*(correct() for _ in range(25)))
    assert set(statuses) == {201, 400}
    rooms = desk.front.gw.store
    rows = (await desk.got(f"{ROWS}?limit=100"))["data"]
    left = dict.fromkeys(request_ids, 0)
    for row in rows:
        left[row["corrects"] or row["request_id"]] += row["cost_micros"]
    assert all(0 <= cost <= 1000 for cost in left.values())
    places = sorted(row["position"] for row in rows if row["corrects"])
    assert places == list(range(1, statuses.count(201) + 1))
    verdict = await verify(rooms)
    assert (verdict.findings, verdict.num_rows, verdict.num_chains) == ([], len(rows), 2)


async def test_closed_days_are_listed_with_their_digests(desk):
    await settle(desk, an_entry())
    today = day_of(time.time())
    closed = await close_next(desk.front.gw.store, today + 1, 17)
    (day,) = (await desk.got("ledger/days"))["data"]
    assert day == {"day": closed.day, "num_rows": 1, "digest": closed.digest, "closed_at": 17}


async def test_who_may_read_may_not_correct(desk):
    (request_id,) = await settle(desk, an_entry())
    reader = (await desk.made("admin_keys", {"name": "finance", "role": "billing_reader"}))["key"]
    assert await desk.got(ROWS, key=reader)
    asked = {"request_id": request_id, "reason": "r", "cost_micros": 1}
    assert (await desk("POST", CORRECTIONS, asked, key=reader)).status == 403
    assert (await desk("GET", ROWS, key=KEY)).status == 401


@pytest.mark.parametrize(
    "query",
    ["since=-1", "limit=0", "limit=501", "after=x", "after=WyJsZWRnZXIiLDFd", "tenant_id=a%00", "order=up", "who=me"],
)
async def test_bad_questions_are_refused_by_name(desk, query):
    refused = await desk("GET", f"{ROWS}?{query}")
    assert (refused.status, refused.fields()) == (400, [query.partition("=")[0]])


async def test_the_state_of_the_ledger_says_how_long_answers_waited_for_their_rows(desk):
    before = await desk.got("ledger")
    assert (before["num_pending"], before["is_failing"], before["added"]["num"]) == (0, False, 0)
    await settle(desk, an_entry())
    after = await desk.got("ledger")
    assert after["added"]["num"] == sum(bucket["num"] for bucket in after["added"]["buckets"]) == 1
