"""Our engine under a closed batch, and its streams while a long prompt arrives."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from time import perf_counter

import msgspec

from policies import settings, wire
from policies.terms import Sampling
from worker.bench import measures
from worker.bench.measures import Round, SharedPrefix, Stall, Timeline
from worker.engine import Engine
from worker.probe import probe
from worker.process import freeze_objects
from worker.runner import Runner
from worker.sampler import Sampler

Prompts = list[list[int]]


class EngineFailed(Exception):
    """The engine ended a request of the measurement; the message says why."""


class Prompter:
    """Random prompts that share nothing, so that no prefix is ever found."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._vocab_size = vocab_size

    def take(self, num: int, num_tokens: int) -> Prompts:
        return [[self._random.randrange(self._vocab_size) for _ in range(num_tokens)] for _ in range(num)]


class Ours:
    """One engine and what it is asked to write: always exactly so many tokens."""

    def __init__(self, runner: Runner, engine: settings.Engine, sampling: Sampling) -> None:
        self.runner, self.vocab_size = runner, runner.vocab_size
        self._sampling = sampling
        sampler = Sampler(runner.vocab_size, runner.eos_token_ids, by_row=engine.deterministic)
        make = partial(Engine, runner, sampler, engine, perf_counter)
        # As a worker does before it serves.
        self._engine = make(probe(make, runner.max_model_tokens))
        freeze_objects()
        # A step is to be a token: what guessing gains depends on the text, and is measured on its own.
        self._engine.speculates = False
        self._timelines: dict[str, Timeline] = {}
        self.written: list[list[int]] = []
        """Token ids of each sequence of the last batch."""

    def batch(self, prompts: Prompts, num_output_tokens: int) -> Round:
        """All prompts at once, to the end. Raises EngineFailed."""
        began_at = perf_counter()
        timelines = [self._submit(prompt, num_output_tokens) for prompt in prompts]
        self._run(lambda: self._engine.has_work)
        self.written = [timeline.token_ids for timeline in timelines]
        return measures.round_of(timelines, perf_counter() - began_at, len(prompts) * num_output_tokens)

    def stall(self, prompts: Prompts, intruder: Sequence[int], num_quiet_tokens: int) -> Stall:
        """Streams that write so many tokens, then beside a long prompt, then as many again. Raises EngineFailed."""
        # Long enough for any prompt: a step advances it by at least one token.
        streams = [self._submit(prompt, 2 * num_quiet_tokens + len(intruder)) for prompt in prompts]
        self._run(lambda: any(len(stream.token_ats) < num_quiet_tokens for stream in streams))
        arrived = self._submit(intruder, num_quiet_tokens)
        self._run(lambda: len(arrived.token_ats) < num_quiet_tokens)
        for request_id in list(self._timelines):
            self._engine.cancel(request_id)
        self._timelines.clear()
        return measures.stall_of(streams, arrived)

    def steady(self, prompts: Prompts, num_tokens: int, during: AbstractContextManager[object]) -> None:
        """All prompts at once; ``during`` is around the steps that write so many tokens for each, once all are being
        written. Raises EngineFailed.
        """
        # Whoever began first has written more than the last one needs to begin.
        streams = [self._submit(prompt, 2 * num_tokens + 64) for prompt in prompts]
        self._run(lambda: any(not stream.token_ats for stream in streams))
        wanted = len(streams[-1].token_ats) + num_tokens
        with during:
            self._run(lambda: len(streams[-1].token_ats) < wanted)
        for request_id in list(self._timelines):
            self._engine.cancel(request_id)
        self._timelines.clear()

    def shared_prefix(
        self, shared: Sequence[int], own: Sequence[Sequence[int]], others: Sequence[Sequence[int]]
    ) -> SharedPrefix:
        """Prompts of ``shared`` and some tokens of their own: the first of ``own`` finds nothing cached, the rest come
        one after another, ``others`` all at once. A single token is written for each. Raises EngineFailed.
        """
        ttfts_s = []
        for tail in own:
            timelines = [self._submit([*shared, *tail], 1)]
            self._run(lambda: self._engine.has_work)
            ttfts_s.append(timelines[0].token_ats[0] - timelines[0].submitted_at)
        timelines = [self._submit([*shared, *tail], 1) for tail in others]
        self._run(lambda: self._engine.has_work)
        return measures.shared_prefix_of(len(shared), ttfts_s, timelines)

    def _submit(self, prompt: Sequence[int], num_output_tokens: int) -> Timeline:
        request_id = f"bench-{len(self._timelines)}-{perf_counter()}"
        sampling = msgspec.structs.replace(self._sampling, max_tokens=num_output_tokens)
        failed = self._engine.add(wire.Submit(request_id, list(prompt), sampling))
        if failed is not None:
            raise EngineFailed(f"the engine refused a prompt of {len(prompt)} tokens: {failed.reason}")
        self._timelines[request_id] = timeline = Timeline(perf_counter())
        return timeline

    def _run(self, wanted: Callable[[], bool]) -> None:
        while wanted():
            deltas, failed = self._engine.step()
            at = perf_counter()
            if failed:
                raise EngineFailed(f"the engine failed a request: {failed[0].reason}")
            for delta in deltas:
                timeline = self._timelines[delta.request_id]
                timeline.token_ats += [at] * len(delta.token_ids)
                timeline.token_ids += delta.token_ids
                if delta.finish is not None:
                    del self._timelines[delta.request_id]
