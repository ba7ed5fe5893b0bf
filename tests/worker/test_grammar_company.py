"""Grammars with what else a worker does: preemption, fixed bits, adapters, several ranks, reasoning, calls."""

from __future__ import annotations

import json
import random
import time

import jsonschema
import pytest
from transformers import LlamaForCausalLM

from gateway.parsers import gathered
from gateway.parsers.grammars import Callable, Held
from gateway.parsers.reader import Wanted
from gateway.parsers.tongue import tongue_of
from policies import wire
from policies.terms import Sampling
from tests.gateway.texts import byte_level
from tests.worker.guided import EOS, Guided, guided_model
from tests.worker.peer import WorkerProcess
from tests.worker.peft_files import adapter_files
from tests.worker.schemas import a_schema
from worker.adapters.store import Store
from worker.boarding import Boarding

SHOP = {
    "type": "object",
    "properties": {"item": {"type": "string", "maxLength": 12}, "count": {"type": "integer"}},
    "required": ["item", "count"],
    "additionalProperties": False,
}
LONG = {"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 6, "maxItems": 60}
SCHEMAS = [a_schema(random.Random(seed)) if seed % 3 else LONG for seed in range(12)]
MAX_TOKENS = 90
SCARCE_BYTES = 100_000
"""Some thirty blocks of eight tokens."""
PROMPT = [5 + 7 * place for place in range(12)]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return guided_model(tmp_path_factory.mktemp("guided"))


def ask(guided: Guided, some: range, priority: int = 0) -> None:
    for seed in some:
        asked = {"max_tokens": MAX_TOKENS, "seed": seed, "temperature": seed % 3 / 2, "top_p": 1 - seed % 2 / 10}
        guided.submit(f"s{seed}", "json_schema", json.dumps(SCHEMAS[seed]), num=3, priority=priority, **asked)


def test_answers_are_the_same_alone_and_in_company_and_whoever_loses_blocks(path):
    guided = Guided(path, deterministic=True)
    for seed in range(len(SCHEMAS)):
        ask(guided, range(seed, seed + 1))
        guided.run()
    guided.close()
    # Those who begin lose blocks to those who are in more of a hurry, and go on from where they were.
    scarce = Guided(path, deterministic=True, max_kv_bytes=SCARCE_BYTES, max_model_tokens=128)
    ask(scarce, range(0, len(SCHEMAS), 2), priority=5)
    while sum(len(answer.token_ids) for answer in scarce.answers.values()) < 60:
        scarce.step()
    ask(scarce, range(1, len(SCHEMAS), 2))
    scarce.run()
    scarce.close()
    assert not guided.failures
    assert not scarce.failures
    stats = scarce.engine.stats()
    assert stats.num_preemptions + stats.num_tail_frees > 0
    assert {name: each.token_ids for name, each in scarce.answers.items()} == {
        name: each.token_ids for name, each in guided.answers.items()
    }
    for (name, _), answer in scarce.answers.items():
        jsonschema.validate(json.loads(answer.text), SCHEMAS[int(name[1:])])


def test_a_model_with_an_adapter_keeps_to_its_grammar_too(tmp_path):
    directory = tmp_path / "base"
    base = guided_model(directory)
    adapter_files(tmp_path / "adapter", LlamaForCausalLM.from_pretrained(base), 1)
    guided = Guided(base)
    store = Store(guided.runner.load_adapter, 1 << 24, guided.executor, lambda: None)
    guided.boarding = Boarding(guided.engine, store, time.monotonic, guided.grammars)
    assert guided.boarding.load(wire.LoadAdapter("a", str(tmp_path / "adapter"))) is None
    for seed in range(6):
        for name in ("", "a"):
            asked = {"max_tokens": MAX_TOKENS, "seed": seed, "adapter": name}
            guided.submit(f"{name}{seed}", "json_schema", json.dumps(SHOP), **asked)
    guided.run()
    guided.close()
    assert not guided.failures
    for answer in guided.answers.values():
        jsonschema.validate(json.loads(answer.text), SHOP)
    assert any(guided.answers[f"a{seed}", 0].text != guided.answers[f"{seed}", 0].text for seed in range(6))


def test_two_ranks_keep_to_a_grammar_as_one_does(path):
    text = byte_level()
    told = []
    for num_ranks in (1, 2):
        with WorkerProcess(path, tensor_parallel=num_ranks) as worker, worker.connect() as gateway:
            for seed in range(4):
                sampling = Sampling(MAX_TOKENS, seed=seed, temperature=seed / 3)
                grammar = wire.Grammar("json_schema", json.dumps(SCHEMAS[seed]), True)
                gateway.send(wire.Submit(f"s{seed}", PROMPT, sampling, grammar=grammar))
            answers = [gateway.finish(f"s{seed}") for seed in range(4)]
            gateway.quiet()
        told.append([text.decode([token_id for token_id in answer if token_id != EOS]) for answer in answers])
    assert told[0] == told[1]
    for schema, answer in zip(SCHEMAS, told[0], strict=False):
        jsonschema.validate(json.loads(answer), schema)


def test_a_model_thinks_before_what_it_is_held_to_and_calls_or_answers_as_it_likes(path):
    tongue = tongue_of([], {}, "hermes", "think")
    function = Callable("shop", SHOP, True)
    schema = wire.Grammar("json_schema", json.dumps(SHOP), True)
    wanted = {
        "answer": (None, schema),
        "must": (Held([function], True, False), None),
        "may": (Held([function], False, True), None),
        "either": (Held([function], False, False), schema),
    }
    guided = Guided(path, max_sequences=32)
    for name, (held, content) in wanted.items():
        for seed in range(5):
            grammar = tongue.grammar(held, content, is_thinking=False)
            assert grammar is not None
            assert grammar.is_strict
            assert grammar.is_composed
            asked = {"max_tokens": 150, "seed": seed, "temperature": 1.3, "is_composed": True}
            guided.submit(f"{name}{seed}", grammar.kind, grammar.source, **asked)
    guided.run()
    guided.close()
    assert not guided.failures
    parsers = tongue.parsers(Wanted(frozenset({"shop"}), True), False)
    assert parsers is not None
    for (name, _), answer in guided.answers.items():
        reader = parsers()
        reader.feed(answer.text)
        reader.finish()
        said = gathered(reader.take())
        for call in said.calls:
            assert call.name == "shop"
            jsonschema.validate(json.loads(call.arguments), SHOP)
        if name.startswith("must"):
            assert len(said.calls) == 1
        elif name.startswith("answer") or (name.startswith("either") and not said.calls):
            assert said.content is not None
            jsonschema.validate(json.loads(said.content), SHOP)
