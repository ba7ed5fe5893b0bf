"""What an answer must be, as clients say it, as it goes to a worker, and what is refused before it does."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import openai
import pytest

from gateway.api.held import grammar_of
from gateway.grammars import Grammars, Remembered
from gateway.house import Gateway
from gateway.openai import AskedGrammar, Malformed, asked_grammar, parse_chat
from gateway.parsers.grammars import Callable, Held
from gateway.parsers.tongue import tongue_of
from policies import holding, wire
from tests.builders import PATIENCE_S
from tests.gateway.conftest import Front

OBJECT = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
COMPACT = json.dumps(OBJECT, separators=(",", ":"))


def format_of(schema: object, **extra: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema} | extra}


@pytest.fixture
def grammars():
    made = Grammars(holding.Grammars(compile_s=PATIENCE_S))
    yield made
    made.close()


async def checked(grammars: Grammars, **fields: object) -> wire.Grammar | None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return await grammars.checked(asked_grammar(parse_chat(msgspec.json.encode(body))))


GUIDANCE = {
    "guided_decoding_backend": "guidance",
    "guided_grammar": 'start: "a"',
    "structured_outputs": {"grammar": 'start: "a"'},
}
"""As the guidance package asks vLLM, of whichever version."""


@pytest.mark.parametrize(
    ("fields", "kind", "source", "is_strict"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", "", True),
        ({"response_format": {"type": "json_object", "schema": {}}}, "json_object", "", True),
        ({"response_format": {"type": "json_object", "schema": OBJECT}}, "json_schema", COMPACT, False),
        ({"response_format": format_of(OBJECT)}, "json_schema", COMPACT, False),
        ({"response_format": format_of(OBJECT, strict=True)}, "json_schema", COMPACT, True),
        ({"response_format": {"type": "regex", "regex": "a+"}}, "regex", "a+", False),
        ({"response_format": {"type": "grammar", "grammar": 'start: "a"'}}, "lark", 'start: "a"', False),
        ({"guided_json": OBJECT}, "json_schema", COMPACT, False),
        ({"guided_json": json.dumps(OBJECT)}, "json_schema", json.dumps(OBJECT), False),
        ({"guided_regex": "a|b"}, "regex", "a|b", False),
        ({"guided_choice": ["yes", "naïve"]}, "choice", '["yes","naïve"]', False),
        ({"guided_grammar": 'start: "a" | "b"'}, "lark", 'start: "a" | "b"', False),
        ({"structured_outputs": {"regex": "a"}}, "regex", "a", False),
        ({"structured_outputs": {"choice": ["a"]}}, "choice", '["a"]', False),
        ({"structured_outputs": {"json": OBJECT}}, "json_schema", COMPACT, False),
        ({"structured_outputs": {"json_object": True}}, "json_object", "", False),
        ({"regex": "a{2}"}, "regex", "a{2}", False),
        (GUIDANCE, "lark", 'start: "a"', False),
    ],
)
async def test_each_spelling_says_the_same_to_a_worker(grammars, fields, kind, source, is_strict):
    assert await checked(grammars, **fields) == wire.Grammar(kind, source, is_strict)


async def test_gbnf_becomes_lark_and_names_of_special_tokens_are_left_to_the_worker(grammars):
    for field in ("ebnf", "guided_grammar"):
        grammar = await checked(grammars, **{field: 'root ::= "a" | digit+\ndigit ::= [0-9]'})
        assert grammar is not None
        assert grammar.kind == "lark"
        assert "::=" not in grammar.source
    assert await checked(grammars, ebnf='start: <tool_call> "x"') is not None


async def test_text_and_nothing_at_all_ask_for_no_grammar(grammars):
    assert await checked(grammars, response_format={"type": "text"}) is None
    assert await checked(grammars) is None


IMPOSSIBLE = {"type": "integer", "minimum": 5, "maximum": 3}
NESTED: object = {"type": "string"}
for _ in range(120):
    NESTED = {"type": "array", "items": NESTED}


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "object", "properties": {"x": {"type": "string", "pattern": "(?=a)b"}}}, ".properties.x.pattern"),
        ({"properties": {"a": {"anyOf": [{"type": "null"}, {"type": "strin"}]}}}, ".properties.a.anyOf[1].type"),
        ({"$defs": {"d": {"format": "such"}}, "items": {"$ref": "#/$defs/d"}}, ".$defs.d"),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, ".properties.a.$ref"),
        ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, ".properties.a.uniqueItems"),
        ({"properties": {"a/b~": {"not": {"type": "null"}}}}, ".properties.a/b~.not"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "minLength": 3}]}, ".oneOf"),
        ({"type": "object", "properties": {"n": IMPOSSIBLE}, "required": ["n"]}, ".properties.n"),
        (NESTED, ""),
        ({"enum": ["v" * 1000] * 1100}, ""),
    ],
)  # fmt: skip
async def test_the_part_of_a_strict_schema_that_cannot_be_kept_to_is_named(grammars, schema, path):
    with pytest.raises(Malformed) as refused:
        await checked(grammars, response_format=format_of(schema, strict=True))
    assert refused.value.param is not None
    where = refused.value.param.removeprefix("response_format.json_schema.schema")
    assert where == path or (path and where.startswith(path)), refused.value


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
        ({"response_format": format_of(OBJECT, name="a b")}, "response_format.json_schema.name"),
        ({"response_format": format_of([])}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "regex"}}, "response_format.regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [1]}, "guided_choice[0]"),
        ({"guided_choice": [""]}, "guided_choice[0]"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[]"}, "guided_json"),
        ({"guided_regex": "a(b"}, "guided_regex"),
        ({"guided_regex": "a" * (1 << 20) + "b"}, "guided_regex"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar"),
        ({"guided_grammar": "root ::= ("}, "guided_grammar"),
        ({"ebnf": ""}, "ebnf"),
        ({"regex": "a", "guided_choice": ["a"]}, "regex"),
        ({**GUIDANCE, "guided_grammar": 'start: "b"'}, "guided_grammar"),
        ({"guided_json": {}, "structured_outputs": {"regex": "a"}}, "guided_json"),
    ],
)  # fmt: skip
async def test_what_cannot_be_kept_to_is_refused_by_its_name(grammars, fields, param):
    with pytest.raises(Malformed) as refused:
        await checked(grammars, **fields)
    assert refused.value.param == param


async def test_a_grammar_is_read_once(grammars):
    good, bad = (AskedGrammar(wire.Grammar("regex", source), "regex") for source in ("a+", "a("))
    for turn in range(2):
        assert await grammars.checked(good) == good.grammar
        with pytest.raises(Malformed):
            await grammars.checked(bad)
        if not turn:
            grammars.close()  # nothing can be read from now on


async def test_a_grammar_goes_to_the_worker_with_its_request(front: Front):
    call = front.chat(response_format=format_of(OBJECT, strict=True))
    submit = await front.peer.submitted()
    assert submit.grammar == wire.Grammar("json_schema", COMPACT, True)
    front.peer.say(submit, front.ids('{"x":"y"}'))
    front.peer.say(submit, [], "stop")
    answer = await call
    assert answer.choices[0].message.content == '{"x":"y"}'
    assert answer.choices[0].finish_reason == "stop"


async def test_a_grammar_that_cannot_be_read_never_reaches_a_worker(front: Front):
    with pytest.raises(openai.BadRequestError) as refused:
        await front.chat(response_format=format_of({"properties": {"x": {"pattern": "a("}}}))
    assert refused.value.param == "response_format.json_schema.schema.properties.x.pattern"
    assert front.rows() == []


def test_what_was_found_is_remembered_of_so_many_in_so_many_bytes_and_for_the_model_s_own_tongue():
    known, tongue = Remembered[str](2, 10), object()
    for name in "ab":
        known.put(name.encode(), tongue, name, 4)
    assert known.find(b"a", tongue) == "a"
    assert known.find(b"a", object()) is None, "the model writes otherwise since"
    known.put(b"c", tongue, "c", 1)
    assert [known.find(name, tongue) for name in (b"a", b"b", b"c")] == ["a", None, "c"]
    known.put(b"c", tongue, "cc", 6)
    assert [known.find(name, tongue) for name in (b"a", b"c")] == ["a", "cc"], "ten bytes, the older c not counted"
    known.put(b"c", tongue, "ccc", 7)
    assert [known.find(name, tongue) for name in (b"a", b"c")] == [None, "ccc"]
    known.put(b"d", tongue, "d", 11)
    assert [known.find(name, tongue) for name in (b"c", b"d")] == [None, None]


def test_the_grammar_of_calls_that_is_remembered_is_the_one_that_would_be_made():
    chance = random.Random(11)
    tongues = [tongue_of([word], {}) for word in ("<tool_call>", "[TOOL_CALLS]", "<function=", "")]
    grammars = Grammars(holding.Grammars(max_known=40, max_known_bytes=20_000))
    gw = cast(Gateway, SimpleNamespace(grammars=grammars))
    schemas: list[dict[str, Any]] = [
        {"type": "object", "properties": {key: {"type": kind} for key in names}}
        for names in ("ab", "ba", "c")
        for kind in ("string", "integer")
    ]
    for _ in range(2000):
        names = chance.sample(("one", "two"), chance.choice((1, 2)))
        functions = [Callable(name, chance.choice(schemas), chance.random() < 0.5) for name in names]
        held = Held(functions, chance.random() < 0.5, chance.random() < 0.5)
        content = chance.choice((None, wire.Grammar("choice", '["x"]', False)))
        is_thinking, tongue = chance.random() < 0.5, chance.choice(tongues)
        found = grammar_of(gw, "grey", held, content, is_thinking, tongue)
        assert found == tongue.grammar(held, content, is_thinking)
        assert found is grammar_of(gw, "grey", held, content, is_thinking, tongue), "it is made once"
    grammars.close()
