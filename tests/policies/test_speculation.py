import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.speculation import PLAIN_EVERY, Chance, Effort, Own, Purse, Survival, allot

falling = st.lists(st.floats(0.0, 1.0), max_size=6).map(lambda own: sorted(own, reverse=True))


def rate(chances, weights, num_tokens, num_requests, step_s, token_s):
    worth = num_requests + sum(
        weight * sum(own[:num]) for own, weight, num in zip(chances, weights, num_tokens, strict=True)
    )
    return worth / (step_s + token_s * sum(num_tokens))


@given(
    st.lists(st.tuples(falling, st.sampled_from([1.0, 2.0])), min_size=1, max_size=4),
    st.integers(0, 3),
    st.floats(1e-4, 1e-1),
    st.floats(0.0, 1e-1),
    st.integers(0, 12),
)
def test_no_other_choice_writes_more_tokens_a_second(drafts, num_others, step_s, token_s, max_tokens):
    chances, weights = [own for own, _ in drafts], [weight for _, weight in drafts]
    num_requests = len(drafts) + num_others
    taken = allot(chances, weights, num_requests, step_s, token_s, max_tokens)
    assert sum(taken) <= max_tokens
    best = max(
        rate(chances, weights, other, num_requests, step_s, token_s)
        for other in itertools.product(*(range(len(own) + 1) for own in chances))
        if sum(other) <= max_tokens
    )
    assert rate(chances, weights, taken, num_requests, step_s, token_s) == pytest.approx(best)


def test_a_batch_that_fills_the_device_gets_none():
    # A row to verify takes as long as a sequence more would.
    assert allot([[0.9, 0.8]] * 64, [1.0] * 64, 64, step_s=64e-3, token_s=1e-3, max_tokens=1000) == [0] * 64


def test_whoever_is_behind_its_promise_is_given_more():
    chances = [[0.6, 0.36, 0.2], [0.6, 0.36, 0.2]]
    mine, other = allot(chances, [2.0, 1.0], 2, step_s=1e-3, token_s=3e-4, max_tokens=10)
    assert mine > other


@given(st.integers(0, 20), st.integers(1, 8), st.floats(0.05, 0.95), st.integers(0, 1 << 32))
def test_survival_is_learned_from_what_survived(strength, num_tokens, chance, seed):
    rng = random.Random(seed)
    survival = Survival()
    own = Own()
    for _ in range(400):
        num_right = next((place for place in range(num_tokens) if rng.random() >= chance), num_tokens)
        survival.tell(strength, num_tokens, num_right, own)
    expected = survival.expected(strength, num_tokens, own)
    assert expected == sorted(expected, reverse=True)
    assert expected[0] == pytest.approx(chance, abs=0.3)
    assert all(0.0 < each <= 1.0 for each in expected)


def test_nothing_is_looked_at_behind_a_token_that_is_unlikely():
    survival = Survival()
    own = Own()
    for number in range(64):
        survival.tell(1, 1, number % 2, own)
    *likely, last = survival.expected(1, 48, own)
    assert 1 < len(likely) < 16
    assert last < 0.01 <= min(likely)


def test_a_request_of_its_own_kind_is_soon_known_for_it():
    survival = Survival()
    for _ in range(200):
        survival.tell(3, 4, 4, Own())
    odd = Own()
    assert survival.expected(3, 1, odd)[0] > 0.9
    for _ in range(12):
        survival.tell(3, 4, 0, odd)
    assert survival.expected(3, 1, odd)[0] < 0.3
    assert survival.expected(3, 1, Own())[0] > 0.8


def test_that_weak_guesses_of_a_request_fail_says_little_against_its_strong_ones():
    survival = Survival()
    for number in range(200):
        survival.tell(2, 1, number % 2, Own())
        survival.tell(16, 4, 4, Own())
    odd = Own()
    for _ in range(4):
        survival.tell(2, 1, 0, odd)
    assert survival.expected(2, 1, odd)[0] < 0.3
    assert survival.expected(16, 1, odd)[0] > 0.9
    for _ in range(4):
        survival.tell(16, 1, 0, odd)
    assert survival.expected(16, 1, odd)[0] < 0.7


def test_what_was_long_ago_fades():
    chance = Chance(memory=20)
    for _ in range(1000):
        chance.tell(True)
    for _ in range(60):
        chance.tell(False)
    assert chance.mean() < 0.1


# What verifying costs


def told(effort, num_steps, seconds, num_draft_tokens=0, fitted_s=1e-3, num_right=0):
    for _ in range(num_steps):
        effort.tell(fitted_s, seconds, num_draft_tokens, 1, num_right)


def test_the_cost_of_a_draft_token_is_what_steps_with_drafts_take_longer_than_those_without():
    effort = Effort()
    told(effort, 20, 2e-3)  # twice as long as the fitted costs say
    told(effort, 20, 3e-3, num_draft_tokens=10)
    assert effort.step_s(1e-3) == pytest.approx(2e-3)
    assert effort.token_s == pytest.approx(1e-4)


def test_plain_steps_are_taken_from_time_to_time_and_seldom_where_drafts_gain_much():
    vain, worthy = Effort(), Effort()
    for effort, num_right in ((vain, 0), (worthy, 4)):
        told(effort, 8, 1e-3)
        told(effort, PLAIN_EVERY, 1e-3, num_draft_tokens=4, num_right=num_right)
    assert vain.wants_plain
    assert not worthy.wants_plain
    told(vain, 1, 1e-3)
    assert not vain.wants_plain


def test_what_was_dear_is_tried_again_with_little_at_stake():
    effort = Effort()
    assert effort.max_tokens(1e-3) == 8
    told(effort, 8, 1e-3)
    told(effort, 8, 5e-3, num_draft_tokens=10)
    assert effort.token_s > 2e-4
    told(effort, 200, 1e-3)
    assert effort.token_s < 1e-5
    assert effort.max_tokens(1e-3) <= 2


def test_one_slow_trial_is_no_verdict():
    effort = Effort()
    told(effort, 8, 1e-3)
    told(effort, 1, 9e-3, num_draft_tokens=1)
    assert effort.token_s == 0.0
    assert effort.max_tokens(1e-3) == 1  # tried again, with little at stake
    told(effort, 2, 1.01e-3, num_draft_tokens=1)
    assert effort.token_s == pytest.approx(1e-5)


def test_what_came_into_doubt_comes_back_only_as_far_as_the_next_trial_confirms_it():
    cheap, dear = Effort(), Effort()
    for effort, seconds in ((cheap, 1e-3), (dear, 5e-3)):
        told(effort, 8, 1e-3)
        told(effort, 8, 5e-3, num_draft_tokens=10)
        told(effort, 60, 1e-3)
        told(effort, 1, seconds, num_draft_tokens=10)
    assert cheap.token_s < 1e-4
    assert dear.token_s == pytest.approx(3e-4)


def test_so_few_tokens_do_not_teach_what_many_take():
    effort = Effort()
    told(effort, 8, 1e-3)
    told(effort, 3, 1e-3, num_draft_tokens=8)
    assert effort.max_tokens(1e-3) == 32


def test_a_draft_that_is_refused_for_long_gets_another_chance():
    survival = Survival()
    for _ in range(200):
        survival.tell(2, 1, 0, Own())
    before = survival.expected(2, 1, Own())[0]
    for _ in range(400):
        survival.refuse(2, Own())
    assert survival.expected(2, 1, Own())[0] > 0.4 > 0.1 > before


@pytest.mark.parametrize("is_right", [True, False])
def test_who_is_not_asked_is_thought_of_as_before_or_better(is_right):
    survival = Survival()
    own = Own()
    for _ in range(100):
        survival.tell(0, 1, is_right, own)
    before = survival.expected(0, 1, own)
    for _ in range(400):
        survival.forgive(own)
    (after,) = survival.expected(0, 1, own)
    assert before == [after] if is_right else after > 0.4 > 0.1 > before[0]


class Machine:
    """A decoder on which a step takes a time of its own and more for each row, and drafts that are right by chance."""

    def __init__(self, step_s, row_s, verify_s, chance, num_requests, seed, first_s=0.0):
        """``first_s``: what the first step with drafts takes beyond that."""
        self.first_s = first_s
        self.rng = random.Random(seed)
        self.step_s, self.row_s, self.verify_s, self.chance = step_s, row_s, verify_s, chance
        self.num_requests = num_requests
        self.survival, self.effort = Survival(), Effort()
        self.owns = [Own() for _ in range(num_requests)]

    def run(self, num_steps, max_draft_tokens=8):
        """Tokens a second, over those without drafts."""
        num_tokens = seconds = 0.0
        plain_s = self.step_s + self.row_s * self.num_requests
        for _ in range(num_steps):
            drafted = [0] * self.num_requests
            expected_s = self.effort.step_s(plain_s)
            if not self.effort.wants_plain and expected_s > self.num_requests * self.effort.token_s:
                chances = [self.survival.expected(3, max_draft_tokens, own) for own in self.owns]
                most = self.effort.max_tokens(expected_s)
                weights = [1.0] * self.num_requests
                drafted = allot(chances, weights, self.num_requests, expected_s, self.effort.token_s, most)
            num_right = 0
            for own, num in zip(self.owns, drafted, strict=True):
                right = next((place for place in range(num) if self.rng.random() >= self.chance), num)
                num_right += right
                if num:
                    self.survival.tell(3, num, right, own)
                else:
                    self.survival.refuse(3, own, 1 / self.num_requests)
            taken_s = (plain_s + self.verify_s * sum(drafted)) * self.rng.uniform(0.9, 1.1)
            if sum(drafted):
                taken_s, self.first_s = taken_s + self.first_s, 0.0
            self.effort.tell(plain_s, taken_s, sum(drafted), self.num_requests, num_right)
            num_tokens += self.num_requests + num_right
            seconds += taken_s
        return num_tokens / seconds * plain_s / self.num_requests


@pytest.mark.parametrize("num_requests", [1, 8, 32, 256])
@pytest.mark.parametrize("chance", [0.02, 0.3, 0.6, 0.95])
@pytest.mark.parametrize("verify_s", [1e-6, 3e-5, 1e-4, 1e-3])
def test_no_machine_and_no_drafter_make_it_slower_than_plain_decoding(num_requests, chance, verify_s):
    gain = Machine(1e-3, 1e-4, verify_s, chance, num_requests, seed=1).run(1500)
    assert gain >= 0.97


@pytest.mark.parametrize("first_s", [1e-3, 4e-3, 20e-3])
@pytest.mark.parametrize("verify_s", [1e-6, 3e-5])
def test_a_slow_first_trial_does_not_lock_eight_stories_out(first_s, verify_s):
    unharmed = Machine(1e-3, 1e-4, verify_s, 0.8, 8, seed=4).run(300)
    assert Machine(1e-3, 1e-4, verify_s, 0.8, 8, seed=4, first_s=first_s).run(300) > 0.85 * unharmed > 1.4


def test_good_drafts_pay_where_there_is_time_to_spare():
    assert Machine(1e-3, 1e-4, 1e-5, 0.95, 1, seed=2).run(500) > 4.0
    assert Machine(1e-3, 1e-4, 1e-4, 0.9, 8, seed=2).run(500) > 1.4


@pytest.mark.parametrize("num_requests", [1, 8, 32])
def test_guesses_that_gain_nothing_cost_a_small_part_of_all_steps(num_requests):
    purse, rng, num_steps, spent = Purse(num_requests), random.Random(5), 4000, 0.0
    for _ in range(num_steps):
        purse.pass_steps(1)
        if not purse.is_empty and (not purse.is_low or rng.random() < 0.5):
            more = rng.uniform(0.0, 0.5)
            purse.tell(1.0, more, 0, num_requests)
            spent += more
    assert spent < 0.011 * num_steps + 20


def test_a_purse_that_guesses_fill_is_never_empty_and_holds_little():
    purse = Purse(8)
    for _ in range(1000):
        purse.tell(1.0, 0.3, 4, 8)
        assert not purse.is_low
    for _ in range(9):
        purse.tell(1.0, 0.5, 0, 8)
    assert purse.is_empty


def test_a_purse_that_was_empty_is_filled_before_anybody_catches_up_with_a_text_again():
    purse = Purse(1)
    while not purse.is_empty:
        purse.tell(1.0, 100.0, 0, 1)
    num_steps = 0
    while purse.is_empty:
        purse.pass_steps(1)
        num_steps += 1
    assert num_steps > 1000
    purse.tell(1.0, 100.0, 0, 1)
    assert not purse.is_empty, "what it has caught up for is given a chance to pay"


def test_steps_that_others_hold_up_do_not_end_what_pays():
    purse = Purse(1)
    for _ in range(100):
        for _ in range(9):
            purse.tell(1.0, 0.8, 3, 1)
        for _ in range(2):
            purse.tell(1.0, 100.0, 0, 1)
        assert not purse.is_empty
