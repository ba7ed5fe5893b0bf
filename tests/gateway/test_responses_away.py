"""Responses while their database is away: what is asked is answered, what is stored is not found, and what is written
in the background is stored when it is back."""

from __future__ import annotations

import contextlib

import openai
import pytest

from gateway.openai import KEEP_ALIVE
from gateway.responses.events import Events, split
from gateway.responses.requests import parse
from gateway.responses.shapes import begun
from gateway.responses.shelf import Kept, Shelf
from gateway.shelving import ShelfAway
from policies import settings
from tests.builders import until, when
from tests.gateway.conftest import KEY
from tests.gateway.responding import END, answered, ask
from tests.gateway.test_responses_background import over


@pytest.mark.parametrize("how", ["kill", "stall"])
async def test_without_the_database_responses_are_given_and_not_kept(open_front, fragile_postgres, tmp_path, how):
    where = settings.Store(data_dir=str(tmp_path / "data"), url=f"{fragile_postgres.url}/postgres")
    async with open_front(store=where) as front:
        before = await answered(front)
        running = await ask(front, background=True)
        submit = await front.peer.submitted()
        front.peer.say(submit, front.ids("Hi"))
        mine = (await front.client.conversations.create()).id
        conversed = ask(front, conversation=mine)
        said = await front.peer.submitted()
        getattr(fragile_postgres, how)()
        given = await answered(front)
        assert (given.output_text, given.store) == ("Hi there.", False)
        front.peer.say(said, [*front.ids("Yes."), END], "stop")
        assert ((await conversed).output_text, (await conversed).conversation) == ("Yes.", None)
        stream = ask(front, stream=True)
        front.peer.say(await front.peer.submitted(), [*front.ids("Yes."), END], "stop")
        events = [event async for event in await stream]
        assert (events[-1].type, events[-1].response.output_text) == ("response.completed", "Yes.")
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert (events[0].response.store, events[-1].response.store) == (True, False)
        for refused in (
            front.client.responses.retrieve(before.id),
            front.client.responses.delete(before.id),
            ask(front, previous_response_id=before.id),
            ask(front, background=True),
            ask(front, conversation=mine),
            front.client.conversations.create(),
        ):
            with pytest.raises(openai.InternalServerError) as away:
                await refused
            assert (away.value.status_code, away.value.code) == (503, "server_is_overloaded")
        front.peer.say(submit, [*front.ids(" there."), END], "stop")
        (fragile_postgres.start if how == "kill" else fragile_postgres.resume)()
        patient = front.client.with_options(max_retries=20)
        assert (await over(patient, running.id)).output_text == "Hi there."
        assert (await patient.responses.retrieve(before.id)) == before
        assert (await patient.conversations.items.list(mine)).data == []


@pytest.mark.parametrize("how", ["kill", "stall"])
async def test_a_stream_of_what_another_gateway_writes_waits_for_the_database(
    open_front, fragile_postgres, tmp_path, caplog, how
):
    where = settings.Store(data_dir=str(tmp_path / "data"), url=f"{fragile_postgres.url}/postgres")
    async with open_front(store=where) as front:
        shelf, tenant_id = front.gw.responses.shelf, front.gw.auth.caller(KEY).tenant_id
        call = parse(b'{"model":"demo","input":"Hello","background":true}')
        written = Events(begun(call, "resp_" + "5" * 32, 1, True), 0)
        await shelf.put(Kept.of(tenant_id, written.body, []))
        told = split(written.queued())
        assert await shelf.advance(written.body, 0, told)
        async with front.http.get(f"{front.url}/v1/responses/{written.body.id}?stream=true") as stream:
            heard = b"".join([await stream.content.readuntil(b"\n\n") for _ in told])
            getattr(fragile_postgres, how)()
            await until(lambda: "stored responses cannot be reached" in caplog.text)
            (fragile_postgres.start if how == "kill" else fragile_postgres.resume)()
            first, told = len(told), told + split(written.cancelled())
            await when(lambda: has_ended(shelf, written, first, told[first:]))
            heard += await stream.content.read()
            assert heard.replace(KEEP_ALIVE, b"") == b"".join(told)


async def has_ended(shelf: Shelf, written: Events, first: int, last: list[bytes]) -> bool:
    """In the store, by now."""
    with contextlib.suppress(ShelfAway):
        await shelf.advance(written.body, first, last)  # again, where nobody was told that it is
        return True
    return False
