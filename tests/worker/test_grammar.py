"""Answers that are held to a grammar, of a random model that would say anything."""

import json
import re

import jsonschema
import pytest

from tests.worker.guided import Guided, guided_model

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return guided_model(tmp_path_factory.mktemp("guided"))


@pytest.fixture
def guided(path):
    bench = Guided(path)
    yield bench
    bench.close()


def test_an_answer_is_what_its_schema_says_and_ends_by_itself(guided):
    for seed in range(8):
        guided.submit(f"r{seed}", "json_schema", json.dumps(PERSON), max_tokens=400, seed=seed)
    guided.run()
    assert not guided.failures
    for answer in guided.answers.values():
        jsonschema.validate(json.loads(answer.text), PERSON)


def test_an_expression_a_choice_and_lark_are_followed_too(guided):
    guided.submit("regex", "regex", "[a-z]{3}-[0-9]+/x", max_tokens=300)
    guided.submit("choice", "choice", '["yes", "no \\"never\\"", "naïve 東京"]')
    guided.submit("lark", "lark", 'start: "<" INNER ">" <|im_end|>\nINNER: /[0-9]{4}/')
    guided.submit("object", "json_object", "", max_tokens=300)
    guided.run()
    text = {request_id: answer.text for (request_id, _), answer in guided.answers.items()}
    assert re.fullmatch(r"[a-z]{3}-[0-9]+/x|[a-z]{3}-[0-9]+", text["regex"])
    assert text["choice"] in ("yes", 'no "never"', "naïve 東京")
    assert re.fullmatch(r"<[0-9]{4}>", text["lark"])
    assert isinstance(json.loads(text["object"]), dict)
    assert guided.answers["choice", 0].reason == "stop"


def test_what_cannot_be_compiled_fails_that_request_alone(guided):
    guided.submit("bad", "regex", "a(b")
    guided.submit("worse", "json_schema", '{"type": "strin"}')
    guided.submit("worst", "lark", "start: nothing")
    guided.submit("good", "choice", '["yes"]')
    guided.submit("plain", "", "", max_tokens=4)
    guided.run()
    assert {failure.code for failure in guided.failures.values()} == {"invalid_request"}
    assert set(guided.failures) == {"bad", "worse", "worst"}
    assert guided.answers["good", 0].text == "yes"
    assert guided.answers["plain", 0].reason in ("length", "stop")
