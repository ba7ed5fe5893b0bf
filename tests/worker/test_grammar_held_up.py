"""Answers whose masks are not there yet: what they hold meanwhile is others', and what they are is not raised by it."""

from __future__ import annotations

import itertools
import threading

import pytest

from tests.worker.guided import Guided, guided_model
from worker.boarding import Boarding
from worker.engine import Engine
from worker.grammar import store

SUMS = 'start: sum\nsum: term (("+" | "-") term)*\nterm: /[0-9]{1,3}/ | "(" sum ")"\n'
MAX_STEPS = 200


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return guided_model(tmp_path_factory.mktemp("guided"))


@pytest.fixture
def blocked():
    """What has a guided engine's threads do nothing until the test is over."""
    let_go = threading.Event()

    def block(guided: Guided) -> None:
        guided.grammars._aside.wait = lambda future: None
        for is_slow in (False, True):
            guided.grammars._aside.submit(let_go.wait, is_slow=is_slow)

    yield block
    let_go.set()


def step_until(guided: Guided, is_so) -> int:
    """How many steps it takes."""
    for num_steps in range(MAX_STEPS):
        if is_so():
            return num_steps
        guided.step()
    raise AssertionError("it never comes to that")


def held_up(guided: Guided, blocked, num: int, **asked) -> None:
    """So many answers begin, and stop."""
    for number in range(num):
        guided.submit(f"held{number}", "lark", SUMS, max_tokens=90, min_tokens=80, seed=number, **asked)
    while len(guided.answers) < num:
        guided.step()
    blocked(guided)
    step_until(guided, lambda: guided.engine._scheduler.num_held_up == num)


def test_places_of_answers_that_are_held_up_are_lent(path, blocked):
    guided = Guided(path, max_sequences=2, deterministic=True)
    held_up(guided, blocked, 2)
    assert guided.engine.stats().num_idle == 2
    for number in range(5):
        guided.submit(f"plain{number}", "", "", max_tokens=9, seed=number, ignore_eos=True)
    most = 0
    for _ in range(MAX_STEPS):
        guided.step()
        guided.engine.audit()
        most = max(most, guided.engine.stats().num_running)
    assert most == 4
    assert all(len(guided.answers[f"plain{number}", 0].token_ids) == 9 for number in range(5))
    guided.close()


def test_a_prompt_that_is_held_up_takes_no_others_part_of_the_steps(path, blocked, monkeypatch):
    monkeypatch.setattr(store, "_is_wide", lambda grammar: True)
    guided = Guided(path, max_step_tokens=13, prefix_cache=False)
    blocked(guided)
    guided.submit("held", "json_schema", '{"type": "boolean"}', max_tokens=9)
    while not guided.engine.has_work:
        guided.step()
    guided.submit("plain", "", "", max_tokens=9)
    assert step_until(guided, lambda: ("plain", 0) in guided.answers) <= 3
    assert ("held", 0) not in guided.answers
    guided.close()


def test_who_was_held_up_for_long_is_no_more_important_for_that(path, blocked):
    guided = Guided(path)
    now = itertools.count(0.0, 7.0).__next__
    guided.engine = Engine(guided.runner, guided.sampler, guided.settings, now)
    guided.boarding = Boarding(guided.engine, None, now, guided.grammars)
    held_up(guided, blocked, 1, priority=2)
    for _ in range(MAX_STEPS):
        guided.step()
    assert [sequence.place[0] for sequence in guided.engine._scheduler.running] == [2]
    guided.engine.cancel("held0")
    assert guided.engine.stats().num_idle == 0
    guided.close()
