"""Answers that are held to a grammar, of a random model that would say anything."""

import json
import math
import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import jsonschema
import numpy as np
import pytest
import torch

from policies import wire
from policies.holding import KeptGrammars
from policies.terms import Sampling
from tests.builders import PATIENCE_S
from tests.gateway.texts import byte_fallback, byte_level
from tests.worker.guided import EOS, VOCAB_SIZE, Guided, guided_model
from tests.worker.schemas import a_schema
from worker.boarding import Boarding
from worker.engine import Engine
from worker.grammar import aside
from worker.grammar.store import Grammars
from worker.grammar.vocabulary import read_vocabulary
from worker.native import library
from worker.sampling import race
from worker.sampling.masks import Bits, Masks
from worker.sampling.wishes import wish_of
from worker.speculation import Speculation
from worker.speculation.forced import ForcedDrafter

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


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize(
    ("kind", "source", "says"),
    [
        ("choice", '["<tool_call>"]', "<tool_call>"),
        ("regex", r"x<\/s>[a-c]", "x</s>[a-c]"),
        ("json_schema", '{"const": "</s><tool_call>"}', '"</s><tool_call>"'),
        (
            "lark",
            'start: <tool_call> "<|im_end|>" a\na: %json {"const": "<tool_call>"}',
            r'<tool_call><\|im_end\|>"<tool_call>"',
        ),
    ],
)
def test_a_text_that_must_come_may_say_what_a_special_token_is_called(path, kind, source, says, is_strict):
    guided = Guided(path)
    for seed in range(3):
        guided.submit(f"s{seed}", kind, source, is_strict, seed=seed)
    guided.run()
    guided.close()
    assert not guided.failures
    (special,) = byte_level().encode("<tool_call>").ids
    for answer in guided.answers.values():
        assert answer.token_ids.count(special) == (kind == "lark")
        assert re.fullmatch(says, answer.text)


def test_a_choice_may_be_one_of_very_many(guided):
    texts = [f"{number * 7919 % 100_003} of them" for number in range(10_000)]
    guided.submit("choice", "choice", json.dumps(texts))
    guided.run()
    assert not guided.failures
    assert (guided.answers["choice", 0].text in texts, guided.answers["choice", 0].reason) == (True, "stop")


def test_a_grammar_without_an_end_is_its_requests_own_fault_at_once_or_on_the_way(guided):
    guided.submit("at once", "lark", 'start: "a" start', max_tokens=300)
    guided.submit("on the way", "lark", 'start: /[xy]{4}/ again\nagain: "a" again', max_tokens=300)
    guided.submit("plain", "", "", max_tokens=4)
    guided.run()
    assert {name: failure.code for name, failure in guided.failures.items()} == {
        "at once": "invalid_request",
        "on the way": "invalid_request",
    }
    assert all("grammar" in failure.reason for failure in guided.failures.values())
    assert guided.answers["plain", 0].reason in ("length", "stop")


def test_what_grammars_cost_is_counted_and_those_that_are_kept_have_a_bound(path):
    guided = Guided(path, grammars=KeptGrammars(max_kept=2, max_kept_bytes=24))
    for number, source in enumerate(["[a-c]{9}", "[a-c]{9}", "a(", "[a-c]{8}", "[a-c]{7}", "[é-ü]{12}[a-z]{12}"]):
        guided.submit(f"r{number}", "regex", source)
        guided.run()
    stats = guided.boarding.stats(1)
    guided.close()
    assert set(guided.failures) == {"r2"}
    counts = stats.num_grammars, stats.num_grammars_compiled, stats.num_grammar_hits, stats.num_grammars_refused
    assert counts == (1, 4, 1, 1)
    assert min(stats.num_masks, stats.mask_s, stats.grammar_compile_s) > 0


def test_a_grammar_that_one_salt_has_asked_for_is_not_there_for_another(guided):
    one, other, again = (
        wire.Submit(name, [5], Sampling(9), cache_salt=salt, grammar=wire.Grammar("regex", "[a-c]{9}"))
        for name, salt in (("one", b"grey"), ("other", b"blue"), ("again", b"grey"))
    )
    grammars = Grammars(lambda: guided.vocabulary, VOCAB_SIZE, frozenset({EOS}), guided.executor, lambda: None)
    grammars._prepare(one)
    assert grammars.find(other) is None
    assert grammars.find(again) is not None
    grammars._prepare(other)
    assert grammars.num_compiled == 2


def test_the_step_loop_does_not_wait_for_a_vocabulary_that_is_read(guided):
    is_read, may_go_on = Event(), Event()

    def slow():
        is_read.set()
        assert may_go_on.wait(PATIENCE_S)
        return guided.vocabulary

    grammars = Grammars(slow, VOCAB_SIZE, frozenset({EOS}), guided.executor, lambda: None)
    first, second = (
        wire.Submit(name, [5], Sampling(9), grammar=wire.Grammar("regex", name, True)) for name in ("a", "b")
    )
    grammars.begin(first)
    assert is_read.wait(PATIENCE_S)
    with ThreadPoolExecutor(1) as step_loop:
        finding = step_loop.submit(grammars.find, second)
        try:
            assert finding.result(5) is None
        finally:
            may_go_on.set()


@pytest.mark.parametrize(("kind", "source"), [("regex", "[a-c]{9}"), ("lark", 'start: "a" "b"')])
def test_where_no_thread_can_be_had_a_request_fails_and_the_next_one_is_answered(guided, kind, source):
    before = threading.stack_size(1 << 46)  # more than there are addresses
    try:
        guided.submit("first", kind, source)
        guided.run()
    finally:
        threading.stack_size(before)
    assert "its grammar could not be made ready: RuntimeError" in guided.failures["first"].reason
    guided.submit("second", kind, source)
    guided.run()
    assert list(guided.failures) == ["first"]
    assert guided.answers["second", 0].text


NUM_SCHEMAS, MAX_TOKENS = 250, 300


def test_every_strict_answer_is_whole_and_as_its_schema_says_cut_or_not(path):
    guided = Guided(path, max_sequences=64)
    schemas = {f"s{seed}": a_schema(random.Random(seed)) for seed in range(NUM_SCHEMAS)}
    for seed, (name, schema) in enumerate(schemas.items()):
        while guided.boarding.stats(1).num_waiting >= 32:
            guided.step()
        # Some have room, some must come to an end soon.
        guided.submit(name, "json_schema", json.dumps(schema), max_tokens=MAX_TOKENS - seed % 3 * 12, seed=seed)
    guided.run()
    guided.close()
    assert not guided.failures
    reasons = set()
    for name, schema in schemas.items():
        answer = guided.answers[name, 0]
        jsonschema.Draft202012Validator(schema).validate(json.loads(answer.text))
        reasons.add(answer.reason)
    assert reasons == {"stop", "length"}


def test_answers_are_the_same_with_guesses_and_without(path):
    schemas = [a_schema(random.Random(seed)) for seed in range(24)]
    # Of what is bound to repeat itself.
    schemas += [{"type": "array", "items": {"enum": ["again and again"]}, "minItems": 4, "maxItems": 9}] * 8
    told = []
    for speculates in (True, False):
        guided = Guided(path, max_sequences=16)
        guided.engine.speculates = speculates
        for seed, schema in enumerate(schemas):
            guided.submit(f"s{seed}", "json_schema", json.dumps(schema), max_tokens=120, seed=seed, temperature=0.7)
        guided.run()
        guided.close()
        told.append({name: answer.token_ids for name, answer in guided.answers.items()})
    assert told[0] == told[1]


def test_a_token_drawn_before_its_mask_is_the_one_that_the_mask_leads_to(path):
    told = []
    # A top-k of all tokens asks for masks before anything is drawn, and for nothing else.
    for top_k in (0, VOCAB_SIZE):
        guided = Guided(path, max_sequences=16)
        for seed in range(24):
            asked = {"max_tokens": 80, "seed": seed, "temperature": seed % 3 / 2, "top_k": top_k}
            guided.submit(f"s{seed}", "json_schema", json.dumps(a_schema(random.Random(seed))), **asked)
            guided.submit(f"x{seed}", "regex", "(naïve|[a-f]{2,9}[0-9 ]+|東京.*|forced words)+", min_tokens=9, **asked)
        guided.run()
        guided.close()
        assert not guided.failures
        told.append({name: answer.token_ids for name, answer in guided.answers.items()})
    assert told[0] == told[1]


@pytest.mark.parametrize("top_k", [0, VOCAB_SIZE])
def test_what_the_grammar_leaves_no_choice_about_is_a_draft_that_is_always_right(path, top_k, monkeypatch):
    # Nor is anybody followed aside, where nothing is guessed.
    for limit in ("SLOW_S", "MAX_NOTED_S"):
        monkeypatch.setattr(aside, limit, math.inf)
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    for name in ("first name", "second name", "東京の名前"):
        schema["properties"][name] = {"enum": ["a fixed word", "another fixed word"]}
    schema["required"] = list(schema["properties"])
    told = []
    for speculates in (True, False):
        guided = Guided(path, max_sequences=16)
        # No time passes: guessing is never too dear, however slow the machine is.
        spec = Speculation([ForcedDrafter()], 12, lambda chances, *rest: [len(each) for each in chances], float)
        guided.engine = Engine(guided.runner, guided.sampler, guided.settings, float, speculation=spec)
        guided.engine.speculates = speculates
        guided.boarding = Boarding(guided.engine, None, time.monotonic, guided.grammars)
        for seed in range(6):
            asked = {"max_tokens": 200, "seed": seed, "top_k": top_k, "num_logprobs": 1, "presence_penalty": 0.5}
            guided.submit(f"s{seed}", "json_schema", json.dumps(schema), seed % 2 == 0, **asked)
        guided.run()
        guided.close()
        assert not guided.failures
        told.append({name: answer.token_ids for name, answer in guided.answers.items()})
        if speculates:
            assert spec.num_drafted_tokens > 100
            assert spec.num_accepted_tokens == spec.num_drafted_tokens
    assert told[0] == told[1]


def test_an_answer_goes_on_elsewhere_as_it_would_have_here(path):
    whole = Guided(path)
    whole.submit("r", "json_schema", json.dumps(PERSON), max_tokens=60)
    whole.run()
    whole.close()
    token_ids = whole.answers["r", 0].token_ids
    for num in (1, len(token_ids) // 2, len(token_ids) - 2):
        later = Guided(path)
        later.submit("r", "json_schema", json.dumps(PERSON), max_tokens=60, emitted={0: token_ids[:num]})
        later.run()
        later.close()
        assert later.answers["r", 0].token_ids == token_ids[num:]
    broken = Guided(path)
    broken.submit("r", "json_schema", json.dumps(PERSON), emitted={0: [0, 0]})
    broken.run()
    broken.close()
    assert "no beginning" in broken.failures["r"].reason


def test_an_answer_that_was_cut_is_cut_wherever_it_goes_on(path):
    either = {"a": {"enum": ["xq" * 60, "y"]}, "b": {"enum": ["east", "west"]}}
    schema = {"type": "object", "properties": either, "required": ["a", "b"], "additionalProperties": False}
    whole = Guided(path)
    for seed in range(12):
        whole.submit(f"s{seed}", "json_schema", json.dumps(schema), max_tokens=60, seed=seed)
    whole.run()
    whole.close()
    cut = {name: answer for (name, _), answer in whole.answers.items() if answer.cut_from}
    assert len(cut) > 3
    for turn, (name, answer) in enumerate(cut.items()):
        assert answer.reason == "length"
        assert len(answer.token_ids) < 60
        emitted = {0: answer.token_ids[: answer.cut_from if turn % 2 else -1]}
        later, asked = Guided(path), {"max_tokens": 60, "seed": int(name[1:])}
        later.submit(name, "json_schema", json.dumps(schema), emitted=emitted, cut=[0], **asked)
        later.run()
        later.close()
        assert later.answers[name, 0].token_ids == answer.token_ids[len(emitted[0]) :]
        assert later.answers[name, 0].reason == "length"


def test_several_answers_to_a_prompt_keep_to_the_grammar_in_chunks_too(path):
    guided, chunked = Guided(path), Guided(path, max_step_tokens=16)
    for bench in (guided, chunked):
        bench.submit("n", "json_schema", json.dumps(PERSON), max_tokens=120, num=4)
        bench.submit("penalised", "regex", "[ab]{40}", max_tokens=60, logit_bias={9: 5.0}, presence_penalty=1.0)
        bench.run()
        bench.close()
    for index in range(4):
        jsonschema.validate(json.loads(guided.answers["n", index].text), PERSON)
    assert {key: each.token_ids for key, each in guided.answers.items()} == {
        key: each.token_ids for key, each in chunked.answers.items()
    }


def test_what_is_complete_ends_however_short_and_own_stops_end_it_where_it_may_end(guided):
    guided.submit("min", "choice", '["yes"]', min_tokens=50, max_tokens=100)
    stop = byte_level().token_to_id("Z")
    guided.submit("stop", "regex", "[a-c]{3,60}", stop_token_ids=(stop,), logit_bias={stop: 100.0}, max_tokens=80)
    guided.submit("logprobs", "choice", '["yes", "no"]', num_logprobs=2)
    guided.submit("ignored", "regex", "a+", ignore_eos=True, logit_bias={EOS: 100.0})
    guided.submit("called", "regex", ".*", ignore_eos=True, logit_bias={EOS: 100.0})
    guided.run()
    assert guided.answers["min", 0].text == "yes"
    assert guided.answers["stop", 0].token_ids[-1] == stop
    assert len(guided.answers["logprobs", 0].logprobs) == len(guided.answers["logprobs", 0].token_ids)
    assert guided.answers["ignored", 0].reason == "stop"
    assert guided.answers["called", 0].token_ids == [EOS]


def test_what_may_only_go_on_with_own_stops_before_it_may_stop_is_the_requests_own_fault(guided):
    said = guided.vocabulary.decode_bytes
    stops = tuple(token for token in range(2, 380) if said([token]) and set(said([token])) == {ord("a")})
    guided.submit("x", "regex", "a{5,9}", min_tokens=3, stop_token_ids=stops)
    guided.run()
    failed = guided.failures["x"]
    assert failed.code == "invalid_request"
    assert failed.reason == "the grammar leaves nothing but stop tokens before min_tokens are reached"


def test_every_kind_of_tokenizer_is_understood(tmp_path):
    for name, tokenizer, eos in (("level", byte_level(), 1), ("fallback", byte_fallback(), 2)):
        directory = tmp_path / name
        directory.mkdir()
        tokenizer.save(str(directory / "tokenizer.json"))
        vocabulary = read_vocabulary(directory, 700, [eos])
        text = "naïve 東京 {7}"
        assert vocabulary.decode_str(tokenizer.encode(text, add_special_tokens=False).ids).lstrip() == text
        assert vocabulary.vocab_size >= 700
        assert vocabulary.is_special_token(eos)


@pytest.mark.parametrize("vocab_size", [64, 97, 1000, 2050, 4160])
@pytest.mark.parametrize("scale", [0.0, 0.3, 8.0])
@pytest.mark.parametrize("asked", [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}])
def test_compiled_kernels_draw_by_masks_what_they_draw_from_logits_that_torch_has_masked(vocab_size, scale, asked):
    kernels = library()
    if kernels is None:
        pytest.skip("no compiled kernels")
    generator = torch.Generator().manual_seed(vocab_size)
    logits = scale * torch.randn((40, vocab_size), generator=generator)
    logits[8, 5], logits[9, 6], logits[11] = torch.nan, torch.inf, -torch.inf
    # Some leave half of all tokens, some one in a hundred, or nothing of most tiles; behind the last one is nothing.
    shares = torch.tensor([0.5, 0.01, 0.98, 0.0])[torch.arange(40) % 4, None]
    bits = np.packbits((torch.rand((40, vocab_size), generator=generator) < shares).numpy(), axis=1, bitorder="little")
    words = np.full((40, -(-vocab_size // 32) + 1), -1, dtype=np.int32)
    words.view(np.uint8)[:, : bits.shape[1]] = bits
    words[12:24, ::3], words[16:28, 1::3] = 0, -1
    rows = [row for row in range(40) if row % 5]
    masks = Masks(rows, [Bits(words[row], words[row].ctypes.data) for row in rows])
    wishes = b"".join(race.start(seed, 5) + wish_of(Sampling(1, **asked)) for seed in range(40))
    expected = logits.clone()
    masks.apply(expected)
    for num_tries in (1, 3):
        for some in (range(40), range(39, 5, -2)):
            own, wanted = logits.clone(), expected.clone()
            addresses, num_words = masks.addresses(some), words.shape[1]
            drawn = kernels.draw(own, kernels.maxima(own), wishes, num_tries, some, addresses, num_words)
            assert drawn == kernels.draw(wanted, kernels.maxima(wanted), wishes, num_tries, some)
