"""What happens at the moment, as whoever watches is told it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec
import pytest

from gateway import live
from gateway.gateways import Gateways
from gateway.ledger.tally import Columns
from gateway.live.counts import Counts, percentiles
from gateway.redis import Redis
from policies import wire
from policies.settings import CLASSES
from tests.builders import PATIENCE_S, an_entry, until
from tests.gateway.conftest import ADMIN_KEY, Front
from tests.gateway.desk import Desk


@pytest.fixture(autouse=True)
def short_seconds(monkeypatch) -> None:
    monkeypatch.setattr(live, "TICK_S", 0.1)


@pytest.fixture
def desk(front: Front) -> Desk:
    return Desk(front)


class Watcher:
    """Reads snapshots."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response

    async def next(self) -> Any:
        async for line in self.response.content:
            if line.startswith(b"data: "):
                return msgspec.json.decode(line[6:])
        raise EOFError

    async def until(self, what: Any) -> Any:
        """The first snapshot of which it is true."""
        async with asyncio.timeout(PATIENCE_S):
            while not what(snapshot := await self.next()):
                pass
        return snapshot


@contextlib.asynccontextmanager
async def watching(front: Front, query: str = "", key: str = ADMIN_KEY) -> AsyncIterator[Watcher]:
    headers = {"authorization": f"Bearer {key}"}
    async with front.http.get(f"{front.url}/admin/v1/live{query}", headers=headers) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        yield Watcher(response)


async def test_an_answer_is_seen_while_it_is_written_and_when_it_has_ended(front):
    async with watching(front) as watcher:
        first = await watcher.next()
        assert (first["num_open"], first["requests_per_s"], first["tenants"]) == (0, 0, [])
        assert [each["sla_class"] for each in first["classes"]] == list(CLASSES)
        assert {each["attainment"] for each in first["classes"]} == {None}
        asked = front.chat(max_tokens=4)
        submit = await front.peer.submitted()
        busy = await watcher.until(lambda snapshot: snapshot["num_open"] == 1)
        assert [(each["name"], each["num_open"]) for each in busy["tenants"]] == [("default", 1)]
        front.peer.say(submit, front.ids("one"))
        front.peer.say(submit, front.ids("two"), "stop")
        await asked
        ended = await watcher.until(lambda snapshot: snapshot["ttft_ms"]["num"])
        assert ended["num_open"] == 0
        assert 0 < ended["ttft_ms"]["p50"] <= ended["ttft_ms"]["p99"]
        (standard,) = [each for each in ended["classes"] if each["sla_class"] == "standard"]
        assert (standard["num_ended"], standard["attainment"]) == (1, 1.0)
        assert ended["tenants"][0]["num_ended"] == 1


async def test_a_worker_is_told_of_as_it_reports_and_by_what_it_computes_a_second(front):
    counts = dict.fromkeys(("num_waiting", "num_cached_tokens", "num_steps", "num_preemptions"), 0)
    counts |= {"num_running": 3, "num_blocks": 64, "num_used_blocks": 10, "num_cached_blocks": 4, "num_free_blocks": 50}
    async with watching(front) as watcher:
        for num_tokens in (1000, 2500):
            front.peer.send(wire.Stats(**counts, num_prefill_tokens=0, num_decode_tokens=num_tokens, step_ms=2.0))
            snapshot = await watcher.until(lambda snapshot: any(each["num_running"] for each in snapshot["workers"]))
        (worker,) = snapshot["workers"]
        assert (worker["state"], worker["num_used_blocks"], worker["num_free_blocks"]) == ("ready", 10, 50)
        if not worker["decode_tokens_per_s"]:  # the report came after the tick
            (worker,) = (await watcher.until(lambda snapshot: snapshot["decode_tokens_per_s"]))["workers"]
        assert 0 < worker["decode_tokens_per_s"] <= 1500 / 0.05


async def test_what_a_watcher_is_told_first_is_of_all_gateways(open_front, redis_settings):
    async with open_front(redis=redis_settings) as front:
        redis = Redis(redis_settings, front.gw.clock)
        other = Gateways(redis, front.gw.clock, 1, front.gw.dispatch, lambda: None, front.gw.live.own)
        async with other.opened():
            await until(lambda: front.gw.gateways.num_gateways == 2 and front.gw.live.num_told)
            async with watching(front) as watcher:
                assert (await watcher.next())["num_gateways"] == 2
        await redis.close()


async def test_a_watcher_may_have_what_was_before_it_came(front):
    async with watching(front) as watcher:
        for _ in range(2):
            await watcher.next()
    async with watching(front, "?history=300") as watcher:
        past = [await watcher.next() for _ in range(3)]
    assert [each["at"] for each in past] == sorted(each["at"] for each in past)
    reply = await Desk(front)("GET", "live?history=301")
    assert (reply.status, reply.fields()) == (400, ["history"])


async def test_watchers_are_counted_by_nobody_who_waits_and_bounded(front, monkeypatch):
    monkeypatch.setattr(live, "MAX_WATCHERS", 1)
    async with watching(front) as watcher:
        await watcher.next()
        reply = await Desk(front)("GET", "live")
        assert (reply.status, "retry-after" in reply.headers) == (503, True)
        assert front.gw.live.num_watchers == 1
        front.gw.dispatch.draining = True
        with pytest.raises(EOFError):
            await watcher.until(lambda snapshot: False)
        assert (await Desk(front)("GET", "live")).status == 503
    assert front.gw.live.num_watchers == 0


async def test_whoever_may_not_watch_any_more_is_told_no_more(desk, monkeypatch):
    monkeypatch.setattr("gateway.admin.live.LOOK_S", 0.0)
    made = await desk.made("admin_keys", {"name": "watcher", "role": "operator"})
    reader = await desk.made("admin_keys", {"name": "reader", "role": "billing_reader"})
    assert (await desk("GET", "live", key=reader["key"])).status == 403
    async with watching(desk.front, key=made["key"]) as watcher:
        await watcher.next()
        assert (await desk("DELETE", f"admin_keys/{made['id']}")).status == 200
        with pytest.raises(EOFError):
            await watcher.until(lambda snapshot: False)


def test_percentiles_are_off_by_a_twentieth_at_most():
    rng = random.Random(3)
    times_ms = sorted(rng.lognormvariate(5, 2) for _ in range(2000))
    counts = Counts()
    counts.take(Columns([an_entry(ttft_ms=ms, duration_ms=ms) for ms in times_ms], CLASSES))
    found = percentiles(counts.ttft)
    for share, value in ((0.5, found.p50), (0.9, found.p90), (0.99, found.p99)):
        assert value == pytest.approx(times_ms[int(share * 2000) - 1], rel=0.05)
    assert percentiles({}) == live.Percentiles(0, None, None, None)


def test_what_was_added_is_taken_away_again_to_the_last():
    rng = random.Random(5)
    window, seconds = Counts(), []
    for number in range(200):
        second = Counts()
        some = [
            an_entry(
                tenant_id=rng.choice("abc"),
                sla_class=rng.choice(list(CLASSES)),
                status=rng.choice((200, 200, 499, 500)),
                ttft_ms=rng.choice((None, 12.0, 9000.0)),
            )
            for _ in range(rng.randrange(5))
        ]
        second.take(Columns(some, CLASSES))
        window.add(second)
        seconds.append(second)
        if len(seconds) > 10:
            window.add(seconds.pop(0), -1)
        summed = Counts()
        for each in seconds:
            summed.add(each)
        assert window == summed, number
    for each in seconds:
        window.add(each, -1)
    assert window == Counts()


def test_a_promise_counts_first_token_and_tokens_and_not_what_clients_break_off():
    promised = CLASSES["interactive"]
    ended = {
        "kept": an_entry(ttft_ms=promised.ttft_ms, duration_ms=promised.ttft_ms + 100, num_completion_tokens=10),
        "late": an_entry(ttft_ms=promised.ttft_ms + 1, duration_ms=promised.ttft_ms + 100),
        "slow": an_entry(ttft_ms=1.0, duration_ms=1 + 3 * promised.tpot_ms, num_completion_tokens=3),
        "failed": an_entry(status=500, ttft_ms=None),
        "broken off": an_entry(status=499, ttft_ms=None),
    }
    counts = Counts()
    counts.take(Columns([msgspec.structs.replace(each, sla_class="interactive") for each in ended.values()], CLASSES))
    assert counts.classes == {"interactive": (4, 1)}
    assert (counts.num_requests, counts.num_failed) == (5, 1)


async def test_a_workers_batch_names_who_is_in_it(desk):
    front = desk.front
    assert (await desk.got(f"workers/{_worker(front)}/batch"))["requests"] == []
    asked = front.chat(max_tokens=8)
    submit = await front.peer.submitted()
    (one,) = (await desk.got(f"workers/{_worker(front)}/batch"))["requests"]
    assert (one["request_id"], one["state"], one["num_completion_tokens"]) == (submit.request_id, "prefill", 0)
    front.peer.say(submit, front.ids("one two"))
    ((_, flight),) = front.gw.dispatch.flights()
    await until(lambda: flight.num_tokens)
    (one,) = (await desk.got(f"workers/{_worker(front)}/batch"))["requests"]
    assert (one["state"], one["num_blocks"]) == ("decode", -(-(one["num_prompt_tokens"] + flight.num_tokens) // 32))
    front.peer.say(submit, front.ids("three"), "stop")
    await asked
    assert (await desk("GET", "workers/none/batch")).status == 404


def _worker(front: Front) -> str:
    (worker,) = front.gw.dispatch.workers()
    return quote(worker.name, safe="")
