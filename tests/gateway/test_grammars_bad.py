"""Grammars that would take for ever, or all memory: each is refused by the path at fault, and nobody waits for it."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from functools import reduce

import pytest

from gateway.errors import ServiceUnavailable
from gateway.grammars import Grammars
from gateway.openai import AskedGrammar, Malformed
from gateway.schemas import Fault, choices_fault, fault_of, joined_fault, multiples_fault, width_fault
from policies import holding, wire
from tests.builders import PATIENCE_S

SCHEMA = "response_format.json_schema.schema"


def asked(schema: object, is_strict: bool = True) -> AskedGrammar:
    source = schema if isinstance(schema, str) else json.dumps(schema)
    return AskedGrammar(wire.Grammar("json_schema", source, is_strict), SCHEMA)


@pytest.fixture
def grammars():
    made = Grammars(holding.Grammars(compile_s=PATIENCE_S))
    yield made
    made.close()


LOOP = {"type": "object", "properties": {"n": {"$ref": "#/$defs/a"}}, "required": ["n"]}
CIRCLE = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}
FULL_OF_CHOICES = {
    "allOf": [
        {"anyOf": [{"type": "object", "properties": {f"k{i}_{j}": {"type": "string"}}} for j in range(4)]}
        for i in range(12)
    ]
}


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"enum": ["v" * 1000] * 10_000}, ""),
        ('{"items":' * 10_000 + "{}" + "}" * 10_000, ""),
        ({"$ref": "#"}, ".$ref"),
        ({"$defs": {"a": LOOP}, "$ref": "#/$defs/a"}, ".$defs.a.properties.n.$ref"),
        ({"$defs": CIRCLE, "allOf": [{"$ref": "#/$defs/a"}]}, ".$defs"),
        (FULL_OF_CHOICES, ""),
        ({"properties": {"a": {"frobnicate": 3}}}, ".properties.a.frobnicate"),
        ({"anyOf": [{"type": "null"}, {"type": "string", "nulable": True}]}, ".anyOf[1].nulable"),
        ({"properties": {"a": {"unevaluatedProperties": False}}}, ".properties.a.unevaluatedProperties"),
        ({"items": {"type": "string", "minLength": 1 << 40}}, ".items.minLength"),
        ({"type": "array", "minItems": 1 << 40}, ".minItems"),
        ({"properties": {"n": {"type": "number", "multipleOf": 1e-300}}}, ".properties.n.multipleOf"),
        ({"properties": {"n": {"type": "integer", "multipleOf": 100_000_007}}}, ".properties.n.multipleOf"),
        ({"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 1.01}]}, ".allOf"),
        ({"x-n": [{"type": "integer", "multipleOf": 100_000_007}], "$ref": "#/x-n/0"}, ".x-n[0].multipleOf"),
        ({"properties": {"a": {"enum": 5}}}, ""),
        ({"properties": {"a": {"required": [{}]}}}, ""),
        ({"properties": {"s": {"type": "string", "pattern": "(" * 3000 + "a" + ")" * 3000}}}, ".properties.s.pattern"),
    ],
)  # fmt: skip
async def test_a_schema_that_nobody_could_keep_to_is_refused_by_its_path(grammars, schema, path):
    with pytest.raises(Malformed) as refused:
        await grammars.checked(asked(schema))
    assert refused.value.param is not None
    assert refused.value.param.startswith(SCHEMA + path), refused.value
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize(
    "source",
    ["(a+)+$", "(.*a){25}", ".*a.{30}", "((a{1,100}){1,100}){1,100}", "(?:a?){5000}a{5000}", "(x*)*" * 1000],
)
async def test_an_expression_that_others_take_for_ever_with_is_read_like_any(grammars, source):
    assert await grammars.checked(AskedGrammar(wire.Grammar("regex", source), "guided_regex")) is not None


@pytest.mark.parametrize(
    "source",
    [f'start: {"(a " * 3000}{")" * 3000}\na: "x"', f"""root ::= {'("a" ' * 3000}{")" * 3000}""", "start: start start"],
)
async def test_rules_that_lead_nowhere_are_refused(grammars, source):
    with pytest.raises(Malformed) as refused:
        await grammars.checked(AskedGrammar(wire.Grammar("lark", source), "guided_grammar"))
    assert refused.value.param == "guided_grammar"


@pytest.mark.parametrize(
    "schema", [r'{"multiple\u004ff": 100000007}', '{"x-n": %s, "multipleOf": 100000007}' % ("9" * 5000)]
)
async def test_so_it_is_in_a_grammar_that_has_a_schema_in_it(grammars, schema):
    with pytest.raises(Malformed, match="multiples"):
        await grammars.checked(AskedGrammar(wire.Grammar("lark", f"start: %json {schema}"), "guided_grammar"))


@pytest.mark.parametrize(
    "multiples", [[0.01, 5, 60], [1_000_000, 60, 86_400], [0.25, 1024, 1000], [-7, 0, "a", 10**40]]
)
def test_what_numbers_usually_are_multiples_of_is_no_fault(multiples):
    assert multiples_fault({"anyOf": [{"type": "number", "multipleOf": each} for each in multiples]}) is None


async def test_words_for_people_and_recursion_with_an_end_are_no_faults(grammars):
    node = {"properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}}, "x-own": 1, "example": 2}
    schema = {"$defs": {"node": node}, "$ref": "#/$defs/node", "title": "t", "$comment": "c"}
    assert await grammars.checked(asked(schema)) is not None
    assert await grammars.checked(asked({"properties": {"a": {"frobnicate": 3}}}, is_strict=False)) is not None


def test_a_long_name_is_not_written_down_for_each_part_below_it():
    schema = {"properties": {"n" * 100_000: {"anyOf": [{}] * 1000 + [{"frobnicate": 1}]}}}
    tracemalloc.start()
    fault = fault_of(schema, True)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert fault is not None
    assert fault.path.endswith("n.anyOf[1000].frobnicate")
    assert most < 5e6


def pattern(number: int) -> dict[str, str]:
    return {"pattern": f"^(.*)a.{{{number}}}b(.*)$"}


def chain(num: int) -> dict[str, object]:
    parts = {f"p{i}": {**pattern(i), "$ref": f"#/$defs/p{i + 1}"} for i in range(num)}
    return {"$ref": "#/$defs/p0", "$defs": {**parts, f"p{num}": {"type": "string"}}}


MANY = [pattern(number) for number in range(40)]


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"properties": {"a": {"type": "string", "allOf": MANY}}}, ".properties.a"),
        ({"allOf": [{"properties": {"a": each}} for each in MANY]}, ".properties.a"),
        (reduce(lambda inner, each: {**each, "anyOf": [inner]}, MANY, {"type": "string"}), ""),
        (chain(40), ""),
        ({"properties": {f"k{i}": {"$ref": "#/$defs/n"} for i in range(9)}, "$defs": {"n": {"allOf": MANY}}}, ".prop"),
        ({"allOf": [{"items": each} for each in MANY]}, ".items"),
        ({"allOf": [{"prefixItems": [{}, each]} for each in MANY]}, ".prefixItems[1]"),
        ({"allOf": [{"properties": {"a": {}}}, *({"additionalProperties": each} for each in MANY)]}, ".additional"),
        ({"allOf": [{"anyOf": [MANY[0], {"pattern": f"{number}"}]} for number in range(40)]}, ""),
    ],
)
def test_patterns_that_a_text_must_match_together_are_few(schema, path):
    fault = joined_fault(schema)
    assert fault is not None
    assert fault_of(schema, False) is not None
    assert fault.path.startswith(path)


async def test_patterns_apart_from_each_other_may_be_many(grammars):
    apart = {"$ref": "#/$defs/c", "description": "one of them"}
    some = {"properties": {f"p{i}": each for i, each in enumerate(MANY)}, "$defs": {"c": MANY[0]}}
    one_of = [{"type": "object", "properties": {"t": {"type": "string", **each}}} for each in MANY]
    inherited = {"allOf": [some, {"properties": {"more": MANY[1]}}, {"required": ["p0"], "anyOf": one_of}], **some}
    several = {"allOf": [{"anyOf": [MANY[2 * at], MANY[2 * at + 1]]} for at in range(6)]}
    linked = {"$ref": "#/$defs/n", "$defs": {"n": {**some, "properties": {**some["properties"], "n": {"$ref": "#"}}}}}
    for schema in (
        some,
        {"type": "object", "properties": {"a": apart}, **some},
        {"anyOf": one_of, "title": "t"},
        {**some, "allOf": [{"required": ["p0"]}, {"type": "object"}]},
        inherited,
        several,
        linked,
    ):
        assert joined_fault(schema) is None
    wide = {"allOf": [{"properties": {f"p{i}": {} for i in range(600)}} for _ in range(600)], "$defs": {"c": one_of}}
    assert "too many parts" in str(joined_fault(wide))
    assert await grammars.checked(asked({"type": "string", "allOf": [{"pattern": "^a"}, {"pattern": "b$"}]}))


EACH = [f"/(.*)a.{{{number}}}b(.*)/" for number in range(40)]
TURNS = "\n".join(f"A{i}: A{i + 1} & {each}" for i, each in enumerate(EACH))


@pytest.mark.parametrize("rules", [f"start: A\nA: {' & '.join(EACH)}", f"start: A0\n{TURNS}\nA40: /.*/"])
async def test_what_a_grammar_joins_is_little(grammars, rules):
    with pytest.raises(Malformed, match="may have less than 10 '&'"):
        await grammars.checked(AskedGrammar(wire.Grammar("lark", rules), "ebnf"))


async def test_a_grammar_may_join_little_in_many_places(grammars):
    rules = [f'r{i}: "&&" /&{i}&/ A{i}\nA{i}: {EACH[i]} & /.{{2,80}}/' for i in range(40)]
    whole = "\n".join([f"start: {' | '.join(f'r{i}' for i in range(40))}", *rules])
    assert await grammars.checked(AskedGrammar(wire.Grammar("lark", whole), "ebnf"))


async def test_what_takes_too_long_is_refused_and_others_go_on_meanwhile():
    grammars = Grammars(holding.Grammars(compile_s=0.001, num_threads=1))
    many = {f"p{i}": {"type": "string", "pattern": f"^[a-z]{{{1 + i % 50}}}[0-9]+$"} for i in range(5000)}
    slow = asyncio.create_task(grammars.checked(asked({"type": "object", "properties": many, "required": list(many)})))
    with pytest.raises(Malformed, match="could not be read within"):
        await slow
    grammars.close()
    assert grammars.num_refused == 1


def slow(num: int) -> AskedGrammar:
    """Takes some hundredths of a second."""
    many = {f"p{i}": {"type": "string", "pattern": f"^[a-z]{{{num + i % 50}}}[0-9]+$"} for i in range(500)}
    return asked({"type": "object", "properties": many, "required": list(many)})


async def test_what_waits_for_others_is_no_fault_and_not_remembered_as_one(monkeypatch):
    grammars = Grammars(holding.Grammars(compile_s=PATIENCE_S, num_threads=1))
    monkeypatch.setattr("gateway.grammars.WAITING_S", 0.0)
    before = asyncio.create_task(grammars.checked(slow(1)))
    await asyncio.sleep(0)
    with pytest.raises(ServiceUnavailable):
        await grammars.checked(asked({"type": "string"}))
    monkeypatch.setattr("gateway.grammars.WAITING_S", PATIENCE_S)
    await asyncio.gather(before, return_exceptions=True)
    assert await grammars.checked(asked({"type": "string"})) is not None
    grammars.close()


async def test_a_tenants_many_grammars_are_not_before_anothers_one(monkeypatch):
    grammars, read = Grammars(holding.Grammars(compile_s=PATIENCE_S, num_threads=1)), list[wire.Grammar]()
    of_one = grammars._read

    def noted(grammar: wire.Grammar) -> wire.Grammar | Fault:
        read.append(grammar)
        return of_one(grammar)

    monkeypatch.setattr(grammars, "_read", noted)
    many = [asyncio.create_task(grammars.checked(slow(number), "grey")) for number in range(4)]
    await asyncio.sleep(0)
    await asyncio.gather(grammars.checked(asked({"type": "string"}), "blue"), *many)
    assert read.index(asked({"type": "string"}).grammar) < 3
    grammars.close()


async def test_what_is_known_of_a_tenants_grammar_makes_nobody_elses_faster():
    grammars = Grammars()
    for tenant_id in ("grey", "blue", "grey"):
        await grammars.checked(asked({"type": "string"}), tenant_id)
    assert (grammars.num_read, grammars.num_known_hits) == (2, 1)
    grammars.close()


async def test_what_many_ask_for_at_once_is_read_once_though_some_of_them_leave():
    grammars = Grammars(holding.Grammars(compile_s=PATIENCE_S, num_threads=1))
    every = [asyncio.create_task(grammars.checked(slow(1))) for _ in range(300)]
    alone = asyncio.create_task(grammars.checked(slow(2)))
    await asyncio.sleep(0)
    for each in (*every[:100], alone):
        each.cancel()
    found = await asyncio.gather(*every, alone, return_exceptions=True)
    assert all(isinstance(each, wire.Grammar) for each in found[100:-1])
    assert await grammars.checked(slow(1)) == found[100]
    await grammars.checked(slow(2))
    assert grammars.num_known_hits == 1
    assert grammars.num_read == 2
    grammars.close()


async def test_what_is_known_of_grammars_has_its_bounds_and_is_counted():
    grammars = Grammars(holding.Grammars(max_known=2, max_known_bytes=64, max_bytes=40))
    for source in ("a", "b", "c", "c", "d" * 38, "e" * 38):
        await grammars.checked(AskedGrammar(wire.Grammar("regex", source), "regex"))
    with pytest.raises(Malformed):
        await grammars.checked(AskedGrammar(wire.Grammar("regex", "é" * 21), "regex"))
    assert (grammars.num_read, grammars.num_known_hits, grammars.num_refused) == (5, 1, 1)
    grammars.close()


def choices(leads_to) -> dict[str, object]:
    """Sixty definitions, each a choice of those that it leads to, and texts."""
    ways = {f"d{at}": [{"$ref": f"#/$defs/d{other}"} for other in range(60) if leads_to(at, other)] for at in range(60)}
    return {name: {"anyOf": [*way, {"type": "string"}]} for name, way in ways.items()}


@pytest.mark.parametrize("leads_to", [lambda at, other: True, lambda at, other: at < other])
def test_choices_that_lead_on_to_too_many_others_are_refused(leads_to):
    """A mask takes seconds, and nothing stops llguidance."""
    defs = choices(leads_to)
    behind = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/c"}}}
    for root, path in (({"$ref": "#/$defs/d0"}, ""), (behind, ".properties.b"), ({"items": defs["d0"]}, ".items")):
        fault = fault_of({**root, "$defs": {**defs, "c": {"$ref": "#/$defs/d0"}}}, True)
        assert "choices lead on to more than 256 others" in str(fault)
        assert fault.path in (path, ".$defs.c")


async def test_rules_may_have_no_schema_whose_choices_lead_on_to_too_many_others(grammars):
    schema = json.dumps({"$ref": "#/$defs/d0", "$defs": choices(lambda at, other: True)})
    with pytest.raises(Malformed, match="choices lead on"):
        await grammars.checked((wire.Grammar("lark", f"start: %json {schema}", True), "grammar"))


async def test_choices_between_many_things_that_are_none_are_no_fault(grammars):
    expression = {"$ref": "#/$defs/expression"}
    kinds = {
        f"k{at}": {
            "type": "object",
            "properties": {"kind": {"const": f"k{at}"}, "of": {"type": "array", "items": expression}, "to": expression},
            "required": ["kind"],
            "additionalProperties": False,
        }
        for at in range(40)
    }
    tree = {"$defs": {"expression": {"anyOf": [{"$ref": f"#/$defs/{kind}"} for kind in kinds]}, **kinds}, **expression}
    assert await grammars.checked(asked(tree)) is not None
    optional = {f"p{at}": {"anyOf": [expression, {"type": "null"}]} for at in range(300)}
    for schema in (
        {**tree, "properties": optional},
        {"anyOf": [{"$ref": "#/$defs/k0"}] * 2000, "$defs": tree["$defs"]},
        {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        {"$ref": "#"},
    ):
        assert choices_fault(schema) is None


def lists(num: int) -> dict[str, object]:
    items = {"anyOf": [{"$ref": f"#/$defs/d{number}"} for number in range(num)]}
    return {"$defs": {f"d{number}": {"type": "array", "items": dict(items)} for number in range(num)}}


def kinds(num: int, **before: object) -> dict[str, object]:
    """Each is told by its kind, and has any of them within."""
    within = {"type": "array", "items": {"anyOf": [{"$ref": f"#/$defs/k{number}"} for number in range(num)]}}
    defs = {}
    for number in range(num):
        properties = {**before, "kind": {"const": f"k{number}"}, "within": json.loads(json.dumps(within))}
        defs[f"k{number}"] = {"type": "object", "properties": properties, "required": list(properties)}
    return {"$defs": defs, "anyOf": within["items"]["anyOf"]}


@pytest.mark.parametrize("lies_behind", [False, True])
def test_too_many_things_that_may_be_meant_at_one_place_are_refused_with_their_number(lies_behind):
    schema = {**lists(50), "$ref": "#/$defs/d0"}
    if lies_behind:
        schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}}, **lists(50)}
    fault = fault_of(schema, is_strict=False)
    at = "at .a[][]" if lies_behind else "at [][]"
    assert str(fault) == f"2500 choices and properties may be meant {at}, and 2000 are allowed"


def test_things_that_are_told_apart_by_what_comes_before_are_not_meant_together():
    assert width_fault(kinds(60)) is None
    assert width_fault(kinds(60, at={"type": "integer"})) is None
    assert width_fault({**lists(40), "$ref": "#/$defs/d0"}) is None
    one = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(1500)}}
    assert width_fault({"type": "array", "items": one}) is None
    assert width_fault({"anyOf": [{"const": f"text {number}"} for number in range(3000)]}) is None


def test_to_count_what_may_be_meant_takes_little_memory_however_many_properties_have_constants():
    names = [f"property_{number}" for number in range(3000)]
    schema = {"type": "object", "properties": {name: {"const": name} for name in names}, "required": names}
    tracemalloc.start()
    try:
        assert width_fault(schema) is None
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 16 << 20
