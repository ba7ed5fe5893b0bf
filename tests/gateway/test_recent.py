"""Where a request's time went, as the administration tells it: by its trace, by what was noted of it, or by its row."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from msgspec.msgpack import Decoder

from gateway.journey import Journey
from gateway.ledger.recent import Recent
from gateway.spent import Spent
from gateway.tracing.kept import Kept
from policies import settings
from policies.policy import Policy
from tests.builders import an_entry
from tests.gateway.conftest import HELLO
from tests.gateway.desk import Desk

BEFORE = ["receive", "auth", "parse", "render", "cache", "admit"]
LINE = ["queue", "worker", "stream", "settle"]
DEAF = "http://127.0.0.1:9"


async def asked(front, **others):
    """A chat that is answered; its id."""
    call = asyncio.create_task(front.post("/v1/chat/completions", {"model": "demo", "messages": HELLO, **others}))
    submit = await front.peer.submitted()
    front.peer.say(submit, [*front.ids("Hi"), 3], "stop", queue_s=0.0, prefill_s=1e-4, decode_s=1e-4)
    status, _, headers = await call
    assert status == 200
    return headers["x-request-id"]


async def parts_of(front, request_id):
    return await Desk(front).got(f"requests/{request_id}/parts")


def lies_end_to_end(parts):
    outer = [part for part in parts if part["level"] == 0]
    assert outer[0]["at_ms"] == 0
    for before, after in pairwise(outer):
        assert before["at_ms"] + before["duration_ms"] == pytest.approx(after["at_ms"], abs=1e-3)
    return [part["name"] for part in outer]


@pytest.mark.parametrize(
    ("tracing", "source", "names"),
    [
        (settings.Tracing(), "gateway", [*BEFORE[1:], *LINE]),
        (settings.Tracing(endpoint=DEAF, sample_ratio=0.0, keep_missed=False), "gateway", [*BEFORE, *LINE]),
        (settings.Tracing(endpoint=DEAF, sample_ratio=1.0), "trace", [*BEFORE, "queue", "route", *LINE[1:]]),
    ],
    ids=["no traces", "not sampled", "sampled"],
)
async def test_its_parts_lie_end_to_end_and_the_worker_says_what_it_did(open_front, tracing, source, names):
    async with open_front(tracing=tracing) as front:
        request_id = await asked(front)
        told = await parts_of(front, request_id)
        (row,) = await front.settled(1)
    assert (told["source"], told["num_gateways"]) == (source, 1)
    assert lies_end_to_end(told["parts"]) == names
    worker = told["parts"][names.index("worker")]
    assert {"scheduled", "first token", "last token"} <= {moment["name"] for moment in worker["moments"]}
    for moment in worker["moments"]:
        assert 0 <= moment["at_ms"] - worker["at_ms"] <= worker["duration_ms"] + 1e-3
    settle = told["parts"][-1]
    assert settle["at_ms"] >= row["duration_ms"] - 1e-3


async def test_of_those_that_are_no_longer_held_on_to_the_ledger_says_what_it_knows(open_front):
    async with open_front(console=settings.Console(recent_requests=1)) as front:
        first, last = [await asked(front, seed=number) for number in range(2)]
        rows = await front.settled(2)
        old, new = await parts_of(front, first), await parts_of(front, last)
        absent = await Desk(front)("GET", "requests/req_of_nobody/parts")
    assert (old["source"], new["source"], absent.status) == ("ledger", "gateway", 404)
    assert sum(part["duration_ms"] for part in old["parts"]) == pytest.approx(rows[0]["duration_ms"])
    assert lies_end_to_end(old["parts"])[-1] == "stream"


async def test_what_was_asked_and_answered_is_not_held_on_to_with_a_trace(open_front, monkeypatch):
    tracing = settings.Tracing(endpoint=DEAF, sample_ratio=1.0, content=True)
    async with open_front(tracing=tracing, policies={"default": Policy(trace_content=True)}) as front:
        sent: list[bytes] = []
        monkeypatch.setattr(front.gw.tracing.sender, "send", sent.extend)
        await asked(front)
        front.gw.tracing.flush()
        ((_, kept),) = front.gw.ledger.recent._kept
        (told,) = sent
        contents = [(each.prompt != "", each.completion != "") for each in map(Decoder(Kept).decode, (told, kept))]
        assert contents == [(True, True), (False, False)]


async def test_those_that_go_into_a_trace_are_told_together_and_the_last_at_the_end(open_front, monkeypatch):
    monkeypatch.setattr("gateway.tracing.tracer.GATHER_S", 3600.0)
    monkeypatch.setattr("gateway.tracing.tracer.AT_ONCE", 2)
    async with open_front(tracing=settings.Tracing(endpoint=DEAF, sample_ratio=1.0)) as front:
        sent: list[list[bytes]] = []
        monkeypatch.setattr(front.gw.tracing.sender, "send", sent.append)
        ids = [await asked(front, seed=number) for number in range(3)]
        assert [len(together) for together in sent] == [2]
    assert [Decoder(Kept).decode(each).request_id for together in sent for each in together] == ids


def test_a_request_s_times_are_held_on_to_until_so_many_others_have_come():
    recent, journey = Recent(3), Journey()
    journey.started_at = journey.queue_at = 100.0
    ids = [f"req_{number:032x}" for number in range(7)]
    for request_id in ids:
        recent.note(an_entry(request_id=request_id), Spent(), journey, 100.1)
    assert [request_id for request_id in ids if recent.way(request_id) is not None] == ids[-3:]
    assert recent.way("") is recent.way("req_") is recent.way("\0" * 36) is None
    nobody = Recent(0)
    nobody.note(an_entry(), Spent(), journey, 100.1)
    assert nobody.way(an_entry().request_id) is None


@pytest.mark.parametrize(
    ("row", "names"),
    [
        ({"cache": "hit", "ttft_ms": 1.0, "duration_ms": 2.0}, ["auth", "stream", "settle"]),
        ({"cache": "shared", "ttft_ms": 1.0, "duration_ms": 2.0}, ["auth", "shared", "settle"]),
        ({"status": 503, "ttft_ms": None, "queue_ms": 0.0}, ["auth", "queue", "settle"]),
        ({"status": 502, "ttft_ms": None, "queue_ms": 0.1}, ["auth", "queue", "worker", "settle"]),
        ({"upstream": "far", "ttft_ms": 2.0, "queue_ms": 0.0}, ["auth", "queue", "upstream", "stream", "settle"]),
    ],
)
def test_each_way_through_the_house_has_its_own_parts(row, names):
    recent, entry, journey = Recent(1), an_entry(**{"duration_ms": 9.0, **row}), Journey()
    journey.started_at, journey.queue_at = 100.0, 100.001
    recent.note(entry, Spent(prefill_s=99.0, decode_s=99.0), journey, 100.1)
    way = recent.way(entry.request_id)
    assert [part.name for part in way.parts] == names
    assert sum(part.duration_ms for part in way.parts) == pytest.approx(100)
    assert all(part.duration_ms >= 0 for part in way.parts)
