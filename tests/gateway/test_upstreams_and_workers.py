"""Upstreams and workers for the same request: workers answer where no upstream does, and upstreams what has waited for
a worker as long as it could. Clients see no difference."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from policies import settings, wire
from policies.upstreams.terms import Upstream, fault_of
from tests.builders import PATIENCE_S, until
from tests.gateway.conftest import HELLO, Front
from tests.gateway.elsewhere import Elsewhere, elsewhere, fails, says, stalls
from tests.gateway.peer import Peer
from tests.gateway.test_chat_tools import TEMPLATE

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
HI = {"messages": HELLO, "max_tokens": 50}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
SAID = "One two END three"
QUESTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", HI, SAID),
    ("/v1/chat/completions", {**HI, "stop": ["END"]}, SAID),
    ("/v1/chat/completions", {**HI, "n": 2, "logprobs": True, "top_logprobs": 1}, SAID),
    ("/v1/chat/completions", {**HI, "tools": [TOOL]}, f"So: {CALL}"),
    ("/v1/chat/completions", {**HI, "tools": [TOOL], "tool_choice": "none"}, SAID),
    ("/v1/completions", {"prompt": "Once", "logprobs": 1, "stop": " END"}, SAID),
    ("/v1/completions", {"prompt": ["Once", "Twice"], "max_tokens": 50}, SAID),
    ("/v1/messages", {**HI, "stop_sequences": ["END"]}, SAID),
    ("/v1/messages", {**HI, "tools": [{"name": "add", "input_schema": {"type": "object"}}]}, CALL),
    ("/v1/responses", {"input": "Hello"}, SAID),
    ("/api/chat", HI, SAID),
    ("/api/generate", {"prompt": "Hello", "options": {"stop": ["END"]}}, SAID),
]
OWN = (
    "id",
    "created",
    "created_at",
    "completed_at",
    "model",
    "system_fingerprint",
    "item_id",
    "call_id",
    "obfuscation",
)
"""Differs from answer to answer."""


@pytest.fixture
async def far() -> AsyncIterator[Elsewhere]:
    async with elsewhere() as server:
        yield server


async def played(peer: Peer, front: Front, text: str, num_submits: int) -> None:
    """Each of so many requests is answered with this, in three steps."""
    for _ in range(num_submits):
        submit = await peer.submitted()
        ids = [*front.ids(text), 3]
        wants = submit.sampling.num_logprobs is not None
        for index in range(submit.num_sequences):
            for start, end in ((0, 2), (2, len(ids) - 2), (len(ids) - 2, len(ids))):
                logprobs = [wire.TokenLogprob(-0.5 - at, [7], [-0.25]) for at in range(start, end)] if wants else None
                reason = "stop" if end == len(ids) else None
                peer.say(submit, ids[start:end], reason, index=index, logprobs=logprobs, engine_s=0.25)


async def answered(front: Front, path: str, body: dict[str, Any], text: str, streams: bool) -> Any:
    """What the client hears of it, when workers say ``text``: without what is an answer's own."""
    num_submits = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
    playing = asyncio.create_task(played(front.peer, front, text, num_submits))
    async with front.http.post(front.url + path, json={**body, "stream": streams}) as answer:
        assert answer.status == 200, await answer.text()
        lines = (await answer.text()).splitlines()
    await playing
    while not front.peer.is_quiet():  # what was stopped
        await front.peer.cancelled()
    told = [line.removeprefix("data: ") for line in lines]
    return [_shared(json.loads(each)) for each in told if each.startswith("{")]


async def answered_as_text(front: Front, body: dict[str, Any]) -> str:
    """The text of a stream, whoever gives it."""
    async with front.http.post(f"{front.url}/v1/chat/completions", json={**body, "stream": True}) as answer:
        chunks = [json.loads(line[6:]) async for line in answer.content if line.startswith(b"data: {")]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def _shared(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _shared(each) for name, each in value.items() if name not in OWN and "duration" not in name}
    return [_shared(each) for each in value] if isinstance(value, list) else value


def joined(events: list[Any]) -> list[Any]:
    """Chunks whose texts are one, as where they are divided is nobody's promise."""
    text: dict[str, str] = {}
    others = []

    def collect(value: Any, at: str) -> Any:
        if isinstance(value, dict):
            return {name: collect(each, f"{at}.{name}") for name, each in value.items()}
        if isinstance(value, list):
            return [collect(each, at) for each in value]
        if isinstance(value, str) and at.endswith((".content", ".text", ".arguments", ".delta", ".response", "_json")):
            text[at] = text.get(at, "") + value
            return ""
        return value

    for event in events:
        other = collect({name: each for name, each in event.items() if name != "sequence_number"}, "")
        if other not in others:
            others.append(other)
    return [text, others]


@pytest.mark.parametrize("streams", [False, True])
async def test_workers_answer_in_an_upstreams_place_as_they_do_in_their_own(open_front, far, streams):
    far.always = fails(500)
    terms = far.upstream(fallbacks=("demo",), breaker_failures=1000)
    async with open_front(upstreams=(terms,), model={"template": TEMPLATE}) as front:
        for number, (path, body, text) in enumerate(QUESTIONS):
            own = await answered(front, path, {"model": "demo", **body}, text, streams)
            instead = await answered(front, path, {"model": "far", **body}, text, streams)
            if streams:
                own, instead = joined(own), joined(instead)
            assert instead == own, (path, body)
            rows = await front.settled(2 * number + 2)
            assert [row["model"] for row in rows[-2:]] == ["demo", "far"]
            mine, theirs = (
                {name: row[name] for name in row if name.startswith(("num_", "engine", "finish", "upstream"))}
                for row in rows[-2:]
            )
            assert theirs == mine, (path, body)
        assert len(far.heard) == sum(2 if isinstance(body.get("prompt"), list) else 1 for _, body, _ in QUESTIONS)
        assert not front.gw.upstreams.pools()[0].num_open


async def test_what_is_the_clients_own_fault_and_what_has_begun_stay_where_they_are(open_front, far):
    async with open_front(upstreams=(far.upstream(fallbacks=("demo",)),)) as front:
        far.always = fails(400, "too hot")
        status, body, _ = await front.post("/v1/chat/completions", {"model": "far", **HI})
        assert (status, body["error"]["message"]) == (400, "too hot")
        far.always = stalls("one ", "two ")
        async with front.http.post(
            f"{front.url}/v1/chat/completions", json={"model": "far", **HI, "stream": True}
        ) as answer:
            await answer.content.readline()
        await front.settled(1)
        assert front.peer.is_quiet()


async def test_a_chain_ends_with_workers_and_a_breaker_that_is_open_leads_to_them_at_once(open_front, far):
    far.always = fails(500)
    async with elsewhere(fails(503)) as second:
        chain = (
            far.upstream(fallbacks=("second", "demo"), breaker_failures=1, max_retries=3, retry_share=1.0),
            second.upstream("second-1", "second", breaker_failures=1),
        )
        async with open_front(upstreams=chain) as front:
            for _ in range(3):
                (said,) = await answered(front, "/v1/chat/completions", {"model": "far", **HI}, SAID, False)
                assert said["choices"][0]["message"]["content"] == SAID
            assert (len(far.heard), len(second.heard)) == (1, 1)
            assert {row["upstream"] for row in await front.settled(3)} == {None}


async def states(front: Front) -> dict[str, str]:
    """Of all models as clients are told, which /readyz agrees with."""
    async with front.http.get(f"{front.url}/v1/models") as answer:
        told = {model["id"]: model["penstock"]["state"] for model in (await answer.json())["data"]}
    async with front.http.get(f"{front.url}/readyz") as answer:
        assert (await answer.json())["models"] == told
        assert answer.status == (200 if "ready" in told.values() else 503)
    return told


async def test_a_model_is_in_the_state_of_whoever_would_answer_for_it(open_front, far):
    far.always = fails(500)
    async with elsewhere() as relief:
        breaker: dict[str, Any] = {"breaker_failures": 1, "breaker_open_s": 3600.0}
        upstreams = (
            far.upstream(fallbacks=("demo",), **breaker),
            far.upstream("alone-1", "alone", **breaker),
            relief.upstream("near-1", "demo", overflow=True, **breaker),
        )
        async with open_front(upstreams=upstreams) as front:
            assert await states(front) == {"demo": "ready", "far": "ready", "alone": "ready"}
            await answered(front, "/v1/chat/completions", {"model": "far", **HI}, SAID, False)
            assert (await front.post("/v1/chat/completions", {"model": "alone", **HI}))[0] == 502
            assert await states(front) == {"demo": "ready", "far": "ready", "alone": "failed"}
            await front.peer.close()
            await front.lost()
            assert await states(front) == {"demo": "ready", "far": "ready", "alone": "failed"}
            for model in ("demo", "far"):
                assert (await front.post("/v1/chat/completions", {"model": model, **HI}))[0] == 200
            relief.always = fails(500)
            assert (await front.post("/v1/chat/completions", {"model": "demo", **HI}))[0] >= 500
            assert await states(front) == {"demo": "starting", "far": "starting", "alone": "failed"}


async def test_what_no_upstream_is_asked_is_not_asked_of_workers_instead(open_front, far):
    terms = far.upstream(fallbacks=("demo",), kinds=("embeddings",))
    async with open_front(upstreams=(terms,)) as front:
        status, body, _ = await front.post("/v1/chat/completions", {"model": "far", **HI})
        assert (status, body["error"]["param"]) == (400, "model")


async def test_what_workers_cannot_read_is_told_as_the_upstreams_failure(open_front, far):
    far.always = fails(500)
    async with open_front(peer=Peer(max_model_tokens=8), upstreams=(far.upstream(fallbacks=("demo",)),)) as front:
        status, body, _ = await front.post("/v1/chat/completions", {"model": "far", **HI})
        assert (status, body["error"]["code"]) == (502, "upstream_failed")


@pytest.mark.parametrize("is_over", [False, True])
async def test_whoever_hangs_up_on_workers_in_an_upstreams_place_owes_what_they_wrote(open_front, far, is_over):
    far.always = fails(500)
    async with open_front(upstreams=(far.upstream(fallbacks=("demo",)),)) as front:
        body = {"model": "far", **HI, "stream": True}
        async with front.http.post(f"{front.url}/v1/chat/completions", json=body) as answer:
            submit = await front.peer.submitted()
            front.peer.say(submit, front.ids("One two "))
            await answer.content.readline()
            (flight,) = front.gw.live.own().streams
            assert (flight.model, flight.worker is None, flight.upstream) == ("demo", False, None)
        assert (await front.peer.cancelled()).request_id == submit.request_id
        if is_over:
            front.peer.say(submit, [], "cancelled", engine_s=0.5)
        else:
            front.peer.hang_up()
        (row,) = await front.settled(1)
        assert (row["status"], row["upstream"], row["engine_us"]) == (499, None, 500_000 if is_over else 0)
        assert 0 < row["num_completion_tokens"] <= len(front.ids("One two "))
        assert not front.gw.upstreams.pools()[0].num_open


async def filled(front: Front) -> tuple[asyncio.Task[Any], wire.Submit]:
    """A request that takes all places of the worker: one of the batch, and the one beyond it."""
    first = front.chat(n=2, max_tokens=60)
    return first, await front.peer.submitted()


async def emptied(front: Front, first: asyncio.Task[Any], held: wire.Submit) -> None:
    for index in range(2):
        front.peer.say(held, [*front.ids("Hi"), 3], "stop", index=index)
    await first


def promising(ttft_ms: float) -> dict[str, settings.SlaClass]:
    return {
        name: msgspec.structs.replace(terms, ttft_ms=ttft_ms, max_ttft_ms=0.0)
        for name, terms in settings.CLASSES.items()
    }


@pytest.mark.parametrize("streams", [False, True])
async def test_what_waits_for_workers_leaves_for_an_upstream_before_it_is_too_late(open_front, far, streams):
    relief = far.upstream(model="demo", overflow=True)
    async with open_front(peer=Peer(max_sequences=1), upstreams=(relief,), classes=promising(400.0)) as front:
        first, held = await filled(front)
        body = {"model": "demo", **HI, "stream": streams}
        async with front.http.post(f"{front.url}/v1/chat/completions", json=body) as answer:
            text = await answer.text()
        assert "one" in text
        assert "three" in text
        assert [heard.body["model"] for heard in far.heard] == ["demo"]
        assert (front.gw.dispatch.num_waiting(), front.gw.upstreams.pools()[0].num_waiting) == (0, 0)
        await emptied(front, first, held)
        rows = {row["upstream"]: row for row in await front.settled(2)}
        assert rows.keys() == {None, "far-1"}
        assert 200 < rows["far-1"]["queue_ms"] <= rows["far-1"]["ttft_ms"] + 1
        assert front.peer.is_quiet()


async def test_what_has_its_turn_in_time_stays_with_the_workers(open_front, far):
    relief = far.upstream(model="demo", overflow=True)
    async with open_front(peer=Peer(max_sequences=1), upstreams=(relief,), classes=promising(600_000.0)) as front:
        first, held = await filled(front)
        second = front.chat(max_tokens=60, stop=["END"])
        await until(lambda: front.gw.dispatch.num_waiting() == 1)
        hung_up = front.chat(max_tokens=60)
        await until(lambda: front.gw.dispatch.num_waiting() == 2)
        hung_up.cancel()
        await until(lambda: front.gw.dispatch.num_waiting() == 1)
        await emptied(front, first, held)
        await played(front.peer, front, SAID, 1)
        assert (await second).choices[0].message.content == "One two "
        rows = await front.settled(3)
        assert {row["upstream"] for row in rows} == {None}
        assert sorted(row["status"] for row in rows) == [200, 200, 499]
        assert not far.heard
        assert not front.gw.upstreams.pools()[0].num_open


async def test_while_no_upstream_has_room_it_goes_on_waiting_for_workers(open_front, far):
    gap = asyncio.Event()
    far.always = says("one ", "two", gap=gap)
    relief = far.upstream(model="demo", overflow=True, max_concurrent=1)
    async with open_front(peer=Peer(max_sequences=1), upstreams=(relief,), classes=promising(200.0)) as front:
        first, held = await filled(front)
        body = {"model": "demo", **HI}
        both = [asyncio.create_task(answered_as_text(front, body)) for _ in range(2)]
        async with asyncio.timeout(PATIENCE_S):
            await far.came.wait()
        await until(lambda: front.gw.dispatch.num_waiting() == 1)
        await emptied(front, first, held)
        await played(front.peer, front, SAID, 1)
        gap.set()
        assert sorted(await asyncio.gather(*both)) == [SAID, "one two"]
        assert len(far.heard) == 1
        rows = await front.settled(3)
        assert sorted(row["upstream"] or "" for row in rows) == ["", "", "far-1"]


async def test_an_upstream_that_fails_gives_what_it_relieves_back_to_the_workers(open_front, far):
    far.always = fails(500)
    relief = far.upstream(model="demo", overflow=True)
    async with open_front(peer=Peer(max_sequences=1), upstreams=(relief,), classes=promising(100.0)) as front:
        first, held = await filled(front)
        second = front.chat()
        async with asyncio.timeout(PATIENCE_S):
            await far.came.wait()
        await until(lambda: front.gw.dispatch.num_waiting() == 1)
        await emptied(front, first, held)
        await played(front.peer, front, SAID, 1)
        assert (await second).choices[0].message.content == SAID
        assert {row["upstream"] for row in await front.settled(2)} == {None}


def test_a_chain_that_goes_on_behind_workers_is_refused():
    def faults(**terms: Any) -> list[str]:
        upstream = Upstream(name="a", model="m", url="http://host/v1", **terms)
        return [field for field, _ in fault_of(upstream, {"demo"})]

    assert faults(fallbacks=("other", "demo")) == []
    assert faults(fallbacks=("demo", "other")) == ["fallbacks"]


@pytest.mark.parametrize(
    ("path", "one", "many"), [("/v1/rerank", "query", "documents"), ("/v1/score", "text_1", "text_2")]
)
async def test_what_all_pairs_have_in_common_is_weighed_once(open_front, far, path, one, many):
    """Before it is known who answers. The worker gives no vectors, and says so."""
    relief = far.upstream(model="demo", overflow=True, kinds=("rerank",))
    async with open_front(upstreams=(relief,)) as front:
        body = {"model": "demo", one: "river " * 5000, many: ["hat"] * 200}
        tracemalloc.start()
        try:
            status, refused, _ = await front.post(path, body)
            _, most_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert (status, refused["error"]["param"]) == (400, "model")
    assert most_bytes < 4_000_000


async def test_vectors_and_scores_come_from_workers_too(house):
    """Of an upstream that nobody answers for."""
    terms = {"model": "far", "url": "http://127.0.0.1:9/v1", "fallbacks": ["demo"], "max_retries": 0}
    asked = (
        ("/v1/embeddings", {"input": ["one river", "two rivers", "three"]}),
        ("/v1/rerank", {"query": "river", "documents": ["one river", "two hats"]}),
        ("/v1/score", {"text_1": "river", "text_2": ["one river", "two hats"]}),
    )
    async with house.http(house.admin_key) as admin, house.http() as session:
        kinds = ["embeddings", "rerank"]
        async with admin.post("/admin/v1/upstreams", json={"name": "gone", "kinds": kinds, **terms}) as made:
            assert made.status == 201, await made.text()
        try:
            for path, body in asked:
                told = []
                for model in ("demo", "far"):
                    async with session.post(path, json={**body, "model": model}) as answer:
                        assert answer.status == 200, await answer.text()
                        told.append(_shared(await answer.json()))
                assert told[0]["usage"] == told[1]["usage"]
                key = "results" if "results" in told[0] else "data"
                assert len(told[0][key]) == len(told[1][key]) == len(body.get("input") or [1, 2])
                for mine, theirs in zip(told[0][key], told[1][key], strict=True):
                    assert mine.keys() == theirs.keys()
                    for name in mine.keys() & {"embedding", "relevance_score", "score"}:
                        assert theirs[name] == pytest.approx(mine[name], abs=1e-5)
        finally:
            async with admin.delete("/admin/v1/upstreams/gone") as gone:
                assert gone.status in (200, 204), await gone.text()
