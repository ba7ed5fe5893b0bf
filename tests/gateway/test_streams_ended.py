"""Streams that end early, in every dialect: what their clients hear, and what they owe."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from gateway.reply.events import EventStream
from policies import settings
from tests.builders import PATIENCE_S
from tests.gateway.conftest import HELLO, Front, OpenFront

pytestmark = pytest.mark.usefixtures("patient_store")

DIALECTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 50},
    "/api/chat": {"messages": HELLO},
    "/api/generate": {"prompt": "Hello"},
}
ENDS = ("[DONE]", "message_stop", "message_delta", "response.completed", '"done":true', '"finish_reason":"')
"""What a whole answer has, each in its dialect."""
every_dialect = pytest.mark.parametrize("path", DIALECTS)


async def asked(front: Front, path: str) -> aiohttp.ClientResponse:
    body = {"model": "demo", "stream": True, **DIALECTS[path]}
    return await front.http.post(front.url + path, json=body)


async def begun(front: Front, path: str) -> tuple[aiohttp.ClientResponse, Any, str]:
    """A stream, what its worker was told, and what was read of it so far: all of the first word."""
    asking = asyncio.create_task(asked(front, path))
    submit = await front.peer.submitted()
    front.peer.say(submit, front.ids("Word"))
    answer, read = await asking, ""
    async with asyncio.timeout(PATIENCE_S):
        while "".join(told(path, read)) != "Word":
            read += (await answer.content.readany()).decode()
    return answer, submit, read


def events(read: str) -> list[Any]:
    """Each that is whole, be it a line or behind ``data:``."""
    lines = [line.removeprefix("data: ") for line in read.split("\n")[:-1]]
    return [json.loads(line) for line in lines if line.startswith("{")]


def told(path: str, read: str) -> list[str]:
    """The pieces of the text."""
    pieces: list[Any] = []
    for event in events(read):
        match path:
            case "/v1/chat/completions":
                pieces += [choice["delta"].get("content") for choice in event.get("choices", ())]
            case "/v1/completions":
                pieces += [choice["text"] for choice in event.get("choices", ())]
            case "/v1/responses" | "/v1/messages":
                is_piece = event["type"] in ("response.output_text.delta", "content_block_delta")
                pieces.append(event["delta"] if is_piece else None)
            case "/api/chat":
                pieces.append(event.get("message", {}).get("content"))
            case _:
                pieces.append(event.get("response"))
    return [piece["text"] if isinstance(piece, dict) else piece for piece in pieces if piece]


def failure(path: str, last: Any) -> str:
    """What the ``last`` event says in the form that the dialect's clients take for a failure."""
    match path:
        case "/v1/responses":
            assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
            said = last["response"]["error"]["message"]
        case "/v1/messages":
            assert (last["type"], set(last)) == ("error", {"type", "error", "request_id"})
            said = last["error"]["message"]
        case "/api/chat" | "/api/generate":
            said = last["error"]
        case _:
            assert set(last["error"]) == {"message", "type", "param", "code"}
            said = last["error"]["message"]
    assert isinstance(said, str)
    return said


@every_dialect
async def test_one_whose_client_hangs_up_is_cancelled_and_owes_what_was_sent(front: Front, path):
    answer, submit, _ = await begun(front, path)
    answer.close()
    assert (await front.peer.cancelled()).request_id == submit.request_id
    front.peer.say(submit, [], "cancelled")
    (row,) = await front.settled(1)
    assert (row["status"], row["finish_reason"]) == (499, "cancelled")
    assert row["num_completion_tokens"] == len(front.ids("Word"))
    assert front.gw.dispatch.num_waiting() == 0


@every_dialect
async def test_one_that_its_worker_gives_up_ends_with_the_failure_and_is_no_whole_answer(front: Front, path):
    answer, submit, read = await begun(front, path)
    front.peer.say(submit, [], "error")
    read += (await answer.read()).decode()
    assert "failed while answering" in failure(path, events(read)[-1])
    assert not [end for end in ENDS if end in read]
    assert "".join(told(path, read)) == "Word"
    (row,) = await front.settled(1)
    assert (row["status"], row["finish_reason"]) == (500, "error")
    assert row["num_completion_tokens"] == len(front.ids("Word"))


@every_dialect
async def test_one_that_loses_its_worker_for_good_says_that_it_may_be_tried_again(open_front: OpenFront, path):
    async with open_front(workers=settings.Workers(max_failovers=0)) as front:
        answer, _, read = await begun(front, path)
        front.peer.hang_up()
        read += (await answer.read()).decode()
        assert "was lost. Please try again." in failure(path, events(read)[-1])
        assert not [end for end in ENDS if end in read]
        (row,) = await front.settled(1)
        assert (row["status"], row["num_completion_tokens"]) == (503, len(front.ids("Word")))


@pytest.mark.parametrize(
    ("path", "others", "headers"),
    [
        *[(path, {}, {}) for path in DIALECTS],
        ("/v1/chat/completions", {}, {"idempotency-key": "once"}),
        ("/v1/responses", {"background": True}, {}),
    ],
)
async def test_a_client_that_is_gone_when_its_stream_opens_is_no_failure(
    front: Front, monkeypatch, caplog, path, others, headers
):
    async def open(stream: EventStream, real: Any = EventStream.open) -> Any:
        assert stream._request.transport is not None
        stream._request.transport.abort()
        return await real(stream)

    monkeypatch.setattr(EventStream, "open", open)
    body = {"model": "demo", "stream": True, **DIALECTS[path], **others}
    asking = asyncio.create_task(front.http.post(front.url + path, json=body, headers=headers))
    submit = await front.peer.submitted()
    front.peer.say(submit, [*front.ids("Word"), 3], "stop")
    with pytest.raises(aiohttp.ClientConnectionError):
        await asking
    await front.settled(1)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
