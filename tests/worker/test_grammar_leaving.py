"""Schemas that take long are followed aside: their answers are what they would be within the step."""

from __future__ import annotations

import json
import random
import threading

import jsonschema
import pytest

from tests.worker.guided import Guided, guided_model
from tests.worker.guided_parts import Device
from tests.worker.schemas import a_schema
from worker.budget import OutOfMemory
from worker.grammar import aside, in_time, store
from worker.grammar.aside import AsideGuide
from worker.grammar.masks import MaskMaker

NUM_REQUESTS = 10
EXPRESSION = "(naïve|[a-f]{2,9}[0-9 ]+|東京.*|forced words)+"


def lists(num: int) -> dict[str, object]:
    """Definitions that are each a list of any of them: whoever is in several of them is in any."""
    names = [f"d{number}" for number in range(num)]
    items = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in names]}
    return {"$defs": {name: {"type": "array", "items": dict(items)} for name in names}, "$ref": "#/$defs/d0"}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return guided_model(tmp_path_factory.mktemp("guided"))


def ask(guided: Guided, seed: int) -> None:
    chance = random.Random(seed)
    for number in range(NUM_REQUESTS):
        source = json.dumps(a_schema(random.Random(1000 * seed + number)))
        kind, source = chance.choice([("json_schema", source), ("json_schema", source), ("regex", EXPRESSION)])
        asked = {"temperature": number % 3 / 2, "max_tokens": chance.choice([20, 40]), "num": chance.choice([1, 1, 3])}
        asked |= chance.choice([{}, {"top_p": 0.9}, {"min_tokens": 9}, {"presence_penalty": 1.5}])
        guided.submit(f"r{number}", kind, source, chance.random() < 0.6, seed=number, **asked)


def answers_of(guided: Guided) -> dict[tuple[str, int], tuple[list[int], str]]:
    return {key: (each.token_ids, each.reason) for key, each in guided.answers.items()}


def told(path, seed: int, overlaps: bool = False, **settings: object) -> dict[tuple[str, int], object]:
    guided = Guided(path, not overlaps, deterministic=True, max_sequences=16, **settings)
    guided.runner.overlaps = overlaps
    ask(guided, seed)
    guided.run()
    guided.close()
    assert not guided.failures
    return answers_of(guided)


class Leaving(aside.Rules):
    """Of grammars that are slow once they were asked a few times."""

    def took(self, seconds: float) -> None:
        self.num_asked = getattr(self, "num_asked", 0) + 1
        if self.num_asked > 4:
            self.leave()


def late_guides(monkeypatch) -> list[AsideGuide]:
    """Those that have left a step, from now on."""
    found, of = [], AsideGuide.of

    def noted(*asked):
        found.append(of(*asked))
        return found[-1]

    monkeypatch.setattr(AsideGuide, "of", noted)
    return found


@pytest.mark.parametrize("overlaps", [False, True])
def test_answers_are_the_same_in_the_step_and_aside_from_the_beginning_or_from_the_middle(path, monkeypatch, overlaps):
    """``overlaps``: steps are launched before the tokens of the one before are read, as on a device."""
    seed = int(overlaps)
    within = told(path, seed, overlaps)
    assert {"stop", "length"} >= {reason for _, reason in within.values()}
    monkeypatch.setattr(store, "MAX_WIDTH", -1)
    assert told(path, seed, overlaps) == within
    monkeypatch.undo()
    left = late_guides(monkeypatch)
    monkeypatch.setattr(store, "Rules", Leaving)
    assert told(path, seed, overlaps) == within
    assert len(left) > NUM_REQUESTS / 3
    left.clear()
    # With hardly any room they lose their blocks as well.
    assert told(path, seed, overlaps, max_kv_bytes=100_000, max_model_tokens=128) == within
    assert left


def test_answers_whose_ends_take_long_to_find_leave_the_step_and_are_whole(path, monkeypatch):
    within = told(path, 3)
    left = late_guides(monkeypatch)
    monkeypatch.setattr(in_time, "MAX_STEP_S", 0.0)
    assert told(path, 3) == within
    assert left


def test_siblings_begin_together_once_the_masks_of_all_are_there(path, monkeypatch):
    asked = {"kind": "json_schema", "source": json.dumps(lists(4)), "num": 3, "max_tokens": 20, "temperature": 1}
    within = Guided(path, deterministic=True)
    within.submit("r", **asked)
    within.run().close()
    monkeypatch.setattr(store, "MAX_WIDTH", -1)
    let_go, follow_now, followed = threading.Event(), AsideGuide._follow_now, []

    def blocked(guide: AsideGuide) -> aside.Found:
        followed.append(guide)
        if len(followed) == 2:
            let_go.wait()
        return follow_now(guide)

    monkeypatch.setattr(AsideGuide, "_follow_now", blocked)
    late = Guided(path, deterministic=True)
    late.submit("r", **asked)
    while len(followed) < 2:
        late.step()
    for _ in range(3):
        late.step()
    assert late.engine.rests
    assert not late.answers
    let_go.set()
    late.run().close()
    assert not late.failures
    assert answers_of(late) == answers_of(within)


def test_one_slow_mask_has_all_answers_with_its_grammar_leave_and_new_ones_begin_aside(path, monkeypatch):
    guided = Guided(path)
    source = json.dumps({"type": "array", "items": {"type": "string", "pattern": "^[a-f]{3}[0-9]"}, "minItems": 30})
    left = late_guides(monkeypatch)
    guided.submit("first", "json_schema", source, num=3, top_k=40, max_tokens=60)
    while len(guided.answers) < 3:
        guided.step()
    assert not left
    monkeypatch.setattr(aside, "NOTED_S", 0.0)
    monkeypatch.setattr(aside, "SLOW_S", 0.0)
    guided.submit("plain", "", "", max_tokens=30, ignore_eos=True)
    guided.run()
    monkeypatch.setattr(aside, "SLOW_S", 0.02)
    assert len(left) == 3
    guided.submit("second", "json_schema", source, max_tokens=60)
    while not guided.engine.has_work:
        guided.step()
    (request,) = guided.engine._requests.values()
    assert request.live[0].guide.is_aside
    guided.run()
    guided.close()
    assert not guided.failures
    assert {len(answer.token_ids) for key, answer in guided.answers.items() if key[0] != "plain"} == {60}


def test_schemas_that_may_mean_many_things_at_one_place_are_followed_aside_and_usual_ones_are_not(path):
    guided = Guided(path)
    guided.submit("wide", "json_schema", json.dumps(lists(24)), max_tokens=40, seed=5)
    guided.submit("usual", "json_schema", json.dumps(lists(4)), max_tokens=40)
    while guided.boarding.has_waiting:
        guided.boarding.turn()
    is_aside = {name: request.live[0].guide.is_aside for name, request in guided.engine._requests.items()}
    assert is_aside == {"wide": True, "usual": False}
    guided.run()
    guided.close()
    assert not guided.failures
    for name, num in (("wide", 24), ("usual", 4)):
        answer = guided.answers[name, 0]
        jsonschema.validate(json.loads(answer.text), lists(num))


def test_what_was_written_elsewhere_goes_on_aside_as_it_would_have(path, monkeypatch):
    schema = json.dumps({"type": "array", "items": {"enum": ["xq" * 9, "y"]}, "minItems": 3, "maxItems": 30})
    guided = Guided(path)
    for seed in range(6):
        guided.submit(f"s{seed}", "json_schema", schema, max_tokens=40, seed=seed)
    guided.run()
    guided.close()
    monkeypatch.setattr(store, "MAX_WIDTH", -1)
    later = Guided(path)
    for seed in range(6):
        whole = guided.answers[f"s{seed}", 0]
        for num in (1, len(whole.token_ids) // 2):
            cut = [0] if 0 < whole.cut_from <= num else []
            emitted = {0: whole.token_ids[:num]}
            later.submit(f"s{seed}", "json_schema", schema, max_tokens=40, seed=seed, emitted=emitted, cut=cut)
            later.run()
            answer = later.answers.pop((f"s{seed}", 0))
            assert (answer.token_ids, answer.reason) == (whole.token_ids[num:], whole.reason)
    later.submit("wrong", "json_schema", schema, emitted={0: [0, 0]})
    later.run()
    later.close()
    assert "no beginning" in later.failures["wrong"].reason


def test_where_no_threads_can_be_had_answers_stay_in_the_step(path, monkeypatch):
    within = told(path, 4)
    left = late_guides(monkeypatch)
    guided = Guided(path, deterministic=True, max_sequences=16)
    guided.submit("first", "regex", EXPRESSION, top_k=40)
    guided.run()
    guided.answers.clear()
    monkeypatch.setattr(store, "Rules", Leaving)
    ask(guided, 4)
    while guided.boarding.has_waiting:  # the threads that compile are there
        guided.boarding.turn()
    before = threading.stack_size(1 << 46)  # more than there are addresses
    try:
        guided.run()
    finally:
        threading.stack_size(before)
    guided.close()
    assert not left
    assert answers_of(guided) == within


def test_where_no_thread_can_be_had_masks_are_made_in_the_step_and_by_none_that_comes_later(path):
    within = told(path, 4)
    guided = Guided(path, deterministic=True, max_sequences=16)
    maker = guided.engine._drawing._mask_maker = MaskMaker(False)
    maker._num_spare = 1
    ask(guided, 4)
    while guided.boarding.has_waiting:  # the threads that compile are there
        guided.boarding.turn()
    before = threading.stack_size(1 << 46)  # more than there are addresses
    try:
        for _ in range(6):
            guided.step()
    finally:
        threading.stack_size(before)
    guided.run().close()
    assert answers_of(guided) == within


def test_where_neither_a_step_nor_its_masks_have_memory_the_next_one_goes_on(path):
    guided = Guided(path, deterministic=True)
    maker = guided.engine._drawing._mask_maker = MaskMaker(False)
    maker._num_spare = 1
    guided.submit("alone", "regex", EXPRESSION, top_k=40, max_tokens=30)
    guided.run()
    guided.submit("short", "regex", EXPRESSION, top_k=40, max_tokens=30)
    while ("short", 0) not in guided.answers:
        guided.step()
    guided.submit("other", "", "", max_tokens=9)  # where one token alone has no room it never has
    forward, fill, lost = guided.runner.forward, maker.fill, []

    def short_of_memory(*_):
        lost.append(1)
        raise OutOfMemory("there is no room")

    guided.runner.forward = maker.fill = short_of_memory
    guided.step()
    guided.runner.forward, maker.fill = forward, fill
    guided.run().close()
    assert len(lost) == 2
    assert not guided.failures
    assert guided.answers["short", 0].token_ids == guided.answers["alone", 0].token_ids


def test_who_has_ended_while_its_mask_was_made_ahead_is_not_drawn_again(path):
    guided = Guided(path)
    guided.submit("r", "json_schema", json.dumps(lists(4)), max_tokens=20)
    while not guided.answers:
        guided.step()
    (sequence,) = guided.engine._requests["r"].live
    maker = guided.engine._drawing._mask_maker
    maker.late.add(sequence)
    guided.engine.cancel("r")
    assert not maker.take_late([sequence])
    guided.close()


def test_tokens_that_were_refused_count_once_however_often_they_are_drawn(path):
    schema = {"type": "array", "items": {"enum": [*(30 * char for char in "abc"), "x", "y", "z"]}, "minItems": 1}

    def answers(is_short: bool) -> dict[tuple[str, int], tuple[list[int], str]]:
        guided, num_calls = Guided(path, True, Device(), deterministic=True), 0
        start = guided.sampler.start

        def started(*asked: object) -> object:
            nonlocal num_calls
            pending, num_calls = start(*asked), num_calls + 1
            if is_short and num_calls % 2:
                raise OutOfMemory("there is no room for what was drawn")
            return pending

        guided.sampler.start = started
        for seed in range(20):
            guided.submit(f"s{seed}", "json_schema", json.dumps(schema), max_tokens=12, seed=seed, temperature=1)
            guided.run()
        guided.close()
        assert not guided.failures
        return answers_of(guided)

    assert answers(True) == answers(False)
