"""The events of a response: whatever is said, in whatever pieces, they are numbered without gaps, what was added is
done, and the deltas add up to what the response has."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from gateway.errors import WorkerLost
from gateway.parsers import Content, Event, Reasoning, ToolArguments, ToolCallBegin
from gateway.reply.choices import Choice
from gateway.responses.events import Events, obfuscated, split
from gateway.responses.requests import parse
from gateway.responses.shapes import ResponseBody, begun
from gateway.text.detokenize import Vocabulary
from policies import terms, wire
from tests.gateway.texts import byte_level

VOCABULARY = Vocabulary(byte_level())
RESPONSE_ID = "resp_" + "5" * 32
ADDED = {
    "response.output_item.added": "response.output_item.done",
    "response.content_part.added": "response.content_part.done",
    "response.reasoning_summary_part.added": "response.reasoning_summary_part.done",
}
_adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


class Script:
    """A parser that has read it all before: each time it is asked there is the next of it."""

    is_over = False
    num_reasoning_tokens = 0

    def __init__(self, batches: list[list[Event]]) -> None:
        self.marks: dict[int, str] = {}
        self._batches = batches
        self.num_calls = sum(isinstance(event, ToolCallBegin) for batch in batches for event in batch)

    def feed(self, text: str) -> None:
        pass

    def mark(self, name: str) -> None:
        pass

    def rest(self, text: str) -> None:
        pass

    def finish(self, is_cut: bool = False) -> None:
        pass

    def take(self) -> list[Event]:
        return self._batches.pop(0) if self._batches else []


texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)


@st.composite
def spoken(draw: st.DrawFn) -> list[list[Event]]:
    """What a model says, in the batches in which it moves."""
    events: list[Event] = []
    numbers = itertools.count()
    for kind in draw(st.lists(st.sampled_from(["content", "reasoning", "call"]), max_size=6)):
        pieces = draw(st.lists(texts, min_size=1, max_size=4))
        if kind == "call":
            number = next(numbers)
            events.append(ToolCallBegin(number, f"call_{number}", "look_up"))
            events += [ToolArguments(number, text) for text in pieces[1:]]
        else:
            events += [Content(text) if kind == "content" else Reasoning(text) for text in pieces]
    cuts = sorted(draw(st.lists(st.integers(0, len(events)), max_size=5)))
    return [events[start:end] for start, end in itertools.pairwise([0, *cuts, len(events)])]


def a_response(**asked: object) -> Events:
    call = parse(msgspec.json.encode({"model": "demo", "input": "Hello", **asked}))
    events = Events(begun(call, RESPONSE_ID, 1_795_000_000, True), 1)
    events.usage = lambda: terms.Usage(3, 1, 5, 2)
    return events


def told(events: Events, batches: list[list[Event]], reason: str | None) -> bytes:
    """``reason``: how it ended; None: it has not."""
    choice = Choice(0, VOCABULARY.decoder(continues=False), parser=Script([*batches]))
    said = b""
    for number in range(len(batches)):
        is_last = reason is not None and number == len(batches) - 1
        finish = wire.Finish(reason, 0, 0, 0.0, 0.0, 0.0) if is_last else None  # type: ignore[arg-type]
        choice.take(wire.Delta("r", 0, [], finish=finish))
        said += events.moved(choice)
    return said


def checked(said: bytes) -> list[dict[str, Any]]:
    """The events, each a valid one of OpenAI's."""
    events = []
    for number, event in enumerate(split(said)):
        name, data = event.decode().removesuffix("\n\n").split("\n", 1)
        events.append(msgspec.json.decode(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        assert events[-1]["sequence_number"] == number
        _adapter.validate_json(data.removeprefix("data: "))
    return events


def check_whole(events: list[dict[str, Any]]) -> None:
    """Each item and part was added before it was done, and is done with what its deltas add up to, in order."""
    open_: list[tuple[str, Any]] = []
    deltas: dict[tuple[Any, ...], str] = {}
    items = []
    for event in events:
        kind, place = event["type"], (event.get("output_index"), event.get("item_id"))
        if kind in ADDED:
            open_.append((ADDED[kind], event["output_index"]))
        elif kind in ADDED.values():
            assert open_.pop() == (kind, event["output_index"])
        if kind.endswith(".delta"):
            key = (kind.removesuffix(".delta"), *place)
            deltas[key] = deltas.get(key, "") + event["delta"]
        elif kind.removesuffix(".done") in {key[0] for key in deltas}:
            whole = event["arguments"] if "arguments" in event else event["text"]
            assert whole == deltas.get((kind.removesuffix(".done"), *place), "")
        if kind == "response.output_item.done":
            assert event["output_index"] == len(items)
            items.append(event["item"])
    assert open_ == []
    assert events[-1]["response"]["output"] == items
    assert len({item["id"] for item in items}) == len(items)


@settings(deadline=None)
@given(spoken(), st.sampled_from(["stop", "length"]), st.sampled_from([None, "auto"]), st.booleans())
def test_events_are_whole_and_add_up_to_the_response(batches, reason, summary, is_in_background):
    response = a_response(reasoning={"summary": summary}, background=is_in_background)
    said = response.queued() if is_in_background else b""
    said += told(response, batches, reason) + response.last(None)
    events = checked(said)
    check_whole(events)
    begins = ["response.created", *(["response.queued"] if is_in_background else []), "response.in_progress"]
    assert [event["type"] for event in events[: len(begins)]] == begins
    assert events[-1]["type"] == ("response.completed" if reason == "stop" else "response.incomplete")
    assert msgspec.convert(events[-1]["response"], ResponseBody) == response.body
    pieces = [event for batch in batches for event in batch]
    body = Response.model_validate(events[-1]["response"])
    assert body.output_text == "".join(event.text for event in pieces if isinstance(event, Content))
    calls = [item.name for item in body.output if item.type == "function_call"]
    assert calls == [event.name for event in pieces if isinstance(event, ToolCallBegin)]
    assert body.output


@settings(max_examples=25, deadline=None)
@given(spoken(), st.sampled_from(["stop", "length"]))
def test_openais_own_reader_of_streams_comes_to_the_same_response(batches, reason):
    response = a_response()
    said = told(response, batches, reason) + response.last(None)
    state: Any = ResponseStreamState(input_tools=[], text_format=omit)
    for event in checked(said)[:-1]:
        state.handle_event(_adapter.validate_python(event))
    snapshot = state._ResponseStreamState__current_snapshot
    expected = Response.model_validate(msgspec.to_builtins(response.body))
    seen = [(item.type, item.id, getattr(item, "arguments", None)) for item in snapshot.output]
    assert seen == [(item.type, item.id, getattr(item, "arguments", None)) for item in expected.output]
    assert snapshot.output_text == expected.output_text


@settings(deadline=None)
@given(spoken(), st.sampled_from(["failed", "cancelled"]))
def test_what_is_broken_off_is_told_to_its_end_all_the_same(batches, how):
    response = a_response(background=True)
    said = response.queued() + told(response, batches, None)
    said += response.failed(WorkerLost("gone")) if how == "failed" else response.cancelled()
    events = checked(said)
    check_whole(events)
    assert events[-1]["response"]["status"] == how
    if how == "failed":
        assert (events[-2]["type"], events[-2]["code"]) == ("error", "worker_lost")
        assert events[-1]["response"]["error"] == {"code": "server_error", "message": "gone"}


def test_of_events_that_bring_no_piece_none_is_read_again_to_be_padded():
    whole = b"event: response.completed\ndata: however long this is\n\n"
    assert obfuscated(whole) == whole
    piece = b'event: response.output_text.delta\ndata: {"delta":"Hi"}\n\n'
    assert b'"obfuscation":' in obfuscated(piece)
