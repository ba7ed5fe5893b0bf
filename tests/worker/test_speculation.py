"""Speculation changes no answer: seeded and greedy ones are those without it, and frequencies are the model's."""

import random

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import wire
from policies.costs import StepCosts
from policies.settings import Engine as EngineSettings
from policies.terms import Sampling
from tests.worker.scripted import ScriptedRunner, ScriptedSampler, answer
from tests.worker.test_engine_models import STEMS, Families, run, schedules
from tests.worker.tiny import VOCAB_SIZE
from worker.engine import Engine
from worker.sampler import Row, Sampler
from worker.speculation import NO_DRAFT, Draft, Speculation, SuffixDrafter


def everything(chances, weights, num_requests, step_s, token_s, max_tokens):
    """All drafts are verified, as far as they fit, whatever it costs."""
    taken = []
    for own in chances:
        taken.append(min(len(own), max_tokens))
        max_tokens -= taken[-1]
    return taken


class Hindsight:
    """Knows the answers, and changes some tokens of them."""

    name = "hindsight"
    is_free = True

    def __init__(self, answers, rng, wrong):
        self.answers, self.rng, self.wrong = answers, rng, wrong

    def propose(self, sequences, num_tokens):
        drafts = []
        for sequence, num in zip(sequences, num_tokens, strict=True):
            whole = self.answers[sequence.request.request_id, sequence.index]
            at = len(sequence.output_token_ids)
            draft = whole[at : at + self.rng.randint(0, num)]
            draft = [self.rng.randrange(VOCAB_SIZE) if self.rng.random() < self.wrong else each for each in draft]
            drafts.append(Draft(draft, self.rng.randrange(20)))
        return drafts

    def learn(self, sequence):
        pass

    def forget(self, sequence):
        pass


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    return Families(tmp_path_factory.mktemp("families"))


@st.composite
def samplings(draw):
    """Any mix of what a request may ask for."""
    return Sampling(
        max_tokens=draw(st.integers(1, 14)),
        seed=draw(st.integers(0, 1 << 40)),
        temperature=draw(st.sampled_from([0.0, 0.0, 0.7, 1.3])),
        top_p=draw(st.sampled_from([1.0, 0.8])),
        top_k=draw(st.sampled_from([0, 5])),
        min_p=draw(st.sampled_from([0.0, 0.05])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.4])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.2])),
        logit_bias=draw(st.sampled_from([{}, {5: 3.0, 7: -100.0}])),
        allowed_token_ids=draw(st.sampled_from([(), tuple(range(0, VOCAB_SIZE, 2))])),
        bad_words=draw(st.sampled_from([(), ((4,), (8, 8), *((i, i + 2) for i in range(0, VOCAB_SIZE - 2, 3)))])),
        stop_token_ids=draw(st.sampled_from([[], list(range(0, VOCAB_SIZE, 9))])),
        min_tokens=draw(st.sampled_from([0, 3])),
        num_logprobs=draw(st.sampled_from([None, 0, 3])),
        ignore_eos=draw(st.booleans()),
    )


def told(engine, arrivals):
    """Answers with their log-probabilities, and the finishes."""
    logprobs = {}
    step = engine.step

    def stepped():
        deltas, failed = step()
        for delta in deltas:
            assert delta.logprobs is None or len(delta.logprobs) == len(delta.token_ids)
            logprobs.setdefault((delta.request_id, delta.index), []).extend(delta.logprobs or [])
        return deltas, failed

    engine.step = stepped
    answers, finishes = run(engine, arrivals)
    return answers, finishes, logprobs


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@settings(max_examples=60, deadline=None)
@given(schedule=schedules(), mixed=st.lists(samplings(), min_size=6, max_size=6), seed=st.integers(0, 1 << 32))
def test_answers_with_speculation_are_those_without(families, family, schedule, mixed, seed):
    arrivals, changes = schedule
    arrivals = [
        (step, msgspec.structs.replace(submit, sampling=sampling))
        for (step, submit), sampling in zip(arrivals, mixed, strict=False)
    ]
    plain = families.engine(family)
    plain.speculates = False
    expected, ends, logprobs = told(plain, arrivals)
    rng = random.Random(seed)
    guessing = families.engine(family, **changes)
    drafters = [SuffixDrafter(max_text=24), Hindsight(expected, rng, wrong=rng.choice([0.0, 0.1, 0.5]))]
    guessing._speculation = Speculation(drafters, max_draft_tokens=rng.choice([1, 4, 9]), allot=everything, now=float)
    answers, finishes, guessed_logprobs = told(guessing, arrivals)
    assert answers == expected
    for key, finish in finishes.items():
        assert finish.reason == ends[key].reason
        assert finish.num_accepted_tokens <= finish.num_drafted_tokens
        assert len(answers[key]) >= finish.num_accepted_tokens
        for mine, theirs in zip(guessed_logprobs[key], logprobs[key], strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-3)


def test_a_good_draft_saves_steps(families):
    prompt = STEMS[0][:20]
    submit = wire.Submit("one", prompt, Sampling(max_tokens=13, temperature=0.0, ignore_eos=True))
    whole = families.generated("llama", tuple(prompt))[:13]
    engine = families.engine("llama")
    engine._speculation = Speculation([Hindsight({("one", 0): whole}, random.Random(1), 0.0)], 40, everything, float)
    engine.add(submit)
    num_steps = 0
    while engine.has_work:
        deltas, _ = engine.step()
        num_steps += 1
    assert deltas[-1].finish.num_drafted_tokens >= deltas[-1].finish.num_accepted_tokens >= 5
    assert num_steps < 9
    assert engine.stats().num_decode_tokens == 12


class Beyond(Hindsight):
    """Knows what would come after an end, too, as whoever copies an earlier turn of a chat does."""

    def __init__(self):
        pass

    def propose(self, sequences, num_tokens):
        return [
            Draft(answer(sequence.token_ids, sequence.row.seed, num, eos_token_ids=()), 1)
            for sequence, num in zip(sequences, num_tokens, strict=True)
        ]


@pytest.mark.parametrize("stop_token_ids", [[], [10]])
def test_nothing_is_verified_behind_what_ends_an_answer(stop_token_ids):
    prompt, seed = [1, 2, 3], 20
    whole = answer(prompt, seed, 40, eos_token_ids=(0, *stop_token_ids))
    runner = ScriptedRunner(num_blocks=64)
    speculation = Speculation([Beyond()], 8, everything, float)
    engine = Engine(runner, ScriptedSampler(), EngineSettings(), float, None, speculation)
    engine.add(wire.Submit("one", prompt, Sampling(max_tokens=40, seed=seed, stop_token_ids=stop_token_ids)))
    token_ids, finish = [], None
    while engine.has_work:
        for delta in engine.step()[0]:
            token_ids += delta.token_ids
            finish = delta.finish
    assert token_ids == whole
    assert finish.reason == "stop"
    assert finish.num_drafted_tokens == finish.num_accepted_tokens > 4
    num_computed = sum(num_tokens for step in runner.steps for _, num_tokens in step)
    assert num_computed == len(prompt) + len(whole) - 1


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_sampled_frequencies_are_the_models_whatever_the_draft_says(temperature):
    """The first token of the run that is emitted at each place, over seeds, against the target's own distribution."""
    num, vocab_size = 4000, 12
    generator = torch.Generator().manual_seed(1)
    first, second = torch.randn(2, vocab_size, generator=generator)
    sampler = Sampler(vocab_size, ())
    target = (second / temperature).softmax(0)
    draft = int(first.argmax())
    counts = torch.zeros(vocab_size)
    for begin in range(0, num, 500):
        rows = [
            Row(Sampling(8, temperature=temperature), seed, [1], [], draft_token_ids=[draft][:place])
            for seed in range(begin, begin + 500)
            for place in (0, 1)
        ]
        token_ids = sampler.sample(torch.stack([first, second] * 500), rows).token_ids
        for own, after in zip(token_ids[::2], token_ids[1::2], strict=True):
            if own == draft:  # else the second row counts for nothing
                counts[after] += 1
    expected = target * counts.sum()
    assert counts.sum() > 300
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 31.3  # 11 degrees of freedom, one in a thousand


class Broken:
    """Raises for some."""

    name = "broken"
    is_free = True

    def __init__(self, request_id):
        self.request_id = request_id

    def propose(self, sequences, num_tokens):
        if any(sequence.request.request_id == self.request_id for sequence in sequences):
            raise ValueError("this one cannot be drafted for")
        return [Draft([1], 1) for _ in sequences]

    def learn(self, sequence):
        pass

    def forget(self, sequence):
        pass


def test_a_drafter_that_raises_is_switched_off_for_that_request_alone():
    speculation = Speculation([Broken("bad"), SuffixDrafter()], 4)
    engine = Engine(ScriptedRunner(num_blocks=64), ScriptedSampler(), EngineSettings(), float, None, speculation)
    for request_id in ("good", "bad", "fine"):
        engine.add(wire.Submit(request_id, [1, 2, 3, 1, 2], Sampling(max_tokens=30, ignore_eos=True)))
    answers = {}
    while engine.has_work:
        for delta in engine.step()[0]:
            answers.setdefault(delta.request_id, []).extend(delta.token_ids)
    assert speculation.num_faults == {"broken": 1}
    assert all(answers[each] == answer([1, 2, 3, 1, 2], 0, 30, eos_token_ids=()) for each in ("good", "bad", "fine"))
    assert speculation.num_drafted_tokens > 0


class Short(Broken):
    """A Watcher that cannot take what it is shown."""

    name, is_free = "short", True

    def expected_s(self, num_sequences, num_tokens):
        return 0.0

    def computed(self, batch):
        pass

    def watch(self, sequences, rows):
        raise ValueError("not of my size")


def test_a_drafter_that_cannot_keep_what_it_sees_sees_nothing_more_and_answers_go_on():
    speculation = Speculation([Short("none"), SuffixDrafter()], 4)
    engine = Engine(ScriptedRunner(num_blocks=64), ScriptedSampler(), EngineSettings(), float, None, speculation)
    engine.add(wire.Submit("a", [1, 2, 3, 1, 2], Sampling(max_tokens=30, ignore_eos=True)))
    token_ids = []
    while engine.has_work:
        for delta in engine.step()[0]:
            token_ids += delta.token_ids
    assert speculation.num_faults == {"short": 1}
    assert token_ids == answer([1, 2, 3, 1, 2], 0, 30, eos_token_ids=())


class Retentive(Short):
    """A Watcher that keeps the sequences of one step, and has no room for those of another."""

    def __init__(self):
        self.seen = set()

    def computed(self, batch):
        if self.seen:
            raise ValueError("no room for more")
        self.seen.update(sequence for sequence, _ in batch)

    def watch(self, sequences, rows):
        pass

    def forget(self, sequence):
        self.seen.discard(sequence)


def test_a_drafter_that_sees_nothing_more_lets_go_of_what_it_has_seen():
    watcher = Retentive()
    speculation = Speculation([watcher], 4)
    speculation._rests_until = 100  # nobody is looked at
    in_chunks = EngineSettings(max_step_tokens=4)
    engine = Engine(ScriptedRunner(num_blocks=64), ScriptedSampler(), in_chunks, float, None, speculation)
    engine.add(wire.Submit("a", list(range(12)), Sampling(max_tokens=1)))
    while engine.has_work:
        engine.step()
    assert speculation.num_faults == {"short": 1}
    assert not watcher.seen


class Silent:
    """Has nothing to say, and counts how often it is asked."""

    name = "silent"
    is_free = True

    def __init__(self):
        self.num_asked = 0

    def propose(self, sequences, num_tokens):
        self.num_asked += 1
        return [NO_DRAFT for _ in sequences]

    def learn(self, sequence):
        pass

    def forget(self, sequence):
        pass


def test_while_the_purse_is_empty_nobody_is_asked_and_every_step_fills_it():
    silent = Silent()
    speculation = Speculation([silent], 4)
    engine = Engine(ScriptedRunner(num_blocks=600), ScriptedSampler(), EngineSettings(), float, None, speculation)
    for number in range(16):
        engine.add(wire.Submit(str(number), [1, 2, 3], Sampling(max_tokens=400, ignore_eos=True)))
    purse = speculation._accounts[(16).bit_length()].purse
    while not purse.is_empty:
        purse.tell(1.0, 1.0, 0, 16)
    num_steps = 0
    while not silent.num_asked:
        engine.step()
        num_steps += 1
    assert 250 < num_steps < 300  # from -0.5 to 0.75 by 0.005 each, and it is seen a few steps later


def test_who_has_nothing_to_say_is_asked_in_every_other_step_at_most():
    silent = Silent()
    engine = Engine(
        ScriptedRunner(num_blocks=64), ScriptedSampler(), EngineSettings(), float, None, Speculation([silent], 4)
    )
    engine.add(wire.Submit("one", [1, 2, 3], Sampling(max_tokens=100, ignore_eos=True)))
    while engine.has_work:
        engine.step()
    assert 45 <= silent.num_asked <= 55


class Once(Silent):
    """Guesses right for each the first time that it is asked, and has nothing to say from then on."""

    def __init__(self):
        super().__init__()
        self.known = set()

    def propose(self, sequences, num_tokens):
        new = [sequence not in self.known for sequence in sequences]
        self.known.update(sequences)
        return [
            Draft(answer(each.token_ids, each.row.seed, 2, eos_token_ids=()), 1) if is_new else NO_DRAFT
            for each, is_new in zip(sequences, new, strict=True)
        ]


@pytest.mark.parametrize("is_broke", [False, True])
def test_a_device_is_not_waited_for_in_steps_in_which_nobody_is_looked_at(is_broke):
    runner, sampler = ScriptedRunner(num_blocks=1200, overlaps=True), ScriptedSampler()
    speculation = Speculation([Once()], 4, everything, float)
    engine = Engine(runner, sampler, EngineSettings(), float, None, speculation)
    for number in range(16):
        engine.add(wire.Submit(str(number), [1, 2, number], Sampling(max_tokens=250, ignore_eos=True)))
    for _ in range(64):
        engine.step()
    assert len(speculation._promising) == 16
    if is_broke:
        purse = speculation._accounts[(16).bit_length()].purse
        while not purse.is_empty:
            purse.tell(1.0, 1.0, 0, 16)
    overtaken = []
    runner.fault = lambda spans: overtaken.append(sampler.num_untaken)
    for _ in range(160):
        engine.step()
    assert sum(overtaken) > 120


def test_a_step_without_guesses_is_not_taken_beside_a_prompt_where_it_teaches_nothing():
    speculation = Speculation([Beyond()], 4, everything, float)
    costs = StepCosts.of((1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0))
    settings = EngineSettings(max_step_tokens=64, max_prefill_tokens_beside_decodes=16)
    engine = Engine(ScriptedRunner(num_blocks=600), ScriptedSampler(), settings, float, costs, speculation)
    engine.add(wire.Submit("one", [1, 2, 3], Sampling(max_tokens=400, ignore_eos=True)))
    engine.step()
    effort = speculation._accounts[(1).bit_length()].effort
    while not effort.wants_plain:
        effort.tell(1.0, 1.0, 1, 1, 0)
    engine.add(wire.Submit("long", list(range(1, 50)) * 12, Sampling(max_tokens=1)))
    num_steps = 0
    while engine.holds("long"):
        engine.step()
        num_steps += 1
    assert num_steps > 30
    assert effort.wants_plain
    assert speculation.num_accepted_tokens > num_steps
    engine.step()
    assert not effort.wants_plain
