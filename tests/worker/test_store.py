"""Drafts from recent answers: what is found, by whom, and for how long."""

from hypothesis import given
from hypothesis import strategies as st

from policies import wire
from policies.settings import Engine as EngineSettings
from policies.terms import Sampling
from tests.worker.scripted import ScriptedRunner, ScriptedSampler, answer
from tests.worker.test_speculation import everything
from worker.engine import Engine
from worker.sequence import Request
from worker.speculation import NO_DRAFT, Draft, Speculation, StoreDrafter


class Text:
    """As far as the store looks at a sequence."""

    def __init__(self, root, prompt, output=()):
        self.request = Request("any", root=root)
        self.num_prompt_tokens = len(prompt)
        self.token_ids = [*prompt, *output]

    @property
    def num_known(self):
        return len(self.token_ids)


def asked(store, sequence, num_tokens=8):
    (draft,) = store.propose([sequence], [num_tokens])
    return draft


def test_what_was_answered_is_drafted_for_whoever_asks_alike():
    store = StoreDrafter()
    store.learn(Text(b"a", [1, 2, 3], [4, 5, 6]))
    store.learn(Text(b"a", [7, 8, 3], [9]))
    again = Text(b"a", [0, 1, 2, 3])
    assert asked(store, again) == Draft([4, 5, 6], 3)
    again.token_ids += [4]
    assert asked(store, again, 1) == Draft([5], 4)
    again.token_ids += [5, 6]
    assert asked(store, again) == NO_DRAFT  # the answer had ended there


def test_another_salt_finds_nothing():
    store = StoreDrafter()
    store.learn(Text(b"a", [1, 2, 3], [4, 5, 6]))
    assert asked(store, Text(b"b", [1, 2, 3])) == NO_DRAFT
    assert asked(store, Text(b"", [1, 2, 3])) == NO_DRAFT


@given(
    st.lists(
        st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.lists(st.integers(0, 3), min_size=1, max_size=9)),
        max_size=40,
    ),
    st.integers(2, 40),
    st.integers(2, 100),
)
def test_drafts_are_what_the_same_salt_was_answered_and_memory_is_bounded(texts, max_shelf, max_stored):
    store = StoreDrafter(max_shelf, max_stored)
    said = {}
    for salt, output in texts:
        reader = Text(salt, output[:3])
        draft = asked(store, reader)
        assert draft == NO_DRAFT or any(
            earlier[at : at + len(whole)] == whole
            for whole in [output[:3][-draft.strength :] + draft.token_ids]
            for earlier in said.get(salt, [])
            for at in range(len(earlier))
        )
        store.forget(reader)
        store.learn(Text(salt, [5], output))
        said.setdefault(salt, []).append([5, *output])
        kept = sum(shelf.num_tokens for shelves in store._salts.values() for shelf in shelves)
        assert kept == store.num_stored <= max(max_shelf, max_stored)
    assert not store._readings


def test_the_salt_that_was_idle_longest_makes_room():
    store = StoreDrafter(max_shelf=10, max_stored=14)
    for salt in (b"a", b"b"):
        store.learn(Text(salt, [1], [2, 3, 4]))
    asked(store, Text(b"a", [1, 2]))
    store.learn(Text(b"c", [1], [2, 3, 4]))
    assert asked(store, Text(b"a", [1, 2])).token_ids == [3, 4]
    assert asked(store, Text(b"b", [1, 2])) == NO_DRAFT
    assert b"b" not in store._salts


def test_of_one_salt_the_oldest_texts_make_room():
    store = StoreDrafter(max_shelf=10, max_stored=100)
    reader = Text(b"a", [1, 2])
    for token_id in range(1, 40, 4):
        store.learn(Text(b"a", [token_id], [token_id + 1, token_id + 2, token_id + 3]))
        asked(store, reader)
    assert asked(store, Text(b"a", [37, 38])).token_ids == [39, 40]
    assert asked(store, Text(b"a", [1, 2])) == NO_DRAFT
    assert asked(store, reader) == NO_DRAFT
    assert store.num_stored <= 20


def test_an_answer_that_is_asked_for_again_takes_fewer_steps_for_the_same_salt_and_adapter_only():
    speculation = Speculation([StoreDrafter()], 8, everything, float)
    engine = Engine(ScriptedRunner(num_blocks=64), ScriptedSampler(), EngineSettings(), float, None, speculation)
    nums = {}
    for request_id, salt, adapter in (("1", b"a", ""), ("2", b"b", ""), ("3", b"a", "x"), ("4", b"a", "")):
        sampling = Sampling(max_tokens=30, seed=5, ignore_eos=True)
        engine.add(wire.Submit(request_id, [1, 2, 3, 4], sampling, cache_salt=salt, adapter=adapter))
        token_ids, num_steps = [], 0
        while engine.has_work:
            num_steps += 1
            for delta in engine.step()[0]:
                token_ids += delta.token_ids
                finish = delta.finish
        assert token_ids == answer([1, 2, 3, 4], 5, 30, eos_token_ids=())
        nums[request_id] = (num_steps, finish.num_accepted_tokens)
    assert [nums[each][1] for each in "123"] == [0, 0, 0]
    assert nums["4"][0] < nums["1"][0] / 3
    assert nums["4"][1] > 20
