"""Drafts by a small model: what they say, what they cost, and that they change nothing."""

import itertools
import random

import pytest

from demo import DRAFT_DIR
from policies import wire
from policies.settings import Engine as EngineSettings
from policies.settings import Speculation as SpeculationSettings
from policies.terms import Sampling
from tests.worker.test_engine_models import BLOCK_SIZE, STEMS, Families, run
from tests.worker.test_speculation import everything
from tests.worker.tiny import checkpoint
from worker.budget import OutOfMemory
from worker.inputs import Span
from worker.models import ModelError
from worker.runner import Runner
from worker.speculation import NO_DRAFT, Speculation
from worker.speculation.following import follow
from worker.speculation.load import draft_model
from worker.speculation.model import Durations, ModelDrafter

TINY = EngineSettings(device="cpu", dtype="float32", num_threads=1, block_size=BLOCK_SIZE, max_kv_bytes=8 << 20)


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    return Families(tmp_path_factory.mktemp("families"))


def clock():
    ticks = itertools.count()
    return lambda: 0.001 * next(ticks)


class Asked:
    """As far as a drafter looks at a sequence."""

    def __init__(self, token_ids):
        self.token_ids = list(token_ids)


def test_it_says_what_is_likeliest_however_its_drafts_turn_out(families):
    drafter = ModelDrafter(families.runner("llama"), clock())
    rng = random.Random(3)
    sequences = [Asked(stem[:20]) for stem in STEMS]
    for _ in range(12):
        nums = [rng.randint(1, 6) for _ in sequences]
        drafts = drafter.propose(sequences, nums)
        for sequence, num, draft in zip(sequences, nums, drafts, strict=True):
            assert draft.token_ids == families.generated("llama", tuple(sequence.token_ids))[:num]
            right = rng.randint(0, num)
            sequence.token_ids += [*draft.token_ids[:right], rng.randrange(3, 90)]
    for sequence in sequences:
        drafter.forget(sequence)
    assert len(drafter._free) == families.runner("llama").num_blocks


def test_a_long_text_is_caught_up_with_over_several_steps(families):
    drafter = ModelDrafter(families.runner("llama"), clock(), max_catch_up=64)
    sequence = Asked([*STEMS[0], *STEMS[1]][:100])
    other = Asked(STEMS[1][:10])
    assert drafter.propose([sequence, other], [3, 3]) == [NO_DRAFT, NO_DRAFT]
    drafts = drafter.propose([sequence, other], [3, 3])
    assert drafts[0].token_ids == families.generated("llama", tuple(sequence.token_ids))[:3]
    assert drafts[1].token_ids == families.generated("llama", tuple(other.token_ids))[:3]


def test_what_could_not_be_computed_is_computed_when_it_is_asked_for_again(families, monkeypatch):
    runner = families.runner("llama")
    drafter = ModelDrafter(runner, clock())
    sequences = [Asked(stem[:20]) for stem in STEMS]
    forward = runner.forward

    def has_no_memory(spans):
        monkeypatch.setattr(runner, "forward", forward)
        raise OutOfMemory("as much as this was not there")

    monkeypatch.setattr(runner, "forward", has_no_memory)
    with pytest.raises(OutOfMemory):
        drafter.propose(sequences, [4] * len(sequences))
    for sequence in sequences:
        (draft,) = drafter.propose([sequence], [4])
        assert draft.token_ids == families.generated("llama", tuple(sequence.token_ids))[:4]
        drafter.forget(sequence)


def test_whoever_finds_no_blocks_goes_without(families):
    runner = families.runner("llama")
    runner.num_blocks = 3
    drafter = ModelDrafter(runner, clock())
    first, second = Asked(STEMS[0][:12]), Asked(STEMS[1][:12])
    drafts = drafter.propose([first, second], [4, 4])
    assert drafts[0].token_ids
    assert drafts[1] == NO_DRAFT
    drafter.forget(first)
    assert drafter.propose([second], [4])[0].token_ids


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_with_a_draft_model_are_those_without(families, tmp_path_factory, temperature):
    directory = tmp_path_factory.mktemp("other")
    checkpoint(directory, "LlamaForCausalLM", seed=5)
    arrivals = [
        (number, wire.Submit(str(number), stem[: 8 + number], Sampling(13, seed=number, temperature=temperature)))
        for number, stem in enumerate(STEMS * 2)
    ]
    plain = families.engine("llama")
    plain.speculates = False
    expected, _ = run(plain, arrivals)
    for draft in (Runner.load(str(directory), TINY), Runner.load(str(families.directory / "llama"), TINY)):
        guessing = families.engine("llama", num_blocks=13)
        guessing._speculation = Speculation([ModelDrafter(draft, clock())], 4, everything, clock())
        answers, finishes = run(guessing, arrivals)
        assert answers == expected
    assert sum(finish.num_accepted_tokens for finish in finishes.values()) > 0


def test_many_steps_in_one_call_say_what_single_steps_say():
    runner = Runner.load(str(DRAFT_DIR), EngineSettings(device="cpu", max_kv_bytes=4 << 20, num_threads=1))
    if runner.whole is None:
        pytest.skip("no compiled kernel computes whole steps here")
    tables = [[0, 1, 2], [3, 4, 5], [6, 7]]
    # One is caught up with, one in part, and one is known but for its last token.
    prompts = [[5, 6, 7, 8] * 8, [9, 10, 11] * 13, [3, 4] * 9]
    runner.forward([Span(prompts[2][:-1], 0, tables[2], 0)])
    spans = [Span(prompts[0], 0, tables[0], 1), Span(prompts[1], 0, tables[1], 0), Span([4], 17, tables[2], 1)]
    at_once = [follow(runner, spans, num) for num in (1, 2, 9)]
    runner.whole = None
    one_by_one = follow(runner, spans, 9)
    assert [len(tokens) for tokens in one_by_one] == [2] * 9
    for num, tokens in zip((1, 2, 9), at_once, strict=True):
        assert tokens == one_by_one[:num]


def test_what_a_draft_takes_is_learned_by_the_size_of_the_batch():
    durations = Durations()
    assert durations.expected_s(4, 8) == 0.0
    durations.begin(1, 1e-3, 5e-4)
    assert durations.expected_s(4, 3) == pytest.approx(2e-3)
    for _ in range(40):
        durations.tell(1, 5, 6e-3)
        durations.tell(32, 5, 12e-3)
    assert durations.expected_s(1, 5) == pytest.approx(6e-3, rel=0.05)
    assert durations.expected_s(1, 3) == pytest.approx(4e-3, rel=0.05)
    assert durations.expected_s(30, 5) == pytest.approx(12e-3)


def speculating(**changes):
    return EngineSettings(
        device="cpu",
        dtype="float32",
        block_size=BLOCK_SIZE,
        max_kv_bytes=8 << 20,
        speculation=SpeculationSettings(**changes),
    )


def test_a_draft_model_of_another_vocabulary_is_refused_by_name(families):
    target = families.runner("llama")
    engine = speculating(draft_model=str(DRAFT_DIR))
    with pytest.raises(ModelError, match="vocabulary of 4096 tokens, but somewhere one of"):
        draft_model("somewhere", engine, target, clock())


@pytest.mark.parametrize(
    ("said", "named"),
    [
        (b'{"model": {"vocab": {"a": 1}, "mer', "cannot be read"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"[]", "is not a JSON object"),
        (b'{"model": "BPE"}', "has no vocabulary"),
        (b'{"version": "1.0"}', "has no vocabulary"),
        (b'{"model": {"vocab": {"a": 2}}}', "has another vocabulary than"),
    ],
)
def test_a_draft_model_whose_tokenizer_is_broken_or_another_is_refused_by_name(families, tmp_path, said, named):
    draft, source = tmp_path / "draft", tmp_path / "source"
    checkpoint(draft, "LlamaForCausalLM", seed=5)
    (draft / "tokenizer.json").write_bytes(said)
    source.mkdir()
    (source / "tokenizer.json").write_bytes(b'{"model": {"vocab": {"a": 1}}}')
    with pytest.raises(ModelError, match=named) as refused:
        draft_model(str(source), speculating(draft_model=str(draft)), families.runner("llama"), clock())
    assert str(draft) in str(refused.value)


def test_only_the_demo_model_has_a_draft_model_of_its_own(families):
    target = families.runner("llama")
    assert draft_model("somewhere", speculating(), target, clock()) is None
    assert draft_model("demo", speculating(drafters=("suffix",)), target, clock()) is None
    assert draft_model("demo", speculating(enabled=False), target, clock()) is None
