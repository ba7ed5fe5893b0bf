"""Exports on both databases: nothing missing, nothing twice, the same bytes again; interrupted ones go on."""

from __future__ import annotations

import csv
import datetime
import io
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from decimal import Decimal

import msgspec
import pytest
import sqlalchemy as sa
from pyarrow import parquet

from gateway import store
from gateway.exports import DAY_S, EPOCH, BadOrder, Order, check, files, pieces
from gateway.exports.files import InTheWay, write_file, write_stream
from gateway.exports.pieces import Export
from gateway.launcher import environment
from gateway.ledger import Entry
from gateway.ledger.closing import close_next
from gateway.store import Store
from policies import pricing
from policies.policy import Price
from policies.pricing import FROM_CACHE
from policies.terms import Usage
from tests.builders import an_entry, write_chain
from tests.gateway.conftest import ADMIN_KEY, KEY
from tests.gateway.desk import Desk

FIRST = 1_795_000_000 // DAY_S
"""The first day of what is tested, since 1970."""
PRICE = Price(
    prompt=Decimal("0.31"),
    cached_prompt=Decimal("0.07"),
    completion=Decimal("1.7"),
    cache_hit=Decimal("0.1"),
    request=Decimal("0.000123"),
    engine_second=Decimal("0.002"),
)


@pytest.fixture
async def rooms(store_settings) -> AsyncIterator[Store]:
    async with store.opened(store_settings) as rooms:
        async with rooms.engine.begin() as connection:
            row = {"version": 1, "model": "*", "sla_class": "*", "effective_from": 0, "created_at": 0}
            document = msgspec.json.encode({"currency": "USD", "price": PRICE}).decode()
            row |= {"document": document, "created_by": "test", "note": "", "revision": 1}
            await connection.execute(sa.insert(store.prices), row)
        yield rooms


def an_order(what: str = "usage", format: str = "csv", first: int = FIRST, days: int = 3, **others: object) -> Order:
    from_, to = (EPOCH + datetime.timedelta(days=day) for day in (first, first + days))
    return Order(what=what, format=format, from_=from_, to=to, **others)


def random_entries(seed: int, number: int, days: int = 3) -> list[Entry]:
    """In the order of their settlement, over so many days, priced as their rows say."""
    chance = random.Random(seed)
    entries = []
    for at in sorted(chance.randrange(FIRST * DAY_S, (FIRST + days) * DAY_S) for _ in range(number)):
        num_prompt = chance.randrange(1, 4000)
        usage = Usage(num_prompt, chance.randrange(num_prompt), chance.randrange(900))
        cache, engine_us = chance.choice(["miss", "hit", "shared", "bypass"]), chance.randrange(10**7)
        discount = Decimal(chance.choice(["0", "0.1", "0.3333"]))
        engine_us = 0 if cache in FROM_CACHE else engine_us
        cost = pricing.cost_micros(pricing.rates_of(PRICE, discount), usage, cache, engine_us)
        entries.append(
            an_entry(
                tenant_id=chance.choice(["ten_1", "ten_2"]),
                key_id=chance.choice(["key_1", "key_2"]),
                model=chance.choice(["demo", "größer"]),
                cache=cache,
                num_prompt_tokens=usage.num_prompt_tokens,
                num_cached_tokens=usage.num_cached_tokens,
                num_completion_tokens=usage.num_completion_tokens,
                engine_us=engine_us,
                cost_micros=cost,
                price_version=f"list:1;discount={discount}" if discount else "list:1",
                settled_at=at,
                link=chance.randbytes(32),
                end_user=chance.choice([None, 'a "quoted", user', "=1+1"]),
            )
        )
    return entries


async def closed(rooms: Store, until: int) -> None:
    while await close_next(rooms, until, until * DAY_S):
        pass


async def exported(rooms: Store, order: Order, tenants: tuple[str, ...] = ()) -> bytes:
    sink = io.BytesIO()
    await write_stream(await Export.begin(rooms, order, tenants), sink)
    return sink.getvalue()


async def rows_of(rooms: Store, order: Order) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO((await exported(rooms, order)).decode())))


async def test_every_row_of_a_period_is_exported_once_closed_or_not(rooms, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_ROWS", 40)
    monkeypatch.setattr("gateway.exports.spans.PAGE_ROWS", 7)
    entries = random_entries(1, 300)
    await write_chain(rooms, *entries[::2], chain=1)
    await write_chain(rooms, *entries[1::2], chain=2)

    async def check_days() -> None:
        for day in range(3):
            asked = await rows_of(rooms, an_order(first=FIRST + day, days=1))
            assert Counter(row["request_id"] for row in asked) == Counter(
                entry.request_id for entry in entries if entry.settled_at // DAY_S == FIRST + day
            )
        whole = await rows_of(rooms, an_order())
        assert (
            sum(Decimal(row["cost"]) for row in whole) == sum(Decimal(entry.cost_micros) for entry in entries) / 10**6
        )

    await check_days()
    for until in range(FIRST + 1, FIRST + 4):
        await closed(rooms, until)
        await check_days()


async def test_a_closed_period_is_the_same_bytes_again_and_a_late_row_is_in_the_next_day(rooms):
    entries = random_entries(2, 60, days=1)
    await write_chain(rooms, *entries[:40], chain=1)
    # The 41st has not come yet.
    await write_chain(rooms, *entries[41:], chain=1, first_position=42)
    await closed(rooms, FIRST + 1)
    orders = [an_order(format=format, days=1) for format in ("csv", "jsonl", "parquet")]
    orders += [an_order("costs", format, days=1) for format in ("csv", "jsonl", "parquet", "focus")]
    before = [await exported(rooms, order) for order in orders]
    assert all(before)
    await write_chain(rooms, entries[40], chain=1, first_position=41)
    assert [await exported(rooms, order) for order in orders] == before
    for is_closed in (False, True):
        if is_closed:
            await closed(rooms, FIRST + 2)
        late = await rows_of(rooms, an_order(first=FIRST + 1, days=1))
        assert [row["request_id"] for row in late] == [entry.request_id for entry in entries[40:]]


async def test_all_formats_say_the_same(rooms):
    entries = random_entries(3, 50)
    await write_chain(rooms, *entries)
    rows = await rows_of(rooms, an_order())
    objects = [
        json.loads(line, parse_float=Decimal) for line in (await exported(rooms, an_order(format="jsonl"))).splitlines()
    ]
    table = parquet.read_table(io.BytesIO(await exported(rooms, an_order(format="parquet")))).to_pylist()
    for row, object_, record, entry in zip(rows, objects, table, entries, strict=True):
        assert row["request_id"] == object_["request_id"] == record["request_id"] == entry.request_id
        assert Decimal(row["cost"]) == object_["cost"] == record["cost"] == Decimal(entry.cost_micros) / 10**6
        assert row["end_user"] == (object_["end_user"] or "") == (record["end_user"] or "") == (entry.end_user or "")
        at = datetime.datetime.fromtimestamp(entry.settled_at, datetime.UTC)
        assert record["settled_at"] == at
        assert row["settled_at"] == object_["settled_at"] == f"{at:%Y-%m-%dT%H:%M:%SZ}"
        assert row["link"] == object_["link"] == record["link"] == (entry.link or b"").hex()
        assert int(row["num_prompt_tokens"]) == object_["num_prompt_tokens"] == entry.num_prompt_tokens


async def test_what_a_client_calls_its_user_makes_no_row_of_its_own(rooms):
    users = ["a\rreq_forged,ten_2", "\r", "a\r\nb", "a\nb", "\x0b\x85\u2028", 'a,"b"\r']
    await write_chain(rooms, *(an_entry(settled_at=FIRST * DAY_S, end_user=user) for user in users))
    written = await exported(rooms, an_order())
    rows = list(csv.DictReader(io.StringIO(written.decode(), newline="")))
    assert [row["end_user"] for row in rows] == users
    assert written.count(b"\r\n") == 1


@pytest.mark.parametrize("format", ["csv", "focus"])
async def test_the_lines_of_costs_add_up_to_the_rows(rooms, format):
    entries = random_entries(4, 200)
    await write_chain(rooms, *entries)
    cost, listed = ("BilledCost", "ListCost") if format == "focus" else ("cost", "list_cost")
    lines = await rows_of(rooms, an_order("costs", format))
    assert sum(Decimal(line[cost]) for line in lines) == Decimal(sum(entry.cost_micros for entry in entries)) / 10**6
    undiscounted = sum(
        pricing.cost_micros(
            pricing.rates_of(PRICE),
            Usage(entry.num_prompt_tokens, entry.num_cached_tokens, entry.num_completion_tokens),
            entry.cache,
            entry.engine_us,
        )
        for entry in entries
    )
    found = sum(Decimal(line[listed]) for line in lines) * 10**6
    assert abs(found - undiscounted) <= len(entries) + len(lines)  # each of them is rounded


async def test_what_failed_is_in_no_line_of_what_was_paid_for(rooms):
    paid = [row for row in random_entries(5, 60, days=1) if row.cache == "miss"]
    failed = [
        msgspec.structs.replace(
            row,
            request_id=f"{row.request_id}0",
            status=503,
            finish_reason="error",
            num_prompt_tokens=0,
            num_cached_tokens=0,
            num_completion_tokens=0,
            cost_micros=0,
        )
        for row in paid
    ]
    await write_chain(rooms, *sorted((*paid, *failed), key=lambda row: row.settled_at))
    for line in await rows_of(rooms, an_order("costs", "focus", days=1)):
        exact = Decimal(line["PricingQuantity"]) * Decimal(line["ContractedUnitPrice"])
        assert abs(exact - Decimal(line["ContractedCost"])) * 10**6 <= int(line["x_NumRequests"])


async def test_a_corrections_lines_are_corrections_with_the_sign_of_what_they_take_back(rooms):
    entry = an_entry(settled_at=FIRST * DAY_S, price_version="list:1", num_prompt_tokens=1_000_000, cost_micros=310_123)
    correction = an_entry(
        settled_at=FIRST * DAY_S + 1,
        price_version="list:1",
        corrects=entry.request_id,
        reason="counted twice",
        num_prompt_tokens=-500_000,
        num_cached_tokens=0,
        num_completion_tokens=0,
        cost_micros=-155_000,
        endpoint="correction",
    )
    await write_chain(rooms, entry, correction)
    lines = await rows_of(rooms, an_order("costs", "focus", days=1))
    (corrected,) = [line for line in lines if line["ChargeClass"] == "Correction"]
    assert (corrected["BilledCost"], corrected["ConsumedQuantity"]) == ("-0.155000", "-500000.0")


@pytest.mark.parametrize("format", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("what", ["usage", "costs"])
async def test_an_interrupted_export_goes_on_to_the_same_file(rooms, tmp_path, monkeypatch, what, format):
    monkeypatch.setattr(pieces, "PIECE_ROWS", 40)
    await write_chain(rooms, *random_entries(5, 150))
    await closed(rooms, FIRST + 3)
    order = an_order(what, format)
    await write_file(await Export.begin(rooms, order), tmp_path / "whole", lambda num_read: None)

    class Interrupted(Exception):
        pass

    for num_pieces in range(1, 3):
        heard: list[int] = []

        def tell(num_read: int, heard: list[int] = heard, num_pieces: int = num_pieces) -> None:
            heard.append(num_read)
            if len(heard) > num_pieces:
                raise Interrupted

        with pytest.raises(Interrupted):
            await write_file(await Export.begin(rooms, order), tmp_path / "again", tell)
        assert not (tmp_path / "again").exists()
    heard = []
    num_read = await write_file(await Export.begin(rooms, order), tmp_path / "again", heard.append)
    assert heard[0] > 0
    assert sum(heard) == num_read == 150
    assert (tmp_path / "again").read_bytes() == (tmp_path / "whole").read_bytes()
    assert not (tmp_path / "again.pieces").exists()


async def test_what_lies_in_the_way_is_left_alone(rooms, tmp_path):
    begun = await Export.begin(rooms, an_order())
    (tmp_path / "there").write_text("mine")
    with pytest.raises(InTheWay, match="is there already"):
        await write_file(begun, tmp_path / "there", lambda num_read: None)
    (tmp_path / "other.pieces").mkdir()
    note = tmp_path / "other.pieces" / files.NOTE
    note.write_bytes(msgspec.json.encode(files.Note(an_order("costs"), begun.period)))
    with pytest.raises(InTheWay, match="pieces of another export"):
        await write_file(begun, tmp_path / "other", lambda num_read: None)
    note.write_bytes(b"{torn")
    with pytest.raises(InTheWay, match="cannot be read"):
        await write_file(begun, tmp_path / "other", lambda num_read: None)


async def test_of_one_tenant_only_its_rows(rooms):
    entries = random_entries(6, 80)
    await write_chain(rooms, *entries)
    rows = await rows_of(rooms, an_order(tenant_ids=("ten_2",)))
    assert [row["request_id"] for row in rows] == [e.request_id for e in entries if e.tenant_id == "ten_2"]
    with pytest.raises(BadOrder, match="there is no such tenant"):
        await Export.begin(rooms, an_order(), ("nobody",))


@pytest.mark.parametrize("format", ["csv", "jsonl", "parquet", "focus"])
async def test_an_empty_period_is_an_empty_table(rooms, format):
    data = await exported(rooms, an_order("costs", format))
    match format:
        case "jsonl":
            assert data == b""
        case "parquet":
            assert parquet.read_table(io.BytesIO(data)).num_rows == 0
        case _:
            assert len(data.splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"days": 0}, "to"),
        ({"days": -3}, "to"),
        ({"days": 401}, "to"),
        ({"first": FIRST + 10}, "from"),
        ({"format": "focus"}, "format"),
    ],
)
def test_a_period_that_makes_no_sense_is_refused_by_its_field(change, field):
    today = EPOCH + datetime.timedelta(days=FIRST + 5)
    check(an_order(), today)
    with pytest.raises(BadOrder) as refused:
        check(an_order(**change), today)
    assert refused.value.field == field


async def test_the_administration_exports_the_same_bytes_and_goes_on_where_a_download_broke_off(front):
    gw = front.gw
    await write_chain(gw.store, *random_entries(8, 120), chain=999)
    await closed(gw.store, FIRST + 3)
    days = {"from": str(an_order().from_), "to": str(an_order().to)}

    async def get(path: str, key: str = ADMIN_KEY, **query: str) -> tuple[int, bytes, Mapping[str, str]]:
        url = f"{front.url}/admin/v1/exports/{path}"
        async with front.http.get(url, params=days | query, headers={"authorization": f"Bearer {key}"}) as answer:
            return answer.status, await answer.read(), answer.headers

    status, data, headers = await get("usage")
    assert status == 200, data
    assert data == await exported(gw.store, an_order())
    assert headers["content-disposition"] == f'attachment; filename="usage-{days["from"]}-{days["to"]}.csv"'
    status, rest, again = await get("usage", offset="1000")
    assert (status, rest) == (200, data[1000:])
    assert again["etag"] == headers["etag"]
    for format in ("jsonl", "parquet", "focus"):
        status, data, _ = await get("costs", format=format)
        assert (status, data) == (200, await exported(gw.store, an_order("costs", format)))
    status, data, _ = await get("usage", tenant="ten_2")
    assert status == 404 or b"there is no such tenant" in data


async def test_what_cannot_be_exported_is_refused_by_its_field(front):
    desk = Desk(front)
    today = datetime.datetime.now(datetime.UTC).date()
    tomorrow = today + datetime.timedelta(days=1)
    for query, field in (
        (f"from={tomorrow}&to={today}", "to"),
        (f"from={today}&to={tomorrow}&format=xml", "format"),
        (f"from={today}&to={tomorrow}&offset=-1", "offset"),
        (f"from={today}&to={tomorrow}&offset=10", "offset"),
        (f"from={today}&to={tomorrow}&tenant=nobody", "tenant"),
        (f"from=yesterday&to={tomorrow}", "from"),
        (f"to={tomorrow}", "from"),
        (f"from={today}&to={tomorrow}&unknown=1", "unknown"),
    ):
        reply = await desk("GET", f"exports/usage?{query}")
        assert (reply.status, reply.fields()) == (400, [field]), query
    reply = await desk("GET", f"exports/usage?from={today}&to={tomorrow}&format=focus")
    assert reply.fields() == ["format"]
    reply = await desk("GET", f"exports/usage?from={today}&to={tomorrow}", key=KEY)
    assert reply.status in (401, 403)


def test_the_command_writes_a_file_that_the_next_start_may_go_on_with(tmp_path):
    def penstock(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "gateway", *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment())

    period = ("--from", "2026-11-01", "--to", "2026-11-02")
    missing = penstock("export", "usage", *period)
    assert (missing.returncode, missing.stderr) == (2, "penstock: there is no store in data\n")
    penstock("migrate")
    written = penstock("export", "costs", *period, "--format", "focus", "--output", "november.csv")
    assert (written.returncode, written.stdout) == (0, ""), written.stderr
    assert (tmp_path / "november.csv").read_text().startswith("AvailabilityZone,BilledCost,")
    again = penstock("export", "costs", *period, "--output", "november.csv")
    assert (again.returncode, again.stderr) == (2, "penstock: november.csv is there already\n")
    assert penstock("export", "usage", *period).stdout.startswith("request_id,tenant_id,")
    reversed_ = penstock("export", "usage", "--from", "2026-11-02", "--to", "2026-11-01")
    assert reversed_.returncode == 2
    assert "--to must be a later day" in reversed_.stderr
    assert penstock("export", "usage", "--from", "soon", "--to", "2026-11-01").returncode == 2
