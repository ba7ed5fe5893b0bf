"""Responses while their database is away: what is asked is answered, what is stored is not found, and what is written
in the background is stored when it is back."""

from __future__ import annotations

import openai
import pytest

from policies import settings
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
