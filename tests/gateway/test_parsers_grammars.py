"""What calls are held to: grammars that llguidance reads, and that allow what the family's parser reads as calls."""

from __future__ import annotations

import codecs
import json

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from gateway.parsers import Said, gathered
from gateway.parsers.grammars import Callable, Held, is_mark
from gateway.parsers.reader import Wanted
from gateway.parsers.tongue import CALLS, THINKING, Tongue, tongue_of
from policies import wire

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Arden", "Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}
STRICT = Callable("get_weather", CITY, True)
FREE = Callable("get_time", {"type": "object", "properties": {}}, False)
FAMILIES = sorted(set(CALLS) - {"harmony"})  # which has tests of its own


class Bytes:
    """A vocabulary of single bytes, and the words of a family as tokens behind them."""

    bos_token_id, eos_token_id = None, 256

    def __init__(self, words: list[str]) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)] + [b"\xff<end>"]
        self.tokens += [b"\xff" + word.encode() for word in words]
        self.special_token_ids = range(256, len(self.tokens))
        self.ids = {word: 257 + i for i, word in enumerate(words)}

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)

    def encode(self, text: str) -> list[int]:
        for word, token_id in self.ids.items():
            text = text.replace(word, chr(0xE000 + token_id))
        return [
            token_id
            for char in text
            for token_id in ([ord(char) - 0xE000] if 0xE000 <= ord(char) < 0xF000 else char.encode())
        ]


def made(family: str, thinking: str = "none", are_tokens: bool = True) -> tuple[Tongue, Bytes]:
    words = [*CALLS[family]().marks, *(THINKING[thinking] if thinking != "none" else ())]
    vocabulary = Bytes(words if are_tokens else [])
    added = {word: (token_id, True) for word, token_id in vocabulary.ids.items()}
    return tongue_of([], added, family, thinking), vocabulary


def allows(grammar: wire.Grammar | None, vocabulary: Bytes, text: str) -> bool:
    """Whether the text is a whole answer under the grammar."""
    assert grammar is not None
    matcher = LLMatcher(LLTokenizer(TokenizerWrapper(vocabulary)), grammar.source)
    assert not matcher.is_error(), (matcher.get_error(), grammar.source)
    token_ids = [*vocabulary.encode(text), 256]
    return matcher.validate_tokens(token_ids) == len(token_ids)


def said(tongue: Tongue, vocabulary: Bytes, text: str, is_thinking: bool = False, name: str = "get_weather") -> Said:
    """As the parser reads it."""
    parsers = tongue.parsers(Wanted(frozenset({name, "get_time"}), True), is_thinking)
    assert parsers is not None
    reader, decoder = parsers(), codecs.getincrementaldecoder("utf-8")()
    for token_id in vocabulary.encode(text):
        reader.feed(reader.marks.get(token_id) or decoder.decode(bytes([token_id])))
    reader.finish()
    return gathered(reader.take())


def written(family: str, city: str = "Arden", several: bool = True, name: str = "get_weather") -> str:
    """Calls as the grammars have them."""
    arguments, time = f'{{"city": "{city}"}}', "{}"
    first, second = f'{{"name": "{name}", "arguments": {arguments}}}', f'{{"name": "get_time", "arguments": {time}}}'
    match family:
        case "hermes":
            each = [f"<tool_call>\n{call}\n</tool_call>" for call in (first, second)]
            return "\n".join(each[: 1 + several])
        case "llama":
            return "; ".join([first, second][: 1 + several]).replace('"arguments":', '"parameters":')
        case "tagged":
            each = [
                f"<tool_call>\n<function={called}>\n{told}</function>\n</tool_call>"
                for called, told in ((name, f"<parameter=city>\n{city}\n</parameter>\n"), ("get_time", ""))
            ]
            return "\n".join(each[: 1 + several])
        case "glm":
            told = f"<arg_key>city</arg_key>\n<arg_value>{city}</arg_value>\n"
            return "\n".join(
                [f"<tool_call>{name}\n{told}</tool_call>", "<tool_call>get_time\n</tool_call>"][: 1 + several]
            )
        case "json":
            return f"[{first},{second}]" if several else first
        case "mistral":
            each = [f"[TOOL_CALLS]{name}[ARGS]{arguments}", f"[TOOL_CALLS]get_time[ARGS]{time}"]
            return "".join(each[: 1 + several])
        case "deepseek":
            each = [
                f"<｜tool▁call▁begin｜>{called}<｜tool▁sep｜>{told}<｜tool▁call▁end｜>"
                for called, told in ((name, arguments), ("get_time", time))
            ]
            return f"<｜tool▁calls▁begin｜>{''.join(each[: 1 + several])}<｜tool▁calls▁end｜>"
        case _:
            each = [
                f"<|tool_call_begin|>functions.{called}:{i}<|tool_call_argument_begin|>{told}<|tool_call_end|>"
                for i, (called, told) in enumerate(((name, arguments), ("get_time", time)))
            ]
            return f"<|tool_calls_section_begin|>{''.join(each[: 1 + several])}<|tool_calls_section_end|>"


FORMS = [(family, are_tokens) for family in FAMILIES for are_tokens in (True, False)]
FORMS.remove(("mistral", False))  # without its tokens it writes an array, of which there is a test below


@pytest.mark.parametrize(("family", "are_tokens"), FORMS)
def test_a_model_that_has_to_call_calls(family, are_tokens):
    tongue, vocabulary = made(family, are_tokens=are_tokens)
    grammar = tongue.grammar(Held([STRICT, FREE], True, True), None, False)
    text = written(family)
    assert allows(grammar, vocabulary, text)
    assert [(call.name, json.loads(call.arguments)) for call in said(tongue, vocabulary, text).calls] == [
        ("get_weather", {"city": "Arden"}),
        ("get_time", {}),
    ]
    assert allows(grammar, vocabulary, written(family, several=False))
    for other in ("Hello", "", written(family, city="Rome"), written(family, name="other"), "Hello " + text):
        assert not allows(grammar, vocabulary, other), other
    one = tongue.grammar(Held([STRICT], True, False), None, False)
    assert allows(one, vocabulary, written(family, several=False))
    assert not allows(one, vocabulary, text)


@pytest.mark.parametrize(("family", "are_tokens"), FORMS)
@pytest.mark.parametrize("name", ["parse_arguments", "parameters", "name", "function", "json"])
def test_a_function_may_be_called_like_a_word_of_a_call(family, are_tokens, name):
    tongue, vocabulary = made(family, are_tokens=are_tokens)
    grammar = tongue.grammar(Held([Callable(name, CITY, True)], True, False), None, False)
    text = written(family, several=False, name=name)
    assert allows(grammar, vocabulary, text)
    (call,) = said(tongue, vocabulary, text, name=name).calls
    assert (call.name, json.loads(call.arguments)) == (name, {"city": "Arden"})


def test_older_mistrals_have_to_write_an_array():
    tongue, vocabulary = made("mistral", are_tokens=False)
    grammar = tongue.grammar(Held([STRICT, FREE], True, True), None, False)
    text = '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Arden"}}]'
    assert allows(grammar, vocabulary, text)
    assert len(said(tongue, vocabulary, text).calls) == 1


@pytest.mark.parametrize(("family", "are_tokens"), FORMS)
def test_strict_functions_are_called_as_their_schemas_say_or_not_at_all(family, are_tokens):
    tongue, vocabulary = made(family, are_tokens=are_tokens)
    grammar = tongue.grammar(Held([STRICT, FREE], False, True), None, False)
    assert allows(grammar, vocabulary, "Hello there.")
    assert allows(grammar, vocabulary, "")
    assert allows(grammar, vocabulary, written(family))
    assert not allows(grammar, vocabulary, written(family, city="Rome"))
    assert tongue.grammar(Held([FREE], False, True), None, False) is None
    if family not in ("json", "llama"):
        assert allows(grammar, vocabulary, "I look.\n" + written(family))


def test_where_calls_are_json_a_text_may_begin_with_what_is_none():
    others = ["`x` is", "``", "```python\nprint()\n```", "```java", "```js\n", "```jsox", "```j", " \n<b>"]
    calls = ['{"a": 1}', "```json\n{}\n```", "```\n[]\n```", "``` json", "\n {"]
    for family, allowed in (
        ("json", others[:1] + others[2:6] + others[7:]),
        ("llama", [*others, "[1]", "```json\n{}"]),
    ):
        tongue, vocabulary = made(family)
        grammar = tongue.grammar(Held([STRICT], False, True), None, False)
        for text in allowed:
            assert allows(grammar, vocabulary, text), (family, text)
            assert said(tongue, vocabulary, text).content == text
        for text in calls if family == "json" else ('{"a": 1}', " {"):
            assert not allows(grammar, vocabulary, text), (family, text)


@pytest.mark.parametrize("are_tokens", [True, False])
@pytest.mark.parametrize("is_thinking", [True, False])
def test_reasoning_comes_before_whatever_is_asked_for(is_thinking, are_tokens):
    tongue, vocabulary = made("hermes", "think", are_tokens)
    opening = "" if is_thinking else "<think>"
    thought = opening + "\nHm. {}\n</think>\n\n"
    schema = wire.Grammar("json_schema", json.dumps(CITY), True)
    for grammar, text in (
        (tongue.grammar(Held([STRICT], True, True), None, is_thinking), written("hermes", several=False)),
        (tongue.grammar(None, schema, is_thinking), '{"city": "Arden"}'),
        (tongue.grammar(None, wire.Grammar("regex", "^a/b+$"), is_thinking), "a/bb"),
        (tongue.grammar(None, wire.Grammar("choice", '["yes", "no"]'), is_thinking), "no"),
        (tongue.grammar(None, wire.Grammar("lark", 'start: a "c"\na: "b"'), is_thinking), "bc"),
        (tongue.grammar(None, wire.Grammar("json_object", ""), is_thinking), '{"x": [1]}'),
    ):
        assert allows(grammar, vocabulary, thought + text)
        assert not allows(grammar, vocabulary, thought + "Hello")
        assert allows(grammar, vocabulary, text) is (not is_thinking)
    assert tongue.grammar(None, None, is_thinking) is None


def test_arguments_in_tags_are_held_each_to_its_own_schema():
    tongue, vocabulary = made("tagged")
    given = {"a": {"type": "string"}, "n": {"type": "integer"}}
    function = Callable("get_time", {"type": "object", "properties": given, "required": ["n"]}, True)
    grammar = tongue.grammar(Held([function], True, True), None, False)

    def written(*given: tuple[str, str]) -> str:
        tags = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given)
        return f"<tool_call>\n<function=get_time>\n{tags}</function>\n</tool_call>"

    assert allows(grammar, vocabulary, written(("a", "some <text>\nof two lines"), ("n", "7")))
    assert allows(grammar, vocabulary, written(("n", "7")))
    for wrong in (written(("n", "x")), written(), written(("a", "b")), written(("n", "7"), ("b", "x"))):
        assert not allows(grammar, vocabulary, wrong)


PLACE = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}


@pytest.mark.parametrize("family", ["tagged", "glm"])
@pytest.mark.parametrize(
    ("given", "right", "wrong"),
    [
        ({"$ref": "#/$defs/place"}, '{"x": 1}', "there"),
        (
            {"type": "array", "items": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}]}},
            '[null, {"x": 1}]',
            "[2]",
        ),
        ({"type": "string", "const": "a b"}, "a b", "a"),
        ({"type": "string", "minLength": 2, "maxLength": 3}, "a\n", "four"),
        ({"type": "string", "pattern": "^(a|b/)+$"}, "b/a", "b/c"),
        ({"type": "string", "pattern": "b/?c"}, "a\nb/cd", "b/d"),
        ({"type": "string", "pattern": "^$"}, "", "a"),
        ({"type": "string", "pattern": "^a+$", "minLength": 2}, "aa", "a"),
    ],
)
def test_in_tags_texts_keep_to_their_words_and_references_lead_to_definitions(family, given, right, wrong):
    tongue, vocabulary = made(family)
    schema = {"type": "object", "properties": {"city": given}, "required": ["city"], "$defs": {"place": PLACE}}
    held = Held([Callable("get_weather", schema, True)], True, False)
    grammar = tongue.grammar(held, None, False)
    assert allows(grammar, vocabulary, written(family, right, several=False))
    assert not allows(grammar, vocabulary, written(family, wrong, several=False))


def test_in_tags_what_cannot_be_told_of_one_argument_holds_it_to_nothing():
    tongue, vocabulary = made("tagged")
    for given in ({"$ref": "#"}, {"type": "string", "pattern": "^a|b$"}):
        schema = {"type": "object", "properties": {"city": given}, "required": ["city"]}
        grammar = tongue.grammar(Held([Callable("get_weather", schema, True)], True, False), None, False)
        assert allows(grammar, vocabulary, written("tagged", several=False))


def test_content_that_is_held_to_a_schema_leaves_calls_allowed():
    tongue, vocabulary = made("hermes")
    schema = wire.Grammar("json_schema", json.dumps({"type": "object", "required": ["a"]}))
    grammar = tongue.grammar(Held([FREE], False, True), schema, False)
    assert allows(grammar, vocabulary, '{"a": 1}')
    assert allows(grammar, vocabulary, '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>')
    assert not allows(grammar, vocabulary, "Hello")
    assert tongue.grammar(None, schema, False) is schema


def test_what_counts_as_a_mark_is_what_llguidance_counts_as_one():
    assert is_mark("<tool_call>", False)
    assert is_mark("[TOOL_CALLS]", True)
    assert not is_mark("[TOOL_CALLS]", False)
