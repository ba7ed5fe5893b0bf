"""A random model with a tokenizer, and its answers to requests that have grammars."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

from policies import wire
from policies.settings import Engine as EngineSettings
from policies.terms import Sampling
from tests.gateway.texts import byte_level
from tests.worker.tiny import checkpoint
from worker.boarding import Boarding
from worker.engine import Engine
from worker.grammar.store import Grammars
from worker.grammar.vocabulary import read_vocabulary
from worker.runner import Runner
from worker.sampler import Sampler

VOCAB_SIZE = 416
"""More than the tokenizer has, as real models do."""
EOS = 1


def guided_model(directory: Path, **changes: object) -> Path:
    """Its tokens are a byte-level tokenizer's."""
    checkpoint(directory, "LlamaForCausalLM", vocab_size=VOCAB_SIZE, max_position_embeddings=2048, **changes)
    byte_level().save(str(directory / "tokenizer.json"))
    return directory


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    reason: str = ""
    logprobs: list[wire.TokenLogprob] = field(default_factory=list)
    num_accepted_tokens: int = 0
    has_end_token: bool = False
    cut_from: int = 0
    """Tokens that it had when it was first said to be cut; 0: it was not, as long as it went on."""

    @property
    def text(self) -> str:
        return byte_level().decode([i for i in self.token_ids if i != EOS])


class Guided:
    """An engine, and the answers of all steps so far."""

    def __init__(self, path: Path, sampler_is_compiled: bool = True, runner: Any = None, **settings: object) -> None:
        """``runner``: else it loads the model."""
        asked = {"device": "cpu", "dtype": "float32", "num_threads": 1, "block_size": 8, "max_kv_bytes": 32 << 20}
        self.settings = EngineSettings(**{**asked, **settings})
        self.runner = runner or Runner.load(str(path), self.settings)
        by_row = self.settings.deterministic
        self.sampler = sampler = Sampler(self.runner.vocab_size, self.runner.eos_token_ids, sampler_is_compiled, by_row)
        self.executor = ThreadPoolExecutor(2)
        eos_token_ids = frozenset(self.runner.eos_token_ids)
        vocab_size = self.runner.vocab_size
        self.vocabulary = read_vocabulary(path, vocab_size, eos_token_ids)
        self._woken = Event()
        self.grammars = Grammars(
            lambda: self.vocabulary, vocab_size, eos_token_ids, self.executor, self._woken.set, self.settings.grammars
        )
        self._make = lambda: Engine(self.runner, sampler, self.settings, time.monotonic)
        self.engine = self._make()
        self.boarding = Boarding(self.engine, None, time.monotonic, self.grammars)
        self.answers: dict[tuple[str, int], Answer] = {}
        self.failures: dict[str, wire.Failed] = {}

    def submit(
        self,
        request_id: str,
        kind: str,
        source: str,
        is_strict: bool = True,
        num: int = 1,
        emitted=None,
        cut=(),
        adapter: str = "",
        priority: int = 0,
        is_composed: bool = False,
        **sampling,
    ) -> None:
        sampling = {"max_tokens": 100, "seed": 7, **sampling}
        prompt = [5 + (7 * place + len(request_id)) % 300 for place in range(12)]
        grammar = wire.Grammar(kind, source, is_strict, is_composed) if kind else None
        asked = Sampling(**sampling)
        refused = self.boarding.add(
            wire.Submit(
                request_id,
                prompt,
                asked,
                num,
                emitted_token_ids=emitted or {},
                cut_indices=list(cut),
                grammar=grammar,
                adapter=adapter,
                priority=priority,
            )
        )
        if refused is not None:
            self.failures[request_id] = refused

    def step(self) -> None:
        _, failed = self.boarding.turn()
        if self.engine.has_work:
            deltas, faults = self.engine.step()
            failed += faults
            for delta in deltas:
                answer = self.answers.setdefault((delta.request_id, delta.index), Answer())
                answer.token_ids += delta.token_ids
                answer.logprobs += delta.logprobs or []
                if delta.is_cut and not answer.cut_from:
                    answer.cut_from = len(answer.token_ids)
                if delta.finish is not None:
                    answer.reason = delta.finish.reason
                    answer.num_accepted_tokens = delta.finish.num_accepted_tokens
                    answer.has_end_token = delta.finish.has_end_token
        self.failures |= {failure.request_id: failure for failure in failed}

    def run(self) -> Guided:
        while self.boarding.has_waiting or self.engine.has_work:
            self._woken.clear()
            self.step()
            if self.engine.rests:
                self._woken.wait(1.0)  # as the loop does
        self.engine.audit()
        return self

    def close(self) -> None:
        self.executor.shutdown()
