"""Slow readers, silent workers, clients that stall: what a stream does when the other end does not play along."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket

import msgspec
import openai
import pytest

from gateway import ending, reply
from policies import settings, wire
from tests.builders import PATIENCE_S, until
from tests.gateway.conftest import HELLO, KEY, Front

KERNEL_BYTES = 4096
"""Of either end of a connection: as small as it gets, so that a few hundred chunks fill both."""
SMALL = settings.Server(max_stream_buffer_bytes=10_000)


async def connected(front: Front) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client that takes next to nothing that it does not read."""
    host, port = front.url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KERNEL_BYTES)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
    # With so low a limit asyncio takes next to nothing that was not asked for.
    return await asyncio.open_connection(sock=connection, limit=1)


async def ask(front: Front, stream: bool = True) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Asks for a stream, or for a body, and reads nothing of it yet."""
    reader, writer = await connected(front)
    body = msgspec.json.encode({"model": "demo", "messages": HELLO, "stream": stream})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
    writer.write(f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    return reader, writer


async def quick_answer(front: Front) -> None:
    """Somebody else's request, from its beginning to its end."""
    call = front.chat()
    front.peer.say(await front.peer.submitted(), [*front.ids("quick"), 3], "stop")
    assert (await call).choices[0].message.content == "quick"


async def flood(front: Front, submit: wire.Submit, num_rounds: int) -> None:
    """Five tokens a round, and others are answered between the rounds."""
    for _ in range(num_rounds):
        for _ in range(5):
            front.peer.say(submit, front.ids(" stone")[:1])
        await quick_answer(front)


async def test_a_slow_reader_holds_up_nobody_loses_nothing_and_fills_no_memory(open_front):
    ledger = settings.Ledger(mark_tokens=1001)
    async with open_front(server=SMALL, ledger=ledger, send_buffer_bytes=KERNEL_BYTES) as front:
        reader, writer = await ask(front)
        submit = await front.peer.submitted()
        await flood(front, submit, 200)
        front.peer.say(submit, [3], "stop")
        received = bytearray()
        async with asyncio.timeout(PATIENCE_S):
            while not received.endswith(b"0\r\n\r\n"):
                received += await reader.read(1000)
        writer.close()
        chunks = [msgspec.json.decode(line[6:]) for line in received.split(b"\n") if line.startswith(b"data: {")]
        texts = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
        assert "".join(texts) == front.text.decode(front.ids(" stone")[:1] * 1000)
        # What could not be sent waited as token ids, and went out together.
        assert len(chunks) < 150
        assert max(map(len, texts)) > len("".join(texts)) / 4
        assert (await front.settled(201))[-1]["num_completion_tokens"] == 1001


@pytest.mark.parametrize("asks_before", [False, True])
async def test_a_client_that_does_not_say_all_that_it_wants_is_given_up_and_one_that_is_silent_is_not(
    open_front, asks_before
):
    whole = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"
    async with open_front(server=settings.Server(stall_s=0.3)) as front:
        (silent, ask_late), (reader, writer) = await connected(front), await connected(front)
        if asks_before:
            writer.write(whole)
            while not (await reader.read(1000)).endswith(b"}"):
                pass
        trickles = asyncio.create_task(trickle(writer, whole[:-2]))
        async with asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(ConnectionResetError):  # a byte came when it was closed already
                await reader.read()
        trickles.cancel()
        await asyncio.wait([trickles])
        ask_late.write(whole)
        assert await silent.readexactly(15) == b"HTTP/1.1 200 OK"
        for each in (writer, ask_late):
            each.close()


async def trickle(writer: asyncio.StreamWriter, head: bytes) -> None:
    for byte in head + b"x: " + b"y" * 8000:
        if writer.is_closing():
            break
        writer.write(bytes([byte]))
        await asyncio.sleep(0.01)  # the clock of the other end is real


async def test_a_reader_that_reads_nothing_is_given_up(open_front):
    server = msgspec.structs.replace(SMALL, stall_s=0.3)
    async with open_front(server=server, send_buffer_bytes=KERNEL_BYTES) as front:
        _, writer = await ask(front)
        submit = await front.peer.submitted()
        for _ in range(1000):
            front.peer.say(submit, front.ids(" stone")[:1] * 100)
        assert (await front.peer.cancelled()).request_id == submit.request_id
        front.peer.say(submit, [], "cancelled", engine_s=0.5)
        (row,) = await front.settled(1)
        assert (row["status"], row["finish_reason"]) == (499, "cancelled")
        assert row["num_completion_tokens"] > 0
        assert row["engine_us"] == 500_000, "its connection is closed while the worker's last word is waited for"
        writer.close()


async def test_a_body_of_which_nothing_is_read_is_given_up(open_front):
    async with open_front(server=settings.Server(stall_s=0.3), send_buffer_bytes=KERNEL_BYTES) as front:
        num_before = num_connections()
        _, writer = await ask(front, stream=False)
        front.peer.say(await front.peer.submitted(), front.ids(" stone")[:1] * 40_000, "length")
        assert (await front.settled(1))[0]["status"] == 200
        assert num_connections() == num_before + 1
        await until(lambda: num_connections() == num_before)
        writer.close()


def num_connections() -> int:
    """That the gateway has, as far as it looks after them."""
    return [task.get_coro().__qualname__ for task in asyncio.all_tasks()].count("RequestHandler.start")


@pytest.mark.parametrize("what", ["stream", "body", "file"])
async def test_a_stop_waits_for_whoever_has_not_read_all_of_an_answer_yet(open_front, what):
    server, ledger = settings.Server(max_stream_buffer_bytes=1 << 22), settings.Ledger(mark_tokens=100_000)
    async with open_front(server=server, ledger=ledger, send_buffer_bytes=KERNEL_BYTES) as front:
        if what == "file":
            made = await front.client.files.create(file=("a", b"x" * 1_000_000), purpose="user_data")
            reader, writer = await connected(front)
            head = f"GET /v1/files/{made.id}/content HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n\r\n"
            writer.write(head.encode())
            end = b"x" * 1_000_000
        else:
            reader, writer = await ask(front, stream=what == "stream")
            submit = await front.peer.submitted()
            for _ in range(200):
                front.peer.say(submit, front.ids(" stone")[:1] * 200)
            front.peer.say(submit, [3], "stop")
            assert (await front.settled(1))[0]["status"] == 200
            end = b"0\r\n\r\n" if what == "stream" else b'"}'
        received = bytearray(await reader.readexactly(1))
        await until(lambda: not front.doors.num_inside)
        draining = asyncio.create_task(ending.drain(front.gw, front.doors, Unhurried()))  # type: ignore[arg-type]
        assert not (await asyncio.wait([draining], timeout=0.2))[0]
        async with asyncio.timeout(PATIENCE_S):
            while not received.endswith(end):
                received += await reader.read(1000)
            await draining
        writer.close()


class Unhurried:
    """A stop that was asked for and is not urgent."""

    def __init__(self) -> None:
        self.urgent = asyncio.Event()


async def test_a_reader_that_leaves_while_it_is_waited_for_is_cancelled(open_front):
    async with open_front(server=SMALL, send_buffer_bytes=KERNEL_BYTES) as front:
        _, writer = await ask(front)
        submit = await front.peer.submitted()
        await flood(front, submit, 150)
        writer.transport.abort()
        assert (await front.peer.cancelled()).request_id == submit.request_id
        front.peer.say(submit, [], "cancelled")
        assert (await front.settled(151))[-1]["status"] == 499


async def test_a_client_that_goes_while_its_body_is_sent_is_no_error(open_front, caplog):
    async with open_front(send_buffer_bytes=KERNEL_BYTES) as front:
        num_before = num_connections()
        _, writer = await ask(front, stream=False)
        front.peer.say(await front.peer.submitted(), front.ids(" stone")[:1] * 40_000, "length")
        await front.settled(1)
        await until(front.doors.is_sending)
        writer.transport.abort()
        await until(lambda: num_connections() == num_before)
        gc.collect()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_headers_do_not_wait_for_a_first_token_that_is_long_in_coming(front: Front, monkeypatch):
    monkeypatch.setattr(reply, "HEADERS_AFTER_S", 0.0)
    call = front.chat(stream=True)
    submit = await front.peer.submitted()
    stream = await call
    assert stream.response.headers["x-request-id"] == submit.request_id
    front.peer.send(wire.Failed(submit.request_id, "overloaded", "too late for a status"))
    with pytest.raises(openai.APIError, match="overloaded"):
        await anext(stream)
    (row,) = await front.settled(1)
    assert (row["status"], row["num_prompt_tokens"]) == (503, 0)


async def test_a_stream_that_says_nothing_is_kept_alive(open_front, monkeypatch):
    monkeypatch.setattr(reply, "HEADERS_AFTER_S", 0.0)
    call = {"model": "demo", "messages": HELLO, "stream": True}
    async with (
        open_front(server=settings.Server(heartbeat_s=0.01)) as front,
        front.http.post(f"{front.url}/v1/chat/completions", json=call) as answer,
    ):
        submit = await front.peer.submitted()
        assert await answer.content.readuntil(b"\n\n") == b": keep-alive\n\n"
        assert await answer.content.readuntil(b"\n\n") == b": keep-alive\n\n"
        front.peer.say(submit, [*front.ids("at last"), 3], "stop")
        rest = await answer.content.read()
    assert b'"content":"at last"' in rest
    assert rest.endswith(b"data: [DONE]\n\n")


async def test_tokens_that_arrive_together_leave_together(front: Front):
    call = front.chat(stream=True)
    submit = await front.peer.submitted()
    front.peer.say(submit, front.ids("one two three"))
    stream = await call
    opening, chunk = await anext(stream), await anext(stream)
    assert (opening.choices[0].delta.content, chunk.choices[0].delta.content) == ("", "one two three")
    front.peer.say(submit, [3], "stop")
    assert [chunk.choices[0].finish_reason async for chunk in stream] == ["stop"]


async def test_the_ledger_has_the_row_before_the_client_has_the_end(front: Front):
    call = front.chat(stream=True)
    submit = await front.peer.submitted()
    front.peer.say(submit, [*front.ids("so it is"), 3], "stop")
    async for chunk in await call:
        if chunk.choices[0].finish_reason is not None:
            assert len(front.rows()) == 1


@pytest.mark.parametrize("obfuscates", [True, False])
@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/chat/completions", {"messages": HELLO, "store": True}),
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/responses", {"input": "Hello"}),
    ],
)
async def test_pieces_are_of_one_length_where_a_client_asks_for_obfuscation(front: Front, path, asked, obfuscates):
    body = {"model": "demo", **asked, "stream": True, "stream_options": {"include_obfuscation": obfuscates}}
    asking = asyncio.create_task(front.http.post(front.url + path, json=body))
    submit = await front.peer.submitted()
    events = []
    async with asyncio.timeout(PATIENCE_S):
        for text in ("stone", ' "seven"\n', "é", " "):
            front.peer.say(submit, front.ids(text))
            content = (await asking).content
            while msgspec.json.encode(text) not in (event := await content.readuntil(b"\n\n")):
                assert b'"obfuscation"' not in event
            events.append(event)
        front.peer.say(submit, [3], "stop")
        await content.read()
    assert [b'"obfuscation"' in event for event in events] == [obfuscates] * 4
    assert len({len(event) for event in events}) == (1 if obfuscates else 4)
