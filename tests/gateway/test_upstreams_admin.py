"""Upstreams over the admin API: made, changed and forgotten while requests go on, their keys never to be seen again."""

from __future__ import annotations

import asyncio
import gc
import shutil
import sqlite3
from weakref import ref

import msgspec
import pytest

from gateway.dispatch import Dispatch
from gateway.sealing import SealBroken, sealed, unsealed
from gateway.upstreams.registry import LOOK_S, Upstreams
from policies import settings
from policies.upstreams.terms import Upstream
from tests.builders import ROOT, until
from tests.gateway.conftest import HELLO, KEY, Front, OpenFront
from tests.gateway.desk import Desk
from tests.gateway.elsewhere import elsewhere, fails, says, stalls
from tests.gateway.test_upstreams_trouble import streamed

SECRET = "sk-of-the-upstream-4711"
ASKED = {"model": "far", "messages": HELLO}


async def test_one_is_made_changed_and_forgotten(front: Front):
    desk = Desk(front)
    async with elsewhere() as far, elsewhere(says("other")) as other:
        status, refused, _ = await front.post("/v1/chat/completions", ASKED)
        assert (status, refused["error"]["code"]) == (404, "model_not_found")
        body = {"name": "far-1", "model": "far", "url": f"{far.url}/v1", "key": SECRET, "probe_s": 0}
        made = await desk("POST", "upstreams", body)
        assert (made.status, made.body["has_key"], made.body["origin"]) == (201, True, "admin")
        assert (await desk("POST", "upstreams", body)).status == 409

        status, answer, _ = await front.post("/v1/chat/completions", ASKED)
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "one two three")
        assert far.heard[0].request.headers["authorization"] == f"Bearer {SECRET}"
        seen = await desk.got("upstreams/far-1")
        assert (seen["live"]["state"], seen["live"]["num_asked"]) == ("closed", 1)
        assert [each["name"] for each in (await desk.got("upstreams?model=far"))["data"]] == ["far-1"]
        assert (await desk.got("upstreams?model=fa"))["data"] == []

        stale = await desk("PATCH", "upstreams/far-1", {"weight": 2}, if_match='"7"')
        assert stale.status == 412
        changed = await desk("PATCH", "upstreams/far-1", {"weight": 2, "max_concurrent": 3}, if_match=made.etag)
        assert (changed.body["version"], changed.body["terms"]["weight"], changed.body["has_key"]) == (2, 2.0, True)
        moved = await desk("PATCH", "upstreams/far-1", {"url": f"{other.url}/v1"}, if_match=changed.etag)
        assert (moved.status, moved.fields()) == (400, ["key"])
        keyless = {"url": f"{other.url}/v1", "key": None}
        assert (await desk("PATCH", "upstreams/far-1", keyless)).status == 428
        moved = await desk("PATCH", "upstreams/far-1", keyless, if_match=changed.etag)
        assert (moved.status, moved.body["has_key"]) == (200, False)
        status, answer, _ = await front.post("/v1/chat/completions", ASKED)
        assert answer["choices"][0]["message"]["content"] == "other"
        assert "authorization" not in other.heard[0].request.headers

        gone = await desk("DELETE", "upstreams/far-1")
        assert gone.status == 200
        assert (await desk("GET", "upstreams/far-1")).status == 404
        assert (await front.post("/v1/chat/completions", ASKED))[0] == 404
        again = await desk("POST", "upstreams", {**body, "key": "another"})
        assert (again.status, again.body["version"]) == (201, 5)
        actions = [line["action"] for line in (await desk.got("audit_log?limit=500"))["data"]]
        assert actions.count("upstream.updated") == 2
        assert {"upstream.created", "upstream.deleted"} <= set(actions)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("url", "far away"),
        ("url", "http://me:secret@host/v1"),
        ("model", "demo"),
        ("overflow", True),
        ("weight", 0),
        ("kinds", []),
        ("kinds", ["painting"]),
        ("fallbacks", ["far"]),
        ("key", "with blanks in it"),
        ("key_variable", "PENSTOCK_ADMIN_KEY"),
        ("timeout_s", -1),
        ("unheard_of", 1),
    ],
)
async def test_what_cannot_be_is_named_and_nothing_is_made(front: Front, field, value):
    desk = Desk(front)
    body = {"name": "far-1", "model": "far", "url": "http://127.0.0.1:9/v1", field: value}
    refused = await desk("POST", "upstreams", body)
    assert refused.status == 400
    assert field in str(refused.body["fields"])
    assert (await desk.got("upstreams"))["data"] == []


async def test_who_may(front: Front):
    desk = Desk(front)
    assert (await desk("GET", "upstreams", key=KEY)).status in (401, 403)
    reader = await desk.made("admin_keys", {"name": "reader", "role": "billing_reader"})
    assert (await desk("GET", "upstreams", key=reader["key"])).status == 200
    body = {"name": "far-1", "model": "far", "url": "http://127.0.0.1:9/v1"}
    assert (await desk("POST", "upstreams", body, key=reader["key"])).status == 403


async def test_a_key_is_in_no_answer_no_log_no_table_and_outlives_the_gateway(open_front: OpenFront, caplog):
    caplog.set_level("DEBUG")
    told = []
    async with elsewhere() as far:
        async with open_front() as front:
            desk = Desk(front)
            body = {"name": "far-1", "model": "far", "url": f"{far.url}/v1", "key": SECRET, "probe_s": 0}
            told.append(await desk("POST", "upstreams", body, idempotency_key="once"))
            told.append(await desk("GET", "upstreams"))
            told.append(await desk("GET", "audit_log?limit=500"))
            told.append(await desk("PATCH", "upstreams/far-1", {"weight": 3}, if_match="*"))
            far.scripts = [fails(500, f"bad key {SECRET}"), fails(400, f"no: {SECRET}")]
            told += [await front.post("/v1/chat/completions", ASKED) for _ in range(2)]
            told.append(await desk("GET", "upstreams/far-1"))
            rows = sqlite3.connect(next(front.data_dir.glob("*.db"))).execute("SELECT * FROM upstreams").fetchall()
            assert rows
            told.append(rows)
            told.append(repr(front.gw.upstreams.known()))
        assert SECRET not in str(told)
        assert SECRET not in caplog.text
        assert any("no: ***" in str(each) for each in told)
        for path in front.data_dir.rglob("*"):
            assert path.is_dir() or SECRET.encode() not in path.read_bytes()
        far.heard.clear()
        async with open_front() as front:
            assert (await front.post("/v1/chat/completions", ASKED))[0] == 200
        assert far.heard[0].request.headers["authorization"] == f"Bearer {SECRET}"


async def test_what_is_under_way_is_known_however_often_its_model_comes_and_goes(open_front: OpenFront):
    async with elsewhere(stalls("one ")) as far, open_front() as front:
        desk, asking = Desk(front), []
        for number in range(2):
            await desk.made("upstreams", {"name": "far-1", "model": "far", "url": f"{far.url}/v1", "probe_s": 0})
            asking.append(asyncio.create_task(streamed(front, seed=number)))
            await until(lambda: len(far.heard) == len(asking))
            assert (await desk("DELETE", "upstreams/far-1")).status == 200
        assert [model for model, _ in front.gw.upstreams.flights()] == ["far", "far"]
        front.gw.upstreams.cut()
        assert [failure["code"] for _, failure in await asyncio.gather(*asking)] == ["draining"] * 2


async def test_one_that_was_refused_is_asked_as_soon_as_it_has_another_key(front: Front):
    desk = Desk(front)
    async with elsewhere(says("well")) as far:
        far.scripts = [fails(401)]
        body = {"name": "far-1", "model": "far", "url": f"{far.url}/v1", "key": SECRET, "probe_s": 0}
        made = await desk("POST", "upstreams", {**body, "breaker_failures": 1, "breaker_open_s": 3600.0})
        for code in ("upstream_refused", "upstream_unavailable"):
            _, refused, _ = await front.post("/v1/chat/completions", ASKED)
            assert refused["error"]["code"] == code
        heavier = await desk("PATCH", "upstreams/far-1", {"weight": 2}, if_match=made.etag)
        _, refused, _ = await front.post("/v1/chat/completions", ASKED)
        assert refused["error"]["code"] == "upstream_unavailable"
        await desk("PATCH", "upstreams/far-1", {"key": "sk-another-4712"}, if_match=heavier.etag)
        status, answer, _ = await front.post("/v1/chat/completions", ASKED)
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "well")
        assert far.heard[-1].request.headers["authorization"] == "Bearer sk-another-4712"


async def test_those_of_the_settings_are_shown_and_changed_there(open_front: OpenFront):
    async with elsewhere() as far:
        settled = far.upstream(key_variable="FAR_KEY")
        async with open_front(upstreams=(settled,), environ={"FAR_KEY": SECRET}) as front:
            desk = Desk(front)
            (listed,) = (await desk.got("upstreams"))["data"]
            assert (listed["name"], listed["origin"], listed["has_key"]) == ("far-1", "settings", True)
            assert SECRET not in str(listed)
            assert (await desk("PATCH", "upstreams/far-1", {"weight": 2}, if_match="*")).status == 409
            assert (await desk("DELETE", "upstreams/far-1")).status == 409
            body = {"name": "far-1", "model": "far", "url": "http://127.0.0.1:9/v1"}
            assert (await desk("POST", "upstreams", body)).status == 409
            await front.post("/v1/chat/completions", ASKED)
            assert far.heard[0].request.headers["authorization"] == f"Bearer {SECRET}"


def test_a_sealed_key_opens_for_its_upstream_alone():
    secret = b"s" * 32
    text = sealed(secret, "upstream", "a", SECRET)
    assert unsealed(secret, "upstream", "a", text) == SECRET
    assert SECRET.encode() not in text
    assert sealed(secret, "upstream", "a", SECRET) != text
    for other, what, name, body in (
        (b"t" * 32, "upstream", "a", text),
        (secret, "compaction", "a", text),
        (secret, "upstream", "b", text),
        (secret, "upstream", "a", text[:-1] + b"\0"),
        (secret, "upstream", "a", b""),
    ):
        with pytest.raises(SealBroken):
            unsealed(other, what, name, body)


class Written:
    """A board of a test's own."""

    def __init__(self, *upstreams: Upstream) -> None:
        self.upstreams = {terms.name: (terms, SECRET) for terms in upstreams}


async def test_nobody_wakes_up_as_long_as_none_is_to_be_probed(clock):
    config = settings.Settings(models={})
    registry = Upstreams(config, {}, clock, Dispatch(config, clock))
    quiet, probed = (
        Upstream(name=name, model="far", url="http://127.0.0.1:9/v1", probe_s=probe_s)
        for name, probe_s in (("quiet", 0.0), ("probed", 15.0))
    )
    async with registry.opened():
        for board in (Written(), Written(quiet)):
            registry.follow(board)
            for _ in range(5):
                await asyncio.sleep(0)
            assert clock.waits() == []
        registry.follow(Written(quiet, probed))
        await until(clock.waits)
        assert clock.waits() == [LOOK_S]


async def test_a_tokenizer_is_looked_for_again_when_upstreams_change_and_goes_with_the_last_that_names_it(
    clock, tmp_path, caplog
):
    config = settings.Settings(models={})
    registry = Upstreams(config, {}, clock, Dispatch(config, clock))
    place = tmp_path / "tokenizer"
    far = Upstream(name="far-1", model="far", url="http://127.0.0.1:9/v1", probe_s=0.0, tokenizer=str(place))
    async with registry.opened():
        registry.follow(Written(far))
        await until(lambda: "so tokens are estimated" in caplog.text)
        pool = registry.of("far")
        assert pool is not None
        assert pool.text is None
        shutil.copytree(ROOT / "demo" / "model", place, ignore=shutil.ignore_patterns("*.safetensors"))
        registry.follow(Written(far))
        await until(lambda: pool.text)
        text = ref(pool.text)
        registry.follow(Written(msgspec.structs.replace(far, tokenizer="")))
        assert pool.text is None
        gc.collect()
        assert text() is None
