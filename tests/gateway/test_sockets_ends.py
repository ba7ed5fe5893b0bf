"""WebSockets that end: idle ones, old ones, those of a server that goes, and those of clients that are gone."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import aiohttp

from gateway import ending
from gateway.doors import Doors
from policies import settings
from tests.builders import PATIENCE_S, until
from tests.gateway.conftest import KEY
from tests.gateway.responding import END
from tests.gateway.talking import Socket, talking

KERNEL_BYTES = 4096


class Unurgent:
    """A stop that nobody hurries."""

    def __init__(self) -> None:
        self.asked, self.urgent = asyncio.Event(), asyncio.Event()


async def test_one_that_is_idle_is_closed_and_one_that_is_answered_is_not(open_front):
    async with open_front(responses=settings.Responses(socket_idle_s=0.5)) as front:
        async with talking(front) as idle, talking(front) as busy:
            await busy.ask()
            submit = await front.peer.submitted()
            assert await idle.closed() == 1000
            front.peer.say(submit, [*front.ids("Hi there."), END], "stop")
            assert (await busy.events())[-1]["type"] == "response.completed"
            assert await busy.closed() == 1000
        await until(lambda: not front.gw.sockets.num_open)


async def test_one_that_has_lasted_takes_nothing_more_and_says_so(open_front):
    config = settings.Responses(socket_max_s=0.5)
    async with open_front(responses=config) as front, talking(front) as busy, talking(front) as idle:
        await busy.ask()
        submit = await front.peer.submitted()
        assert await idle.refusal() == (400, "websocket_connection_limit_reached", None)
        assert await idle.closed() == 1001
        await busy.ask()
        assert await busy.refusal() == (400, "websocket_connection_limit_reached", None)
        front.peer.say(submit, [*front.ids("Hi there."), END], "stop")
        assert (await busy.events())[-1]["type"] == "response.completed"
        assert await busy.refusal() == (400, "websocket_connection_limit_reached", None)
        assert await busy.closed() == 1001


async def test_a_server_that_goes_closes_idle_ones_and_lets_others_finish(front):
    async with talking(front) as idle, talking(front) as busy:
        await busy.ask()
        submit = await front.peer.submitted()
        draining = asyncio.create_task(ending.drain(front.gw, Doors(), Unurgent()))  # type: ignore[arg-type]
        assert await idle.closed() == 1001
        await busy.ask("One more.", stream_id="late")
        event = await busy.next()
        assert (event["status"], event["error"]["code"], event["stream_id"]) == (503, "draining", "late")
        assert not draining.done()
        front.peer.say(submit, [*front.ids("Hi there."), END], "stop")
        assert (await busy.events())[-1]["type"] == "response.completed"
        assert await busy.closed() == 1001
        await draining
    assert not front.gw.sockets.num_open


async def test_a_silent_client_is_asked_whether_it_is_there_and_given_up_when_it_is_not(open_front):
    async with open_front(server=settings.Server(heartbeat_s=0.2, stall_s=0.4)) as front:
        url, headers = f"{front.url}/v1/responses", {}
        async with front.http.ws_connect(url, headers=headers, autoping=False) as deaf, talking(front) as there:
            assert (await deaf.receive(PATIENCE_S)).type is aiohttp.WSMsgType.PING
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(there.socket.receive(), 1.0)  # it answers pings by itself
            while (message := await deaf.receive(PATIENCE_S)).type is aiohttp.WSMsgType.PING:
                pass
            assert message.type is not aiohttp.WSMsgType.TEXT
            await until(lambda: front.gw.sockets.num_open == 1)
            await there.answered()


async def test_what_waits_on_a_connection_that_is_gone_is_never_begun(front):
    async with talking(front) as socket:
        for _ in range(3):
            await socket.ask("Mine.")
        await socket.socket.send_bytes(b"")
        assert await socket.refusal() == (400, "invalid_message_type", None)  # so all three are here
        submit = await front.peer.submitted()
    assert (await front.peer.cancelled()).request_id == submit.request_id
    front.peer.say(submit, [], "cancelled")
    await until(lambda: not front.gw.sockets.num_open)
    async with talking(front) as other:
        await other.ask("Another's.")
        assert "Another's." in await other.say()
        await other.events()
    assert len(await front.settled(2)) == 2


async def test_a_client_that_reads_nothing_is_given_up_and_pays_for_what_it_was_sent(open_front):
    server = settings.Server(stall_s=0.3, max_stream_buffer_bytes=KERNEL_BYTES)
    async with (
        open_front(server=server, send_buffer_bytes=KERNEL_BYTES) as front,
        aiohttp.TCPConnector(socket_factory=small) as connector,
        aiohttp.ClientSession(connector=connector, headers={"authorization": f"Bearer {KEY}"}) as http,
        http.ws_connect(f"{front.url}/v1/responses") as client,
    ):
        await Socket(front, client).ask()
        client._conn.transport.pause_reading()  # type: ignore[union-attr]
        submit = await front.peer.submitted()
        for _ in range(1000):
            front.peer.say(submit, front.ids(" stone")[:1] * 100)
        assert (await front.peer.cancelled()).request_id == submit.request_id
        front.peer.say(submit, [], "cancelled")
        (row,) = await front.settled(1)
        assert (row["status"], row["num_completion_tokens"] > 0) == (499, True)
        await until(lambda: not front.gw.sockets.num_open)


def small(address: Any) -> socket.socket:
    """One that the kernel keeps little for."""
    made = socket.socket(*address[:3])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KERNEL_BYTES)
    return made
