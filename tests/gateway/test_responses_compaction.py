"""/v1/responses/compact: a conversation as its user's messages and a sealed summary, and what goes on from that."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import openai
import pytest

from gateway.responses.compaction import ASKING, READING
from gateway.sealing import sealed
from tests.gateway.conftest import Front, OpenFront
from tests.gateway.responding import ASSISTANT, another_tenant, answered, ask, prompt_of, turn
from tests.gateway.test_conversations import begun, said

pytestmark = pytest.mark.usefixtures("patient_store")

SUMMARY = "They said hello."


def compact(front: Front, **others: Any) -> asyncio.Task[Any]:
    """One under way."""
    call: dict[str, Any] = {"model": "demo", "input": "Hello", **others}
    return asyncio.create_task(front.client.responses.compact(**call))


async def compacted(front: Front, **asked: Any) -> tuple[str, Any]:
    """What the model read, and what came of it, with this summary."""
    return await prompt_of(front, compact(front, **asked), SUMMARY)


def again(compaction: Any) -> list[Any]:
    """Its output, as input."""
    return [item.model_dump(exclude_unset=True, warnings=False) for item in compaction.output]


async def test_a_conversation_is_made_short_and_gone_on_from(front: Front):
    given = [said("Hello"), said("Hi there.", "assistant"), said("And?")]
    prompt, short = await compacted(front, input=given, instructions="Be brief.")
    told = [("system", "Be brief."), ("user", "Hello"), ("assistant", "Hi there."), ("user", "And?")]
    assert prompt == "".join([turn(*each) for each in told]) + turn("user", ASKING) + ASSISTANT
    *users, summary = short.output
    assert [(item.type, item.role, item.content[0].text) for item in users] == [
        ("message", "user", "Hello"),
        ("message", "user", "And?"),
    ]
    assert (short.object, summary.type) == ("response.compaction", "compaction")
    assert len({item.id for item in short.output}) == 3
    assert SUMMARY not in summary.encrypted_content
    prompt, _ = await prompt_of(front, ask(front, input=[*again(short), said("So?")]))
    told = [("user", "Hello"), ("user", "And?"), ("user", READING + SUMMARY), ("user", "So?")]
    assert prompt == "".join([turn(*each) for each in told]) + ASSISTANT
    row, _ = front.rows()
    assert (row["endpoint"], row["status"]) == ("/v1/responses/compact", 200)
    assert row["num_prompt_tokens"] == short.usage.input_tokens
    assert row["num_completion_tokens"] == short.usage.output_tokens == len(front.ids(SUMMARY)) + 1


async def test_what_was_made_short_is_made_shorter(front: Front):
    first = await answered(front)
    _, short = await compacted(front, input=None, previous_response_id=first.id)
    assert [item.type for item in short.output] == ["message", "compaction"]
    prompt, shorter = await compacted(front, input=[*again(short), said("And?")])
    assert turn("user", READING + SUMMARY) in prompt
    assert [item.type for item in shorter.output] == ["message", "message", "compaction"]
    assert shorter.output[0].id == short.output[0].id


async def test_a_summary_lies_in_a_conversation_sealed(front: Front):
    _, short = await compacted(front)
    mine = await begun(front)
    added = await front.client.conversations.items.create(mine, items=again(short))
    assert added.data[-1].encrypted_content == short.output[-1].encrypted_content  # type: ignore[union-attr]
    prompt, _ = await prompt_of(front, ask(front, input="So?", conversation=mine))
    assert turn("user", READING + SUMMARY) + turn("user", "So?") in prompt


async def test_one_that_was_not_made_here_for_the_tenant_is_refused_by_name(front: Front):
    _, short = await compacted(front)
    summary = again(short)[-1]
    text = summary["encrypted_content"]
    elsewhere = base64.urlsafe_b64encode(sealed(b"another" * 5, "compaction", "ten_1", SUMMARY)).decode()
    for forged in (text[:-4] + "AAAA", text[:40], "", "é", elsewhere):
        item: Any = {**summary, "encrypted_content": forged}
        for call, param in (
            (ask(front, input=[said("Hello"), item]), "input[1].encrypted_content"),
            (compact(front, input=[item]), "input[0].encrypted_content"),
            (front.client.conversations.create(items=[item]), "items[0].encrypted_content"),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                await call
            assert (refused.value.param, refused.value.code) == (param, "invalid_encrypted_content")
    async with another_tenant(front) as other:
        with pytest.raises(openai.BadRequestError) as foreign:
            await other.responses.create(model="demo", input=[summary])
        assert foreign.value.code == "invalid_encrypted_content"
    assert front.peer.is_quiet()


async def test_it_is_opened_after_a_restart(open_front: OpenFront, store_settings):
    async with open_front(store=store_settings) as front:
        _, short = await compacted(front)
    async with open_front(store=store_settings) as front:
        prompt, _ = await prompt_of(front, ask(front, input=again(short)))
        assert READING + SUMMARY in prompt


async def test_a_cut_summary_is_one_all_the_same_and_a_failure_is_none(front: Front):
    call = compact(front)
    submit = await front.peer.submitted()
    front.peer.say(submit, front.ids("They said"), "length")
    prompt, _ = await prompt_of(front, ask(front, input=again(await call)))
    assert prompt.endswith(turn("user", READING + "They said") + ASSISTANT)
    failing = compact(front)
    front.peer.say(await front.peer.submitted(), [], "error")
    with pytest.raises(openai.InternalServerError):
        await failing
