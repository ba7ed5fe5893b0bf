"""Several ranks, as real processes, say what one says: every family, any schedule, whatever is shared or copied."""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import wire
from policies.settings import Engine as EngineSettings
from policies.terms import Sampling
from tests.worker.peft_files import adapter_files
from tests.worker.test_engine_models import FAMILIES, STEMS, run, schedules
from tests.worker.tiny import BLOCK_SIZE, Walk, checkpoint, oracle_logits
from tests.worker.troop import NUM_BLOCKS, Memory, Troop
from worker.adapters import Adapter, AdapterError
from worker.budget import OutOfMemory
from worker.engine import Engine
from worker.inputs import Span
from worker.loading import load_model
from worker.models import Layout
from worker.parallel.adapters import Shelf
from worker.parallel.control import Kept, Read, Refused
from worker.parallel.link import keep_to_this_machine
from worker.parallel.plan import decoded, encoded, in_parts
from worker.runner import Runner
from worker.sampler import Sampler

MIXED = ("gemma2", "gpt-oss")
"""Some of its layers have windows, and others see everything; a stage of two has not both kinds."""
WITH_EXPERTS = ("gpt-oss", "deepseek-v3")
NUMBERS = {family: number for number, family in enumerate(FAMILIES)}
LAYOUTS = [Layout(2), Layout(4), Layout(pipeline=2), Layout(2, 2)]
ENGINE = EngineSettings(device="cpu", dtype="float32", num_threads=1, block_size=BLOCK_SIZE, max_kv_bytes=8 << 20)

ADAPTERS = {number: Adapter(f"adapter {number}", "", 4, {}, 0, number=number) for number in (1, 7, 100_000)}
KINDS = {
    "every matrix": {"target_modules": "all-linear"},
    "the first layer": {"target_modules": r".*layers\.0\.mlp\.down_proj", "r": 3},
    "the last layer": {"target_modules": r".*layers\.2\..*o_proj", "r": 5},
}
"""With several stages, some ranks have nothing of some of them."""
KINDS_OF_EXPERTS = {
    "every matrix": {
        "target_modules": ["q_proj", "k_proj", "v_proj", "q_a_proj", "q_b_proj", "kv_b_proj", "o_proj"],
        "target_parameters": [
            *("experts.gate_up_proj", "experts.down_proj", "gate.weight", "router.weight"),
            *("gate_proj.weight", "down_proj.weight"),
        ],
    },
}

lengths = st.integers(1, 40)
spans = st.lists(
    lengths.flatmap(
        lambda length: st.builds(
            Span,
            st.lists(st.integers(0, 200_000), min_size=length, max_size=length),
            st.integers(0, 5000),
            st.lists(st.integers(0, 100_000), max_size=9),
            st.integers(0, length),
            adapter=st.sampled_from([None, *ADAPTERS.values()]),
        )
    ),
    min_size=1,
    max_size=6,
)


@settings(deadline=None)
@given(
    copies=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1 << 30), st.integers(0, 1 << 30)), max_size=4),
    plan=spans,
    companions=st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(-1, 1 << 30)), max_size=4),
)
def test_a_plan_arrives_as_it_was_sent(copies, plan, companions):
    assert decoded(encoded(copies, plan, companions), ADAPTERS) == (copies, plan, companions)


@settings(deadline=None)
@given(plan=spans, most=st.integers(1, 5), least_tokens=st.integers(1, 30))
def test_parts_hold_the_same_tokens_in_the_same_order_and_ask_for_the_same_logits(plan, most, least_tokens):
    def rows(pieces):
        found = []
        for span in pieces:
            for place, token_id in enumerate(span.token_ids):
                wanted = place >= len(span.token_ids) - span.num_logits
                found.append((token_id, span.start + place, tuple(span.block_ids), wanted, span.adapter))
        return found

    parts = in_parts(plan, most, least_tokens)
    assert rows(itertools.chain(*parts)) == rows(plan)
    sizes = [sum(len(span.token_ids) for span in part) for part in parts]
    assert len(parts) == max(1, min(most, sum(sizes) // least_tokens))
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.skipif(sys.platform != "linux", reason="names of interfaces are the system's")
@pytest.mark.parametrize(
    ("chosen", "expected"),
    [({}, "=lo"), ({"NCCL_SOCKET_IFNAME": "eth0"}, "eth0"), ({"NCCL_SOCKET_FAMILY": "AF_INET6"}, None)],
)
def test_nccl_listens_on_the_loopback_interface_unless_told_otherwise(chosen, expected):
    environ = dict(chosen)
    keep_to_this_machine(environ)
    assert environ.get("NCCL_SOCKET_IFNAME") == expected


class Families:
    """Each model once, on one rank."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.runner, self.adapters = cache(self._runner), cache(self._adapters)
        self._bases = {}
        for family, number in NUMBERS.items():
            architecture, changes = FAMILIES[family]
            self._bases[family] = checkpoint(directory / str(number), architecture, **changes)

    def _runner(self, family: str) -> Runner:
        model = load_model(str(self.directory / str(NUMBERS[family])), ENGINE)
        return Runner.of(model, ENGINE, NUM_BLOCKS)

    def _adapters(self, family: str) -> dict[str, Any]:
        """Directories of one of each kind, with the model as PEFT changes it."""
        kinds = KINDS_OF_EXPERTS if family in WITH_EXPERTS else KINDS
        places = {kind: str(self.directory / f"{family}, {kind}") for kind in kinds}
        return {
            place: adapter_files(Path(place), self._bases[family], seed, **kinds[kind])
            for seed, (kind, place) in enumerate(places.items())
        }


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    return Families(tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda layout: f"{layout.tensor}x{layout.pipeline}")
def troop(request, families):
    troop = Troop(request.param, families.directory, block_size=BLOCK_SIZE)
    yield troop
    troop.close()
    assert not troop.lost


def engine_on(runner, num_blocks=NUM_BLOCKS, **changes):
    runner.num_blocks = num_blocks  # fewer than there are: the rest stays untouched
    ticks = itertools.count()
    sampler = Sampler(runner.vocab_size, runner.eos_token_ids)
    return Engine(runner, sampler, EngineSettings(**changes), lambda: float(next(ticks)))


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=3, deadline=None)
@given(schedule=schedules())
def test_greedy_answers_of_several_ranks_are_those_of_one_on_any_schedule(families, troop, family, schedule):
    arrivals, changes = schedule
    alone, _ = run(engine_on(families.runner(family), **changes), arrivals)
    runner = troop.runner(NUMBERS[family], may_part=True)
    assert (runner.apart is not None) is (family in MIXED and troop.layout.pipeline == 1)
    together, _ = run(engine_on(runner, **changes), arrivals)
    assert together == alone


@settings(max_examples=8, deadline=None)
@given(
    schedule=schedules(),
    rank=st.integers(0, 3),
    num_tokens=st.integers(1, 6),
    call=st.integers(0, 6),
    family=st.sampled_from(["llama", "olmo2"]),
)
def test_where_one_rank_runs_out_of_memory_all_take_smaller_steps_and_nothing_is_lost(
    families, troop, family, schedule, rank, num_tokens, call
):
    arrivals, changes = schedule
    alone, _ = run(engine_on(families.runner(family), **changes), arrivals)
    runner = troop.runner(NUMBERS[family])
    troop.limit(Memory(rank % troop.num_ranks, num_tokens, call))
    try:
        together, _ = run(engine_on(runner, **changes), arrivals)
    finally:
        troop.limit(Memory())
    assert together == alone


@pytest.mark.parametrize("num_logits", [0, 1, 12])
def test_whichever_rank_has_no_memory_for_a_step_the_next_step_is_computed(families, troop, num_logits):
    spans = [Span(STEMS[0][:12], 0, [3, 1], num_logits)]
    expected = families.runner("olmo2").forward(spans)
    runner = troop.runner(NUMBERS["olmo2"])
    for rank, call in itertools.product(range(troop.num_ranks), (0, 1, 2)):
        troop.limit(Memory(rank, 2, call))
        with pytest.raises(OutOfMemory, match="tokens ran out of memory"):
            runner.forward(spans)
        troop.limit(Memory())
        torch.testing.assert_close(runner.forward(spans), expected, atol=1e-4, rtol=1e-4)


def test_ranks_speak_in_one_order_whatever_one_of_them_cannot_compute(families, troop):
    """gloo finds what belongs together by itself; NCCL does what each rank says one after the other."""
    runner = troop.runner(NUMBERS["olmo2"])
    prompt = Span(STEMS[0][:12], 0, [3, 1], 0)
    for spans in ([prompt], [prompt, Span(STEMS[1][:9], 0, [2, 5], 9)], [Span(STEMS[0][12:13], 12, [3, 1], 1)]):
        for rank, call in itertools.product(range(troop.num_ranks), range(6)):
            troop.limit(Memory(rank, 0, call))
            with contextlib.suppress(OutOfMemory):
                runner.forward(spans)
        troop.limit(Memory())
        runner.forward(spans)
    runner.forward([Span([7], 13, [3, 1], 1)])  # by now each has noted what came before
    calls = troop.calls()
    assert sum(map(len, calls)) > 100
    while any(calls):
        meeting = [own[0] for own in calls if own]
        at_once = [each for each in meeting if meeting.count(each) == len(each[1])]
        assert at_once, "each waits for another"
        for kind, ranks, *what in at_once[:1]:
            for rank in ranks:
                assert calls[rank].pop(0) == (kind, ranks, *what)


@pytest.mark.parametrize("family", ["olmo2", "gemma2"])
def test_a_fork_writes_into_its_own_copy_on_every_rank(families, troop, family):
    sampling = Sampling(max_tokens=12, seed=3, temperature=1.2, ignore_eos=True, num_logprobs=2)
    arrivals = [
        (0, wire.Submit("forked", STEMS[0][:21], sampling, num_sequences=3)),
        (6, wire.Submit("cached", STEMS[0][:30], sampling)),
    ]
    alone, _ = run(engine_on(families.runner(family)), arrivals)
    runner = troop.runner(NUMBERS[family], may_part=True)
    copied: list[tuple[int, int]] = []
    copy_block = runner.copy_block
    runner.copy_block = lambda source, target: (copied.append((source, target)), copy_block(source, target))
    together, finishes = run(engine_on(runner), arrivals)
    assert together == alone
    assert copied
    assert finishes["cached", 0].num_cached_tokens == 2 * BLOCK_SIZE


def ready(troop, family):
    """The runner of a model that all ranks have by now."""
    runner = troop.runner(NUMBERS[family])
    runner.num_blocks = NUM_BLOCKS
    runner.forward([Span(STEMS[0][:3], 0, [0], 1)])
    return runner


@pytest.mark.parametrize("family", ["llama", "phi3", *WITH_EXPERTS])
def test_adapters_of_several_ranks_say_what_those_of_one_and_peft_say(families, troop, family):
    made = families.adapters(family)
    runners = families.runner(family), ready(troop, family)
    prompts = [STEMS[place % 3][: 5 + 4 * place] for place in range(len(made) + 2)]
    walks = []
    for runner in runners:
        runner.num_blocks = NUM_BLOCKS
        adapters = [runner.load_adapter(source, source, 1 << 24) for source in made]
        walks.append(Walk(runner, prompts, 3, random.Random(1), [*adapters, None, adapters[0]]))
    alone, together = walks
    assert together.token_ids == alone.token_ids
    oracles = [*made.values(), None, next(iter(made.values()))]
    for oracle, token_ids, one, several in zip(oracles, alone.token_ids, alone.logits, together.logits, strict=True):
        torch.testing.assert_close(torch.stack(several), torch.stack(one), atol=1e-3, rtol=1e-3)
        if oracle is not None:
            expected = oracle_logits(oracle, token_ids[:-1])
            torch.testing.assert_close(torch.stack(several), expected, atol=2e-3, rtol=2e-3)


def test_what_one_rank_refuses_all_do_and_what_is_given_up_all_forget(families, troop):
    runner = ready(troop, "llama")
    every, first, _ = families.adapters("llama")
    with pytest.raises(AdapterError, match=r"engine\.max_adapter_bytes is 100$") as caught:
        runner.load_adapter("first", first, 100)
    # The first layer is not on the rank that asks where there are several stages.
    assert str(caught.value).startswith("rank ") is (troop.layout.pipeline > 1)
    span = Span(STEMS[1][:9], 0, [1, 2], 1)
    base = runner.forward([span])
    for source in (first, every, first):
        adapter = runner.load_adapter("one id", source, 1 << 24)
        alone = families.runner("llama")
        expected = alone.forward([replace(span, adapter=alone.load_adapter("one id", source, 1 << 24))])
        changed = runner.forward([replace(span, adapter=adapter)])
        torch.testing.assert_close(changed, expected, atol=1e-3, rtol=1e-3)
        assert (changed - base).abs().max() > 1e-3
        del adapter
        assert torch.equal(runner.forward([span]), base)
    adapter = runner.load_adapter("one id", first, 1 << 24)
    number = adapter.number
    del adapter
    assert runner._adapters.gone() == [number]


def test_another_rank_keeps_what_it_has_read_until_it_is_told_that_rank_0_has_not(families):
    shelf = Shelf(families.runner("llama"))
    every, first, _ = families.adapters("llama")
    kept = shelf.read(Read(1, "every", every, 1 << 24, "", []))
    assert isinstance(kept, Kept)
    assert kept.rank == 4
    assert isinstance(shelf.read(Read(2, "first", first, 100, "", [])), Refused)
    assert list(shelf.adapters) == [1]
    assert isinstance(shelf.read(Read(3, "first", first, 1 << 24, "", [1, 2])), Kept)
    assert list(shelf.adapters) == [3]
    shelf.drop([3])
    assert not shelf.adapters
