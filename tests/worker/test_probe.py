"""What a worker knows of its own speed before it serves anybody."""

from functools import partial

import pytest

from policies.costs import Work, pairs
from policies.settings import Engine as EngineSettings
from tests.worker.scripted import ScriptedRunner, ScriptedSampler
from worker.engine import Engine
from worker.probe import ProbeFailed, probe


class PacedRunner(ScriptedRunner):
    """Takes a time for its work that is known, on a clock of its own."""

    def __init__(self, **changes):
        super().__init__(num_blocks=600, **changes)
        self.seconds = 0.0

    pace = 1.0

    def forward(self, spans, sampled_before=None):
        num_decodes = sum(len(span.token_ids) == 1 for span in spans)
        num_prompt_tokens = sum(len(span.token_ids) for span in spans) - num_decodes
        self.seconds += self.pace * (2e-3 + 1e-4 * num_decodes + 2e-5 * num_prompt_tokens)
        return super().forward(spans, sampled_before)


def probed(runner, **changes):
    return probe(
        partial(Engine, runner, ScriptedSampler(), EngineSettings(**changes), lambda: runner.seconds),
        runner.max_model_tokens,
    )


def test_the_first_prompt_beside_streams_is_planned_with_what_it_will_take():
    runner = PacedRunner(max_model_tokens=2000)
    costs = probed(runner)
    assert costs.known
    assert costs.predict(Work(0, 8, 8 * 20)) == pytest.approx(2.8e-3, rel=0.1)
    assert costs.predict(Work(100, 8, 8 * 20, pairs(100, 0), 1)) == pytest.approx(4.8e-3, rel=0.1)
    beside = [step for step in runner.steps if len(step) > 1 and any(num_tokens > 16 for _, num_tokens in step)]
    assert all(sum(num_tokens == 1 for _, num_tokens in step) == 8 for step in beside)
    assert max(num_tokens for step in beside[-4:] for _, num_tokens in step) < 200


def test_before_anybody_is_served_a_token_is_drawn_as_clients_may_ask_for_it():
    runner, asked = PacedRunner(max_model_tokens=64), []

    class Listening(ScriptedSampler):
        def start(self, logits, rows, maxima=None):
            asked.append(rows[0].sampling)
            return super().start(logits, rows, maxima)

    probe(partial(Engine, runner, Listening(), EngineSettings(), lambda: runner.seconds), 64)
    first, *_, last = asked
    assert first.temperature > 0
    assert first.top_p < 1
    assert first.num_logprobs == 1
    assert last.temperature == 0


@pytest.mark.parametrize("pace", [1.0, 10.0, 100.0])
def test_a_slow_machine_is_known_as_well_and_in_little_more_time(pace, monkeypatch):
    runner = PacedRunner(max_model_tokens=2000)
    runner.pace = pace
    monkeypatch.setattr("worker.probe.time.monotonic", lambda: runner.seconds)
    costs = probed(runner)
    # Twelve steps at least, however slow they are.
    assert runner.seconds < (1.2 if pace < 100 else 3.5)
    true_s = [pace * 12.24e-3, pace * 2.1e-3, pace * 2.8e-3, pace * 4.8e-3]
    works = [Work(512, 0, 0, pairs(512, 0), 1), Work(0, 1, 500), Work(0, 8, 8 * 500), Work(100, 8, 8 * 20, 5050, 1)]
    for work, seconds in zip(works, true_s, strict=True):
        assert costs.predict(work) == pytest.approx(seconds, rel=0.3), work


@pytest.mark.parametrize("changes", [{"max_sequences": 1}, {"max_step_tokens": 1}, {"max_step_tokens": 40}])
def test_an_engine_of_little_room_is_probed_too(changes):
    assert probed(PacedRunner(max_model_tokens=64), **changes).known


def test_a_model_that_cannot_compute_is_found_out():
    runner = PacedRunner(max_model_tokens=2000)

    def fault(_):
        raise RuntimeError("no such instruction")

    runner.fault = fault
    with pytest.raises(ProbeFailed, match="no such instruction"):
        probed(runner)
