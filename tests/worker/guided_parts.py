"""What walks over answers that are held to grammars take in place of a model, of threads and of guesses."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np
import torch

from tests.worker.guided import EOS, VOCAB_SIZE
from tests.worker.scripted import ScriptedRunner
from worker.grammar import aside
from worker.sequence import Sequence
from worker.speculation import Draft

NUM_KINDS = 4096
"""Of logits."""


class Device(ScriptedRunner):
    """What may follow a history is as likely as its hash has it, in any company."""

    def __init__(self, **asked: Any) -> None:
        super().__init__(vocab_size=VOCAB_SIZE, max_model_tokens=128, eos_token_ids=(EOS,), **asked)
        self._likely = np.random.default_rng(7).normal(0.0, 3.0, (NUM_KINDS, VOCAB_SIZE)).astype(np.float32)

    def forward(self, spans, sampled_before=None):
        super().forward(spans, None if sampled_before is None else sampled_before.clamp(min=0).tolist())
        self.steps.clear()
        kinds = [
            int(self.memory[self._slot(span, position)]) % NUM_KINDS
            for span in spans
            for position in range(span.start + len(span.token_ids) - span.num_logits, span.start + len(span.token_ids))
        ]
        return torch.from_numpy(self._likely[kinds])


class Threads(aside.Aside):
    """Those that follow answers aside, of which chance says when each has come to what it was given."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(lambda: None)
        self._chance = chance
        self._given: list[tuple[Future[Any], Callable[[], Any]]] = []
        self.waits = chance.choice([0.0, 0.3, 0.9])
        """How often what is waited for comes in time."""

    def start(self) -> None:
        pass

    def submit(self, call: Callable[[], Any], tenant: bytes = b"", is_slow: bool = False) -> Future[Any]:
        future = Future[Any]()
        self._given.append((future, call))
        return future

    def wait(self, future: Future[Any]) -> None:
        if self._chance.random() < self.waits:
            self.go_on([each for each in self._given if each[0] is future])

    def go_on(self, some: list[tuple[Future[Any], Callable[[], Any]]] | None = None) -> None:
        """With these, or one of all."""
        for each in some if some is not None else self._chance.sample(self._given, min(1, len(self._given))):
            self._given.remove(each)
            future, call = each
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except Exception as error:
                    future.set_exception(error)


class AtOnce(Executor):
    """No threads."""

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        future = Future[Any]()
        try:
            future.set_result(call(*arguments, **named))
        except Exception as error:
            future.set_exception(error)
        return future


class Prophet:
    """Knows how answers go on, and says so more or less."""

    name = "prophet"
    is_free = True

    def __init__(self, chance: random.Random, told: Callable[[Sequence], list[int]]) -> None:
        self._chance, self._told = chance, told

    def propose(self, sequences, num_tokens):
        return [self._draft(*each) for each in zip(sequences, num_tokens, strict=True)]

    def _draft(self, sequence, num_tokens):
        chance = self._chance
        token_ids = self._told(sequence)[len(sequence.output_token_ids) :][: chance.randint(0, num_tokens)]
        if token_ids and chance.random() < 0.4:
            token_ids[chance.randrange(len(token_ids))] = chance.randrange(VOCAB_SIZE)
        return Draft(token_ids, chance.randrange(20))

    def learn(self, sequence):
        pass

    def forget(self, sequence):
        pass
