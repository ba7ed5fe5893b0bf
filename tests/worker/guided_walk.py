"""All that can happen to answers that are held to grammars, by chance: each is what it is alone, within the step."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from policies import wire
from policies.batching.room import MAX_PARKED
from policies.terms import Sampling
from tests.worker.guided import VOCAB_SIZE, Answer, Guided
from tests.worker.guided_parts import AtOnce, Device, Prophet, Threads
from tests.worker.schemas import a_schema
from worker.boarding import Boarding
from worker.budget import OutOfMemory
from worker.drawing import Drawing
from worker.engine import Engine
from worker.grammar import aside, in_time, store
from worker.grammar.masks import MaskMaker
from worker.handing import InTurn
from worker.sequence import Sequence
from worker.speculation import Speculation, SuffixDrafter
from worker.speculation.forced import ForcedDrafter

NUM_CASES, NUM_OPERATIONS = 6, 60
MAX_STEPS = 5000
"""Until all that is left has ended."""
SUMS = 'start: sum\nsum: term (("+" | "-") term)*\nterm: /[0-9]{1,3}/ | "(" sum ")"\n'
EXPRESSION = "(naïve|[a-f]{2,9}[0-9 ]+|東京.*|forced words)+"
REASONS = ("this was chance", "no usable logits", "nothing but stop tokens")
"""Of failures that the walk itself has brought about."""


@dataclass
class Case:
    """A request, and what is answered to it alone."""

    submit: wire.Submit
    answers: dict[int, Answer]
    failure: wire.Failed | None


def a_request(chance: random.Random, number: int) -> wire.Submit:
    kind, source = chance.choice(
        [
            ("json_schema", json.dumps(a_schema(random.Random(chance.random())))),
            ("json_schema", json.dumps(a_schema(random.Random(chance.random())))),
            ("json_schema", '{"type": "array", "items": {"enum": ["again and again", "xq"]}, "minItems": 3}'),
            ("regex", EXPRESSION),
            ("lark", SUMS),
            ("choice", '["a", "b"]'),
            ("", ""),
        ]
    )
    some = [chance.randrange(2, VOCAB_SIZE) for _ in range(3)]
    wishes: list[dict[str, Any]] = [
        *({}, {}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.05}, {"presence_penalty": 1.5}),
        *({"repetition_penalty": 1.3}, {"num_logprobs": 2}, {"min_tokens": 9}, {"stop_token_ids": tuple(some)}),
        *({"min_tokens": 5, "stop_token_ids": tuple(some)}, {"logit_bias": dict.fromkeys(some, 6.0)}),
        *({"ignore_eos": True}, {"bad_words": tuple((token_id,) for token_id in range(5, VOCAB_SIZE, 3))}),
    ]
    asked = {"temperature": chance.choice([0.0, 0.5, 1.0]), "max_tokens": chance.choice([1, 2, 8, 15, 30])}
    stem = [5 + (7 * place + chance.randrange(2)) % 300 for place in range(40)]
    return wire.Submit(
        f"case{number}",
        stem[: chance.choice([3, 12, 40])],
        Sampling(**{"seed": chance.randrange(1 << 32), **asked, **chance.choice(wishes), **chance.choice(wishes)}),
        chance.choice([1, 1, 2, 3, 4]),
        grammar=wire.Grammar(kind, source, chance.random() < 0.4) if kind else None,
    )


def cases(path: Path, seed: int, num: int) -> list[Case]:
    """Each is answered alone."""
    chance, found = random.Random(seed), []
    guided = Guided(path, True, Device(num_blocks=64, block_size=8), deterministic=True)
    guided.engine.speculates = False
    for number in range(num):
        submit = a_request(chance, number)
        refused = guided.boarding.add(submit)
        guided.run()
        answers = {index: guided.answers[submit.request_id, index] for index in submit.indices if not refused}
        found.append(Case(submit, answers, refused or guided.failures.get(submit.request_id)))
    guided.close()
    return found


class Walk:
    """One engine; after ``run`` each of its requests has had its end."""

    def __init__(self, path: Path, seed: int, known: list[Case], monkeypatch: Any) -> None:
        """``known``: of which some are asked."""
        self.chance = chance = random.Random(seed)
        self.overlaps = chance.random() < 0.4
        is_compiled = not self.overlaps and chance.random() < 0.7
        self.cases = chance.sample(known, NUM_CASES)
        self._patch(monkeypatch)
        max_sequences = chance.choice([1, 3, 16])
        block_size, num_blocks = chance.choice([(2, 64), (4, 32), (8, 40), (8, 200)])
        runner = Device(num_blocks=num_blocks, block_size=block_size, overlaps=self.overlaps)
        self.guided = guided = Guided(
            path,
            is_compiled,
            runner,
            deterministic=True,
            max_sequences=max_sequences,
            max_step_tokens=chance.choice([max(4, max_sequences), 20, 256]),
            prefix_cache=chance.random() < 0.8,
        )
        guided.grammars._threads = InTurn(AtOnce())
        self.threads = guided.grammars._aside = Threads(chance)
        ticks = itertools.count()
        drafters = [Prophet(chance, self.told), ForcedDrafter(), SuffixDrafter()]
        speculation = Speculation(drafters, chance.choice([2, 8]))
        now = lambda: 0.01 * next(ticks)  # noqa: E731
        self.engine = guided.engine = Engine(guided.runner, guided.sampler, guided.settings, now, None, speculation)
        self.engine.speculates = chance.random() < 0.6
        guided.boarding = Boarding(self.engine, None, now, guided.grammars)
        self.fault_rate = chance.choice([0, 0, 0.01, 0.05])
        self._break()
        self.live: dict[str, tuple[Case, wire.Submit, set[int]]] = {}
        self.asked: dict[str, tuple[Case, wire.Submit]] = {}
        self.cancelled: set[tuple[str, int]] = set()
        self.request_ids = map(str, itertools.count())

    def _patch(self, monkeypatch: Any) -> None:
        """Which grammars are followed where, and when they leave the step."""
        chance, share = self.chance, self.chance.choice([0.0, 0.3, 1.0])
        limits = chance.choice([[math.inf], [0, 3, 20, math.inf], [3, 10, 30, 60]])

        class Leaving(aside.Rules):
            def took(self, seconds: float) -> None:
                if not hasattr(self, "num_left"):
                    self.num_left = chance.choice(limits)
                self.num_left -= 1
                if self.num_left < 0:
                    self.leave()

        num_spare, is_alone = chance.choice([0, 1]), chance.random() < 0.5

        class Maker(MaskMaker):
            def __init__(self, is_for_device: bool) -> None:
                super().__init__(is_for_device)
                self._num_spare, self._is_alone = num_spare, is_alone

        is_for_device = self.overlaps and chance.random() < 0.5

        def masks(drawing: Drawing, sequences, _):
            if drawing._mask_maker is None:
                drawing._mask_maker = Maker(is_for_device)
            return drawing._mask_maker.make(sequences)

        monkeypatch.setattr(Drawing, "_masks", masks)
        monkeypatch.setattr(store, "Rules", Leaving)
        monkeypatch.setattr(store, "_is_wide", lambda grammar: chance.random() < share)
        if chance.random() < 0.3:
            monkeypatch.setattr(in_time, "MAX_STEP_S", 0.0)

    def _break(self) -> None:
        """What computes fails now and then."""
        chance, runner, sampler = self.chance, self.guided.runner, self.guided.sampler
        forward, start = runner.forward, sampler.start

        def maybe(rate: float = 1.0) -> None:
            if chance.random() < rate * self.fault_rate:
                raise chance.choice([OutOfMemory, OutOfMemory, ValueError])("this was chance")

        def forwarded(spans, sampled_before=None):
            maybe()
            logits = forward(spans, sampled_before)
            if len(logits) and chance.random() < self.fault_rate / 3:
                logits = logits.clone()
                logits[chance.randrange(len(logits))] = torch.nan
            return logits

        def started(logits, rows, maxima=None, masks=None):
            maybe()
            pending = start(logits, rows, maxima, masks)
            maybe()
            return pending

        runner.forward, sampler.start = forwarded, started

    def told(self, sequence: Sequence) -> list[int]:
        case, _ = self.asked[sequence.request.request_id]
        answer = case.answers.get(sequence.index)
        return answer.token_ids if answer else []

    def submit(self) -> None:
        chance = self.chance
        case, request_id = chance.choice(self.cases), next(self.request_ids)
        submit = msgspec.structs.replace(
            case.submit,
            request_id=request_id,
            priority=chance.choice([0, 0, 1, 5]),
            tenant=chance.choice([b"x", b"y"]),
            cache_salt=chance.choice([b"", b"a"]),
            ttft_s=chance.choice([None, 0.05, 60.0]),
            tpot_s=chance.choice([None, 0.01, 10.0]),
        )
        if chance.random() < 0.3 and not case.failure:
            submit = self.resumed(submit, case)
        self.asked[request_id] = case, submit
        refused = self.guided.boarding.add(submit)
        if refused is not None:
            assert refused.code == "overloaded" or case.failure, refused
            del self.asked[request_id]
        else:
            self.live[request_id] = case, submit, set(submit.indices)

    def resumed(self, submit: wire.Submit, case: Case) -> wire.Submit:
        """The same request after some of it was computed elsewhere."""
        emitted, cut = {}, []
        for index, whole in case.answers.items():
            if self.chance.random() < 0.8:
                num = self.chance.randrange(len(whole.token_ids))
                emitted[index] = whole.token_ids[:num]
                cut += [index] if 0 < whole.cut_from <= num else []
        return msgspec.structs.replace(submit, emitted_token_ids=emitted, cut_indices=cut)

    def cancel(self) -> None:
        if self.live:
            request_id = self.chance.choice(list(self.live))
            _, _, indices = self.live[request_id]
            index = self.chance.choice([None, *indices])
            for delta in self.guided.boarding.cancel(request_id, index):
                assert delta.finish is not None
                self.cancelled.add((request_id, delta.index))
                self.over(request_id, delta.index)

    def over(self, request_id: str, index: int) -> None:
        _, _, indices = self.live[request_id]
        indices.remove(index)
        if not indices:
            del self.live[request_id]

    def step(self) -> None:
        guided = self.guided
        before = {key for key, answer in guided.answers.items() if answer.reason}
        guided.step()
        for key, answer in guided.answers.items():
            if answer.reason and key not in before:
                self.check(*key)
                self.over(*key)
        for request_id in [each for each in self.live if each in guided.failures]:
            case, _, _ = self.live.pop(request_id)
            reason = guided.failures[request_id].reason
            alike = case.failure is not None and reason == case.failure.reason
            assert alike or any(each in reason for each in REASONS), reason
        assert self.engine.stats().num_running <= MAX_PARKED * self.engine.max_sequences
        self.engine.audit()

    def check(self, request_id: str, index: int) -> None:
        case, submit = self.asked[request_id]
        answer, whole = self.guided.answers[request_id, index], case.answers[index]
        emitted = submit.emitted_token_ids.get(index, [])
        assert (emitted + answer.token_ids, answer.reason) == (whole.token_ids, whole.reason), (request_id, index)
        assert len(answer.logprobs) == (len(answer.token_ids) if whole.logprobs else 0)
        for own, other in zip(answer.logprobs, whole.logprobs[len(emitted) :], strict=True):
            assert own.logprob == pytest.approx(other.logprob, abs=1e-3)
            assert own.top_token_ids == other.top_token_ids

    def run(self, num_operations: int = NUM_OPERATIONS) -> None:
        chance = self.chance
        eagerness = chance.choice([0.1, 0.25, 0.4])
        hurry = chance.choice([0.1, 0.5, 1.0])
        for _ in range(num_operations):
            draw = chance.random()
            if draw < eagerness:
                self.submit()
            elif draw < eagerness + 0.04:
                self.cancel()
            else:
                self.step()
                if chance.random() < hurry or self.engine.rests:
                    self.threads.go_on()
        for _ in range(MAX_STEPS):
            if not self.live and not self.engine.has_work:
                break
            if chance.random() < 0.01:
                self.cancel()
            self.step()
            if chance.random() < hurry or self.engine.rests or self.guided.boarding.has_waiting:
                self.threads.go_on()
        assert not self.live, "some have no end"
        assert not self.engine.has_work
        assert not self.engine._scheduler._aside
        assert not self.guided.boarding.has_waiting
        assert self.engine.stats().num_used_blocks == 0
