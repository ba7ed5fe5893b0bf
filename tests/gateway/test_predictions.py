"""What a client predicts of an answer is told to the worker, and what came true of it is counted."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.reply.predicted import Predicted
from tests.gateway.conftest import Front

few = st.lists(st.integers(0, 3), max_size=30)


def num_true(prediction: list[int], said: list[int]) -> int:
    return Predicted(prediction).num_true(said)


def longest(first: list[int], second: list[int]) -> int:
    """Of their common subsequences, the obvious way."""
    row = [0] * (len(second) + 1)
    for a in first:
        before = row
        row = [0]
        for j, b in enumerate(second):
            row.append(before[j] + 1 if a == b else max(row[j], before[j + 1]))
    return row[-1]


@given(few, few)
def test_no_more_is_counted_than_can_be(prediction, said):
    assert 0 <= num_true(prediction, said) <= longest(prediction, said)
    assert num_true(prediction, prediction) == len(prediction)


def test_a_changed_middle_does_not_lose_the_end():
    text = list(range(100))
    assert num_true(text, [*text[:40], 7777, *text[50:]]) == 90
    assert num_true(text, [500, 501, *text]) == 100
    assert num_true([], text) == num_true(text, []) == 0


class Watched(list[int]):
    """Notes how much of it is looked at."""

    num_read = 0

    def __getitem__(self, place: Any) -> Any:
        self.num_read += 1
        return super().__getitem__(place)


def test_a_long_prediction_is_gone_through_once_for_however_many_answers():
    text = Watched(range(10_000))
    predicted = Predicted(text)
    assert [predicted.num_true([7777, number, number + 1, number + 2, number + 3]) for number in range(128)] == [
        4
    ] * 128
    assert text.num_read < 12_000


@pytest.mark.parametrize("content", ["The river flows on.", [{"type": "text", "text": "The river flows on."}]])
async def test_a_prediction_is_told_to_the_worker_and_counted(front: Front, content):
    call = front.chat(prediction={"type": "content", "content": content})
    submit = await front.peer.submitted()
    assert submit.predicted_token_ids == front.ids("The river flows on.")
    said = front.ids("The river flows ")
    front.peer.say(submit, [*said, 3], "stop")
    details = (await call).usage.completion_tokens_details
    common = longest(submit.predicted_token_ids, said)
    assert 0 < details.accepted_prediction_tokens <= common
    assert details.rejected_prediction_tokens == 0
