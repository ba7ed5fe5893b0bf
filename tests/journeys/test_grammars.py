"""Answers that are held to a grammar: the real gateway, a real worker, the demo model, OpenAI's own client."""

from __future__ import annotations

import asyncio
import json

import jsonschema
import openai
import pytest

from tests.journeys.test_answers import ask, read

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "likes": {"type": "array", "items": {"enum": ["tea", "naïve art", "東京"]}},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
STRICT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}


async def test_strict_answers_are_as_their_schema_says_however_short_they_must_be(house):
    async with house.client() as client:
        asked = [
            ask(client, house, "Who are you?", seed=seed, max_tokens=max_tokens, response_format=STRICT)
            for max_tokens in (32, 48, 400)
            for seed in range(4)
        ]
        for answer in await asyncio.gather(*asked):
            jsonschema.validate(json.loads(answer.choices[0].message.content), PERSON)
            assert answer.choices[0].finish_reason in ("stop", "length")


async def test_a_stream_with_logprobs_and_several_choices_says_the_same(house):
    parameters = {"seed": 5, "max_tokens": 64, "response_format": STRICT}
    async with house.client() as client:
        whole = await ask(client, house, "Hello!", n=2, logprobs=True, top_logprobs=2, **parameters)
        text, _ = await read(await ask(client, house, "Hello!", stream=True, **parameters))
    assert text == whole.choices[0].message.content
    for choice in whole.choices:
        jsonschema.validate(json.loads(choice.message.content), PERSON)
        said = b"".join(bytes(each.bytes) for each in choice.logprobs.content)
        assert said.decode() == choice.message.content


async def test_choices_and_expressions_hold_for_completions_too(house):
    async with house.client() as client:
        chosen = await client.completions.create(
            model=house.model, prompt="Yes or no?", max_tokens=20, extra_body={"guided_choice": ["yes", "no"]}
        )
        asked = {"structured_outputs": {"regex": "[0-9]{3}-[a-c]{2}"}}
        matched = await client.completions.create(model=house.model, prompt="7", max_tokens=20, extra_body=asked)
    assert chosen.choices[0].text in ("yes", "no")
    assert chosen.choices[0].finish_reason == "stop"
    assert len(matched.choices[0].text) == 6


async def test_what_only_the_worker_can_know_to_be_wrong_is_a_400_as_well(house):
    async with house.client() as client:
        with pytest.raises(openai.BadRequestError, match="unknown special token"):
            await ask(client, house, "Hello!", extra_body={"guided_grammar": 'start: <no_such_token> "x"'})
