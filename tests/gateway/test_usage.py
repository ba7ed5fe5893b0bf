"""Usage and costs as administrators, OpenAI's own client and tenants read them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from collections.abc import AsyncIterator
from decimal import Decimal
from typing import Any

import msgspec
import openai
import pytest

from gateway.admin import usage
from gateway.admin.organization import usage as organization_usage
from gateway.ledger import Entry
from gateway.ledger.sums import Rollup
from policies import pricing
from policies.policy import Policy, Price
from policies.terms import Usage
from tests import official
from tests.builders import PATIENCE_S, an_entry, write_chain
from tests.gateway.conftest import ADMIN_KEY, KEY, Front, OpenFront
from tests.gateway.desk import Desk
from tests.residents import add_key, add_tenant

DAY_S = 86_400
MONDAY = 1_794_787_200
"""Its midnight."""
PRICE = Price(
    prompt=Decimal("0.31"), cached_prompt=Decimal("0.07"), completion=Decimal("1.7"), cache_hit=Decimal("0.1")
)


@pytest.fixture
async def front(open_front: OpenFront) -> AsyncIterator[Front]:
    async with open_front(policies={"default": Policy(prices={"demo": PRICE})}) as front:
        yield front


@pytest.fixture
def desk(front: Front) -> Desk:
    return Desk(front)


@contextlib.asynccontextmanager
async def reading(front: Front, key: str = ADMIN_KEY) -> AsyncIterator[Any]:
    """``client.admin.organization.usage`` of OpenAI's own client."""
    client = official.Client(
        base_url=f"{front.url}/v1", api_key="none", admin_api_key=key, max_retries=0, timeout=PATIENCE_S
    )
    async with client:
        yield client.admin.organization.usage


def a_row(at: int, num_prompt: int = 100, num_completion: int = 10, **others: Any) -> Entry:
    cost = pricing.cost_micros(PRICE, Usage(num_prompt, 40, num_completion), others.get("cache", "miss"))
    tokens = {"num_prompt_tokens": num_prompt, "num_cached_tokens": 40, "num_completion_tokens": num_completion}
    usual = {"price_version": "policy:default@1", "cost_micros": cost}
    return an_entry(settled_at=at, **{**tokens, **usual, **others})


async def own_tenant(front: Front) -> str:
    """Whose KEY is."""
    caller = front.gw.auth.caller(KEY)
    assert caller is not None
    return caller.tenant_id


async def test_what_was_used_a_moment_ago_is_in_the_answer(front, desk):
    since = int(time.time())
    call = front.chat()
    front.peer.say(await front.peer.submitted(), [*front.ids("Hello you"), 3], "stop")
    answered = await call
    (line,) = (await desk.got(f"usage?since={since}&bucket=minute&group_by=tenant_id,model"))["data"]
    assert line["group"] == {"tenant_id": await own_tenant(front), "model": "demo"}
    (row,) = front.rows()
    assert line["starts_at"] <= row["settled_at"] < line["ends_at"] == line["starts_at"] + 60
    assert line["num_requests"] == 1
    assert line["num_prompt_tokens"] == answered.usage.prompt_tokens
    assert line["num_completion_tokens"] == answered.usage.completion_tokens
    page = await desk.got(f"costs?since={since}")
    (cost,) = page["data"]
    assert (page["currency"], cost["cost_micros"]) == ("USD", row["cost_micros"])
    assert {part["kind"]: part["quantity"] for part in cost["parts"]} == {
        "prompt": answered.usage.prompt_tokens,
        "completion": answered.usage.completion_tokens,
        "request": 1,
    } | ({"engine_second": row["engine_us"]} if row["engine_us"] else {})


async def test_parts_of_a_cost_add_up_to_it(front, desk):
    outcomes = ["miss", "hit", "shared", "bypass"]
    rows = [a_row(MONDAY + n, 100 + 7 * n, 13 * n, cache=outcomes[n % 4]) for n in range(20)]
    rows.append(a_row(MONDAY, -5, 0, num_cached_tokens=0, corrects="req_1", endpoint="correction", cost_micros=-3))
    rows.append(a_row(MONDAY, price_version="list:99", cost_micros=77))
    await write_chain(front.gw.store, *rows)
    path = f"costs?since={MONDAY}&until={MONDAY + DAY_S}"
    (line,) = (await desk.got(path))["data"]
    assert line["cost_micros"] == sum(row.cost_micros for row in rows)
    assert sum(part["cost_micros"] for part in line["parts"]) == line["cost_micros"]
    parts = {part["kind"]: part for part in line["parts"]}
    assert parts["other"] == {"kind": "other", "quantity": 0, "unit": "tokens", "cost_micros": 77}
    assert parts["request"] == {"kind": "request", "quantity": 21, "unit": "requests", "cost_micros": 0}
    by_endpoint = (await desk.got(path + "&group_by=endpoint&endpoint=correction"))["data"]
    assert [(one["group"], one["cost_micros"]) for one in by_endpoint] == [({"endpoint": "correction"}, -3)]


async def test_lines_come_in_pages_without_gaps_or_repetitions(front, desk):
    rows = [a_row(MONDAY + 3600 * (n % 5), model=f"m{n % 7}") for n in range(70)]
    await write_chain(front.gw.store, *rows)
    path = f"usage?since={MONDAY}&until={MONDAY + DAY_S}&bucket=hour&group_by=model&limit="
    whole = (await desk.got(path + "1000"))["data"]
    assert len(whole) == 35
    assert [(one["starts_at"], one["group"]["model"]) for one in whole] == sorted(
        {(row.settled_at, row.model) for row in rows}
    )
    pages, cursor = [], ""
    while cursor is not None:
        page = await desk.got(f"{path}4{cursor and '&after=' + cursor}")
        assert page["has_more"] == (page["next_cursor"] is not None)
        pages += page["data"]
        cursor = page["next_cursor"]
    assert pages == whole


async def test_several_are_chosen_by_a_parameter_that_is_given_again_and_a_model_may_have_a_comma(front, desk):
    models = ["large", "large,fast", "fast"]
    rows = [a_row(MONDAY, model=model, tenant_id=await own_tenant(front)) for model in models]
    await write_chain(front.gw.store, *rows, a_row(MONDAY, model="fast", endpoint="/v1/embeddings"))

    async def chosen(what: str) -> list[tuple[str, str]]:
        lines = (await desk.got(f"usage?since={MONDAY}&until={MONDAY + DAY_S}&group_by=model,endpoint&{what}"))["data"]
        return [(line["group"]["model"], line["group"]["endpoint"]) for line in lines]

    chats, vectors = "/v1/chat/completions", "/v1/embeddings"
    assert await chosen("model=large,fast") == [("large,fast", chats)]
    assert await chosen("model=large&model=large,fast") == [("large", chats), ("large,fast", chats)]
    assert await chosen("model=large&model=fast&endpoint=" + vectors) == [("fast", vectors)]
    both = [("fast", chats), ("fast", vectors)]
    assert await chosen(f"model=fast&endpoint={chats},{vectors}") == both
    assert await chosen(f"model=fast&endpoint={chats}&endpoint={vectors}") == both


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("", "since"),
        ("since=yesterday", "since"),
        ("since=-1", "since"),
        ("since=99999999999999999999", "since"),
        ("since=200&until=100", "until"),
        ("since=100&until=100", "until"),
        ("since=253402300799", "since"),
        ("since=0&until=9999999&bucket=week", "bucket"),
        ("since=0&until=253402300799", "bucket"),
        ("since=0&until=99999999&bucket=minute", "bucket"),
        ("since=0&until=100&group_by=color", "group_by"),
        ("since=0&until=100&group_by=model,", "group_by"),
        ("since=0&until=100&group_by=model,model", "group_by"),
        ("since=0&until=100&group_by=" + ",".join(["model"] * 101), "group_by"),
        ("since=0&until=100&tenant_id=ten_none", "tenant_id"),
        ("since=0&until=100&key_id=key_none", "key_id"),
        ("since=0&until=100&model=a%00b", "model[0]"),
        ("since=0&until=100&" + "&".join(["model=a"] * 101), "model"),
        ("since=0&until=100&bucket=day&bucket=day", "bucket"),
        ("since=0&until=100&limit=0", "limit"),
        ("since=0&until=100&limit=1001", "limit"),
        ("since=0&until=100&after=nonsense", "after"),
        ("since=0&until=100&colour=red", "colour"),
    ],
)
async def test_what_cannot_be_asked_is_refused_by_its_name(desk, query, field):
    for path in ("usage", "costs"):
        reply = await desk("GET", f"{path}?{query}")
        assert (reply.status, reply.fields()) == (400, [field]), reply.body


def a_cursor(**others: Any) -> str:
    """As of a question about the first two hours of 1970 in hours, by model."""
    cursor = usage.Cursor(0, 7200, 3600, ("model",), (0, ("demo",)))
    return usage.packed(msgspec.structs.replace(cursor, **others))


async def test_a_cursor_that_was_tampered_with_is_refused(desk, front):
    path = "usage?since=0&until=7200&bucket=hour&group_by=model&after="
    assert (await desk("GET", path + a_cursor())).status == 200
    tampered = [
        a_cursor(since=60),
        a_cursor(until=7260),
        a_cursor(width_s=60),
        a_cursor(group_by=("tenant_id",)),
        a_cursor(place=None),
        a_cursor(place=(60, ("demo",))),
        a_cursor(place=(7200, ("demo",))),
        a_cursor(place=(0, ())),
        a_cursor(place=(0, ("a\0b",))),
        base64.urlsafe_b64encode(b'["0",1]').decode(),
        base64.urlsafe_b64encode(b"[" * 500).decode(),
    ]
    for cursor in tampered:
        reply = await desk("GET", path + cursor)
        assert (reply.status, reply.fields()) == (400, ["after"]), cursor
        page = f"completions?start_time=0&end_time=7200&bucket_width=1h&group_by[]=model&page=page_{cursor}"
        assert (await desk("GET", f"/v1/organization/usage/{page}")).status in (200, 400)


async def test_who_may_read(front, desk):
    reader = (await desk.made("admin_keys", {"name": "finance", "role": "billing_reader"}))["key"]
    path = "usage?since=0&until=60"
    assert (await desk("GET", path, key=reader)).status == 200
    assert (await desk("GET", path, key=KEY)).status == 401
    assert (await desk("GET", path, key="sk-none")).status == 401


async def test_the_official_client_reads_usage(front):
    rows = [
        a_row(MONDAY + 3600, model="demo", service_tier="priority"),
        a_row(MONDAY + 7200, model="demo"),
        a_row(MONDAY + DAY_S + 60, model="other", key_id="key_2"),
        a_row(MONDAY + 3 * DAY_S, model="other", tenant_id="ten_2", cache="hit"),
    ]
    await write_chain(front.gw.store, *rows)
    async with reading(front) as organization:
        page = await organization.completions(start_time=MONDAY + 60, end_time=MONDAY + 4 * DAY_S)
        assert (page.object, page.has_more, page.next_page) == ("page", False, None)
        assert [(bucket.object, bucket.start_time, bucket.end_time) for bucket in page.data] == [
            ("bucket", MONDAY + 60, MONDAY + DAY_S),
            *(("bucket", MONDAY + day * DAY_S, MONDAY + (day + 1) * DAY_S) for day in (1, 2, 3)),
        ]
        first, second, third, fourth = (bucket.results for bucket in page.data)
        assert (len(second), third, len(fourth)) == (1, [], 1)
        (result,) = first
        assert type(result).__name__ == "DataResultOrganizationUsageCompletionsResult"
        assert (result.num_model_requests, result.input_tokens, result.output_tokens) == (2, 200, 20)
        assert (result.input_cached_tokens, result.input_uncached_tokens) == (80, 120)
        assert (result.project_id, result.model, result.user_id, result.batch) == (None, None, None, None)

        words = ["project_id", "user_id", "api_key_id", "model", "batch", "service_tier", "api_source"]
        page = await organization.completions(start_time=MONDAY, end_time=MONDAY + DAY_S, group_by=words)
        (bucket,) = page.data
        assert [
            (one.project_id, one.api_key_id, one.model, one.service_tier, one.batch, one.api_source, one.user_id)
            for one in bucket.results
        ] == [("ten_1", "key_1", "demo", tier, False, "unlabeled", None) for tier in ("default", "priority")]

        async def num_requests(**chosen: Any) -> int:
            page = await organization.completions(start_time=MONDAY, end_time=MONDAY + 5 * DAY_S, **chosen)
            return sum(one.num_model_requests for bucket in page.data for one in bucket.results)

        assert await num_requests() == await num_requests(batch=False) == 4
        assert await num_requests(models=["other"]) == 2
        assert await num_requests(project_ids=["ten_2", "ten_3"]) == 1
        assert await num_requests(api_key_ids=["key_2"]) == 1
        assert await num_requests(user_ids=["user_1"]) == await num_requests(batch=True) == 0


async def test_the_official_client_reads_page_after_page(front, monkeypatch):
    rows = [a_row(MONDAY + 60 * (n % 50) + n, model=f"m{n % 6}") for n in range(200)]
    await write_chain(front.gw.store, *rows)
    async with reading(front) as organization:

        async def everything(**how: Any) -> dict[tuple[int, str], int]:
            found, cursor = {}, {}
            while True:
                page = await organization.completions(
                    start_time=MONDAY, end_time=MONDAY + 3600, bucket_width="1m", group_by=["model"], **how, **cursor
                )
                for bucket in page.data:
                    for one in bucket.results:
                        assert (bucket.start_time, one.model) not in found
                        found[bucket.start_time, one.model] = one.num_model_requests
                assert page.has_more == (page.next_page is not None)
                if page.next_page is None:
                    return found
                cursor = {"page": page.next_page}

        whole = await everything()
        assert sum(whole.values()) == 200
        assert await everything(limit=7) == whole
        monkeypatch.setattr(organization_usage, "MAX_LINES", 3)  # a minute goes on in the next page
        assert await everything(limit=7) == whole


async def test_the_official_client_reads_costs(front):
    rows = [a_row(MONDAY + 60 * n, cache="hit" if n % 3 else "miss") for n in range(9)]
    rows += [a_row(MONDAY + DAY_S, tenant_id="ten_2")]
    await write_chain(front.gw.store, *rows)
    async with reading(front) as organization:
        page = await organization.costs(start_time=MONDAY, end_time=MONDAY + 9 * DAY_S)
        assert (len(page.data), page.has_more) == (7, True)
        ((result,), (second,), *rest) = (bucket.results for bucket in page.data)
        assert rest == [[]] * 5
        assert type(result).__name__ == "DataResultOrganizationCostsResult"
        assert result.amount.currency == "usd"
        assert round(1e6 * result.amount.value) == sum(row.cost_micros for row in rows[:9])
        assert (result.line_item, result.quantity, second.project_id) == (None, None, None)

        both = ["project_id", "line_item"]
        page = await organization.costs(start_time=MONDAY, end_time=MONDAY + 2 * DAY_S, group_by=both)
        items = {one.line_item: one for one in page.data[0].results}
        assert items.keys() == {
            f"demo, {item}"
            for item in ("input_tokens", "input_cached_tokens", "output_tokens", "cache_hit_tokens", "requests")
        }
        assert round(1e6 * sum(one.amount.value for one in items.values())) == sum(row.cost_micros for row in rows[:9])
        hits = items["demo, cache_hit_tokens"]
        assert (hits.quantity, hits.quantity_unit, hits.project_id) == (6 * 110, "tokens", "ten_1")
        assert items["demo, requests"].quantity_unit is None

        chosen = {"group_by": ["line_item"], "line_items": ["demo, output_tokens"], "project_ids": ["ten_2"]}
        page = await organization.costs(start_time=MONDAY, end_time=MONDAY + 9 * DAY_S, **chosen)
        assert [[(one.line_item, one.quantity) for one in bucket.results] for bucket in page.data[:3]] == [
            [],
            [("demo, output_tokens", 10)],
            [],
        ]


async def test_what_the_official_client_cannot_ask_is_refused_by_its_name(front):
    async with reading(front) as organization:
        for param, asked in (
            ("end_time", organization.completions(start_time=200, end_time=100)),
            ("start_time", organization.completions(start_time=10**11)),
            ("limit", organization.completions(start_time=0, limit=32)),
            ("limit", organization.costs(start_time=0, limit=181)),
            ("bucket_width", organization.costs(start_time=0, bucket_width="1h")),
            ("group_by", organization.completions(start_time=0, group_by=["model", "model"])),
            ("group_by[]", organization.completions(start_time=0, group_by=["color"])),
            ("page", organization.completions(start_time=0, page="page_2")),
            ("line_items", organization.costs(start_time=0, line_items=["demo, output_tokens"])),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                await asked
            assert refused.value.param.partition("[0]")[0].removesuffix("[...]") == param, refused.value.message


async def test_a_tenant_reads_its_own_and_nobody_elses(front, desk):
    own = await own_tenant(front)
    other = await add_tenant(front.gw.store, "blue")
    await write_chain(front.gw.store, *(a_row(MONDAY, tenant_id=tenant_id) for tenant_id in (own, other, other)))
    async with reading(front, KEY) as organization:

        async def seen(**chosen: Any) -> list[tuple[str, int]]:
            span = {"start_time": MONDAY, "end_time": MONDAY + DAY_S}
            page = await organization.completions(**span, group_by=["project_id"], **chosen)
            return [(one.project_id, one.num_model_requests) for bucket in page.data for one in bucket.results]

        assert await seen() == await seen(project_ids=[own, other]) == [(own, 1)]
        assert await seen(project_ids=[other]) == []
        costs = await organization.costs(start_time=MONDAY, end_time=MONDAY + DAY_S, group_by=["project_id"])
        assert [one.project_id for one in costs.data[0].results] == [own]
        page = await organization.completions(
            start_time=MONDAY - DAY_S, end_time=MONDAY + DAY_S, limit=1, group_by=["project_id"]
        )
        assert await seen(page=page.next_page) == [(own, 1)]
    for scopes, status in ((["chat.completions"], 403), (["usage"], 200)):
        key = await add_key(front.gw.store, own, scopes={"endpoints": scopes})
        await front.gw.directory.refresh()
        reply = await desk("GET", f"/v1/organization/usage/completions?start_time={MONDAY}", key=key)
        assert reply.status == status
    for path in ("projects", "admin_api_keys", "audit_logs"):
        assert (await desk("GET", f"/v1/organization/{path}", key=KEY)).status == 401


async def test_while_rows_are_written_and_added_up_an_answer_never_shrinks(front, desk):
    since = int(time.time())
    rows = [a_row(since + n % 50) for n in range(400)]

    async def write() -> None:
        for first in range(0, len(rows), 20):
            await write_chain(front.gw.store, *rows[first : first + 20], first_position=first + 1)

    async def add_up() -> None:
        rollup = Rollup(front.gw.store, front.gw.price_history.rates, front.gw.clock)
        while await num_requests() < len(rows):
            await rollup.roll()

    async def num_requests() -> int:
        lines = (await desk.got(f"usage?since={since}&until={since + 100}"))["data"]
        return sum(line["num_requests"] for line in lines)

    seen = []
    working = asyncio.gather(write(), add_up())
    while not working.done():
        seen.append(await num_requests())
    await working
    assert seen == sorted(seen)
    assert await num_requests() == len(rows)
