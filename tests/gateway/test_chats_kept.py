"""Chat completions that are kept, as the official client asks for them: found, listed, labelled and deleted by the
tenant that asked for them and by nobody else."""

from __future__ import annotations

from typing import Any

import openai
import pytest
import sqlalchemy as sa

from policies import settings, wire
from policies.policy import Policy
from tests.gateway.conftest import Front
from tests.gateway.responding import END, another_tenant
from tests.gateway.test_chat_tools import TEMPLATE
from tests.gateway.test_responses_shelf import Wall

pytestmark = pytest.mark.usefixtures("patient_store")


async def kept(front: Front, text: str = "Hi there.", **others: object) -> Any:
    """One that says this."""
    call = front.chat(store=True, **others)
    front.peer.say(await front.peer.submitted(), [*front.ids(text), END], "stop")
    return await call


async def listed(client: openai.AsyncOpenAI, **asked: Any) -> list[str]:
    """Ids, over all pages."""
    return [each.id async for each in await client.chat.completions.list(**asked)]


async def test_what_was_kept_is_read_again(open_front, store_settings):
    async with open_front(store=store_settings) as front:
        chats = front.client.chat.completions
        said = await kept(front, metadata={"topic": "greeting\0", "ключ": "значение"})
        read = await chats.retrieve(said.id)
        assert read.metadata == {"topic": "greeting\0", "ключ": "значение"}
        assert read.model_copy(update={"metadata": None}) == said
        asked = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
        ]
        other = await kept(front, messages=asked)
        messages = (await chats.messages.list(other.id)).data
        assert [(each.id, each.role, each.content) for each in messages] == [
            (f"{other.id}-0", "system", "Be brief."),
            (f"{other.id}-1", "user", None),
        ]
        assert messages[1].content_parts is not None
        assert [part.text for part in messages[1].content_parts] == ["Hel", "lo"]
        behind = await chats.messages.list(other.id, order="desc", limit=1, after=messages[1].id)
        assert ([each.id for each in behind.data], behind.has_more) == ([messages[0].id], False)
        with pytest.raises(openai.BadRequestError) as unknown:
            await chats.messages.list(other.id, after="x")
        assert unknown.value.param == "after"


async def test_a_stream_is_kept_as_a_whole_before_its_last_chunk(front):
    call = front.chat(
        store=True, stream=True, logprobs=True, n=2, metadata={"a": "b"}, stream_options={"include_usage": True}
    )
    submit = await front.peer.submitted()
    for index, words in enumerate((["Hi", " there", "."], ["Good", " day"])):
        for word in words:
            ids, is_last = front.ids(word), word is words[-1]
            ids = [*ids, END] if is_last else ids
            told = [wire.TokenLogprob(-0.5, [], []) for _ in ids]
            front.peer.say(submit, ids, "stop" if is_last else None, index=index, logprobs=told)
    chunks = [chunk async for chunk in await call]
    texts, tokens = ["", ""], [[], []]
    for choice in [chunk.choices[0] for chunk in chunks if chunk.choices]:
        texts[choice.index] += choice.delta.content or ""
        tokens[choice.index] += [] if choice.logprobs is None else [entry.token for entry in choice.logprobs.content]
    read = await front.client.chat.completions.retrieve(chunks[0].id)
    assert [choice.message.content for choice in read.choices] == texts == ["Hi there.", "Good day"]
    assert [[entry.token for entry in choice.logprobs.content] for choice in read.choices] == tokens
    assert [choice.finish_reason for choice in read.choices] == ["stop", "stop"]
    assert (read.usage, read.created, read.metadata) == (chunks[-1].usage, chunks[0].created, {"a": "b"})


async def test_calls_are_kept_streamed_or_not(open_front):
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    async with open_front(model={"template": TEMPLATE}) as front:
        said = '<tool_call>\n{"name": "look", "arguments": {"at": "me"}}\n</tool_call>'
        whole = await kept(front, said, tools=[tool])
        call = front.chat(store=True, stream=True, tools=[tool])
        submit = await front.peer.submitted()
        ids = front.ids(said)
        front.peer.say(submit, ids[:7])
        front.peer.say(submit, [*ids[7:], END], "stop")
        chunks = [chunk async for chunk in await call]
        for read in [await front.client.chat.completions.retrieve(each) for each in (whole.id, chunks[0].id)]:
            (choice,) = read.choices
            (called,) = choice.message.tool_calls
            assert (called.function.name, called.function.arguments, choice.finish_reason) == (
                "look",
                '{"at": "me"}',
                "tool_calls",
            )


async def test_they_are_listed_in_order_by_page_by_model_and_by_metadata(open_front, store_settings):
    async with open_front(store=store_settings) as front:
        ids = []
        for number in range(5):
            metadata = {"parity": "odd" if number % 2 else "even", "number": str(number)}
            ids.append((await kept(front, metadata=metadata)).id)
        list_of = front.client.chat.completions.list
        assert await listed(front.client, limit=2) == ids
        assert await listed(front.client, limit=2, order="desc") == ids[::-1]
        page = await list_of(limit=2, after=ids[1])
        assert ([each.id for each in page.data], page.has_more) == (ids[2:4], True)
        assert await listed(front.client, metadata={"parity": "odd"}) == ids[1::2]
        assert await listed(front.client, metadata={"parity": "odd", "number": "3"}) == [ids[3]]
        assert await listed(front.client, metadata={"parity": "odd", "number": "2"}) == []
        assert await listed(front.client, model="demo") == ids
        assert await listed(front.client, model="another\0") == []
        for wrong in (
            {"limit": 0},
            {"limit": 101},
            {"order": "up"},
            {"after": "chatcmpl-x"},
            {"metadata": {"k" * 65: "v"}},
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                await list_of(**wrong)
            assert refused.value.param.partition(".")[0] == next(iter(wrong))


async def test_a_page_has_what_can_be_read_at_once_and_nothing_is_read_of_what_they_were_asked(front, monkeypatch):
    ids = [(await kept(front, text=text)).id for text in ("One.", "Two.", "Three.")]
    asked: list[str] = []
    sa.event.listen(front.gw.chats._engine.sync_engine, "before_cursor_execute", lambda *sent: asked.append(sent[2]))
    assert len((await front.client.chat.completions.list(limit=3)).data) == 3
    monkeypatch.setattr("gateway.shelving.PIECE_BYTES", 1)
    page = await front.client.chat.completions.list(limit=3)
    assert ([each.id for each in page.data], page.has_more) == (ids[:1], True)
    assert await listed(front.client, limit=3, order="desc") == ids[::-1]
    read = [sent for sent in asked if "FROM chats" in sent]
    assert len(read) == 2 + 2 + 2 * 3
    assert not [sent for sent in read if "messages" in sent]


async def test_metadata_is_changed_as_a_whole(open_front, store_settings):
    async with open_front(store=store_settings) as front:
        chats = front.client.chat.completions
        said = await kept(front, metadata={"a": "1", "b": "2"})
        assert (await chats.update(said.id, metadata={"b": "3"})).metadata == {"b": "3"}
        assert (await chats.retrieve(said.id)).metadata == {"b": "3"}
        assert await listed(front.client, metadata={"a": "1"}) == []
        assert await listed(front.client, metadata={"b": "3"}) == [said.id]
        assert (await chats.update(said.id, metadata=None)).metadata is None
        assert await listed(front.client, metadata={"b": "3"}) == []
        for wrong in ({"k": 1}, {str(number): "" for number in range(17)}, "text"):
            with pytest.raises(openai.BadRequestError) as refused:
                await chats.update(said.id, metadata=wrong)
            assert refused.value.param.startswith("metadata")


async def test_one_that_is_deleted_or_anothers_is_not_there(front):
    said = await kept(front, metadata={"a": "1"})
    async with another_tenant(front) as other:
        assert await listed(other) == []
        for asked in (
            other.chat.completions.retrieve(said.id),
            other.chat.completions.messages.list(said.id),
            other.chat.completions.update(said.id, metadata={}),
            other.chat.completions.delete(said.id),
        ):
            with pytest.raises(openai.NotFoundError) as missing:
                await asked
            assert missing.value.code == "chat_completion_not_found"
    gone = await front.client.chat.completions.delete(said.id)
    assert (gone.id, gone.deleted, gone.object) == (said.id, True, "chat.completion.deleted")
    assert await listed(front.client) == await listed(front.client, metadata={"a": "1"}) == []
    for asked in (front.client.chat.completions.delete(said.id), front.client.chat.completions.retrieve("x\0")):
        with pytest.raises(openai.NotFoundError):
            await asked


@pytest.mark.parametrize(
    "where", [{"responses": settings.Responses(store=False)}, {"policies": {"default": Policy(store_responses=False)}}]
)
async def test_none_is_kept_where_nothing_may_be(open_front, where):
    async with open_front(**where) as front:
        assert (await kept(front)).choices[0].message.content == "Hi there."
        assert await listed(front.client) == []


async def test_none_is_kept_that_nobody_asked_for_or_that_failed(front):
    call = front.chat(store=False)
    front.peer.say(await front.peer.submitted(), [*front.ids("Hi"), END], "stop")
    await call
    failing = front.chat(store=True, stream=True)
    submit = await front.peer.submitted()
    front.peer.say(submit, front.ids("Hi"))
    stream = await failing
    front.peer.say(submit, [], "error")
    with pytest.raises(openai.APIError):
        [chunk async for chunk in stream]
    assert await listed(front.client) == []


async def test_they_expire_and_take_so_much_room_and_no_more(open_front, store_settings):
    bounds = settings.Responses(retention_s=100, max_bytes_per_tenant=10_000)
    async with open_front(store=store_settings, responses=bounds) as front:
        wall = front.gw.chats._wall = Wall()
        ids = []
        for _ in range(5):
            wall.now += 1
            ids.append((await kept(front, messages=[{"role": "user", "content": "x" * 3000}])).id)
        await front.gw.chats.sweep()
        assert await listed(front.client) == ids[3:]
        wall.now += 99
        assert await listed(front.client) == ids[4:]
        await front.gw.chats.sweep()
        wall.now -= 99
        assert await listed(front.client) == ids[4:]


async def test_without_the_database_chats_are_given_and_not_kept(open_front, fragile_postgres, tmp_path):
    where = settings.Store(data_dir=str(tmp_path / "data"), url=f"{fragile_postgres.url}/postgres")
    async with open_front(store=where) as front:
        before = await kept(front)
        fragile_postgres.kill()
        assert (await kept(front)).choices[0].message.content == "Hi there."
        call = front.chat(store=True, stream=True)
        front.peer.say(await front.peer.submitted(), [*front.ids("Yes."), END], "stop")
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in await call]) == "Yes."
        for refused in (front.client.chat.completions.retrieve(before.id), front.client.chat.completions.list()):
            with pytest.raises(openai.InternalServerError) as away:
                await refused
            assert away.value.code == "server_is_overloaded"
        fragile_postgres.start()
        patient = front.client.with_options(max_retries=20)
        assert (await patient.chat.completions.retrieve(before.id)).id == before.id
        assert await listed(front.client) == [before.id]
