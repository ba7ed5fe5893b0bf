"""Speculation changes no answer: seeded and greedy ones are those without it, and frequencies are the model's."""

import random

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import wire
from policies.settings import Engine as EngineSettings
from policies.terms import Sampling
from tests.worker.scripted import ScriptedRunner, ScriptedSampler, answer
from tests.worker.test_engine_models import STEMS, Families, run, schedules
from tests.worker.tiny import VOCAB_SIZE
from worker.engine import Engine
from worker.sampler import Row, Sampler
from worker.speculation import NO_DRAFT, Draft, Speculation, SuffixDrafter
from worker.speculation.automaton import ROOT, SuffixAutomaton


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
    guessing._speculation = Speculation(drafters, max_draft_tokens=rng.choice([1, 4, 9]), allot=everything)
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
    engine._speculation = Speculation([Hindsight({("one", 0): whole}, random.Random(1), 0.0)], 40, everything)
    engine.add(submit)
    num_steps = 0
    while engine.has_work:
        deltas, _ = engine.step()
        num_steps += 1
    assert deltas[-1].finish.num_drafted_tokens >= deltas[-1].finish.num_accepted_tokens >= 5
    assert num_steps < 9
    assert engine.stats().num_decode_tokens == 12


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


# Drafters


def longest_repeated(text):
    """By trying: the longest end that occurs before, and every place where it does."""
    for length in range(len(text) - 1, 0, -1):
        tail = text[-length:]
        ends = [end for end in range(length, len(text)) if text[end - length : end] == tail]
        if ends:
            return length, ends
    return 0, []


@given(st.lists(st.integers(0, 3), max_size=60))
def test_the_automaton_knows_the_longest_end_that_was_there_before(text):
    automaton = SuffixAutomaton()
    for token_id in text:
        automaton.extend([token_id])
        length, end = automaton.repeated()
        expected, ends = longest_repeated(automaton.text)
        assert length == expected
        assert not length or end in ends


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=40), st.integers(0, 5))
def test_another_text_is_followed_through_the_automaton_while_it_grows(text, other, num_each):
    automaton = SuffixAutomaton()
    state, length = ROOT, 0
    for place, token_id in enumerate(other):
        automaton.extend(text[place * num_each : (place + 1) * num_each])
        state, length = automaton.step(state, length, token_id)
        seen = automaton.text
        assert length <= place + 1
        tail = other[place + 1 - length : place + 1]
        end = automaton.end_of(state)
        assert not length or seen[end - length : end] == tail
        if num_each == 0 or place * num_each > len(text):
            longest = max(
                (n for n in range(place + 2) if not n or str(other[place + 1 - n : place + 1])[1:-1] in str(seen)),
                default=0,
            )
            assert length == longest


class Asked:
    """As far as a drafter looks at a sequence."""

    def __init__(self, token_ids, predicted_token_ids=()):
        self.token_ids = token_ids
        self.predicted_token_ids = predicted_token_ids


def test_a_text_that_repeats_itself_is_drafted_from():
    drafter, sequence = SuffixDrafter(), Asked([1, 2, 3, 4, 5, 6, 7, 2, 3, 4])
    (draft,) = drafter.propose([sequence], [3])
    assert draft == Draft([5, 6, 7], 3)
    sequence.token_ids += [5, 9, 9, 9]
    (draft,) = drafter.propose([sequence], [4])
    assert draft == Draft([9, 9, 9, 9], 2)
    assert drafter.propose([Asked([1, 2, 3])], [4]) == [NO_DRAFT]


def test_what_was_predicted_is_drafted_from_as_if_it_had_been_said():
    drafter, sequence = SuffixDrafter(), Asked([1, 2, 3], [8, 7, 2, 3, 9, 5])
    assert drafter.propose([sequence], [2]) == [Draft([9, 5], 2)]
    sequence.token_ids += [9, 5]
    assert drafter.propose([sequence], [1]) == [Draft([1], 4)]


def test_a_copy_that_changes_a_word_is_drafted_from_behind_it():
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    drafter, sequence = SuffixDrafter(), Asked([*text, 20, *text[:4]])
    assert drafter.propose([sequence], [3]) == [Draft([5, 6, 7], 4)]
    sequence.token_ids += [30]  # in place of 5
    assert drafter.propose([sequence], [3]) == [Draft([6, 7, 8], 1)]
    sequence.token_ids += [6, 31]
    assert drafter.propose([sequence], [2]) == [Draft([8, 9], 1)]
    sequence.token_ids += [32, 33]
    assert drafter.propose([sequence], [2]) == [NO_DRAFT]  # it copies no longer


@given(st.lists(st.integers(0, 5), min_size=1, max_size=200), st.integers(1, 40))
def test_memory_is_bounded_and_drafts_come_from_what_is_left(text, max_text):
    drafter = SuffixDrafter(max_text=max_text)
    sequence = Asked([])
    for token_id in text:
        sequence.token_ids.append(token_id)
        if len(sequence.token_ids) % 3:
            drafter.propose([sequence], [4])
    assert drafter._num_tokens <= max_text
    drafter.forget(sequence)
    assert drafter._num_tokens == 0


def test_when_too_much_is_remembered_newcomers_go_without():
    drafter = SuffixDrafter(max_texts=10)
    first, second = Asked([1, 2, 1, 2] * 3), Asked([1, 2, 1, 2])
    assert drafter.propose([first, second], [2, 2])[1] == NO_DRAFT
    drafter.forget(first)
    assert drafter.propose([second], [2]) == [Draft([1, 2], 2)]


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
