"""What a sequence's own text says of how it goes on: repetitions, copies with changes, records with new values."""

import re

from hypothesis import given
from hypothesis import strategies as st

from worker.speculation import NO_DRAFT, Draft, SuffixDrafter
from worker.speculation.automaton import ROOT, SuffixAutomaton
from worker.speculation.origins import MAX_LOST, MAX_WRONG, Origins
from worker.speculation.suffix import MAX_BEGUN
from worker.speculation.twins import Twins


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

    def __init__(self, token_ids, predicted_token_ids=(), num_prompt_tokens=0):
        self.token_ids = token_ids
        self.predicted_token_ids = predicted_token_ids
        self.num_prompt_tokens = num_prompt_tokens


def test_a_text_that_repeats_itself_is_drafted_from():
    drafter, sequence = SuffixDrafter(), Asked([1, 2, 3, 4, 5, 6, 7, 2, 3, 4])
    (draft,) = drafter.propose([sequence], [3])
    assert draft == Draft([5, 6, 7], 3)
    sequence.token_ids += [5, 9, 9, 9]
    (draft,) = drafter.propose([sequence], [4])
    assert draft.token_ids == [9, 9, 9, 9]
    assert drafter.propose([Asked([1, 2, 3])], [4]) == [NO_DRAFT]


def test_what_was_predicted_is_drafted_from_as_if_it_had_been_said():
    drafter, sequence = SuffixDrafter(), Asked([1, 2, 3], [8, 7, 2, 3, 9, 5])
    assert drafter.propose([sequence], [2]) == [Draft([9, 5], 2)]
    sequence.token_ids += [9, 5]
    assert drafter.propose([sequence], [1]) == [Draft([1], 4)]


def drafted(drafter, sequence, num_tokens):
    (draft,) = drafter.propose([sequence], [num_tokens])
    return draft.token_ids


def test_a_copy_that_changes_a_word_is_drafted_from_behind_it():
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    drafter, sequence = SuffixDrafter(), Asked([*text, 20, *text[:4]])
    assert drafter.propose([sequence], [3]) == [Draft([5, 6, 7], 4)]
    sequence.token_ids += [30]  # in place of 5
    assert drafter.propose([sequence], [3]) == [Draft([6, 7, 8], 2)]
    sequence.token_ids += [6, 31]
    assert drafted(drafter, sequence, 2) == [8, 9]
    sequence.token_ids += [32, 33]
    assert drafted(drafter, sequence, 2) == [8, 9]
    sequence.token_ids += [9]  # 7 and 8 have become 31, 32 and 33
    assert drafted(drafter, sequence, 2) == [10, 11]
    sequence.token_ids += [34, 35, 36, 37, 38]
    assert drafted(drafter, sequence, 2) == []  # it copies no longer


def test_a_copy_changes_a_word_as_it_did_before():
    text = [1, 2, 3, 50, 5, 6, 7, 50, 8, 9]
    drafter, sequence = SuffixDrafter(), Asked([*text, 20, 1, 2, 3])
    assert drafted(drafter, sequence, 2) == [50, 5]
    sequence.token_ids += [60]
    assert drafted(drafter, sequence, 5) == [5, 6, 7, 60, 8]
    sequence.token_ids += [5, 6, 7, 60, 8]
    assert drafted(drafter, sequence, 1) == [9]


def test_one_more_record_is_drafted_up_to_its_next_value():
    def record(name, *age):
        return [1, 2, name, 3, 4, *age, 5, 6]

    drafter, sequence = SuffixDrafter(), Asked([*record(100, 41, 42), *record(101, 43, 44)])
    for token_id in record(102, 45, 46):
        drafter.propose([sequence], [6])
        sequence.token_ids.append(token_id)
    assert drafted(drafter, sequence, 6) == [1, 2]
    sequence.token_ids += [1, 2, 103]
    assert drafted(drafter, sequence, 6) == [3, 4]
    sequence.token_ids += [3, 4, 47]
    assert drafted(drafter, sequence, 6) == []
    sequence.token_ids += [48]
    assert drafted(drafter, sequence, 6) == [5, 6, 1, 2]


WORDS = [b".", b"-", b"+", b"=", b"ann", b" ann", b"bob", b" bob", b"cy", b" cy", b"di", b" di", b"ed", b" ed"]
"""Every second one of those with letters begins with a space."""
TWINS = Twins(dict(enumerate(WORDS)))


def spelt(text):
    return [WORDS.index(word.encode()) for word in re.findall(r" ?[a-z]+|[^ ]", text)]


def test_a_record_is_drafted_with_values_of_its_own_from_the_prompt():
    prompt = spelt(". ann-bob. cy-di ed. bob-ed. ed-ann bob.")
    sequence = Asked([*prompt, *spelt("++=ann=+=bob")], num_prompt_tokens=len(prompt))
    drafter = SuffixDrafter(TWINS)
    for token_id in spelt("++=cy=+=di ed++=bob=+="):
        drafter.propose([sequence], [6])
        sequence.token_ids.append(token_id)
    # One word where the record before has two, and then two where that has one; the space in front of them has gone.
    assert drafted(drafter, sequence, 8) == spelt("ed++=ed=+=")
    # Behind them the copy has reached what it has just foreseen, and goes on by that.
    assert drafted(drafter, sequence, 12) == spelt("ed++=ed=+=ann bob++")
    sequence.token_ids += spelt("ed++=ed=+=")
    assert drafted(drafter, sequence, 4) == spelt("ann bob++")
    sequence.token_ids += spelt("ann")
    assert drafted(drafter, sequence, 4) == spelt(" bob++=")


def test_values_that_were_guessed_wrong_are_guessed_no_more_until_much_is_written():
    prompt = spelt(". ann. bob. cy. di. ed. ann")
    text = [*prompt, *spelt("+ann=+bob=+")]
    origins = Origins(text, len(prompt), TWINS)
    origins.change(len(prompt) + 1, len(prompt) + 4)
    num_guessed = 0
    while origins.tells(len(text) - 3, 4):
        assert origins.draft(len(text) - 3, 4, {}, {len(text) - 3})
        text += spelt("bob=+")
        origins.follow()
        num_guessed += 1
    assert 1 <= num_guessed <= 2 * MAX_WRONG
    text += spelt("+=") * MAX_LOST + spelt("+bob=+")
    origins.follow()
    assert origins.tells(len(text) - 3, 4)


def test_a_space_comes_and_goes_as_it_did():
    plain, spaced = spelt("ann")[0], spelt(" ann")[0]
    other, other_spaced = spelt("di")[0], spelt(" di")[0]
    assert TWINS.plain(spaced) == TWINS.plain(plain) == plain
    assert TWINS.alike(other_spaced, spaced, plain) == other
    assert TWINS.alike(other, plain, spaced) == other_spaced
    assert TWINS.alike(other, plain, plain) == other
    assert not TWINS.is_word(0)
    assert TWINS.is_word(plain)
    assert Twins().plain(spaced) == spaced


@given(st.lists(st.integers(0, 13), max_size=30), st.lists(st.integers(0, 13), max_size=60), st.integers(1, 9))
def test_whatever_is_written_its_drafts_are_tokens_of_the_vocabulary(prompt, answer, num_tokens):
    drafter, sequence = SuffixDrafter(TWINS), Asked(list(prompt), num_prompt_tokens=len(prompt))
    for place, token_id in enumerate([*answer, *answer]):
        sequence.token_ids.append(token_id)
        if place % 4:
            draft = drafted(drafter, sequence, num_tokens)
            assert len(draft) <= num_tokens
            assert all(0 <= each < len(WORDS) for each in draft)


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


def test_of_many_texts_that_come_together_a_few_begin_in_each_step():
    drafter = SuffixDrafter()
    sequences = [Asked([1, 2, 3, 4] * (MAX_BEGUN // 8)) for _ in range(5)]
    nums = [sum(bool(draft.token_ids) for draft in drafter.propose(sequences, [4] * 5)) for _ in range(4)]
    assert nums == [2, 4, 5, 5]
    (draft,) = SuffixDrafter().propose([Asked([1, 2, 3, 4] * MAX_BEGUN)], [4])
    assert draft.token_ids == [1, 2, 3, 4]


def test_when_too_much_is_remembered_newcomers_go_without():
    drafter = SuffixDrafter(max_texts=10)
    first, second = Asked([1, 2, 1, 2] * 3), Asked([1, 2, 1, 2, 1])
    assert drafter.propose([first, second], [2, 2])[1] == NO_DRAFT
    drafter.forget(first)
    assert drafter.propose([second], [2]) == [Draft([2, 1], 3)]
