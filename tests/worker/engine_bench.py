"""An engine on the device that knows what it should read, and what came of it."""

import itertools

from policies import wire
from policies.settings import Engine as EngineSettings
from policies.terms import Sampling
from tests.worker.scripted import ScriptedRunner, ScriptedSampler, answer
from worker.engine import Engine


class Bench:
    """An engine, and the deltas of all steps so far."""

    def __init__(self, runner=None, **settings):
        self.runner = runner or ScriptedRunner(num_blocks=64)
        self.sampler = ScriptedSampler(window=self.runner.window)
        self.settings = EngineSettings(**{"block_size": 32, "max_step_tokens": 64, **settings})
        ticks = itertools.count()
        self.engine = Engine(self.runner, self.sampler, self.settings, now=lambda: 0.01 * next(ticks))
        self.answers = {}
        self.finishes = {}
        self.failures = {}

    def submit(
        self,
        request_id,
        prompt,
        max_tokens=5,
        seed=0,
        *,
        num_sequences=1,
        priority=0,
        salt=b"",
        promise=(),
        **sampling,
    ):
        """``promise``: further fields of ``Submit``."""
        sampling = Sampling(max_tokens=max_tokens, seed=seed, **{"ignore_eos": True, **sampling})
        submit = wire.Submit(request_id, list(prompt), sampling, num_sequences, priority, salt, **dict(promise))
        return self.engine.add(submit)

    def step(self):
        """One step; who moved in it."""
        deltas, failed = self.engine.step()
        self.engine.audit()
        self.take(deltas)
        self.failures |= {failure.request_id: failure for failure in failed}
        return {delta.request_id for delta in deltas}

    def take(self, deltas):
        for delta in deltas:
            self.answers.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
            if delta.finish is not None:
                self.finishes[delta.request_id, delta.index] = delta.finish

    def run(self):
        for _ in range(10_000):
            if not self.engine.has_work:
                return self
            self.step()
        raise AssertionError("the engine does not come to an end")

    def cancel(self, request_id, index=None):
        deltas = self.engine.cancel(request_id, index)
        self.engine.audit()
        self.take(deltas)
        return deltas


def tokens(number, first=1):
    return [1 + (first + position) % 49 for position in range(number)]


def expected(prompt, max_tokens=5, seed=0):
    return answer(prompt, seed, max_tokens, eos_token_ids=())
