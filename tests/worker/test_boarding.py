"""Requests with adapters on their way into the engine: what each says is its adapter's, found in the cache or not."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from policies import wire
from policies.settings import Engine as EngineSettings
from policies.terms import Sampling
from tests.worker.peft_files import adapter_files
from tests.worker.tiny import checkpoint
from worker.adapters.store import Store
from worker.boarding import Boarding
from worker.engine import Engine
from worker.runner import Runner
from worker.sampler import Sampler

NUM_ADAPTERS, MAX_TOKENS = 3, 8
PROMPT = [3 + 7 * place % 90 for place in range(40)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A runner, the adapters' directories, and what PEFT says of the prompt with each and without any."""
    directory = tmp_path_factory.mktemp("tiny")
    base = checkpoint(directory / "base", "LlamaForCausalLM")
    asked = EngineSettings(device="cpu", dtype="float32", num_threads=1, block_size=8, max_kv_bytes=8 << 20)
    models = [base, *(adapter_files(directory / f"a{number}", base, number) for number in range(NUM_ADAPTERS))]
    prompt = torch.tensor([PROMPT])
    mask = torch.ones_like(prompt)
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": MAX_TOKENS, "eos_token_id": None}
    said = [model.generate(input_ids=prompt, **options)[0, len(PROMPT) :].tolist() for model in models]
    return Runner.load(str(directory / "base"), asked), directory, said


@pytest.mark.parametrize("num_in_memory", [1, 2, NUM_ADAPTERS])
def test_equal_prompts_share_no_blocks_between_adapters_however_few_of_them_fit(tiny, num_in_memory):
    runner, directory, said = tiny
    one = runner.load_adapter("one", str(directory / "a0"), 1 << 20)
    ticks = itertools.count()
    now = lambda: float(next(ticks))  # noqa: E731
    asked = EngineSettings(max_step_tokens=24, block_size=8)
    engine = Engine(runner, Sampler(runner.vocab_size, runner.eos_token_ids), asked, now)
    sampling = Sampling(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    with ThreadPoolExecutor(1) as reader:
        store = Store(runner.load_adapter, num_in_memory * one.num_bytes, reader, lambda: None)
        boarding = Boarding(engine, store, now)
        for number in range(NUM_ADAPTERS):
            assert boarding.load(wire.LoadAdapter(f"a{number}", str(directory / f"a{number}"))) is None
        answers, cached = {}, {}
        for turn in range(2):
            names = ["", *(f"a{number}" for number in range(NUM_ADAPTERS))]
            for name in names:
                assert boarding.add(wire.Submit(f"{name}-{turn}", PROMPT, sampling, adapter=name)) is None
            while boarding.has_waiting or engine.has_work:
                _, failed = boarding.turn()
                assert not failed
                deltas, failed = engine.step()
                assert not failed
                for delta in deltas:
                    answers.setdefault(delta.request_id, []).extend(delta.token_ids)
                    if delta.finish is not None:
                        cached[delta.request_id] = delta.finish.num_cached_tokens
                        boarding.let_go(delta.request_id)
                boarding.audit()
        engine.audit()
    assert answers == {f"{name}-{turn}": said[index] for turn in range(2) for index, name in enumerate(names)}
    assert [cached[f"{name}-0"] for name in names] == [0] * 4
    assert [cached[f"{name}-1"] for name in names] == [32] * 4


def test_an_adapter_that_nobody_loaded_is_refused_and_a_wait_can_be_given_up(tiny):
    runner, directory, _ = tiny
    engine = Engine(runner, Sampler(runner.vocab_size, runner.eos_token_ids), EngineSettings(block_size=8), lambda: 0.0)
    sampling = Sampling(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    with ThreadPoolExecutor(1) as reader:
        boarding = Boarding(engine, Store(runner.load_adapter, 1 << 20, reader, lambda: None), lambda: 0.0)
        refused = boarding.add(wire.Submit("x", PROMPT, sampling, adapter="a0"))
        assert (refused.code, refused.reason) == ("adapter_unavailable", "this worker has no adapter a0")
        boarding.load(wire.LoadAdapter("a0", str(directory / "a0")))
        assert boarding.add(wire.Submit("y", PROMPT, sampling, num_sequences=2, adapter="a0")) is None
        assert [delta.index for delta in boarding.cancel("y", 1)] == [1]
        assert [delta.finish.reason for delta in boarding.cancel("y")] == ["cancelled"]
        assert not boarding.holds("y")
        boarding.load(wire.LoadAdapter("gone", str(directory / "nowhere")))
        assert boarding.add(wire.Submit("z", PROMPT, sampling, adapter="gone")) is None
        failures = []
        while boarding.has_waiting:
            failures += boarding.turn()[1]
        assert [(failed.request_id, failed.code) for failed in failures] == [("z", "adapter_unavailable")]
        boarding.audit()


class Slow:
    """Grammars that are never ready, unless they are said to be."""

    def __init__(self):
        self.ready = []

    def find(self, submit):
        return None

    def begin(self, submit):
        """Some day."""

    def turn(self):
        ready, self.ready = self.ready, []
        return ready

    def counts(self):
        return {}


@pytest.mark.parametrize("waits_for", ["grammar", "adapter", "both"])
def test_the_wait_for_a_grammar_and_for_an_adapter_is_a_wait_in_line(tiny, waits_for):
    """It is told as such, and the promise counts from when the request came."""
    runner, directory, _ = tiny
    now = [10.0]
    engine = Engine(
        runner, Sampler(runner.vocab_size, runner.eos_token_ids), EngineSettings(block_size=8), lambda: now[0]
    )
    grammar = None if waits_for == "adapter" else wire.Grammar("regex", "a*", False)
    adapter = "" if waits_for == "grammar" else "a0"
    sampling = Sampling(max_tokens=MAX_TOKENS, ignore_eos=True)
    asked = wire.Submit("x", PROMPT, sampling, ttft_s=60.0, num_sequences=2, adapter=adapter, grammar=grammar)
    with ThreadPoolExecutor(1) as reader:
        store = Store(runner.load_adapter, 1 << 20, reader, lambda: None)
        grammars = Slow()
        boarding = Boarding(engine, store, lambda: now[0], grammars)
        boarding.load(wire.LoadAdapter("a0", str(directory / "a0")))
        assert boarding.add(asked) is None
        now[0] += 3.0
        if grammar is not None:
            grammars.ready = [("x", None)]
        assert boarding.cancel("x", 1)[0].finish.queue_s == 3.0
        while boarding.has_waiting:
            now[0] += 1.0
            assert boarding.turn()[1] == []
        (waiting,) = engine._scheduler.waiting
        assert waiting.place[1] == 10.0 + 60.0
        waited_s = now[0] - 10.0
        finishes = []
        while engine.has_work:
            now[0] += 0.5
            finishes += [delta.finish for delta in engine.step()[0] if delta.finish is not None]
    assert [finish.queue_s for finish in finishes] == [waited_s + 0.5]


def test_an_id_that_is_being_answered_is_refused_also_to_who_would_have_to_wait(tiny):
    runner, _, _ = tiny
    engine = Engine(runner, Sampler(runner.vocab_size, runner.eos_token_ids), EngineSettings(block_size=8), lambda: 0.0)
    boarding = Boarding(engine, None, lambda: 0.0, Slow())
    sampling = Sampling(max_tokens=MAX_TOKENS)
    assert boarding.add(wire.Submit("x", PROMPT, sampling)) is None
    refused = boarding.add(wire.Submit("x", PROMPT, sampling, grammar=wire.Grammar("regex", "a*", False)))
    assert (refused.code, refused.reason) == ("invalid_request", "a request of this id is being answered")
    assert not boarding.has_waiting


@pytest.mark.parametrize("grammar", [None, wire.Grammar("regex", "a*", False)])
@pytest.mark.parametrize("num_sequences", [1 << 62, (1 << 64) - 1])
def test_more_sequences_than_can_be_counted_are_refused_before_anything_is_made_of_them(tiny, grammar, num_sequences):
    runner, _, _ = tiny
    engine = Engine(runner, Sampler(runner.vocab_size, runner.eos_token_ids), EngineSettings(block_size=8), lambda: 0.0)
    boarding = Boarding(engine, None, lambda: 0.0, Slow())
    asked = wire.Submit("x", PROMPT, Sampling(max_tokens=MAX_TOKENS), num_sequences, grammar=grammar)
    assert boarding.add(asked).code == "overloaded"
    assert not boarding.has_waiting
