"""How far an answer is from its end at most, and the way there where an expression has to be matched."""

import json
import random
import re

import jsonschema
import pytest

from policies import wire
from policies.expressions import FORMATS, Expression, NotRead, read
from policies.schemas import bound, bound_of, patterns_of
from policies.terms import Sampling
from tests.worker.guided import EOS, Guided, guided_model
from tests.worker.schemas import a_schema
from worker.grammar import in_time
from worker.grammar.closing import Ends, find_end
from worker.grammar.scan import Scan

EXPRESSIONS = (
    "^foo.*bar$", "foo.*bar", r"^\d{3}-\d{4}$", "^(yes|no|perhaps)$", "^[A-F0-9]+$", "^x", "[0-9]$", "^(a*b?){2,4}$",
    r"^[a-z]+@[a-z]+\.(com|org)$", "^((x{2}){3}|y)+z$", "^(ab|cd){2,3}e?$", "^a{3,}b$", "^[^a-z]{2}$", "(a|b)*c",
    "^a*b+c?$", r"^[\w.-]+$", "^.{0,3}q$", "^\\u6771+$", "^(é|ü){1,2}$", r"^\S+\s\W$", "((a*)*b)*c", r"\$$",
)  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return guided_model(tmp_path_factory.mktemp("guided"))


@pytest.mark.parametrize("source", [*EXPRESSIONS, *FORMATS.values()])
def test_every_beginning_of_a_match_has_an_end_no_farther_than_is_said(source):
    expression, chance = Expression(source), random.Random(1)
    for _ in range(100):
        text = ""
        for _ in range(chance.randrange(12)):
            char = chance.choice('abcdefoxyz019-@.comrg Aéü東q$"')
            text += char if expression.ending(text + char) is not None else ""
        end = expression.ending(text)
        assert end is not None
        assert re.search(source, text + end, re.ASCII), (text, end)
        assert len(json.dumps(end, ensure_ascii=False).encode()) - 2 <= expression.farthest


@pytest.mark.parametrize(
    "source",
    [
        "(?=a)b",
        "a(b",
        "a)",
        "^a|b$",
        "a{2}{3}",
        r"\bx",
        "[[:alpha:]]",
        "(?i)a",
        "a{1000}{1000}",
        "x{9999}",
        "[a",
        "a**",
    ],
)
def test_an_expression_that_is_written_otherwise_is_left_alone(source):
    with pytest.raises(NotRead):
        Expression(source)
    assert read([source, "a"])[0].shortest == 1


def test_an_end_is_never_farther_than_the_schema_says(path):
    bench, chance = Guided(path), random.Random(5)
    ends = Ends(bench.vocabulary, bench.vocabulary.vocab_size)
    num_found = 0
    for seed in range(60):
        schema = a_schema(random.Random(seed))
        known = bound_of(schema)
        if known is None:
            continue
        bench.submit(f"s{seed}", "json_schema", json.dumps(schema), max_tokens=1)
        while bench.boarding.has_waiting:
            bench.boarding.turn()
        submit = wire.Submit("r", [1], Sampling(4000), grammar=wire.Grammar("json_schema", json.dumps(schema), True))
        guides = bench.grammars.find(submit)
        assert guides is not None
        matcher, scan, expressions = guides[0].matcher, Scan(), read(patterns_of(schema))
        for _ in range(30):
            end = find_end(matcher, ends, 500, scan=scan, expressions=expressions)
            if end is not None:
                num_found += 1
                assert len(end) <= known.of(scan.num_levels), (schema, end)
            allowed = [i for i in range(2, bench.vocabulary.vocab_size) if matcher.validate_tokens([i])]
            if not allowed:
                break
            token_id = chance.choice(allowed)
            matcher.consume_token(token_id)
            scan.feed(bench.vocabulary.decode_bytes([token_id]))
    bench.close()
    assert num_found > 500


def test_what_is_not_known_of_a_schema_has_no_bound():
    for schema in (
        {"type": "string", "pattern": "(?=a)"},
        {"allOf": [{"type": "string"}, {"minLength": 3}]},
        {"type": "array", "contains": {"type": "null"}},
        {"$ref": "elsewhere"},
        {"$ref": "#/none"},
        {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    ):
        assert bound_of(schema) is None
    assert bound(wire.Grammar("choice", '["a"]')) is None
    assert bound(wire.Grammar("lark", 'start: "<" a\na: %json {"enum": [7]}\n')).total > 5
    assert bound(wire.Grammar("lark", "start: A /b{2}/\nA: /((?s:.){3,9}){1000,}/\n")).total > 3000
    nested = bound_of({"type": "array", "items": {"$ref": "#"}})
    assert nested.total is None
    assert nested.of(3) > nested.of(0)


def test_strings_that_must_match_end_in_time_wherever_the_answer_is_cut(path):
    schema = {
        "type": "object",
        "properties": {
            "a": {"pattern": "foo.*bar", "type": "string"},
            "b": {"type": "string", "pattern": "^x.*yz?[0-9]{3}$"},
        },
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    guided = Guided(path, max_sequences=16)
    for seed in range(24):
        guided.submit(f"s{seed}", "json_schema", json.dumps(schema), max_tokens=36 + 9 * seed, seed=seed)
    guided.run()
    guided.close()
    assert not guided.failures
    assert {answer.reason for answer in guided.answers.values()} == {"length"}
    for answer in guided.answers.values():
        jsonschema.validate(json.loads(answer.text), schema)


@pytest.mark.parametrize("kind", ["json_schema", "lark"])
def test_texts_of_any_format_end_in_time_in_an_answer_and_in_a_call(path, kind):
    guided = Guided(path, max_sequences=16)
    for name in FORMATS:
        text = {"type": "string", "format": name}
        schema = {"type": "object", "properties": {"a": text, "b": text}, "required": ["a", "b"]}
        schema["additionalProperties"] = False
        source = json.dumps(schema)
        if kind == "lark":
            source = f'start: "call" call "."\ncall: %json {source}\n'
        for seed in range(4):
            guided.submit(f"{name} {seed}", kind, source, max_tokens=120 + 40 * seed, seed=seed, is_composed=True)
    guided.run()
    guided.close()
    assert not guided.failures
    assert {answer.reason for answer in guided.answers.values()} == {"stop", "length"}
    for answer in guided.answers.values():
        found = json.loads(answer.text.removeprefix("call").removesuffix("."))
        assert found.keys() == {"a", "b"}


def test_the_known_end_is_come_to_though_no_mask_has_its_next_token(path):
    schema = a_schema(random.Random(262))
    guided = Guided(path, sampler_is_compiled=False)  # masks are laid over one another, as on a device
    guided.submit("s262", "json_schema", json.dumps(schema), max_tokens=288, seed=262)
    guided.run()
    guided.close()
    assert not guided.failures
    jsonschema.validate(json.loads(guided.answers["s262", 0].text), schema)


SHORTEST = {
    '{"name":"","tags":[]}': {
        "type": "object",
        "properties": {"name": {"type": "string"}, "tags": {"type": "array", "items": {"type": "string"}}},
        "required": ["name", "tags"],
        "additionalProperties": False,
    },
    '{"a":{"b":null,"c":true}}': {
        "type": "object",
        "properties": {
            "a": {
                "type": "object",
                "properties": {"b": {"type": "null"}, "c": {"const": True}},
                "required": ["b", "c"],
                "additionalProperties": False,
            }
        },
        "required": ["a"],
        "additionalProperties": False,
    },
    '["xx","xx","xx"]': {"type": "array", "items": {"enum": ["xx", "xx or more"]}, "minItems": 3},
}
"""By the shortest text that they allow."""


def test_an_answer_is_whole_wherever_the_shortest_one_fits(path):
    guided = Guided(path, max_sequences=16)
    fewest = {text: len(_fewest_tokens(guided.vocabulary, text.encode())) for text in SHORTEST}
    for text, schema in SHORTEST.items():
        for num_more in range(8):
            asked = {"max_tokens": fewest[text] + num_more, "seed": num_more}
            guided.submit(f"{text} {num_more}", "json_schema", json.dumps(schema), **asked)
    guided.run()
    guided.close()
    assert not guided.failures
    assert len(guided.answers) == 8 * len(SHORTEST)
    for (name, _), answer in guided.answers.items():
        jsonschema.validate(json.loads(answer.text), SHORTEST[name.rpartition(" ")[0]])


def test_a_short_end_is_found_behind_any_of_a_few_choices(path):
    words = [f"{letter} long way to say what one of many values means" for letter in "abcdghijkmopq"]
    schemas = {"text": {"enum": [*words, "zz"]}, "number": {"enum": [int(str(i) * 12) for i in range(1, 9)] + [9]}}
    guided = Guided(path)
    for name, schema in schemas.items():
        guided.submit(name, "json_schema", json.dumps(schema), max_tokens=8)
    guided.run()
    guided.close()
    for name, schema in schemas.items():
        jsonschema.validate(json.loads(guided.answers[name, 0].text), schema)


@pytest.mark.parametrize("num_drafted", [1, 5, 12])
def test_guesses_do_not_move_where_an_end_is_looked_for(path, monkeypatch, num_drafted):
    schema = '{"type": "array", "items": {"enum": ["a", "bb"]}, "maxItems": 9}'
    guided, searched = Guided(path), []
    guided.submit("r", "json_schema", schema, max_tokens=400)
    while not guided.engine.has_work:
        guided.step()
    monkeypatch.setattr(in_time, "find_end", lambda *_: searched.append(num_left))
    places = []
    for draws_near in (False, True):
        guide = guided.grammars.find(
            wire.Submit("s", [1], Sampling(400), grammar=wire.Grammar("json_schema", schema, True))
        )[0]
        for num_left in range(400, 0, -1):
            if draws_near:
                guide.is_careful(num_left, num_drafted)
            guide.is_careful(num_left)
        places.append(searched.copy())
        searched.clear()
    guided.close()
    assert places[0] == places[1]
    assert len(places[0]) > 3


def _fewest_tokens(vocabulary, text):
    """Over all ways to write it."""
    by_bytes = {vocabulary.decode_bytes([i]): i for i in range(vocabulary.vocab_size)}
    best = [[]]
    for end in range(1, len(text) + 1):
        known = ((best[at], by_bytes.get(text[at:end])) for at in range(end))
        best.append(min(([*found, last] for found, last in known if last is not None), key=len))
    return best[-1]


def test_an_answer_that_is_not_what_it_would_have_been_says_that_its_limit_did_it(path):
    """Also where it then ends by a token of the model's own, and not by its grammar."""
    words = 'start: (word | call)*\nword: /[a-f]/\ncall: "(" /[a-f]/ ~ 12 ")"\n'
    guided = Guided(path, max_sequences=16)
    limits = (400, *range(2, 40, 3))
    for seed in range(12):
        for max_tokens in limits:
            asked = {"max_tokens": max_tokens, "seed": seed, "is_composed": True}
            guided.submit(f"s{seed:02}-{max_tokens:03}", "lark", words, **asked)
        guided.run()
    guided.close()
    assert not guided.failures
    num_by_end_token = {"stop": 0, "length": 0}
    for seed in range(12):
        free = guided.answers[f"s{seed:02}-400", 0]
        assert free.reason == "stop"
        for max_tokens in limits[1:]:
            answer = guided.answers[f"s{seed:02}-{max_tokens:03}", 0]
            assert answer.text.count("(") == answer.text.count(")")
            assert (answer.reason == "stop") == (answer.token_ids == free.token_ids)
            assert answer.has_end_token == (answer.token_ids[-1] == EOS)
            num_by_end_token[answer.reason] += answer.has_end_token
    assert min(num_by_end_token.values()) > 3, num_by_end_token


@pytest.mark.parametrize("sampler_is_compiled", [True, False])
def test_an_answer_that_has_room_for_its_end_alone_ends_before_min_tokens(path, sampler_is_compiled):
    expression = "(yes|no|perhaps)( indeed){0,3}"
    guided = Guided(path, sampler_is_compiled, max_sequences=16)
    for max_tokens in (5, 6, 9, 12):
        for seed in range(8):
            asked = {"max_tokens": max_tokens, "min_tokens": max_tokens, "seed": seed, "temperature": seed % 2}
            guided.submit(f"{max_tokens}-{seed}", "regex", expression, **asked)
    guided.run()
    guided.close()
    assert not guided.failures
    assert len(guided.answers) == 32
    for answer in guided.answers.values():
        assert re.fullmatch(expression, answer.text)
    most = {key: int(key[0].partition("-")[0]) for key in guided.answers}
    early = {answer.reason for key, answer in guided.answers.items() if len(answer.token_ids) < most[key]}
    assert early == {"length"}
