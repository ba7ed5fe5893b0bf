"""What a model thinks before it answers, where clients hand it back, as OpenAI's own client does it."""

from __future__ import annotations

from typing import Any

from tests.gateway.conftest import HELLO, OpenFront
from tests.gateway.test_chat_tools import THINKING, say


async def test_an_answer_that_was_cut_while_it_thought_can_be_gone_on_from(open_front: OpenFront):
    async with open_front(model={"template": THINKING}) as front:
        call = front.chat(stream=True)
        await say(front, "I think", "length")
        said: dict[str, Any] = {}
        async for chunk in await call:
            for name, text in chunk.choices[0].delta.model_dump(exclude_none=True, exclude={"role"}).items():
                said[name] = said.get(name, "") + text
        assert said == {"reasoning_content": "I think"}
        turns: Any = [*HELLO, {"role": "assistant", "content": None, **said}, {"role": "user", "content": "Go on."}]
        again = front.chat(messages=turns)
        await say(front, "I do.\n</think>\n\nHello")
        assert (await again).choices[0].message.content == "Hello"
