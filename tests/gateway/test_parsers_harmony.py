"""Harmony: channels told apart however they arrive, and the grammars that they are held to."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.parsers import Said, gathered
from gateway.parsers.grammars import Held
from gateway.parsers.harmony import Channels, Harmony
from gateway.parsers.marks import marks_of
from gateway.parsers.reader import Wanted
from gateway.parsers.tongue import tongue_of
from policies import wire
from tests.gateway.test_parsers import pieces_of, read, without_ids
from tests.gateway.test_parsers_grammars import FREE, STRICT, allows, made, said

NAMES = frozenset({"get_weather", "get_time"})
THOUGHT = "<|channel|>analysis<|message|>The user wants\nweather.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>It rains."
CALL = '<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Arden"}'
PREAMBLE = "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"


def parser(special: bool = True, names: frozenset[str] | None = NAMES, several: bool = True) -> Channels:
    words = Harmony.marks
    marks = marks_of(words, {word: 1000 + i for i, word in enumerate(words)} if special else {})
    return Channels(marks, Harmony(), None if names is None else Wanted(names, several))


def told(text: str, **options: object) -> Said:
    of = parser(**options)  # type: ignore[arg-type]
    return without_ids(read(of, pieces_of(text, of)))  # type: ignore[arg-type]


@pytest.mark.parametrize("special", [False, True])
def test_channels_are_reasoning_content_and_calls(special):
    assert told(THOUGHT + FINAL, special=special) == Said("It rains.", "The user wants\nweather.", ())
    assert told(FINAL + "<|return|>", special=special, names=None) == Said("It rains.", None, ())
    answer = told(THOUGHT + PREAMBLE + CALL + "<|call|>", special=special)
    assert (answer.content, answer.reasoning) == ("I look.", "The user wants\nweather.")
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == [("get_weather", {"city": "Arden"})]


def test_a_recipient_may_stand_before_the_channel_and_arguments_may_be_missing():
    head = "<|start|>assistant to=functions.get_time<|channel|>commentary json<|message|>"
    (call,) = told(head + "<|call|>").calls
    assert (call.name, call.arguments) == ("get_time", "{}")
    (call,) = told(head).calls
    assert call.arguments == "{}"


def test_a_call_that_was_cut_has_the_arguments_that_were_said():
    for text in (CALL[: CALL.index("{")], CALL[: CALL.index("Arden")]):
        of = parser()
        for piece in pieces_of(text, of):  # type: ignore[arg-type]
            of.feed(piece)
        of.finish(is_cut=True)
        assert of.is_in_call
        (call,) = gathered(of.take()).calls
        assert call.arguments == text.partition("{")[1] + text.partition("{")[2]
    of = parser()
    for piece in pieces_of(CALL + "<|call|>", of):  # type: ignore[arg-type]
        of.feed(piece)
    of.finish(is_cut=True)
    assert not of.is_in_call


def test_what_is_for_nobody_here_is_no_call():
    assert told(CALL, names=None) == Said('{"city": "Arden"}', None, ())
    python = "<|channel|>analysis to=python code<|message|>print(1)<|call|>"
    assert told(python) == Said(None, "print(1)", ())


def test_a_name_that_was_not_offered_is_called():
    (call,) = told(CALL.replace("get_weather", "delete_all")).calls
    assert (call.name, call.arguments) == ("delete_all", '{"city": "Arden"}')


def test_one_call_is_all_where_one_is_allowed():
    of = parser(several=False)
    said = read(of, pieces_of(CALL + "<|call|>" + CALL, of))
    assert len(said.calls) == 1
    assert of.is_over


def test_reasoning_is_counted_with_its_head():
    of = parser()
    pieces = pieces_of(THOUGHT + FINAL, of)
    read(of, pieces)
    assert of.num_reasoning_tokens == len(pieces_of(THOUGHT, of))


def test_a_model_that_writes_no_channel_is_heard_all_the_same():
    assert told("Hello.") == Said("Hello.", None, ())
    assert told("Hello. " * 200) == Said("Hello. " * 200, None, ())
    assert told("<|channel|>final") == Said(None, None, ())


WORDS = ("assistant", "analysis", "final", " to=functions.get_time", "{}", "x")
fragments = st.sampled_from([*Harmony.marks, THOUGHT, FINAL, CALL, PREAMBLE, *WORDS])


@given(st.lists(fragments, max_size=8).map("".join), st.booleans(), st.booleans(), st.lists(st.integers(1, 30)))
def test_how_it_arrives_changes_nothing(text, special, several, sizes):
    at_once = told(text, special=special, several=several)
    of = parser(special=special, several=several)
    chars = pieces_of(text, of)
    bounds = [0, *itertools.takewhile(lambda end: end < len(chars), itertools.accumulate(sizes)), len(chars)]
    events = []
    for a, b in itertools.pairwise(bounds):
        of.feed("".join(chars[a:b]))
        events += of.take()
    of.finish()
    assert without_ids(gathered([*events, *of.take()])) == at_once


def test_the_form_is_found_in_the_template():
    tongue = tongue_of(["{{ '<|start|>assistant<|channel|>final<|message|>' + tools }}"], {})
    assert isinstance(tongue.calls, Harmony)
    assert tongue.parsers(None, False) is not None


@pytest.mark.parametrize("are_tokens", [True, False])
def test_an_answer_is_held_to_what_it_must_be_within_its_channels(are_tokens):
    tongue, vocabulary = made("harmony", are_tokens=are_tokens)
    call, final = CALL.removeprefix("<|start|>assistant"), FINAL.removeprefix("<|start|>assistant")
    must = tongue.grammar(Held([STRICT, FREE], True, True), None, False)
    assert allows(must, vocabulary, call)
    assert allows(must, vocabulary, THOUGHT + CALL)
    assert not allows(must, vocabulary, call.replace("Arden", "Rome"))
    assert not allows(must, vocabulary, final)
    (called,) = said(tongue, vocabulary, THOUGHT + CALL).calls
    assert json.loads(called.arguments) == {"city": "Arden"}
    may = tongue.grammar(Held([STRICT, FREE], False, True), None, False)
    assert allows(may, vocabulary, final)
    assert allows(may, vocabulary, THOUGHT + CALL)
    assert not allows(may, vocabulary, call.replace("Arden", "Rome"))
    schema = wire.Grammar("json_schema", '{"type": "integer"}', True)
    held = tongue.grammar(None, schema, False)
    assert allows(held, vocabulary, THOUGHT + FINAL.replace("It rains.", "42"))
    assert not allows(held, vocabulary, final)
    assert tongue.grammar(None, None, False) is None


@pytest.mark.parametrize("special", [False, True])
def test_wherever_it_is_cut_no_head_is_text(special):
    pieces = pieces_of(THOUGHT + PREAMBLE + CALL, parser(special))  # type: ignore[arg-type]
    for num in range(len(pieces)):
        of = parser(special)
        for piece in pieces[:num]:
            of.feed(piece)
        of.finish(True)
        cut = gathered(of.take())
        # Of a word's one character nobody knows what it would have become.
        assert "I look.".startswith((cut.content or "").removesuffix("<")), num
        assert "The user wants\nweather.".startswith((cut.reasoning or "").removesuffix("<")), num
