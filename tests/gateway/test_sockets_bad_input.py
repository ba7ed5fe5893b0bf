"""What is wrong over a WebSocket is said as an error event, and others are answered all the same."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import aiohttp
import pytest

from policies import settings
from tests.builders import PATIENCE_S, until
from tests.gateway.conftest import KEY, Front
from tests.gateway.desk import Desk
from tests.gateway.responding import END
from tests.gateway.talking import talking

OVER = (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.ERROR)
CREATE = {"type": "response.create", "model": "demo", "input": "Hello"}
WRONG: list[tuple[Any, str | None, str | None]] = [
    ("", "invalid_json", None),
    ("not JSON", "invalid_json", None),
    ("[]", "invalid_type", None),
    ("{}", "missing_required_parameter", "type"),
    ('{"type": "response.create", "model": "a", "model": "b"}', "duplicate_key", "model"),
    ('{"type": "response.create", "x": ' + "[" * 20_000, "invalid_json", None),
    ({"type": 1}, "invalid_type", "type"),
    ({"type": "response.cancel"}, "invalid_value", "type"),
    ({"type": "x" * 10_000}, "invalid_value", "type"),
    ({"type": "response.steer"}, "missing_required_parameter", "previous_response_id"),
    ({**CREATE, "stream_id": ""}, "invalid_stream_id", "stream_id"),
    ({**CREATE, "stream_id": "ä"}, "invalid_stream_id", "stream_id"),
    ({**CREATE, "stream_id": "a\n"}, "invalid_stream_id", "stream_id"),
    ({**CREATE, "stream_id": "a" * 257}, "invalid_stream_id", "stream_id"),
    ({**CREATE, "stream_id": 1}, "invalid_stream_id", "stream_id"),
    ({**CREATE, "generate": "no"}, "invalid_type", "generate"),
    ({**CREATE, "background": True}, "unsupported_parameter", "background"),
    ({**CREATE, "model": "other"}, "model_not_found", "model"),
    ({**CREATE, "temperature": 9}, "decimal_above_max_value", "temperature"),
    ({**CREATE, "prompt": {"id": "p"}}, "unsupported_parameter", "prompt"),
    ({**CREATE, "input": None}, "missing_required_parameter", "input"),
    ({"type": "response.create"}, "missing_required_parameter", "model"),
    ({**CREATE, "previous_response_id": "resp_x"}, "previous_response_not_found", "previous_response_id"),
]


async def test_what_is_wrong_is_said_and_the_next_one_is_answered(front):
    async with talking(front) as socket:
        for message, code, param in WRONG:
            await socket.socket.send_str(message if isinstance(message, str) else json.dumps(message))
            status, found, where = await socket.refusal()
            assert (found, where) == (code, param), message[:60]
            assert status == (404 if code == "model_not_found" else 400)
        await socket.socket.send_bytes(json.dumps(CREATE).encode())
        assert await socket.refusal() == (400, "invalid_message_type", None)
        await socket.socket.ping()
        # What HTTP has for it is not asked.
        await socket.answered(stream=False)


async def test_what_cannot_be_steered_has_its_input_back(front):
    async with talking(front) as socket:
        await socket.ask()
        submit = await front.peer.submitted()
        front.peer.say(submit, front.ids("Hi"))
        created = await socket.next()
        steer = {"type": "response.steer", "previous_response_id": created["response"]["id"], "input": "Stop."}
        await socket.socket.send_json(steer)
        while (event := await socket.next())["type"] != "response.steer.failed":
            pass
        assert event["error"]["code"] == "steering_not_supported"
        assert event["steer"] == {"previous_response_id": created["response"]["id"], "input": "Stop."}
        front.peer.say(submit, [END], "stop")
        assert (await socket.events())[-1]["type"] == "response.completed"


async def test_a_message_that_is_too_long_ends_the_connection_before_all_of_it_is_here(open_front):
    async with open_front(server=settings.Server(max_body_bytes=1 << 20)) as front:
        async with talking(front) as socket:
            await socket.answered("x" * 1000)
            # The head of a frame alone, of text and masked, whose length is said in the next eight bytes.
            transport = socket.socket._conn.transport
            assert transport is not None
            transport.write(b"\x81\xff" + (10 << 20).to_bytes(8, "big") + b"mask")
            assert await socket.closed() == 1009
        await until(lambda: not front.gw.sockets.num_open)
        async with talking(front) as socket:
            with contextlib.suppress(ConnectionError):  # it may be closed before all of it is sent
                await socket.socket.send_str("x" * (10 << 20))
            while (await socket.socket.receive(PATIENCE_S)).type not in OVER:
                pass
        await until(lambda: not front.gw.sockets.num_open)


async def test_lanes_and_what_waits_are_bounded(front, monkeypatch):
    monkeypatch.setattr("gateway.sockets.connection.MAX_NAMED", 2)
    monkeypatch.setattr("gateway.sockets.connection.MAX_WAITING", 2)
    async with talking(front) as socket:
        for lane in ("a", "b"):
            await socket.answered(stream_id=lane)
        await socket.ask(stream_id="c")
        refused = await socket.next()
        assert (refused["error"]["code"], refused["stream_id"]) == ("websocket_stream_limit_reached", "c")
        for number in range(4):
            await socket.ask(f"{number}", stream_id="a")
        refused = await socket.next()
        assert (refused["status"], refused["error"]["code"]) == (429, "rate_limit_exceeded")
        assert (refused["stream_id"], refused["error"]["headers"]["retry-after-ms"]) == ("a", "1000")
        for number in range(3):
            assert f"user\n{number}<" in await socket.say()
            await socket.events()


async def test_who_has_no_key_or_asks_for_no_socket_is_told_so_over_http(front):
    async def refused(headers: dict[str, str], **others: Any) -> int:
        with pytest.raises(aiohttp.WSServerHandshakeError) as error:
            await front.http.ws_connect(f"{front.url}/v1/responses", headers=headers, **others)
        return error.value.status

    assert await refused({"authorization": "Bearer wrong"}) == 401
    scoped = await Desk(front).made("keys", await of_tenant(front, scopes={"endpoints": ["models"]}))
    assert await refused({"authorization": f"Bearer {scoped['key']}"}) == 403
    url, headers = f"{front.url}/v1/responses", {"upgrade": "websocket", "connection": "upgrade"}
    for given, status, code in (({}, 405, "method_not_allowed"), (headers, 400, None)):
        async with front.http.get(url, headers=given) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (status, code)
    front.gw.dispatch.draining = True
    assert await refused({}) == 503


async def of_tenant(front: Front, **others: Any) -> dict[str, Any]:
    """Another key of the tests' tenant."""
    (tenant,) = (await Desk(front).got("tenants"))["data"]
    return {"tenant_id": tenant["id"], "name": "other", **others}


async def test_a_key_that_is_revoked_meanwhile_answers_nothing_more(front):
    desk = Desk(front)
    key = await desk.made("keys", await of_tenant(front))
    async with talking(front, authorization=f"Bearer {key['key']}") as socket, talking(front) as other:
        await socket.ask(stream_id="a")
        submit = await front.peer.submitted()
        assert (await desk("DELETE", f"keys/{key['id']}")).status == 200
        await socket.ask(stream_id="b")
        event = await socket.next()
        assert (event["status"], event["error"]["code"], event["stream_id"]) == (401, "invalid_api_key", "b")
        # What was let in before is answered.
        front.peer.say(submit, [*front.ids("Hi there."), END], "stop")
        assert (await socket.events())[-1]["type"] == "response.completed"
        assert await socket.closed() == 1008
        await other.answered()


async def test_there_are_so_many_sockets_at_most(open_front):
    config = settings.Responses(max_sockets=3, max_sockets_per_tenant=2)
    async with open_front(responses=config) as front:
        async with talking(front), talking(front):
            with pytest.raises(aiohttp.WSServerHandshakeError) as error:
                await front.http.ws_connect(f"{front.url}/v1/responses")
            assert error.value.status == 429
        await until(lambda: not front.gw.sockets.num_open)
        async with talking(front, authorization=f"Bearer {KEY}") as socket:
            await socket.answered()
