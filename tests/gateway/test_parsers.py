"""What a model says, told apart: however it arrives, and whether it means it or not."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.parsers import Call, Said, gathered
from gateway.parsers.marks import marks_of
from gateway.parsers.reader import Reader, Wanted, merged
from gateway.parsers.tongue import CALLS, THINKING

NAMES = frozenset({"get_weather", "get_time"})
ARGUMENTS = '{"city": "Pa\\"r}is"}'
CALL = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
TIME = '{"name": "get_time", "parameters": {}}'
WRITTEN = {
    "hermes": f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{TIME}\n</tool_call>",
    "llama": f"<|python_tag|>{CALL}; {TIME}",
    "mistral": f"[TOOL_CALLS][{CALL}, {TIME}]",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    f"{ARGUMENTS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{{}}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    f"{ARGUMENTS}<|tool_call_end|><|tool_call_begin|>functions.get_time:1<|tool_call_argument_begin|>{{}}"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "tagged": '<tool_call>\n<function=get_weather>\n<parameter=city>\nPa"r}is\n</parameter>\n</function>\n'
    "</tool_call>\n"
    "<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
    "glm": '<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Pa"r}is</arg_value>\n</tool_call>\n'
    "<tool_call>get_time</tool_call>",
    "json": f"```json\n[{CALL}, {TIME}]\n```",
}
FAMILIES = sorted(set(CALLS) - {"harmony"})  # which has a parser of its own


def reader(
    family: str,
    thinking: str | None = None,
    *,
    is_thinking: bool = False,
    special: bool = False,
    names: frozenset[str] | None = NAMES,
    several: bool = True,
) -> Reader:
    calls = CALLS[family]()
    words = THINKING[thinking] if thinking else None
    all_words = (*calls.marks, *(words or ()))
    marks = marks_of(all_words, {word: 1000 + i for i, word in enumerate(all_words)} if special else {})
    wanted = None if names is None else Wanted(names, several, withheld=frozenset({"held"}))
    return Reader(marks, words, is_thinking, calls, wanted)


def pieces_of(text: str, of: Reader) -> list[str]:
    """The text as it is fed, special tokens as what stands for them."""
    for word, spelled in of._spelled.items():
        text = text.replace(word, spelled)
    return list(text)


def read(of: Reader, pieces: list[str], is_ended: bool = True) -> Said:
    for piece in pieces:
        of.feed(piece)
    if is_ended:
        of.finish()
    return gathered(of.take())


def without_ids(said: Said) -> Said:
    return said._replace(calls=tuple(call._replace(id="") for call in said.calls))


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_calls_are_read_as_each_family_writes_them(family, special):
    of = reader(family, special=special)
    said = read(of, pieces_of(WRITTEN[family], of))
    assert said.content is None
    assert [(call.name, json.loads(call.arguments)) for call in said.calls] == [
        ("get_weather", {"city": 'Pa"r}is'}),
        ("get_time", {}),
    ]
    assert len({call.id for call in said.calls}) == 2


def test_arguments_in_tags_are_what_their_schemas_say():
    schemas = {"get_weather": {"city": {"type": "string"}, "days": {"type": "integer"}, "at": {"type": "object"}}}
    given = {"city": "12", "days": "3", "at": '{"x": [1]}', "wet": "true"}
    tags = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given.items())
    marks = marks_of(CALLS["tagged"]().marks, {})
    of = Reader(marks, None, False, CALLS["tagged"](), Wanted(NAMES, True, schemas))
    said = read(of, list(f"<tool_call>\n<function=get_weather>\n{tags}</function>\n</tool_call>"))
    (call,) = said.calls
    assert json.loads(call.arguments) == {"city": "12", "days": 3, "at": {"x": [1]}, "wet": "true"}
    long = "x" * 100_000 + "\n<b>"
    of = Reader(marks, None, False, CALLS["tagged"](), Wanted(NAMES, True, {"get_time": {"n": {"type": "integer"}}}))
    tags = f"<parameter=a>{long}</parameter><parameter=n>\nNaN\n</parameter>"
    text = f"<tool_call><function=get_time>{tags}</function></tool_call>"
    (call,) = read(of, list(text)).calls
    assert json.loads(call.arguments) == {"a": long, "n": "NaN"}


@pytest.mark.parametrize(
    ("value", "schema", "said"),
    [
        ("2024", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "2024"),
        ("2024", {"type": ["string", "null"]}, "2024"),
        ('{"a": 1}', {"type": ["string", "null"]}, '{"a": 1}'),
        ("true", {"oneOf": [{"anyOf": [{"type": "integer"}, {"type": "string"}]}, {"type": "null"}]}, "true"),
        ("1", {"enum": ["1", "2", None]}, "1"),
        ("null", {"type": ["string", "null"]}, None),
        ("None", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ('"a"', {"type": ["string", "null"]}, "a"),
        ("2024", {"type": ["string", "integer"]}, 2024),
        ("2024", {"type": ["string", "number"]}, 2024),
        ("1", {"enum": ["1", 1]}, 1),
        ("2024", {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/year"}]}, 2024),
        ("2024", {}, 2024),
    ],
)
def test_what_may_be_a_string_is_one_unless_its_schema_knows_what_else_it_is(value, schema, said):
    for family, tags in (
        ("tagged", f"\n<function=get_time>\n<parameter=at>\n{value}\n</parameter>\n</function>\n"),
        ("glm", f"get_time\n<arg_key>at</arg_key>\n<arg_value>{value}</arg_value>\n"),
    ):
        wanted = Wanted(NAMES, True, {"get_time": {"at": schema}})
        of = Reader(marks_of(CALLS[family]().marks, {}), None, False, CALLS[family](), wanted)
        (call,) = read(of, list(f"<tool_call>{tags}</tool_call>")).calls
        assert json.loads(call.arguments) == {"at": said}


def test_no_half_character_is_told_of_arguments_whoever_wrote_it():
    of = reader("hermes", special=True)
    half = r'<tool_call>{"name": "get_time", "arguments": "{\"a\": \"\ud800<tool_call>\ud83d\ude42\"}"}</tool_call>'
    assert read(of, pieces_of(half, of)).calls[0].arguments == '{"a": "\ufffd🙂"}'
    of = reader("tagged", special=True)
    tags = "<tool_call><function=get_time><parameter=a<tool_call>b>1</parameter></function></tool_call>"
    assert read(of, pieces_of(tags, of)).calls[0].arguments == '{"ab": "1"}'


def test_glms_write_each_argument_with_its_key():
    schemas = {"get_weather": {"city": {"type": "string"}, "days": {"type": "integer"}, "at": {"type": "object"}}}
    for special in (False, True):
        marks = CALLS["glm"]().marks
        of = Reader(
            marks_of(marks, {word: 1000 + i for i, word in enumerate(marks)} if special else {}),
            None,
            False,
            CALLS["glm"](),
            Wanted(NAMES, True, schemas),
        )
        told = "".join(
            f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"
            for key, value in {"city": "12", "days": "3", "at": '{"x": [1]}', "note": " a <b>\n"}.items()
        )
        said = read(of, pieces_of(f"I look.<tool_call>get_weather{told}</tool_call>", of))
        assert said.content == "I look."
        assert json.loads(said.calls[0].arguments) == {"city": "12", "days": 3, "at": {"x": [1]}, "note": " a <b>\n"}


def test_newer_mistrals_write_each_call_by_itself():
    of = reader("mistral", special=True)
    text = f"I look.[TOOL_CALLS]get_weather[CALL_ID]abc[ARGS]{ARGUMENTS}[TOOL_CALLS]get_time[ARGS]{{}}"
    said = read(of, pieces_of(text, of))
    assert said.content == "I look."
    assert [call.name for call in said.calls] == ["get_weather", "get_time"]
    assert all(len(call.id) == 9 and call.id.isalnum() for call in said.calls)


fragments = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "\n", " ", CALL, TIME, CALL[:20], '{"name": "other", "arguments": {}}', "[", "]",
        "[TOOL_CALLS]", "[ARGS]", "get_time", "{}", "{", "}", ";", ",", "```json\n", "```", "<|python_tag|>", "Hello",
        "<think>", "</think>", "<th", "[THINK]", "[/THINK]", '"', "\\", '{"arguments": {"a": 1}, "name": "get_time"}',
        '{"name": "get_time", "arguments": "{\\"a\\": 1}"}', '{"name": "get_time", "arguments": null, "x": [1, "]"]}',
        *WRITTEN.values(),
    ]
)  # fmt: skip


@given(
    st.lists(fragments, max_size=8).map("".join),
    st.sampled_from(FAMILIES),
    st.sampled_from([None, "think", "mistral"]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(1, 30)),
)
def test_how_it_arrives_changes_nothing(text, family, thinking, special, is_thinking, several, sizes):
    options = {"special": special, "is_thinking": is_thinking and thinking is not None, "several": several}
    first = reader(family, thinking, **options)
    chars = pieces_of(text, first)
    at_once = without_ids(read(first, chars))
    second = reader(family, thinking, **options)
    bounds = [0, *itertools.takewhile(lambda end: end < len(chars), itertools.accumulate(sizes)), len(chars)]
    cut = ["".join(chars[a:b]) for a, b in itertools.pairwise(bounds)]
    events = []
    for piece in cut:
        second.feed(piece)
        events += second.take()
    second.finish()
    events += second.take()
    assert without_ids(gathered(events)) == at_once
    assert without_ids(gathered(merged(events))) == at_once
    if not at_once.calls and not at_once.reasoning and thinking is None:
        # What is no call is said as it stands, but for special tokens, which have no text.
        plain = "".join(char for char in chars if not "\ud800" <= char <= "\udfff")
        assert (at_once.content or "") == plain


@pytest.mark.parametrize(
    "text",
    [
        "Use <tool_call> to call.",
        '<tool_call>\n{"name": "get_weather", "argume',
        '<tool_call>{"name": "held", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "delete it all", "arguments": {}}</tool_call>',
        "<tool_call>{'name': 'get_weather'}</tool_call>",
        '<tool_call>{"name": "get_weather", "arguments": [1]}</tool_call>',
        '<tool_call>{"arguments": {"city": "Paris"}}</tool_call>',
        "a < b and <tool_",
        '{"name": "get_weather", "arguments": {}}',
        " \n text with spaces around \n",
        "",
    ],
)
def test_what_only_looks_like_a_call_is_content(text):
    of = reader("hermes")
    assert read(of, list(text)) == Said(text or None, None, ())
    assert of.num_calls == 0


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"json"}))
def test_a_name_that_was_not_offered_is_called_where_a_word_says_that_it_is_a_call(family):
    text = WRITTEN[family].replace("get_time", "delete_all")
    of = reader(family)
    assert [call.name for call in read(of, pieces_of(text, of)).calls] == ["get_weather", "delete_all"]


def test_json_that_calls_nothing_is_content():
    for text in ('{"name": "Anna", "age": 7}', "[1, 2]", "```python\nprint()\n```", "```json\n{}\n```"):
        assert read(reader("json"), list(text)) == Said(text, None, ())


def test_a_call_that_is_cut_stays_as_far_as_it_came():
    said = read(reader("hermes"), list(f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS[:12]}'))
    assert said.content is None
    (call,) = said.calls
    assert (call.name, call.arguments) == ("get_weather", ARGUMENTS[:12])
    for missing in range(1, 12):  # the closing word is not text either
        assert read(reader("hermes"), list(f"<tool_call>\n{CALL}\n</tool_call>"[:-missing])).content is None


def test_arguments_are_told_as_they_come():
    of = reader("hermes")
    of.feed('<tool_call>{"name": "get_weather", "arguments": {"ci')
    said = gathered(of.take())
    assert said.calls == (Call(said.calls[0].id, "get_weather", '{"ci'),)
    of.feed('ty": ')
    assert [event.text for event in of.take()] == ['ty": ']


def test_text_before_and_after_calls_is_content_and_the_space_between_is_not():
    said = read(reader("hermes"), list(f"I look. \n<tool_call>{CALL}</tool_call>\n\nDone. "))
    assert (said.content, len(said.calls)) == ("I look.Done. ", 1)


def test_where_one_call_is_allowed_the_first_ends_the_answer():
    of = reader("hermes", several=False)
    said = read(of, list(WRITTEN["hermes"]))
    assert [call.name for call in said.calls] == ["get_weather"]
    assert of.is_over


@pytest.mark.parametrize("special", [False, True])
def test_reasoning_comes_before_the_text_and_its_tokens_are_counted(special):
    for is_thinking in (False, True):
        of = reader("hermes", "think", special=special, is_thinking=is_thinking)
        text = "" if is_thinking else "<think>"
        said = read(of, pieces_of(text + "\nHm.\n\nSo.\n</think>\n\nHello <think> there\n", of))
        expected = "Hello <think> there\n" if not special else "Hello  there\n"
        assert said == Said(expected, "Hm.\n\nSo.", ())
        words = 1 if special else len("</think>")
        opening = 0 if is_thinking else (1 if special else len("<think>"))
        assert of.num_reasoning_tokens == opening + len("\nHm.\n\nSo.\n") + words


def test_an_answer_without_reasoning_counts_none():
    of = reader("hermes", "think", names=None)
    assert read(of, list("<thin ice")) == Said("<thin ice", None, ())
    assert of.num_reasoning_tokens == 0


def test_a_call_within_reasoning_is_a_thought():
    said = read(reader("hermes", "think"), list(f"<think><tool_call>{CALL}</tool_call></think>Hello"))
    assert said == Said("Hello", f"<tool_call>{CALL}</tool_call>", ())


def test_a_name_that_never_ends_is_not_held_for_ever():
    of = reader("hermes")
    said = read(of, list('<tool_call>{"x": "' + "a" * 100_000), is_ended=False)
    assert len(said.content) > 60_000
