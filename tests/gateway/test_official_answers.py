"""The client that tests use finds out what an answer lacks: it is held to this by answers that are wrong."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import ValidationError

from tests.gateway.responding import ask
from tests.gateway.test_chat_tools import say
from tests.official import check


def parts_of(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """The places of all fields of objects in it."""
    if isinstance(value, list):
        return [place for number, each in enumerate(value) for place in parts_of(each, (*path, number))]
    if not isinstance(value, dict):
        return []
    return [(*path, name) for name in value] + [
        place for name, each in value.items() for place in parts_of(each, (*path, name))
    ]


def changed(value: Any, path: tuple[str | int, ...], *to: Any) -> Any:
    """A copy with something else there, or without it."""
    first, *rest = path
    copied = list(value) if isinstance(value, list) else dict(value)
    if rest:
        copied[first] = changed(copied[first], tuple(rest), *to)
    elif to:
        copied[first] = to[0]
    else:
        del copied[first]
    return copied


def is_good(answer: Any, type_: Any) -> bool:
    try:
        check(answer, type_)
    except ValidationError:
        return False
    return True


async def test_a_field_that_is_missing_or_of_another_type_is_found(front):
    chat = front.chat()
    await say(front, "Hi there.")
    response = ask(front)
    await say(front, "Hi there.")
    completing = asyncio.create_task(front.client.completions.create(model="demo", prompt="Hello"))
    await say(front, "Hi there.")
    answers = ((await chat, ChatCompletion), (await response, Response), (await completing, Completion))
    for answer, type_ in answers:
        said = answer.model_dump(mode="json")
        assert is_good(said, type_)
        for needed in ("id", "object"):
            assert not is_good(changed(said, (needed,)), type_), needed
        unheld = {place[0] for place in parts_of(said) if is_good(changed(said, place, object()), type_)}
        assert unheld <= {"penstock", "store"}, type_.__name__  # which its types do not know


def test_an_event_that_is_none_is_found():
    delta = {"type": "response.output_text.delta", "content_index": 0, "output_index": 0, "item_id": "msg_1"}
    whole = {**delta, "delta": "Hi", "logprobs": [], "sequence_number": 3}
    assert is_good(whole, ResponseStreamEvent)
    for name in whole:
        assert not is_good({key: value for key, value in whole.items() if key != name}, ResponseStreamEvent), name
    assert not is_good({**whole, "sequence_number": "3"}, ResponseStreamEvent)


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_only_what_is_known_is_let_through(role):
    said: Any = {
        "id": "cmpl_1",
        "object": "text_completion",
        "created": 1,
        "model": "demo",
        "choices": [{"index": 0, "text": "Hi", "finish_reason": None, "logprobs": None}],
    }
    assert is_good(said, Completion)
    assert not is_good(changed(said, ("choices", 0, "finish_reason"), role), Completion)
