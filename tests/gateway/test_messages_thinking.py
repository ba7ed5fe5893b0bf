"""What a model thinks as Anthropic's clients hear it: in a block of its own, or in one without a word."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests import official
from tests.builders import PATIENCE_S
from tests.gateway.conftest import HELLO, KEY, OpenFront
from tests.gateway.responding import END
from tests.gateway.test_chat_tools import THINKING


@pytest.mark.parametrize(("display", "told"), [(None, "I think."), ("summarized", "I think."), ("omitted", "")])
@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_is_told_unless_it_is_to_be_omitted(open_front: OpenFront, stream: bool, display, told: str):
    thinking: Any = {"type": "enabled", "budget_tokens": 1024, **({"display": display} if display else {})}
    call: Any = {"model": "demo", "max_tokens": 64, "messages": HELLO, "thinking": thinking}
    options: Any = {"max_retries": 0, "timeout": PATIENCE_S}
    async with (
        open_front(model={"template": THINKING}) as front,
        official.Anthropic(base_url=front.url, api_key=KEY, **options) as claude,
    ):

        async def read() -> Any:
            if not stream:
                return await claude.messages.create(**call)
            async with claude.messages.stream(**call) as events:
                return await events.get_final_message()

        task = asyncio.create_task(read())
        submit = await front.peer.submitted()
        for token in front.ids("I think.\n</think>\n\nHello"):
            front.peer.say(submit, [token])
        front.peer.say(submit, [END], "stop")
        thought, text = (await task).content
        assert (thought.type, thought.thinking.strip(), thought.signature) == ("thinking", told, "penstock")
        assert text.text.strip() == "Hello"
