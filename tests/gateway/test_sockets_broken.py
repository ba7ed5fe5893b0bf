"""What fails over a WebSocket as nobody foresaw is told to its client, and to the log, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from gateway.head import HEAD
from gateway.sockets import connection
from policies import settings
from tests.builders import PATIENCE_S, until
from tests.gateway.desk import Desk
from tests.gateway.responding import END
from tests.gateway.talking import talking

SECRET = "what nobody else should know"


def failures(caplog) -> list[logging.LogRecord]:
    return [record for record in caplog.records if "failed unexpectedly" in record.getMessage()]


async def refused(socket) -> Any:
    """The next event that is an error."""
    while (event := await socket.next())["type"] != "error":
        pass
    return event


@pytest.mark.parametrize("is_answered", [False, True], ids=["before", "behind"])
async def test_a_response_that_breaks_is_an_error_and_ends_the_connection_behind_all_others(front, caplog, is_answered):
    desk, real, broken, go_on = Desk(front), front.gw.sockets.answer, [], asyncio.Event()
    await desk.made("policies", {"name": "two", "document": {"limits": {"concurrent_requests": 2}}})
    tenant = await desk.made("tenants", {"name": "t", "policy": "two"})
    key = (await desk.made("keys", {"tenant_id": tenant["id"], "name": "k"}))["key"]

    async def answer(request):
        if b'"BREAK"' not in b"".join(request.content._buffer):
            return await real(request)
        if is_answered:
            await real(request)
            broken.append(request[HEAD].request_id)
        await go_on.wait()
        raise RuntimeError(SECRET)

    front.gw.sockets.answer = answer
    async with talking(front, authorization=f"Bearer {key}") as socket:
        await socket.ask(stream_id="good")
        good = await front.peer.submitted()
        await socket.ask("BREAK", stream_id="bad")
        await socket.ask("Behind it.", stream_id="bad")
        if is_answered:
            await socket.say("Hi there.")
            assert (await socket.events())[-1]["type"] == "response.completed"
        await socket.ask(stream_id="")
        assert (await refused(socket))["error"]["code"] == "invalid_stream_id"  # by now the others are there
        go_on.set()
        errors = [await refused(socket), await refused(socket)]
        await socket.ask("One more.")
        event = await refused(socket)
        assert (event["status"], event["error"]["type"]) == (503, "service_unavailable_error")
        front.peer.say(good, [*front.ids("Hi there."), END], "stop")
        told = await socket.events()
        assert (told[-1]["type"], told[-1]["stream_id"]) == ("response.completed", "good")
        assert await socket.closed() == 1011
    for error in errors:
        assert (error["status"], error["stream_id"]) == (500, "bad")
        assert (error["error"]["type"], error["error"]["code"]) == ("server_error", "internal_error")
        assert SECRET not in str(error)
    (record,) = failures(caplog)
    assert SECRET in (caplog.text if record.exc_info is None else str(record.exc_info[1]))
    assert errors[0]["error"]["headers"]["x-request-id"] == record.request_id
    assert not is_answered or broken == [record.request_id]
    await until(lambda: not front.gw.sockets.num_open)
    rows = await front.settled(2 if is_answered else 1)
    assert {row["status"] for row in rows} == {200}
    # Its places are free again.
    async with talking(front, authorization=f"Bearer {key}") as socket:
        for lane in ("a", "b"):
            await socket.ask(stream_id=lane)
        for _ in range(2):
            await socket.say()
            assert (await socket.events())[-1]["type"] == "response.completed"


@pytest.mark.parametrize("part", ["parsed", "_over"])
async def test_a_connection_that_breaks_says_so_and_breaks_off_what_is_answered(open_front, monkeypatch, caplog, part):
    def fail(*_: object) -> None:
        raise RuntimeError(SECRET)

    async with open_front(responses=settings.Responses(socket_max_s=0.4)) as front:
        async with talking(front) as socket:
            await socket.ask()
            submit = await front.peer.submitted()
            monkeypatch.setattr(connection, part, fail)
            if part == "parsed":
                await socket.ask("One more.", stream_id="other")
            else:
                front.peer.say(submit, [*front.ids("Hi there."), END], "stop")
            event = await refused(socket)
            assert (event["status"], event["error"]["type"]) == (500, "server_error")
            assert SECRET not in str(event)
            assert await socket.closed() == 1011
        (record,) = failures(caplog)
        assert record.request_id
        if part == "parsed":
            assert (await front.peer.cancelled()).request_id == submit.request_id
            front.peer.say(submit, [], "cancelled")
        (row,) = await front.settled(1)
        assert row["status"] == (499 if part == "parsed" else 200)
        async with asyncio.timeout(PATIENCE_S):
            await front.gw.sockets.all_left()
