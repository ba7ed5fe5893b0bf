"""Texts for custom tools: read piece by piece from the string that a model writes, and held to grammars there."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from gateway.openai.custom import Custom, Definition, InGrammar
from gateway.parsers.custom import PARAMETERS, Input
from gateway.parsers.escaping import NotEscapable, in_json
from gateway.parsers.grammars import Callable, Held
from gateway.parsers.reader import Wanted
from policies import wire
from tests.gateway.test_parsers_grammars import FORMS, Bytes, allows, made, said, written

SUM = 'start: NUMBER (SP SIGN SP NUMBER)*\nSP: " "\nSIGN: /[-+]/\n%import common.NUMBER\n'
QUOTED = 'start: "say" WS STRING  // what follows\nSTRING: /"[^"\\\\]*"/\n%import common.WS\n'
TREE = 'start: "(" [start ("\\n" start)*] ")" | WORD\n%import common.WORD\n'
GRAMMARS = (
    (SUM, ["4 + 4", "12", "1 - 2 + 3"], ["4+4", "", "4 + "]),
    (QUOTED, ['say "hi"', 'say  "a/b c"'], ["say hi", 'say "x"y"']),
    (TREE, ["(a\n(b\nc))", "()"], ["(a", "(a b)"]),
    ("start: /.*/s\n", ["", 'a"b\\c\nd\té', "\x7f"], []),
    ('start: ("a".."c" | "\\\\")+\n', ["ab\\c"], ["d", ""]),
    (r"start: /\w+\s\d{2}\\(?:\t|x)\/\x41/", ["ab 12\\x/A", "ab 12\\\t/A"], ["ab 12\\y/A"]),
    (r"start: /[^a-c\n]{3}/", ['"\\\t', "xyz"], ["abc", "x\ny"]),
)
_MATCHERS: dict[str, LLMatcher] = {}


def is_of(grammar: str, text: str) -> bool:
    if grammar not in _MATCHERS:
        _MATCHERS[grammar] = LLMatcher(LLTokenizer(TokenizerWrapper(Bytes([]))), grammar)
    matcher = _MATCHERS[grammar].deep_copy()
    assert not matcher.is_error(), (matcher.get_error(), grammar)
    token_ids = [*text.encode(), 256]
    return matcher.validate_tokens(token_ids) == len(token_ids)


def within(grammar: str) -> str:
    """Of JSON strings of it."""
    return f'start: "\\"" text "\\""\ntext: %lark {{\n{in_json(grammar)}\n}}\n'


def as_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


@pytest.mark.parametrize(("grammar", "of_it", "others"), GRAMMARS)
def test_a_grammar_is_the_same_inside_of_a_json_string(grammar, of_it, others):
    for text in of_it:
        assert is_of(grammar, text)
        assert is_of(within(grammar), as_json(text)), in_json(grammar)
    for text in others:
        assert not is_of(grammar, text)
        assert not is_of(within(grammar), as_json(text))


@given(st.sampled_from([grammar for grammar, _, _ in GRAMMARS]), st.text('ab" \\\n\t/()+-1xsy', max_size=12))
def test_no_string_is_let_through_whose_text_is_not_of_the_grammar(grammar, text):
    assert is_of(grammar, text) or not is_of(within(grammar), as_json(text))


@pytest.mark.parametrize(
    "grammar",
    [
        "start: <|tool|>",
        "start: /a(?i)b/",
        'start: "\\""i',
        r"start: /\p{L}/",
        "start: /[[:alpha:]]/",
        'start: %json {"type": "object"}',
        "%import other.THING\nstart: THING",
        r'start: "\q"',
        "start: A\nA: /[z-a]/",
        "start: /" + "a" * (1 << 14) + "/",
    ],
)
def test_what_cannot_be_told_of_a_json_string_is_refused(grammar):
    with pytest.raises(NotEscapable):
        in_json(grammar)


def called(family: str, text: str) -> str:
    """A call with this text, as the family writes it."""
    whole = written(family, several=False)
    if family == "tagged":
        return whole.replace("=city>\nArden\n", f"=input>\n{text}\n")
    if family == "glm":
        return whole.replace("<arg_key>city", "<arg_key>input").replace("Arden", text)
    return whole.replace('{"city": "Arden"}', '{"input": ' + as_json(text) + "}")


@pytest.mark.parametrize(("family", "are_tokens"), FORMS)
def test_a_custom_tool_is_called_with_a_text_of_its_grammar_in_every_family(family, are_tokens):
    tongue, vocabulary = made(family, are_tokens=are_tokens)
    free = Callable("get_time", PARAMETERS, False)
    for grammar, right, wrong in (
        (wire.Grammar("lark", SUM), "4 + 4", "4+4"),
        (wire.Grammar("regex", '^(say "[a-z]+"|no)$'), 'say "hi"', "say hi"),
    ):
        tool = Callable("get_weather", PARAMETERS, False, grammar)
        has_to = tongue.grammar(Held([tool, free], True, True), None, False)
        may = tongue.grammar(Held([tool, free], False, True), None, False)
        for held in (has_to, may):
            assert allows(held, vocabulary, called(family, right))
            assert not allows(held, vocabulary, called(family, wrong))
        assert not allows(has_to, vocabulary, "Hello")
        assert allows(may, vocabulary, "Hello")
        (call,) = said(tongue, vocabulary, called(family, right)).calls
        assert json.loads(call.arguments) == {"input": right}


def test_a_reader_tells_texts_of_custom_tools_and_arguments_of_others():
    tongue, _ = made("hermes", are_tokens=False)
    wanted = Wanted(frozenset({"get_weather", "get_time"}), True, custom=frozenset({"get_weather"}))
    parsers = tongue.parsers(wanted, False)
    assert parsers is not None
    reader = parsers()
    reader.feed(called("hermes", 'a "b"\n') + "\n" + called("hermes", "x").replace("weather", "time"))
    reader.finish()
    first, text, second, arguments = reader.take()
    assert (first.name, first.is_custom, text.text) == ("get_weather", True, 'a "b"\n')  # type: ignore[union-attr]
    assert (second.name, second.is_custom) == ("get_time", False)  # type: ignore[union-attr]
    assert json.loads(arguments.text) == {"input": "x"}  # type: ignore[union-attr]
    assert reader.num_calls == 2


@given(st.text(), st.booleans(), st.data())
def test_a_text_is_the_same_however_its_string_comes(text, is_ascii, data):
    written = f'{{ "input" :{json.dumps(text, ensure_ascii=is_ascii)}}}'
    cuts = sorted(data.draw(st.sets(st.integers(0, len(written)), max_size=8)))
    reader = Input()
    pieces = [written[start:end] for start, end in zip([0, *cuts], [*cuts, len(written)], strict=True)]
    assert "".join(map(reader.feed, pieces)) == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("{}", ""),
        (" { } ", ""),
        ('{"inp', ""),
        ('{"input": "cut \\u00', "cut "),
        ('{"input": "a", "more": 1}', "a"),
        (r'{"input": "\d\ud800x\udc00"}', "\\d\ufffdx\ufffd"),
        (r'{"input": "\ud800"}', "\ufffd"),
        (r'{"input": "\uzz"}', "\\uzz"),
        ('{"code": "x"}', '{"code": "x"}'),
        ('{"input": 5}', '{"input": 5}'),
        ('{"input": ["a"]}', '{"input": ["a"]}'),
        (" " * 2000 + "x", " " * 2000 + "x"),
    ],
)
def test_what_is_not_written_so_is_told_as_it_stands(arguments, text):
    assert Input().feed(arguments) == text
    reader = Input()
    assert "".join(map(reader.feed, arguments)) == text


def test_a_model_is_told_of_a_grammar():
    assert Custom("f").parameters is PARAMETERS
    told = Custom("f", format=InGrammar(Definition("lark", SUM))).parameters["properties"]["input"]
    assert SUM in told["description"]
