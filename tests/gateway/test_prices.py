"""The price list: put on it by the settings and by administrators, in force from its instant on, and the same for
ever."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pytest
import sqlalchemy as sa

from gateway import store
from gateway.bootstrap import bootstrap
from gateway.clock import Clock
from gateway.directory import Directory
from gateway.limits.plans import Plans
from gateway.prices import PriceHistory, Prices
from gateway.store import StoreError
from policies import pricing, settings
from policies.policy import Limits, Policy, Price
from policies.pricelist import Listed, PriceList, Proposed
from policies.terms import Usage
from tests.builders import a_caller
from tests.gateway.desk import Desk
from tests.residents import add_version

FAR = 253_000_000_000
CHEAP, DEAR = Price(prompt=Decimal(1)), Price(prompt=Decimal(3), completion=Decimal("0.5"))


@dataclass
class Board:
    prices: PriceList


@pytest.fixture
def desk(front) -> Desk:
    return Desk(front)


def test_a_price_counts_from_its_instant_on():
    now = [100.0]
    board = Board(PriceList([Listed(1, "*", "*", 50, CHEAP), Listed(2, "*", "batch", 150, DEAR)]))
    plans = Plans(Prices(board, lambda: now[0]))
    caller = a_caller(Policy(discount=Decimal("0.5")))

    def version(sla_class):
        return plans.find(caller, "demo", sla_class).priced.version

    assert [version("batch"), version("standard")] == ["list:1;discount=0.5"] * 2
    now[0] = 149.999
    assert version("batch") == "list:1;discount=0.5"
    now[0] = 150.0
    assert [version("batch"), version("standard")] == ["list:2;discount=0.5", "list:1;discount=0.5"]
    now[0] = 149.0  # the clock was ahead, and is set back
    assert version("batch") == "list:1;discount=0.5"


def test_a_list_that_has_changed_counts_at_once():
    board = Board(PriceList([Listed(1, "*", "*", 50, CHEAP)]))
    plans = Plans(Prices(board, lambda: 100.0))
    limited = a_caller(Policy(limits=Limits(requests_per_minute=5)))

    def versions(model):
        return [plans.find(caller, model).priced.version for caller in (a_caller(), limited)]

    assert versions("demo") == ["list:1"] * 2
    board.prices = board.prices.extended([Listed(2, "demo", "*", 60, DEAR)], 100.0)
    assert versions("demo") == ["list:2"] * 2
    assert versions("other") == ["list:1"] * 2


async def test_prices_of_the_settings_are_listed_once_and_then_left_alone(store_settings):
    proposed = Proposed(price=CHEAP), Proposed(sla_class="batch", price=CHEAP)
    changed = Proposed(price=DEAR), Proposed(model="demo", price=DEAR)
    async with store.opened(store_settings) as rooms:
        await bootstrap(rooms, {}, prices=proposed)
        await bootstrap(rooms, {}, prices=changed)
        directory = await Directory.load(rooms, Clock())
        assert [(e.version, e.model, e.sla_class, e.price) for e in directory.prices.in_force(time.time())] == [
            (1, "*", "*", CHEAP),
            (2, "*", "batch", CHEAP),
            (3, "demo", "*", DEAR),
        ]
        with pytest.raises(StoreError, match=r"billing\.currency is EUR, but the store's price list is in USD"):
            await bootstrap(rooms, {}, currency="EUR")


async def test_the_price_of_a_row_is_the_same_for_ever(store_settings):
    own = Price(prompt=Decimal("0.123456"))
    async with store.opened(store_settings) as rooms:
        await bootstrap(rooms, {}, prices=[Proposed(price=CHEAP)])
        await add_version(rooms, "gold", Policy(prices={"demo": own, "*": DEAR}))
        await add_version(rooms, "gold", Policy(), 2)
        history = PriceHistory(rooms.engine)
        for price_version, model, price, discount in (
            ("list:1", "demo", CHEAP, "0"),
            ("list:1;discount=0.25", "other", CHEAP, "0.25"),
            ("policy:gold@1", "demo", own, "0"),
            ("policy:gold@1;discount=0.1", "other", DEAR, "0.1"),
            ("free", "demo", Price(), "0"),
            ("", "demo", Price(), "0"),
        ):
            for _ in range(2):
                found = await history.rates(price_version, model)
                assert found == pricing.rates_of(price, Decimal(discount)), price_version
        for unknown in ("list:2", "policy:gold@2", "policy:silver@1", "list:1;discount=7", "cheap"):
            with pytest.raises(LookupError, match=unknown.partition(";")[0]):
                await history.rates(unknown, "demo")


async def test_an_administrator_puts_a_price_on_the_list(desk):
    before = int(time.time())
    made = await desk.made("prices", {"price": {"prompt": 0.15, "completion": "0.60"}, "note": "as agreed"})
    assert made["version"] == 1
    assert (made["model"], made["sla_class"], made["currency"], made["note"]) == ("*", "*", "USD", "as agreed")
    assert made["price"] == {"prompt": "0.15", "completion": "0.60"}
    assert before <= made["effective_from"] <= time.time()
    later = await desk.made(
        "prices",
        {"model": "demo", "sla_class": "batch", "price": {"prompt": 1}, "effective_from": FAR, "currency": "USD"},
    )
    assert await desk.got("prices/2") == later
    assert (await desk.got("prices"))["data"] == [made, later]
    assert (await desk.got("prices?model=demo"))["data"] == [later]
    assert (await desk.got("prices?sla_class=*"))["data"] == [made]
    assert (await desk.got("prices?order=desc&limit=1"))["data"] == [later]
    (line,) = (await desk.got("audit_log?object_kind=price&object_id=2"))["data"]
    assert (line["action"], line["before"], line["after"]) == ("price.created", None, later)


async def test_what_was_in_force_at_an_instant_can_be_asked(desk):
    first = await desk.made("prices", {"price": {"prompt": 1}})
    second = await desk.made("prices", {"price": {"prompt": 2}, "effective_from": FAR})
    third = await desk.made("prices", {"price": {"prompt": 3}, "effective_from": FAR})
    other = await desk.made("prices", {"model": "demo", "price": {"prompt": 4}, "effective_from": FAR + 5})
    at = first["effective_from"]
    assert (await desk.got(f"prices?at={at - 1}"))["data"] == []
    assert (await desk.got(f"prices?at={at}"))["data"] == [first]
    assert (await desk.got(f"prices?at={FAR}"))["data"] == [third]
    page = await desk.got(f"prices?at={FAR + 5}&limit=1")
    assert page["data"] == [third]
    assert (await desk.got(f"prices?at={FAR + 5}&limit=1&after={page['next_cursor']}"))["data"] == [other]
    assert second["version"] == 2


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "price"),
    ({"price": {"prompt": -1}}, "price.prompt"),
    ({"price": {"prompt": 0.0000001}}, "price.prompt"),
    ({"price": {"completion": "0.12345678901234567890"}}, "price.completion"),
    ({"price": {"reasoning": "NaN"}}, "price.reasoning"),
    ({"price": {"engine_second": 1e30}}, "price.engine_second"),
    ({"price": {"request": "many"}}, "price.request"),
    ({"price": {"promt": 1}}, "price.promt"),
    ({"price": {}, "currency": "EUR"}, "currency"),
    ({"price": {}, "sla_class": "gold"}, "sla_class"),
    ({"price": {}, "model": ""}, "model"),
    ({"price": {}, "model": "a\0"}, "model"),
    ({"price": {}, "model": "m" * 257}, "model"),
    ({"price": {}, "effective_from": 1}, "effective_from"),
    ({"price": {}, "effective_from": 1e30}, "effective_from"),
    ({"price": {}, "effective_from": "now"}, "effective_from"),
    ({"price": {}, "note": "a\0"}, "note"),
    ({"price": {}, "verison": 1}, "verison"),
]


async def test_a_price_that_cannot_count_is_refused_by_its_field_and_nothing_is_listed(desk):
    for body, field in REFUSED:
        reply = await desk("POST", "prices", body)
        assert (reply.status, reply.fields()) == (400, [field]), (body, reply)
    assert (await desk.got("prices"))["data"] == []
    assert (await desk("GET", "prices/1")).status == 404
    assert (await desk("GET", "prices/one")).status == 404
    for query in ("at=never", "at=-1", "model=", "currency=USD", "after=x"):
        assert (await desk("GET", f"prices?{query}")).status == 400, query


async def answered(desk: Desk, **others: object) -> dict[str, Any]:
    """The row of a request with four tokens of an answer."""
    num_rows = len(desk.front.rows())
    task = desk.front.chat(**others)
    submit = await desk.front.peer.submitted()
    desk.front.peer.say(submit, [5, 6, 7, 3], "stop")
    await task
    return (await desk.front.settled(num_rows + 1))[-1]


async def test_a_request_pays_the_price_of_its_class_as_it_was_when_it_was_admitted(desk):
    assert (await answered(desk))["price_version"] == "free"
    await desk.made("prices", {"price": {"completion": 1, "request": 0.001}})
    await desk.made("prices", {"sla_class": "batch", "price": {"completion": 0.5}})
    row = await answered(desk)
    assert (row["cost_micros"], row["price_version"]) == (1004, "list:1")
    row = await answered(desk, service_tier="flex")
    assert (row["cost_micros"], row["price_version"]) == (2, "list:2")

    num_rows = len(desk.front.rows())
    running = desk.front.chat()
    submit = await desk.front.peer.submitted()
    await desk.made("prices", {"model": "demo", "price": {"completion": 100}})
    desk.front.peer.say(submit, [5, 6, 7, 3], "stop")
    await running
    row = (await desk.front.settled(num_rows + 1))[-1]
    assert (row["cost_micros"], row["price_version"]) == (1004, "list:1")
    row = await answered(desk)
    assert (row["cost_micros"], row["price_version"]) == (400, "list:3")

    await desk.made("prices", {"model": "demo", "price": None})
    assert (await answered(desk))["price_version"] == "list:1"


async def test_a_tenants_discount_and_its_policys_own_price_show_in_its_rows(desk):
    await desk.made("prices", {"price": {"request": 1}})
    policy = await desk("GET", "policies/default")
    document = {"discount": 0.25, "prices": {"special": {"request": 3}}}
    assert (await desk("PUT", "policies/default", {"document": document}, if_match=policy.etag)).status == 200
    row = await answered(desk)
    assert (row["cost_micros"], row["price_version"]) == (750_000, "list:1;discount=0.25")
    policy = await desk("GET", "policies/default")
    document["prices"] = {"demo": {"request": 2}}
    assert (await desk("PUT", "policies/default", {"document": document}, if_match=policy.etag)).status == 200
    row = await answered(desk)
    assert (row["cost_micros"], row["price_version"]) == (1_500_000, "policy:default@3;discount=0.25")
    rates = await desk.front.gw.price_history.rates(row["price_version"], "demo")
    assert pricing.parts(rates, usage_of(row))["request"] == 1_500_000


def usage_of(row: dict[str, Any]) -> Usage:
    return Usage(row["num_prompt_tokens"], row["num_cached_tokens"], row["num_completion_tokens"])


async def test_a_price_of_the_settings_counts_from_the_first_request_on(open_front):
    config = (Proposed(price=Price(request=Decimal("0.5"))),)
    async with open_front(prices=config, billing=settings.Billing(currency="EUR")) as front:
        desk = Desk(front)
        assert (await desk.got("prices/1"))["currency"] == "EUR"
        assert (await answered(desk))["cost_micros"] == 500_000
        assert (await desk("POST", "prices", {"price": {}, "currency": "USD"})).fields() == ["currency"]


async def test_a_price_that_was_put_on_the_list_while_the_clock_was_ahead_takes_none_away(desk, monkeypatch):
    really = time.time
    await desk.made("prices", {"price": {"prompt": "1"}})
    monkeypatch.setattr(time, "time", lambda: really() + 7200)
    await desk.made("prices", {"price": {"prompt": "3"}})
    monkeypatch.setattr(time, "time", really)
    in_force = desk.front.gw.directory.prices.find("demo", "standard", time.time())
    assert in_force is not None
    assert in_force.price == CHEAP
    monkeypatch.setattr(time, "time", lambda: really() + 3 * 86_400)
    await desk.made("prices", {"price": {"prompt": "4"}})
    assert len(desk.front.gw.directory.prices) == 2, "that of a day ago, and the new one"


async def test_a_trial_spends_by_the_price_list_as_it_is_now(desk):
    arrival = {"at_s": 0, "tenant": "a", "model": "demo", "num_prompt_tokens": 10, "num_completion_tokens": 5}
    asked = {"arrivals": [arrival], "workers": {"demo": {}}, "document": {"discount": 0.5}}
    await desk.made("prices", {"price": {"prompt": 2, "completion": 4}})
    await desk.made("prices", {"price": {"prompt": 200}, "effective_from": FAR})
    answer = await desk.made("policies/default/trial", asked)
    assert answer["outcome"]["total"]["cost_micros"] == 20


async def test_an_entry_in_words_of_another_version_has_no_effect_and_the_log_says_so(store_settings, caplog):
    async with store.opened(store_settings) as rooms:
        await bootstrap(rooms, {}, prices=[Proposed(price=CHEAP)])
        async with rooms.changing() as (connection, revision):
            row = {
                "version": 2,
                "model": "*",
                "sla_class": "*",
                "effective_from": 0,
                "document": '{"currency": "USD", "price": {"per_smile": "1"}}',
                "created_at": 0,
                "created_by": "test",
                "note": "",
                "revision": revision,
            }
            await connection.execute(sa.insert(store.prices), row)
        await bootstrap(rooms, {})
        directory = await Directory.load(rooms, Clock())
        assert [entry.version for entry in directory.prices.in_force(time.time())] == [1]
        with pytest.raises(LookupError, match="list:2 cannot be read"):
            await PriceHistory(rooms.engine).rates("list:2", "demo")
    assert "version 2 of the price list cannot be read" in caplog.text


async def test_prices_put_on_the_list_at_once_are_all_there_in_one_order(desk):
    bodies = [{"model": f"m{number}", "price": {"prompt": number}} for number in range(8)]
    made = await asyncio.gather(*(desk.made("prices", body) for body in bodies))
    assert sorted(entry["version"] for entry in made) == list(range(1, 9))
    twice = {"price": {"prompt": 9}}
    first = await desk.made("prices", twice, idempotency_key="once")
    assert await desk.made("prices", twice, idempotency_key="once") == first
    assert len((await desk.got("prices"))["data"]) == 9
